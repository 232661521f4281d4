"""Rows of Arrow tables: .csv and .parquet files and data sets, each value as it stands there or refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError
from ..store.csv_table import read_csv, typed_cells
from .rows import Columns, Row, RowTable

_ROWS_A_BATCH = 4096


def csv_rows(data: bytes, name: str, where: str, columns: Columns) -> RowTable:
    """Read the bytes of a .csv file with a header.

    The texts and the split are text. A label column has the type that all of its cells have, by the rule of
    `typed_cells`; an empty cell is missing.
    """
    try:
        table = read_csv(data, where)
    except pa.ArrowException as error:
        raise DataError(f"{where} cannot be read as .csv: {error}. Mend the file.") from error
    names = _unique(table.column_names, where)
    as_text = {*columns.content, columns.split}
    wanted = {
        n: table.column(n) if n in as_text else typed_cells(n, table.column(n), where)
        for n in names
        if n in {*columns.content, *columns.others}
    }
    # a table without columns would have no rows, and the complaint about a missing column would not come
    chosen = pa.table(wanted) if wanted else table.select([0])
    return RowTable(name, names, list(arrow_rows([chosen], columns, where)))


def parquet_rows(path: Path, name: str, columns: Columns) -> RowTable:
    """Read a .parquet file, one row group after another, and of its columns only those that are asked for."""
    try:
        with pq.ParquetFile(path) as file:
            names = _unique(file.schema_arrow.names, str(path))
            asked = {*columns.content, *columns.others}
            # by number, as a name with a dot in it would be taken for a path
            wanted = [n for n in names if n in asked] or list(names[:1])
            groups = (
                # whole columns of the row group, so that a nested one comes with all of its fields
                pa.table({n: table.column(n) for n in wanted})
                for table in (file.read_row_group(i, columns=_paths(file, wanted)) for i in range(file.num_row_groups))
            )
            return RowTable(name, names, list(arrow_rows(groups, columns, str(path))))
    except (pa.ArrowException, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path} cannot be read as .parquet: {reason}. Mend the file.") from error


def arrow_rows(tables: Iterable[pa.Table], columns: Columns, where: str, first: int = 1) -> Iterator[Row]:
    """Yield the rows of `tables`, one after the other, numbered from `first`; only the columns that are asked for.

    Booleans, integers, floats and strings come as Python's, lists of them as lists, null as None and NaN as NaN; a
    dictionary column as its values, a decimal as the number that it is. `DataError` names a column of another type.
    """
    number = first
    for table in tables:
        for begin in range(0, table.num_rows, _ROWS_A_BATCH):
            part = table.slice(begin, _ROWS_A_BATCH)
            values = _values(part, columns, where, number)
            for at in range(part.num_rows):
                row = {name: column[at] for name, column in values.items()}
                yield Row(f"{where}, row {number}", number, row)
                number += 1


def _values(table: pa.Table, columns: Columns, where: str, first: int) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for name in columns.others:
        if name in table.column_names:
            values[name] = _listed(_label(name, table.column(name), where), name, where, first)
    for name in columns.content:
        if name in table.column_names and name not in values:
            values[name] = _listed(_content(name, table.column(name), columns, where), name, where, first)
            if None not in values[name]:
                break  # no row looks further
    return values


def _label(name: str, column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """Bring a column of labels to booleans, int64, float64 or strings, or lists of them, changing no value."""
    kind = _decoded(column.type)
    inner = _decoded(kind.value_type) if _is_list(kind) else kind
    wanted = _scalar(inner)
    if wanted is None:
        raise DataError(
            f"{where}: the column {name!r} is of type {column.type}. A label is a boolean, a number or a string, or a "
            "list of these with one a token; a split is a string. Cast it, or leave it out."
        )
    try:
        return column.cast(pa.list_(wanted) if _is_list(kind) else wanted)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{where}: the column {name!r}, {column.type}, does not fit into {wanted} ({error})."
        ) from error


def _content(name: str, column: pa.ChunkedArray, columns: Columns, where: str) -> pa.ChunkedArray:
    kind = _decoded(column.type)
    if name == columns.text and name != "input_ids" and not pa.types.is_null(kind) and not _is_text(kind):
        raise DataError(
            f"{where}: the column {name!r} is of type {column.type}, not a string. Name another, or cast it."
        )
    return column.cast(kind) if kind != column.type else column


def _scalar(kind: pa.DataType) -> pa.DataType | None:
    """Give the type that a label of this one is stored as; None for one that no label has."""
    types = pa.types
    if types.is_boolean(kind) or types.is_null(kind):
        return kind
    if _is_text(kind):
        return pa.large_string()
    if types.is_integer(kind) or (types.is_decimal(kind) and kind.scale == 0):
        return pa.int64()
    return pa.float64() if types.is_floating(kind) or types.is_decimal(kind) else None


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _decoded(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _listed(column: pa.ChunkedArray, name: str, where: str, first: int) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        for at in range(len(column)):
            try:
                column[at].as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}, row {first + at}: {name!r} is not UTF-8 at byte {error.start}. Mend the text."
                ) from None
        raise


def _paths(file: pq.ParquetFile, names: list[str]) -> list[str]:
    """Give the paths of all leaves of some columns, by which alone pyarrow tells "a.b" from the field b of a."""
    leaves = [file.schema.column(i) for i in range(len(file.schema))]
    return [leaf.path for leaf in leaves if any(leaf.path == n or leaf.path.startswith(f"{n}.") for n in names)]


def _unique(names: Iterable[str], where: str) -> tuple[str, ...]:
    listed = tuple(names)
    twice = next((n for n in listed if listed.count(n) > 1), None)
    if twice is not None:
        raise DataError(f"{where} has two columns {twice!r}. Rename or leave out one.")
    return listed
