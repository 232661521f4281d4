"""A run in a lake: its record, where its files lie, and which of its units are committed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import CorruptLakeError, RequestError, UnknownNameError, WorldError
from .durable import exclusive_lock, file_sha256, read_sealed
from .layout import check_run_name, is_run_name, runs_folder, unit_name
from .parquet import read_table
from .plan import read_unit_tokens, stored_tokens, tokens_file
from .record import ArraySpec, RunRecord, find_array
from .shard import ShardLayout
from .unit_record import check_unit_record

DRIVER_LOCK = "driver.lock"


class Run:
    """A run in a lake, for reading; the folder is the truth, nothing is remembered that could grow old."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.folder = runs_folder(root) / name
        self._intact: set[Path] = set()
        self._layouts: dict[ArraySpec, ShardLayout] = {}
        self._record_stat: tuple[int, int, int] | None = None
        if not is_run_name(name) or not (self.folder / "run.json").is_file():
            raise UnknownNameError.of("run", name, run_names(root), f" in {root}")

    @functools.cached_property
    def record(self) -> RunRecord:
        """What run.json says."""
        path = self.folder / "run.json"
        with contextlib.suppress(OSError):
            self._record_stat = _file_stat(path)
        record = RunRecord.from_json(read_sealed(path), path)
        if record.name != self.name:
            raise CorruptLakeError(
                f"{path} is the record of run {record.name!r}: a run is known by its folder's name, which must stay."
            )
        return record

    def is_there(self) -> bool:
        """Say whether the run is still as it was opened: its record is written once, and touched by a repair only."""
        try:
            return self._record_stat == _file_stat(self.folder / "run.json")
        except OSError:
            return False

    def check_same(self) -> None:
        """Raise `WorldError` when the run that was opened was removed meanwhile, or another has its name now."""
        if self.is_there():
            return
        opened = self.record.identity, self.record.created
        try:
            now = Run(self.root, self.name).record
        except UnknownNameError:
            raise WorldError(
                f"Run {self.name!r} of {self.root} was removed meanwhile. Start again with what is there now."
            ) from None
        if (now.identity, now.created) != opened:
            raise WorldError(
                f"Run {self.name!r} of {self.root} is not the one that was opened: it was made anew since. Start "
                "again with what is there now."
            )

    def intact(self, name: str) -> Path:
        """Give a file that was written with the run, by its path in the folder; `CorruptLakeError` if it changed."""
        path = self.folder / name
        if file_sha256(path) != self.record.files.get(name):
            raise CorruptLakeError(f"{path} holds other bytes than were written. Run `layerlake verify`.")
        return path

    def planned_tokens(self, unit: int) -> pa.Table:
        """Give the tokens that the plan has a unit read, `row` being NULL where they are not stored.

        Raises `CorruptLakeError` when the plan was changed since.
        """
        path = tokens_file(self.folder / "plan", unit)
        if path not in self._intact:
            self._intact.add(self.intact(f"plan/{path.name}"))
        return read_unit_tokens(self.folder / "plan", unit)

    def stored_tokens(self, unit: int) -> pa.Table:
        """Give the token table that the plan gives a unit; `CorruptLakeError` when the plan was changed since."""
        return stored_tokens(self.planned_tokens(unit))

    @property
    def scratch(self) -> Path:
        """The folder of temporary files, on the same file system as what they become."""
        return self.folder / "tmp"

    def array(self, site: str, layer: int | None = None, rows: str | None = None) -> ArraySpec:
        """Find an array by site, layer and kind of rows; `UnknownNameError` lists the ones there are.

        A site with a single array needs no layer; a layer counts from 0, never from the end. A run that stores one
        kind of rows needs no `rows`.
        """
        kind = self.kind_of_rows(rows)
        return find_array([a for a in self.record.arrays if a.rows == kind], site, layer, f" in run {self.name!r}")

    def kind_of_rows(self, asked: str | None) -> str:
        """Give the kind of rows that was asked for; None is the only one that the run stores, else `RequestError`."""
        kinds = self.record.row_kinds.kinds
        if asked is None and len(kinds) == 1:
            return kinds[0]
        if asked is None:
            raise RequestError(
                f"Run {self.name!r} stores rows of {' and '.join(kinds)}: say which the row numbers are of, as "
                f"rows={kinds[0]!r}."
            )
        if asked not in kinds:
            raise UnknownNameError.of("kind of rows", asked, kinds, f" in run {self.name!r}")
        return asked

    def layout(self, array: ArraySpec) -> ShardLayout:
        """Give the geometry of an array's shards."""
        if array not in self._layouts:
            self._layouts[array] = array.layout(self.record.unit_size(array.rows))
        return self._layouts[array]

    def shard_path(self, array: ArraySpec, unit: int) -> Path:
        """Give the file that holds a unit's rows of an array."""
        key = ".".join(["c", str(unit), *("0" for _ in array.shape)])
        return self.folder / "activations.zarr" / array.name / key

    def unit_path(self, unit: int) -> Path:
        """Give the commit record of a unit."""
        return self.folder / "units" / f"{unit_name(unit)}.json"

    def tokens_path(self, unit: int) -> Path:
        """Give the token table of a unit."""
        return self.folder / "tokens" / f"{unit_name(unit)}.parquet"

    def committed(self) -> set[int]:
        """List the committed units: those whose record is there."""
        names = (p.stem for p in (self.folder / "units").glob("*.json"))
        return {int(n) for n in names if n.isdecimal() and n == unit_name(int(n))}

    def unit_record(self, unit: int) -> dict[str, Any]:
        """Read the commit record of a unit; `CorruptLakeError` when it is not what was written."""
        path = self.unit_path(unit)
        return check_unit_record(read_sealed(path), unit, self.record, path)

    def unit_tokens(self, unit: int, record: dict[str, Any] | None = None) -> pa.Table:
        """Read the token table of a committed unit; `CorruptLakeError` when it is not the one that was committed.

        Whoever has read the unit's `record` already hands it over.
        """
        path = self.tokens_path(unit)
        if file_sha256(path) != (record or self.unit_record(unit))["tokens"]["sha256"]:
            raise CorruptLakeError(f"{path} holds other bytes than were written. Run `layerlake verify`.")
        return read_table(path)

    @contextlib.contextmanager
    def driver_lock(self) -> Iterator[None]:
        """Be the one driver of this run; `RunLockedError` names the process that already is."""
        with driver_lock(self.root, self.name):
            yield


def _file_stat(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def driver_lock(root: Path, name: str) -> Iterator[None]:
    """Be the one driver of a run, which may be damaged; `UnknownNameError` when it was removed meanwhile."""
    busy = (
        f"Another layerlake (process {{holder}}) is working on run {name!r} of {root}. "
        "Wait for it, or stop it and ask again: what is committed is kept."
    )
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive_lock(runs_folder(root) / name / DRIVER_LOCK, busy))
        except FileNotFoundError:
            raise UnknownNameError.of("run", name, run_names(root), f" in {root}") from None
        except OSError as error:
            raise WorldError(
                f"Run {name!r} of {root} cannot be worked on ({error.strerror}: {error.filename}). Mend that and ask "
                "again."
            ) from error
        yield


def run_names(root: Path) -> list[str]:
    """List the runs of a lake by name."""
    folder = runs_folder(root)
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if is_run_name(p.name) and (p / "run.json").is_file())


def find_run(root: Path, name: str) -> Run | None:
    """Find a run by name, or None when there is none yet."""
    exists = (runs_folder(root) / check_run_name(name) / "run.json").is_file()
    return Run(root, name) if exists else None
