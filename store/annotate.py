"""Adding labels to a run later: checked against the run's plan, then published as a version that never changes."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from .. import __version__
from ..errors import CorruptLakeError, DataError, RequestError, WorldError
from .catalog import publish_catalog
from .durable import exclusive_lock, file_sha256, fsync_folder, publish, sealed_json, sweep, write_temporary
from .label_files import LabelSource, read_labels
from .label_match import match_rows
from .label_sets import (
    LABELS_LOCK,
    LabelColumn,
    LabelSet,
    label_file,
    label_versions,
    labels_folder,
    newest_label_sets,
)
from .layout import is_run_name
from .parquet import table_bytes
from .plan import label_columns
from .run import Run
from .tokens import RESERVED_LABELS, TOKEN_FIELDS

pc: Any = pyarrow.compute  # type checkers see none of its functions
_OWN = frozenset(name for name, _ in TOKEN_FIELDS)
_UNLOCKED = "appeared while the lock was held, so locks do not work in this file system. Ask again."
_AS_TEXT = ("run", *(name for name, kind in TOKEN_FIELDS if pa.types.is_string(kind)))


def annotate(root: Path, run: str, source: Any, name: str | None = None) -> LabelSet:
    """Add the labels of a file or table to a run as the next version of the set `name`, and publish the catalog.

    `source` is a .parquet, .csv or .jsonl file, an Arrow table or a frame, with the column `row`, or `seq` and `pos`,
    and at least one label; other columns of the table `tokens` must equal what the run holds. Rows may be left out:
    they have no label. The run may be incomplete, as labels are checked against its plan. Raises `RequestError` where
    anything does not fit, naming the first rows, and nothing is stored then.
    """
    target = Run(root, run)
    if target.record.tokens == 0:
        raise RequestError(f"Run {run!r} has no tokens to label.")
    read = read_labels(source, _AS_TEXT)
    name = _set_name(name, read)
    names = [n for n in read.table.column_names if n not in _OWN and n != "run"]
    _check_names(target, name, names)
    _check_run(read.table, run)
    try:
        rows, key = match_rows(target, read)
        table = _sorted(read.table.select(names), rows)
        stored = _publish(target, name, table, {"key": key, "source": {"file": read.file, "sha256": read.sha256}})
    except pa.ArrowException as error:  # a column of text of more than 2 GiB
        raise DataError(f"The labels cannot be put into one table ({error}). Annotate in parts, by columns.") from error
    except CorruptLakeError:
        target.check_same()  # files that went with their run are no damage
        raise
    except OSError as error:
        target.check_same()
        raise WorldError(
            f"The labels of run {run!r} could not be stored ({error.strerror}: {error.filename}). Mend that and ask "
            "again."
        ) from error
    try:
        publish_catalog(root)
    except WorldError as error:
        raise WorldError(
            f"Labels {name} version {stored.version} of run {run!r} are stored, but SQL does not show them yet: {error}"
        ) from error
    return stored


def _set_name(name: str | None, source: LabelSource) -> str:
    if name is None:
        if source.file is None:
            raise RequestError("Give the labels a name: a table has no file to be named after.")
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(source.file).stem).strip("._-")[:100]
        if not is_run_name(name):
            raise RequestError(f"No name can be made of the file's name {source.file!r}. Give one with --name.")
    if not is_run_name(name):
        raise RequestError(
            f"{name!r} cannot name labels: use up to 100 letters, digits, '.', '_' and '-', beginning with a letter or "
            "digit."
        )
    return name


def _check_names(run: Run, name: str, columns: list[str]) -> None:
    """Refuse label columns whose name is taken; the same set may change its columns from version to version."""
    if not columns:
        raise RequestError("There is no label: every column is one of the run's own. Add a column of labels.")
    for column in columns:
        if column.lower() in RESERVED_LABELS:
            hint = f" Did you mean {column.lower()!r}?" if column.lower() in (*_OWN, "run") else ""
            raise RequestError(
                f"{column!r} cannot name a label: the tables have a column of that name already.{hint} Rename it, or "
                "leave it out."
            )
    taken = {f.name.lower(): "is a label that run {run!r} was extracted with" for f in _extracted(run)}
    sets, faults = newest_label_sets(run)
    for other, fault in faults.items():
        if other != name:
            raise CorruptLakeError(f"Labels {other!r} of run {run.name!r} are damaged: {fault}")
    for other in sets:
        if other.name != name:
            taken |= {c.name.lower(): f"is a label of set {other.name!r} of run {{run!r}}" for c in other.columns}
    for column in columns:
        if column.lower() in taken:
            how = taken[column.lower()].format(run=run.name)
            raise RequestError(f"{column!r} {how} (SQL ignores case). Rename the column, or use that set's name.")


def _extracted(run: Run) -> Iterable[pa.Field]:
    run.intact("plan/tokens-00000.parquet")
    return label_columns(run.folder / "plan")["tokens"]


def _check_run(table: pa.Table, run: str) -> None:
    if "run" not in table.column_names:
        return
    same = pc.fill_null(pc.equal(table["run"].cast(pa.string()), run), False)
    wrong = np.flatnonzero(~same.to_numpy())
    if len(wrong):
        shown = ", ".join(f"{table['run'][int(i)].as_py()!r} in data row {i + 1}" for i in wrong[:3])
        raise DataError(
            f"Labels for another run than {run!r} ({len(wrong):,}): {shown}. Annotate each run with its own rows."
        )


def _sorted(labels: pa.Table, rows: np.ndarray) -> pa.Table:
    order = np.argsort(rows, kind="stable")
    if (np.diff(rows) < 0).any():
        labels = labels.take(pa.array(order))
    return labels.add_column(0, pa.field("row", pa.int64()), pa.array(rows[order])).combine_chunks()


def _publish(run: Run, name: str, table: pa.Table, lineage: dict[str, Any]) -> LabelSet:
    """Publish the table, then its record, which commits them, under the next version of the set.

    A remnant of the same bytes, left by one that was killed before its record, is completed; another one is left
    alone and its number with it.
    """
    data = table_bytes(table)
    sha256 = hashlib.sha256(data).hexdigest()
    labels = table.drop_columns(["row"])
    some = np.zeros(table.num_rows, bool)
    for column in labels.columns:
        some |= column.is_valid().to_numpy()
    columns = [
        LabelColumn(f.name, str(f.type), len(c) - c.null_count)
        for f, c in zip(labels.schema, labels.columns, strict=True)
    ]
    folder = labels_folder(run)
    folder.mkdir(exist_ok=True)
    fsync_folder(run.folder)
    sweep(folder)
    temporary = write_temporary(folder, name, data)
    try:
        with exclusive_lock(run.folder / LABELS_LOCK, "", wait=True):
            now = Run(run.root, run.name).record
            if (now.identity, now.created) != (run.record.identity, run.record.created):
                raise RequestError(f"Run {run.name!r} became another run meanwhile. Check the labels and ask again.")
            _check_names(run, name, [c.name for c in columns])
            done = label_versions(run).get(name, [0])[-1]
            version = _publish_table(run, name, done, temporary, sha256)
            record = LabelSet(
                name=name,
                version=version,
                run=run.name,
                identity=run.record.identity,
                plan_hash=run.record.plan_hash,
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                created_by=__version__,
                rows=table.num_rows,
                labelled=int(some.sum()),
                columns=tuple(columns),
                sha256=sha256,
                previous=done or None,
                **lineage,
            )
            path = label_file(run, name, version, "json")
            if not publish(write_temporary(folder, path.name, sealed_json(record.to_json())), path):
                raise CorruptLakeError(f"{path} {_UNLOCKED}")
    finally:
        temporary.unlink(missing_ok=True)
    return record


def _publish_table(run: Run, name: str, done: int, temporary: Path, sha256: str) -> int:
    last = max(done, label_versions(run, "parquet").get(name, [0])[-1])
    if last > done and file_sha256(label_file(run, name, last, "parquet")) == sha256:
        return last
    if not publish(temporary, label_file(run, name, last + 1, "parquet")):
        raise CorruptLakeError(f"{label_file(run, name, last + 1, 'parquet')} {_UNLOCKED}")
    return last + 1
