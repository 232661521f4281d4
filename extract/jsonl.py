"""A .jsonl file as rows: one object a line, each complaint with its file and line."""

from __future__ import annotations

import json
from typing import Any

from ..errors import DataError
from .rows import Row, kind_of


def read_rows(text: str, path: str) -> list[Row]:
    """Parse the lines of `text`, one JSON object each; blank lines are skipped and counted.

    NaN and Infinity are taken as Python's json module takes them. A key given twice in an object is refused,
    because one of its values would be lost.
    """
    rows: list[Row] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line, object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: not valid JSON ({error.msg}, column {error.colno}). Write one JSON object a line."
            ) from None
        except (
            ValueError,
            RecursionError,
        ) as error:  # a key twice; a number or a nesting beyond Python's limits
            raise DataError(f"{where}: {error}. Mend the line.") from None
        if not isinstance(values, dict):
            raise DataError(f"{where}: {kind_of(values)}, not an object. Write one JSON object a line.")
        rows.append(Row(where, number, values))
    return rows


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} is given twice")
    return values
