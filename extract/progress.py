"""Progress of a job: a bar on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

LINE_EVERY_S = 30.0


class Progress:
    """Shows finished items of `total`, an amount a second, and the time left, on standard error.

    `unit` and `amount` name what is counted ("units", "tokens"). Use it as a context manager and call `advance` for
    each finished item.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        amount: str | None = None,
        *,
        total_amount: int = 0,
        stream: TextIO | None = None,
        line_every: float = LINE_EVERY_S,
    ) -> None:
        self.total = total
        self.unit = unit
        self.amount = amount
        self.total_amount = total_amount
        self.stream = stream or sys.stderr
        self.line_every = line_every
        self.done = 0
        self.counted = 0
        self._bar = None
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        if self.stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = [
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self.unit),
                TextColumn("{task.fields[rest]}"),
            ]
            self._bar = Bar(*columns, console=Console(file=self.stream), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.unit, total=self.total, rest="starting")
        else:
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        else:
            self._ended.set()
            self._lines.join()

    def advance(self, amount: int = 0) -> None:
        """Count one finished item that holds `amount`."""
        self.done += 1
        self.counted += amount
        if self._bar:
            self._bar.update(self._task, advance=1, rest=self._rest())

    def _print_lines(self) -> None:
        # A thread of its own, so that a line comes also while no item ends.
        while not self._ended.wait(self.line_every):
            print(f"{self.done}/{self.total} {self.unit}, {self._rest()}", file=self.stream, flush=True)

    def _rest(self) -> str:
        elapsed = max(time.monotonic() - self._start, 1e-9)
        share = self.counted / self.total_amount if self.total_amount else self.done / max(1, self.total)
        rate = f"{self.counted / elapsed:,.0f} {self.amount}/s, " if self.amount else ""
        return f"{rate}{duration(elapsed / share - elapsed)} left" if share else f"{duration(elapsed)} so far"


def duration(seconds: float) -> str:
    """Write seconds as people read them: ``0:07``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
