"""Removing a run from a lake: whole, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import LayerlakeError, RequestError, UnknownNameError, WorldError
from .catalog import publish_catalog
from .durable import fsync_folder, is_locked, read_json, temporary_name
from .layout import check_run_name, runs_folder
from .orphans import remove
from .parquet import read_table
from .printing import count
from .run import DRIVER_LOCK, Run, driver_lock, run_names


@dataclass(frozen=True)
class Removal:
    """What goes with a run, or went: its committed `units`, `files` and `bytes`; and what of it stays in the lake.

    `damaged` says why the run's record cannot be read, if it cannot. `stays` names the artifacts and results that were
    made from the run: they are facts with their lineage, and stay when it goes.
    """

    run: str
    units: int
    files: int
    bytes: int
    stays: list[str]
    damaged: str | None = None
    removed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Give the removal as plain data."""
        return asdict(self)


def remove_run(root: Path, name: str, *, dry_run: bool = False) -> Removal:
    """Remove a run, also one whose record is damaged, and publish the catalog without it.

    The run's folder first gets a temporary name, so that there is the whole run or none, whatever happens; then it is
    deleted. Open readers keep what they have mapped. With `dry_run` nothing is changed. Raises `UnknownNameError` when
    there is no such run, `RunLockedError` while a driver works on it.
    """
    folder = runs_folder(root) / check_run_name(name)
    if folder.is_symlink():
        raise RequestError(
            f"{folder} is a link, and only folders of the lake are removed. Remove the link yourself, and what it "
            "points to if that is meant."
        )
    if not folder.is_dir():
        raise UnknownNameError.of("run", name, run_names(root), f" in {root}")
    if dry_run:
        if is_locked(folder / DRIVER_LOCK):
            with driver_lock(root, name):  # it raises the sentence that names the holder
                pass
        return _describe(root, folder)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(driver_lock(root, name))
            found = _describe(root, folder)
            temporary = temporary_name(folder.parent, name)
            folder.rename(temporary)
            fsync_folder(folder.parent)
        except OSError as error:
            raise WorldError(
                f"Run {name!r} of {root} is not removed ({error.strerror}: {error.filename}). Mend that and ask again."
            ) from error
        try:
            remove(temporary)
            publish_catalog(root)
        except WorldError as error:
            raise WorldError(f"Run {name!r} is removed, but `layerlake repair` has to clean up: {error}") from error
    return replace(found, removed=True)


def _describe(root: Path, folder: Path) -> Removal:
    files = (p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    sizes = [p.lstat().st_size for p in files if p.name != DRIVER_LOCK]
    units, damaged = 0, None
    try:
        run = Run(root, folder.name)
        units = len(run.committed())
        _ = run.record
    except UnknownNameError:
        damaged = f"{folder / 'run.json'} is missing"
    except LayerlakeError as error:
        damaged = str(error)
    return Removal(folder.name, units, len(sizes), sum(sizes), sorted(_made_from(root, folder.name)), damaged)


def _made_from(root: Path, run: str) -> Iterator[str]:
    """Yield the artifacts and results that say they were made from a run; those that cannot be read say nothing."""
    for path in (root / "artifacts").glob("*/artifact.json"):
        try:
            if read_json(path)["lineage"]["run"] == run:
                yield f"artifacts/{path.parent.name}"
        except (LayerlakeError, KeyError, TypeError):
            continue
    for path in (root / "results").glob("*.parquet"):
        try:
            if run in read_table(path)["run"].to_pylist():
                yield f"results/{path.name}"
        except (LayerlakeError, KeyError):
            continue


def removal_lines(removal: Removal) -> list[str]:
    """Say in words what goes, or went, and what stays."""
    size = f"{count(removal.units, 'unit')}, {count(removal.files, 'file')}, {removal.bytes:,} bytes"
    lines = [f"{'Removed' if removal.removed else 'Would remove'} run {removal.run}: {size}."]
    if removal.damaged:
        lines.append(f"It is damaged: {removal.damaged}")
    if removal.stays:
        lines.append(f"Made from it, and {'left' if removal.removed else 'would stay'} in the lake:")
        lines += [f"  {name}" for name in removal.stays]
    return lines
