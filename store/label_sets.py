"""Label sets: labels that were added to a run later, each version a table and a record that never change.

    runs/RUN/labels/NAME-0001.parquet     row and the label columns, sorted by row
    runs/RUN/labels/NAME-0001.json        the record, sealed and written last: it makes the version one

A table without a record is a remnant, and no reader looks at it. Labels are not part of the run's identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import CorruptLakeError, LayerlakeError
from .durable import file_sha256, is_locked, read_sealed
from .layout import is_run_name
from .parquet import read_table
from .run import Run
from .tokens import RESERVED_LABELS

LABELS_LOCK = "labels.lock"
_FILE = re.compile(r"(?P<name>.+)-(?P<version>\d{4,9})\.(?P<kind>parquet|json)")
_TYPES = {"bool": pa.bool_(), "int64": pa.int64(), "double": pa.float64(), "string": pa.string(), "null": pa.null()}


@dataclass(frozen=True)
class LabelColumn:
    """A column of a label set: its name, its Arrow type as text, and how many of its values are not null."""

    name: str
    type: str
    values: int

    @property
    def field(self) -> pa.Field:
        """The column as an Arrow field."""
        return pa.field(self.name, _TYPES[self.type])


@dataclass(frozen=True)
class LabelSet:
    """The record of one version of a label set: where it came from and what it holds."""

    name: str
    version: int
    run: str
    identity: str
    """The identity of the run that the labels were checked against."""
    plan_hash: str
    key: tuple[str, ...]
    """The columns by which rows were found: row, or seq and pos."""
    source: dict[str, str | None]
    """`file`, its name, and `sha256`, of its bytes; both None for a table that was handed over in Python."""
    created: str
    created_by: str
    rows: int
    labelled: int
    """How many tokens have at least one label that is not null."""
    columns: tuple[LabelColumn, ...]
    sha256: str
    """SHA-256 of the table's file."""
    previous: int | None

    @property
    def title(self) -> str:
        """The name with its version, as files have it."""
        return f"{self.name}-{self.version:04d}"

    def to_json(self) -> dict[str, Any]:
        """Give the content of the record's file."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any], path: Path) -> LabelSet:
        """Read the content of a record; `CorruptLakeError` when it cannot be one of a label set."""
        try:
            columns = tuple(LabelColumn(**c) for c in value["columns"])
            found = cls(**(value | {"columns": columns, "key": tuple(value["key"])}))
            found._check()
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise CorruptLakeError(f"{path} does not describe labels ({error}). Run `layerlake verify`.") from error
        return found

    def _check(self) -> None:
        names = [c.name for c in self.columns]
        lowered = [n.lower() for n in names if isinstance(n, str)]
        if not names or len(set(lowered)) < len(names) or not all(names) or any("\0" in n for n in names):
            raise ValueError(f"its columns are {names!r}")
        if set(lowered) & RESERVED_LABELS:
            raise ValueError("a column has the name of one of the run's own")
        if any(c.type not in _TYPES for c in self.columns):
            raise ValueError("a column has a type that labels do not have")
        texts = (self.name, self.run, self.identity, self.plan_hash, self.created, self.created_by, self.sha256)
        sources = (self.source["file"], self.source["sha256"])
        if not all(isinstance(t, str) for t in texts) or not all(s is None or isinstance(s, str) for s in sources):
            raise ValueError("what should be text is not")
        for number in (self.version, self.rows, self.labelled, *(c.values for c in self.columns)):
            if type(number) is not int or not 0 <= number < 1 << 50:
                raise ValueError(f"{number!r} is no count")
        "".join([*texts, *names, *(s or "" for s in sources)]).encode()  # half characters are no text


def labels_folder(run: Run) -> Path:
    """Give the folder of a run's label sets, which is there once something was annotated."""
    return run.folder / "labels"


def label_file(run: Run, name: str, version: int, kind: str) -> Path:
    """Give the file of a version: `kind` is parquet, or json for its record."""
    return labels_folder(run) / f"{name}-{version:04d}.{kind}"


