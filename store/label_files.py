"""Labels that people bring, a file or a table, read into columns that hold exactly what was written.

pyarrow's own guesses are not taken where they change values without a word: its JSON reader makes times of texts and
rounds whole numbers beyond 2^53. `csv_table` says how the columns of a .csv get their types.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError, RequestError
from .csv_table import exact_doubles, read_csv, typed_cells
from .tokens import label_type

SUFFIXES = (".parquet", ".csv", ".jsonl")
_LINES_A_BATCH = 1 << 16


@dataclass(frozen=True)
class LabelSource:
    """What was brought: `table` has columns of type bool, int64, float64, string or null only."""

    table: pa.Table
    file: str | None
    """The name of the file, without its folder; None for a table."""
    sha256: str | None
    """SHA-256 of the file's bytes; None for a table."""
    empty_is_missing: bool
    """The form cannot tell an empty text from a missing one (CSV)."""


def read_labels(source: Any, as_text: Collection[str]) -> LabelSource:
    """Read a .parquet, .csv or .jsonl file, an Arrow table, or a frame that can give one (pandas, polars).

    Columns named in `as_text` are text whatever they look like. An empty cell of a CSV is missing, and so is NaN in a
    pandas frame, which has no other way to say it; elsewhere NaN is NaN. `DataError` names what cannot be read.
    """
    if not isinstance(source, str | os.PathLike):
        return LabelSource(_plain(_arrow_table(source), "The table"), None, None, False)
    path = Path(source).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise RequestError(f"{path} is none of {', '.join(SUFFIXES)}: labels are read from files of these kinds.")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Name a file of labels.") from error
    kind, where = path.suffix.lower(), str(path)
    try:
        if kind == ".parquet":
            with pq.ParquetFile(pa.BufferReader(data)) as file:
                table = file.read()
        else:
            table = _read_csv(data, where, as_text) if kind == ".csv" else _read_jsonl(data, where)
        table = _plain(table, where)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{where} cannot be read as {kind}: {error}. Mend the file.") from error
    return LabelSource(table, path.name, hashlib.sha256(data).hexdigest(), kind == ".csv")


def _arrow_table(source: Any) -> pa.Table:
    if isinstance(source, pa.Table):
        return source
    try:
        if type(source).__module__.partition(".")[0] == "pandas":
            return pa.Table.from_pandas(source, preserve_index=False)
        if hasattr(source, "__arrow_c_stream__"):
            return pa.table(source)
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"This {type(source).__name__} cannot be turned into an Arrow table: {error}") from error
    raise RequestError(f"Labels come as a file's path, an Arrow table or a frame, not as {type(source).__name__}.")


def _plain(table: pa.Table, where: str) -> pa.Table:
    """Bring every column to one of the types that labels have, without changing a value."""
    names = table.column_names
    lowered = [n.lower() for n in names]
    for name in names:
        if not name or "\0" in name:
            raise DataError(f"{where} has a column without a name. Name it or leave it out.")
        if lowered.count(name.lower()) > 1:
            raise DataError(f"{where} has two columns {name!r} (SQL ignores case). Rename or leave out one.")
        if name.startswith("__index_level_"):
            raise DataError(f"{where} has the index of a pandas frame as column {name!r}. Write it with index=False.")
    return pa.table({n: _plain_column(n, table.column(n), where) for n in names})


def _plain_column(name: str, column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _plain_column(name, column.cast(kind.value_type), where)
    if pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return column
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        wanted: pa.DataType = pa.string()
    elif pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0):
        wanted = pa.int64()
    elif pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        wanted = pa.float64()
    else:
        nested = " is nested:" if pa.types.is_nested(kind) else ""
        raise DataError(
            f"{where}: column {name!r}{nested} is of type {kind}. A label is true or false, a number or text: "
            "cast it, or leave it out."
        )
    try:
        return column.cast(wanted)
    except pa.ArrowInvalid as error:
        raise DataError(f"{where}: column {name!r}, {kind}, does not fit into {wanted} ({error}).") from error


def _read_csv(data: bytes, where: str, as_text: Collection[str]) -> pa.Table:
    table = read_csv(data, where)
    pairs = zip(table.column_names, table.columns, strict=True)
    columns = [c if n in as_text else typed_cells(n, c, where) for n, c in pairs]
    return pa.Table.from_arrays(columns, names=table.column_names)


def _read_jsonl(data: bytes, where: str) -> pa.Table:
    """Read JSON objects, one a line; a key that a line lacks is missing there."""
    parts: dict[str, list[pa.Array]] = {}
    kinds: dict[str, dict[type, Any]] = {}
    total = 0
    for count, columns in _batches(data, where):
        for name, values in columns.items():
            values += [None] * (count - len(values))
            parts.setdefault(name, [pa.nulls(total)] if total else []).append(_array(name, values, kinds, where))
        for name in parts.keys() - columns.keys():
            parts[name].append(pa.nulls(count))
        total += count
    done = {}
    for name, arrays in parts.items():
        wanted = label_type(name, list(kinds[name].values()))  # refuses a mixture
        same = [exact_doubles(name, a, where) if pa.types.is_floating(wanted) else a.cast(wanted) for a in arrays]
        done[name] = pa.chunked_array(same, wanted)
    return pa.table(done)


def _array(name: str, values: list[Any], kinds: dict[str, dict[type, Any]], where: str) -> pa.Array:
    found = {type(v): v for v in values}
    found.pop(type(None), None)
    nested = next((v for k, v in found.items() if k in (list, tuple)), None)
    if nested is not None:
        raise DataError(f"{where}: column {name!r} is nested. A label is true or false, a number, text or null.")
    kinds.setdefault(name, {}).update(found)
    wanted = label_type(name, list(found.values()))
    try:
        if {int, float} <= found.keys():
            exact_doubles(name, pa.array([v for v in values if type(v) is int], pa.int64()), where)
        return pa.array(values, wanted)
    except OverflowError:
        raise DataError(
            f"{where}: an integer of column {name!r} does not fit into 64 bits. Write it as text."
        ) from None
    except UnicodeEncodeError:
        raise DataError(f"{where}: column {name!r} holds half a character (a lone surrogate). Mend the text.") from None


def _batches(data: bytes, where: str) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Give the values of some lines by column, with the number of lines; columns may be short at their end."""
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text ({error}). Convert it.") from None
    decode = json.JSONDecoder(object_pairs_hook=tuple).decode  # tells objects from lists, and keeps a key given twice
    columns: dict[str, list[Any]] = {}
    count = 0
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        try:
            pairs = decode(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}, line {number}: not valid JSON ({error}). Write one object a line.") from None
        if not isinstance(pairs, tuple):
            raise DataError(f"{where}, line {number}: not an object. Write one JSON object a line.")
        for name, value in pairs:
            values = columns.get(name)
            if values is None:
                values = columns[name] = [None] * count
            elif len(values) < count:
                values += [None] * (count - len(values))
            elif len(values) > count:
                raise DataError(f"{where}, line {number}: the key {name!r} is given twice. Mend the line.")
            values.append(value)
        count += 1
        if count == _LINES_A_BATCH:
            yield count, columns
            columns, count = {}, 0
    if count:
        yield count, columns
