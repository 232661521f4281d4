"""How trainings are getting on, as their workers write it into their folders and people see it."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from ..progress import LINE_EVERY_S, duration
from .trainer import Trainer

PROGRESS_FILE = "progress.json"
_LOOK_EVERY_S = 1.0


def write_progress(folder: Path, trainer: Trainer, rate: float) -> None:
    """Say in a seed's folder where its training is; `rate` is steps a second. It need not outlive a power cut."""
    state, last = trainer.state, trainer.state.history[-1:]
    found = {
        "step": state.step,
        "length": trainer.length,
        "loss": state.loss,
        "validation": last[0]["token"] if last else None,
        "rate": rate,
    }
    temporary = folder / f"{PROGRESS_FILE}.tmp"
    temporary.write_text(json.dumps(found))
    temporary.replace(folder / PROGRESS_FILE)


class TrainingWatch:
    """Shows each seed's step, loss, validation accuracy and speed: a bar on a terminal, a line now and then elsewhere.

    `folders` has the folder of each seed. The workers may be in this process, whose own output the engine swallows, or
    on other machines; what they have in common with the driver is the folder.
    """

    def __init__(
        self,
        folders: Mapping[int, Path],
        steps: int,
        *,
        stream: TextIO | None = None,
        line_every: float = LINE_EVERY_S,
    ) -> None:
        self.folders = dict(folders)
        self.steps = steps
        self.stream = stream or sys.stderr
        self.line_every = line_every
        self._bar: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Self:
        if self.stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = [
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rest]}"),
            ]
            self._bar = Bar(*columns, console=Console(file=self.stream), transient=True)
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._bar:
            self._bar.stop()

    def _show(self) -> None:
        tasks: dict[int, Any] = {}
        while not self._ended.wait(_LOOK_EVERY_S if self._bar else self.line_every):
            for seed, folder in self.folders.items():
                if seed in tasks and not (folder / PROGRESS_FILE).exists():  # it ended
                    self._bar.remove_task(tasks.pop(seed))
                with contextlib.suppress(OSError, ValueError):  # not begun, ended, or just being written
                    found = json.loads((folder / PROGRESS_FILE).read_bytes())
                    if not self._bar:
                        line = f"seed {seed}: {found['step']:,}/{self.steps:,} steps, {self._rest(found)}"
                        print(line, file=self.stream, flush=True)
                        continue
                    if seed not in tasks:
                        tasks[seed] = self._bar.add_task(f"seed {seed}", total=self.steps, rest="")
                    self._bar.update(tasks[seed], completed=found["step"], rest=self._rest(found))

    def _rest(self, found: Mapping[str, Any]) -> str:
        parts = [f"length {found['length']}", f"loss {found['loss']:.3f}"]
        if found["validation"] is not None:
            parts.append(f"validation {found['validation']:.3f}")
        parts.append(f"{found['rate']:.1f} steps/s")
        if found["rate"] > 0:
            parts.append(f"at most {duration((self.steps - found['step']) / found['rate'])} left")
        return ", ".join(parts)
