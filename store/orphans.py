"""What dead processes left in a lake: temporary files and folders that nobody will finish."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import WorldError
from .durable import abandoned, is_locked
from .layout import runs_folder
from .run import DRIVER_LOCK, Run


def lake_orphans(root: Path) -> Iterator[Path]:
    """Yield the temporary files and folders of dead processes outside of runs.

    A lake may be shared by several machines, so what was touched within the last hour is left alone, except for the
    folder of a run that was being removed: its remover would hold the run's lock.
    """
    for folder in (root, runs_folder(root), root / "artifacts", root / "results"):
        yield from abandoned(folder)
    for left in runs_folder(root).glob("*.tmp"):
        lock = left / DRIVER_LOCK
        if not left.is_symlink() and lock.is_file() and not is_locked(lock):
            yield left


def scratch_orphans(run: Run) -> list[Path]:
    """List the temporary files in a run, all of which are a dead driver's for who holds the driver's lock."""
    return [] if run.scratch.is_symlink() else sorted(run.scratch.glob("*"))


def clear_scratch(run: Run) -> None:
    """Remove the temporary files of a dead driver; the caller holds the driver's lock.

    A worker of it may still be at work for a moment; it then fails to publish, which is as well.
    """
    for left in scratch_orphans(run):
        remove(left)


def remove(path: Path) -> None:
    """Remove a file, a link (not what it points to) or a whole folder; one that is gone is no error.

    Raises `WorldError` that names what cannot be removed.
    """
    while os.path.lexists(path):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            continue  # another process is at the same folder
        except OSError as error:
            raise WorldError(f"{error.filename or path} cannot be removed ({error.strerror}).") from error
