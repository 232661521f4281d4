"""Cells of a .csv file as columns: the text as it is written, and the one rule by which a column gets a type.

pyarrow's own guesses are not taken, because they change values without a word: dates of texts, numbers of "007".
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute

from ..errors import DataError

pc: Any = pyarrow.compute  # type checkers see none of its functions
_INTEGER = r"^-?(0|[1-9][0-9]*)$"
_REAL = r"^[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$|^(?i:[+-]?(nan|inf|infinity))$"
_TRUTH = r"^(true|false|True|False|TRUE|FALSE)$"
_LARGEST = 2**31 - 2


def read_csv(data: bytes, where: str) -> pa.Table:
    """Read the bytes of a .csv with a header; every column is text, and an empty cell is null.

    A byte order mark is dropped; line breaks inside quotation marks stay as they are; blank lines are no rows.
    `DataError` names the row, counted from 1 without the header, that has too many or too few cells.
    """
    if len(data) > _LARGEST:
        raise DataError(f"{where}: a .csv of more than 2 GiB is not read. Cut it, or give it as .parquet.")
    if data.count(b'"') % 2:
        raise DataError(f"{where}: a quotation mark is never closed; the file may be cut. Mend it.")
    try:
        return _read(data, None)
    except pa.ArrowInvalid:
        wrong: list[Any] = []
        try:
            return _read(data, wrong)  # again, as only one thread knows which row it is that it cannot read
        except pa.ArrowInvalid as error:
            if not wrong:
                raise
            raise DataError(
                f"{where}, row {wrong[0].number - 1}: {wrong[0].actual_columns} cells, where the header has "
                f"{wrong[0].expected_columns}. Mend the row; a text with commas stands in quotation marks."
            ) from error


def _read(data: bytes, wrong: list[Any] | None) -> pa.Table:
    from pyarrow import csv

    def note(row: Any) -> str:
        if wrong is not None:
            wrong.append(row)
        return "error"

    parse = csv.ParseOptions(newlines_in_values=True, invalid_row_handler=note)
    # One block: where one ends between the \r and the \n of a quoted line break, pyarrow drops the \n.
    reading = csv.ReadOptions(block_size=len(data) + 1, use_threads=wrong is None)
    with csv.open_csv(pa.BufferReader(data), parse_options=parse, read_options=reading) as reader:
        names = reader.schema.names
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""]
    )
    return csv.read_csv(pa.BufferReader(data), reading, parse, convert)


def typed_cells(name: str, cells: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """Give a column of text cells the type that all of its cells have: int64, float64, bool, or else string.

    Numbers are those written as a program writes them: "007" and "1e5x" keep a column text. `DataError` where a
    number would be rounded.
    """
    if cells.null_count == len(cells):
        return pa.chunked_array([pa.nulls(len(cells))])

    def all_are(pattern: str) -> bool:
        return bool(pc.all(pc.match_substring_regex(cells, pattern)).as_py())

    if all_are(_INTEGER):
        return _cast_integers(name, cells, where)
    if all_are(_REAL):
        whole = cells.filter(pc.match_substring_regex(cells, _INTEGER))
        exact_doubles(name, _cast_integers(name, whole, where), where)
        return cells.cast(pa.float64())
    return pc.equal(pc.utf8_lower(cells), "true") if all_are(_TRUTH) else cells


def _cast_integers(name: str, cells: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    try:
        return cells.cast(pa.int64())
    except pa.ArrowInvalid:
        raise DataError(
            f"{where}: the integers of column {name!r} do not fit into 64 bits. Give them as text, in a .jsonl."
        ) from None


def exact_doubles(name: str, integers: Any, where: str) -> Any:
    """Cast int64 to float64; `DataError` where a whole number has no double of its own."""
    try:
        return integers.cast(pa.float64())
    except pa.ArrowInvalid:
        raise DataError(
            f"{where}: column {name!r} mixes real numbers with integers beyond 2^53, which would be rounded. Give it "
            "one kind, or write it as text."
        ) from None
