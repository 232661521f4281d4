"""Progress of a job: a bar on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.unit = unit
        self.amount = amount
        self.total_amount = total_amount
        self.stream = stream or sys.stderr
        self.clock = clock
        self.done = 0
        self.counted = 0
        self._bar = None

    def __enter__(self) -> Progress:
        self._start = self._last_line = self.clock()
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, amount: int = 0) -> None:
        """Count one finished item that holds `amount`."""
        self.done += 1
        self.counted += amount
        if self._bar:
            self._bar.update(self._task, advance=1, rest=self._rest())
        elif self.clock() - self._last_line >= LINE_EVERY_S:
            self._last_line = self.clock()
            print(f"{self.done}/{self.total} {self.unit}, {self._rest()}", file=self.stream, flush=True)

    def _rest(self) -> str:
        elapsed = max(self.clock() - self._start, 1e-9)
        share = self.counted / self.total_amount if self.total_amount else self.done / max(1, self.total)
        left = elapsed / share - elapsed if share else 0.0
        rate = f"{self.counted / elapsed:,.0f} {self.amount}/s, " if self.amount else ""
        return f"{rate}{_duration(left)} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
