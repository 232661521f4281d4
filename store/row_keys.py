"""The columns run and row of a selection: which row of which run each of its rows stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import RequestError


def check_keys(table: pa.Table) -> None:
    """Raise `RequestError` unless a table has the columns run, of text, and row, of integers, without NULLs."""
    missing = {"run", "row"} - set(table.column_names)
    if missing:
        raise RequestError(
            f"A selection must return the columns run and row; this query returns {table.column_names}. "
            "Add them: SELECT run, row, ... FROM tokens."
        )
    for name in ("run", "row"):
        if table.column_names.count(name) > 1:
            raise RequestError(f"The selection has two columns {name}: give one of them another name.")
        if table[name].null_count:
            raise RequestError(
                f"Column {name} of the selection holds {table[name].null_count} NULLs. Leave them out: "
                f"WHERE {name} IS NOT NULL."
            )
    if not pa.types.is_integer(table["row"].type):
        raise RequestError(f"Column row of the selection is {table['row'].type}, not an integer. Cast it: row::BIGINT.")
    if table.num_rows and not _is_text(table["run"].type):
        raise RequestError(f"Column run of the selection is {table['run'].type}, not text. Give the run's name.")


def run_codes(runs: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """Give the names of runs, each once, and for each row the place of its run's name."""
    if not pa.types.is_dictionary(runs.type):
        # Encoded before the chunks are joined: the names of billions of rows do not fit into one array of text.
        runs = runs.cast(pa.string()).dictionary_encode()
    coded = runs.unify_dictionaries().combine_chunks()
    names, codes = coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False)
    if len(names) == 1 and len(codes):
        return names, codes
    used = np.flatnonzero(np.bincount(codes, minlength=len(names)))
    if len(used) < len(names):  # an ENUM brings all its names along
        places = np.zeros(len(names), codes.dtype)
        places[used] = np.arange(len(used))
        names, codes = [names[i] for i in used], places[codes]
    return names, codes


def row_numbers(rows: Any) -> np.ndarray:
    """Give row numbers as int64 (n,); `RequestError` unless `rows` is a one-dimensional sequence of integers."""
    try:
        numbers = np.asarray(rows)
    except (ValueError, TypeError):  # a ragged list
        numbers = np.asarray(None)
    if numbers.ndim == 1 and not numbers.size:
        return np.empty(0, np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or int(numbers.max()) > np.iinfo(np.int64).max:
        raise RequestError(
            f"Rows are given as a one-dimensional sequence of whole numbers, not as {type(rows).__name__} of "
            f"{numbers.dtype} {numbers.shape}."
        )
    return numbers.astype(np.int64)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
