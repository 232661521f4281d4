"""A run: what was asked of one extraction, never changed, and which of its units are committed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CorruptLakeError, SettingsDifferError, UnknownNameError
from .dtypes import stored_dtype
from .durable import canonical_json, exclusive_lock, read_json
from .layout import check_run_name, runs_folder, unit_name
from .shard import ShardLayout

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ArraySpec:
    """One array of a run: a site at a layer (None where the site belongs to none), a row a token."""

    site: str
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    """The trailing shape of a row; (width,) for the residual stream."""

    @property
    def name(self) -> str:
        """The array's folder in the run's Zarr group."""
        return self.site if self.layer is None else f"{self.site}-{self.layer}"

    def layout(self, unit_rows: int) -> ShardLayout:
        """Give the geometry of a shard; inner chunks are the largest power of two of rows within 1 MiB."""
        dtype = stored_dtype(self.dtype)
        row_bytes = math.prod(self.shape) * dtype.itemsize
        chunk = 1 << max(0, (_CHUNK_BYTES // row_bytes).bit_length() - 1)
        return ShardLayout(unit_rows, min(unit_rows, chunk), self.shape, dtype)


@dataclass(frozen=True)
class RunRecord:
    """What run.json says: everything that can change a stored byte, and the numbers that follow from it."""

    name: str
    settings: dict[str, Any]
    arrays: tuple[ArraySpec, ...]
    unit_rows: int
    units: int
    sequences: int
    tokens: int
    plan_hash: str
    """Hash of which tokens stand in which rows; runs that share it can be joined by row."""
    tokens_hash: str
    """Hash of the whole token table, labels and spans included."""
    source: dict[str, Any]
    """Where model and data were found, for people and for loading again; not part of the identity."""
    created: str
    created_by: str

    @property
    def identity(self) -> str:
        """Hash of everything that can change a stored byte of this run."""
        parts = {
            "settings": self.settings,
            "arrays": [asdict(a) for a in self.arrays],
            "unit_rows": self.unit_rows,
            "tokens_hash": self.tokens_hash,
        }
        return hashlib.sha256(canonical_json(parts)).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Give the content of run.json."""
        return asdict(self) | {"identity": self.identity}

    @classmethod
    def from_json(cls, value: dict[str, Any], path: Path) -> RunRecord:
        """Read the content of run.json; `CorruptLakeError` when it is not what was written."""
        try:
            fields = {k: v for k, v in value.items() if k != "identity"}
            arrays = tuple(ArraySpec(**(a | {"shape": tuple(a["shape"])})) for a in fields.pop("arrays"))
            record = cls(arrays=arrays, **fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise CorruptLakeError(f"{path} does not describe a run ({error}).") from error
        if record.identity != value.get("identity"):
            raise CorruptLakeError(f"{path} was changed after it was written: its identity does not match.")
        return record

    def check_same(self, asked: RunRecord) -> None:
        """Raise `SettingsDifferError`, naming what differs, unless `asked` would write the same bytes."""
        if asked.identity == self.identity:
            return
        mine, theirs = _flat(self), _flat(asked)
        lines = [
            f"{key}: the run has {mine.get(key)!r}, asked was {theirs.get(key)!r}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]
        raise SettingsDifferError(
            f"Run {self.name!r} exists and was made with other settings ({'; '.join(lines[:6])}"
            f"{'; and more' if len(lines) > 6 else ''}). Choose another name with --run."
        )


def _flat(record: RunRecord) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "sites": ", ".join(f"{a.name} {a.dtype} {a.shape}" for a in record.arrays),
        "unit_rows": record.unit_rows,
        "token table": record.tokens_hash[:12],
    }

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    walk("", record.settings)
    return flat


class Run:
    """A run in a lake, for reading; the folder is the truth, nothing is remembered that could grow old."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.folder = runs_folder(root) / name
        if not (self.folder / "run.json").is_file():
            raise UnknownNameError.of("run", name, run_names(root), f" in {root}")

    @functools.cached_property
    def record(self) -> RunRecord:
        """What run.json says."""
        path = self.folder / "run.json"
        return RunRecord.from_json(read_json(path), path)

    @property
    def scratch(self) -> Path:
        """The folder of temporary files, on the same file system as what they become."""
        return self.folder / "tmp"

    def array(self, site: str, layer: int | None = None) -> ArraySpec:
        """Find an array by site and layer; `UnknownNameError` lists the sites or layers there are.

        A site with a single array needs no layer; a layer counts from 0, never from the end.
        """
        arrays = [a for a in self.record.arrays if a.site == site]
        where = f" in run {self.name!r}"
        if not arrays:
            raise UnknownNameError.of("site", site, dict.fromkeys(a.site for a in self.record.arrays), where)
        if layer is None and len(arrays) == 1:
            return arrays[0]
        for array in arrays:
            if array.layer == layer:
                return array
        raise UnknownNameError.of("layer", layer, [a.layer for a in arrays], f" of site {site!r}{where}")

    def layout(self, array: ArraySpec) -> ShardLayout:
        """Give the geometry of an array's shards."""
        return array.layout(self.record.unit_rows)

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
        return {int(p.stem) for p in (self.folder / "units").glob("*.json") if p.stem.isdecimal()}

    def unit_record(self, unit: int) -> dict[str, Any]:
        """Read the commit record of a unit."""
        return read_json(self.unit_path(unit))

    @contextlib.contextmanager
    def driver_lock(self) -> Iterator[None]:
        """Be the one driver of this run; `RunLockedError` names the process that already is."""
        busy = (
            f"Another layerlake (process {{holder}}) is working on run {self.name!r} of {self.root}. "
            "Wait for it, or stop it and ask again: what is committed is kept."
        )
        with exclusive_lock(self.folder / "driver.lock", busy):
            yield


def run_names(root: Path) -> list[str]:
    """List the runs of a lake by name."""
    folder = runs_folder(root)
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if (p / "run.json").is_file() and not p.name.endswith(".tmp"))


def find_run(root: Path, name: str) -> Run | None:
    """Find a run by name, or None when there is none yet."""
    exists = (runs_folder(root) / check_run_name(name) / "run.json").is_file()
    return Run(root, name) if exists else None
