"""Keeping what a repair takes out of a run, so that nothing is lost by it."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from pathlib import Path

from .durable import fsync_folder
from .run import Run

_FOLDER = "damaged"


class SetAside:
    """The folder ``runs/RUN/damaged/STAMP``, made when it is first needed, with files under their paths in the run.

    No reader looks there, and whoever does not want what is there can delete it.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        now = datetime.datetime.now(datetime.UTC)
        self.folder = run.folder / _FOLDER / f"{now:%Y%m%dT%H%M%S}.{now.microsecond:06d}Z"
        self._absent: set[Path] = set()

    def move(self, path: Path) -> None:
        """Take a file, a link or a folder out of its place."""
        if not os.path.lexists(path):
            self._absent.add(path)
            return
        aside = self._place(path)
        path.rename(aside)
        fsync_folder(aside.parent)
        fsync_folder(path.parent)

    def keep(self, path: Path) -> None:
        """Hold a file by a second name, whatever becomes of its place; what is no plain file is taken out of it."""
        if path.is_symlink() or not path.is_file():
            self.move(path)
            return
        aside = self._place(path)
        os.link(path, aside)
        fsync_folder(aside.parent)

    def replace(self, temporary: Path, path: Path) -> None:
        """Put a finished, fsynced file into a place and keep what was there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.keep(path)
        temporary.replace(path)
        fsync_folder(path.parent)

    def restore(self, path: Path) -> None:
        """Make a place that was moved or kept what it was before."""
        aside = self.folder / path.relative_to(self.run.folder)
        if os.path.lexists(aside):
            if aside.is_dir() and not aside.is_symlink():
                path.unlink(missing_ok=True)  # a folder cannot take a file's place
            aside.replace(path)  # does nothing when both names are one file; `settle` then takes one away
        elif path in self._absent:
            path.unlink(missing_ok=True)

    def was_replaced(self, path: Path) -> bool:
        """Tell whether a place that was moved or kept held something, and holds something else now."""
        aside = self.folder / path.relative_to(self.run.folder)
        return os.path.lexists(aside) and os.path.lexists(path) and not _same_file(aside, path)

    def settle(self) -> None:
        """Give up second names of files that are in their places, also those that an interrupted repair left."""
        home = self.run.folder / _FOLDER
        if home.is_symlink() or not home.is_dir():
            return
        for stamp in sorted(home.iterdir()):
            for folder, _, names in os.walk(stamp, topdown=False):
                for name in names:
                    aside = Path(folder) / name
                    if _same_file(aside, self.run.folder / aside.relative_to(stamp)):
                        aside.unlink()
                with contextlib.suppress(OSError):  # it holds something
                    Path(folder).rmdir()
        with contextlib.suppress(OSError):
            home.rmdir()

    def held(self) -> Iterator[Path]:
        """Yield the places, in the run, of all files that this or an earlier repair set aside."""
        home = self.run.folder / _FOLDER
        for path in () if home.is_symlink() else home.glob("*/*/**/*"):
            yield self.run.folder.joinpath(*path.relative_to(home).parts[1:])

    def _place(self, path: Path) -> Path:
        aside = self.folder / path.relative_to(self.run.folder)
        aside.parent.mkdir(parents=True, exist_ok=True)
        return aside


def _same_file(one: Path, other: Path) -> bool:
    try:
        here, there = one.lstat(), other.lstat()
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