def label_versions(run: Run, kind: str = "json") -> dict[str, list[int]]:
    """List the versions of each label set, ascending: those whose record is there or, by `kind`, whose table is."""
    found: dict[str, list[int]] = {}
    for path in _files(run):
        parts = _parts(path)
        if parts and parts[2] == kind:
            found.setdefault(parts[0], []).append(parts[1])
    return {name: sorted(found[name]) for name in sorted(found)}


def read_label_set(run: Run, name: str, version: int) -> LabelSet:
    """Read the record of a version; `CorruptLakeError` when it is not what was written, or another's."""
    path = label_file(run, name, version, "json")
    found = LabelSet.from_json(read_sealed(path), path)
    if (found.name, found.version) != (name, version):
        raise CorruptLakeError(f"{path} is the record of labels {found.title}. Run `layerlake verify`.")
    if (found.run, found.identity, found.plan_hash) != (run.name, run.record.identity, run.record.plan_hash):
        raise CorruptLakeError(f"{path} belongs to labels of another run than {run.name!r} is. Run `layerlake verify`.")
    return found


def newest_label_sets(run: Run) -> tuple[list[LabelSet], dict[str, str]]:
    """Give the newest version of each set by name, and for each set whose newest is damaged what is wrong.

    No older version stands in for a damaged one: its values would be taken for the new ones.
    """
    found, faults = [], {}
    for name, versions in label_versions(run).items():
        try:
            found.append(read_label_set(run, name, versions[-1]))
        except CorruptLakeError as error:
            faults[name] = str(error)
    return found, faults


def read_label_values(run: Run, labels: LabelSet) -> pa.Table:
    """Read a version's table, `row` ascending and the labels; `CorruptLakeError` unless it is what was written."""
    path = label_file(run, labels.name, labels.version, "parquet")
    if file_sha256(path) != labels.sha256:
        raise CorruptLakeError(f"{path} holds other bytes than were written. Run `layerlake verify`.")
    table = read_table(path)
    expected = pa.schema([pa.field("row", pa.int64()), *(c.field for c in labels.columns)])
    rows = table.column(0) if table.num_columns else None
    if rows is None or not table.schema.equals(expected) or table.num_rows != labels.rows or rows.null_count:
        raise CorruptLakeError(f"{path} is not the table that its record describes. Run `layerlake verify`.")
    if (np.diff(rows.to_numpy()) <= 0).any():
        raise CorruptLakeError(f"{path} does not have its rows in order. Run `layerlake verify`.")
    return table


def verify_labels(run: Run) -> Iterator[tuple[Path, str]]:
    """Check every version of every label set, and find files that belong to none."""
    folder = labels_folder(run)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        yield folder, "is not a folder of labels"
        return
    records, tables = label_versions(run), label_versions(run, "parquet")
    for path in _files(run):
        parts = _parts(path)
        if parts is None:
            if not path.name.endswith(".tmp"):
                yield path, "does not belong to this run"
            continue
        name, version, kind = parts
        if kind == "parquet" and version not in records.get(name, []) and not _is_being_added(run, path):
            completes = version == tables[name][-1] and version > max(records.get(name, [0]))
            help_ = "annotating again with the same file completes it" if completes else "remove it"
            yield path, f"is a remnant: it has no record {path.stem}.json ({help_})"
        if kind != "json":
            continue
        try:
            labels = read_label_set(run, name, version)
        except LayerlakeError as error:
            yield path, str(error)
            continue
        table = path.with_suffix(".parquet")
        try:
            read_label_values(run, labels)
        except LayerlakeError as error:
            yield table, "is missing" if not table.exists() else str(error)


def _is_being_added(run: Run, table: Path) -> bool:
    """Tell whether a table without a record has one by now, or a living annotator, which holds the lock till then."""
    return is_locked(run.folder / LABELS_LOCK) or table.with_suffix(".json").exists()


def _files(run: Run) -> list[Path]:
    folder = labels_folder(run)
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _parts(path: Path) -> tuple[str, int, str] | None:
    """Take a file's name apart; None when it is none of a label set's."""
    found = _FILE.fullmatch(path.name)
    if not found or not is_run_name(found["name"]):
        return None
    version = int(found["version"])
    return (found["name"], version, found["kind"]) if version and found["version"] == f"{version:04d}" else None
