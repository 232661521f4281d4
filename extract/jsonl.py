"""Rows of a .jsonl file: parsed and checked, each complaint with its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import DataError

_INT64 = range(-(2**63), 2**63)
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """One row: the object on one line."""

    where: str
    """The file and the line in words, for messages."""
    line: int
    values: dict[str, Any]


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
            raise DataError(f"{where}: {_kind(values)}, not an object. Write one JSON object a line.")
        rows.append(Row(where, number, values))
    return rows


def read_content(row: Row, text_column: str) -> tuple[str | None, tuple[int, ...] | None]:
    """Give the text, or else the token ids, of a row; a null text counts as none."""
    text = row.values.get(text_column)
    if text_column == "input_ids" or text is None:
        if row.values.get("input_ids") is None:
            raise DataError(
                f"{row.where}: no text in column {text_column!r} and no 'input_ids'. Give one, or remove the row."
            )
        return None, _ids(row)
    if not isinstance(text, str):
        raise DataError(f"{row.where}: {text_column!r} is {_kind(text)}, not a string. Give text, or 'input_ids'.")
    if not text:
        raise DataError(f"{row.where}: {text_column!r} is empty and has no token to store. Remove the row.")
    _check_characters(row, text_column, text)
    return text, None


def read_split(row: Row, column: str) -> str:
    """Give the split of a row, which must be a string."""
    split = row.values.get(column)
    if not isinstance(split, str) or not split:
        raise DataError(
            f"{row.where}: the split {column!r} is {_kind(split) if split != '' else 'empty'}. Give every"
            f" row a name such as 'train' or 'test', or leave the split column out."
        )
    _check_characters(row, column, split)
    return split


def label_of(row: Row, column: str) -> Any:
    """Give a label of a row: a scalar, a list of scalars (one a token), or None where it is null or missing."""
    value = row.values.get(column)
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, dict | list):
            raise DataError(
                f"{row.where}: the label {column!r} holds {_kind(one)}. A label is a boolean, a number, a"
                f" string or null, or a list of these with one a token."
            )
        if isinstance(one, str):
            _check_characters(row, column, one)
        elif isinstance(one, int) and one not in _INT64:
            raise DataError(f"{row.where}: the label {column!r} does not fit into 64 bits. Write it as a string.")
    return value


def check_label_kinds(column: str, labels: Iterable[tuple[str, Any]]) -> None:
    """Refuse a label column whose rows, given as (where, label), are not all of one kind.

    The kinds are booleans, numbers and strings, one a document or one a token; None goes with all.
    """
    first: tuple[str, str] | None = None
    first_shape: tuple[str, str] | None = None
    for where, value in labels:
        if value is None:
            continue
        shape = "a list with a label a token" if isinstance(value, list) else "one label"
        first_shape = first_shape or (where, shape)
        if shape != first_shape[1]:
            _refuse_mix(column, first_shape, (where, shape))
        for one in value if isinstance(value, list) else [value]:
            if one is None:
                continue
            kind = "a number" if _kind(one) in ("an integer", "a float") else _kind(one)
            first = first or (where, kind)
            if kind != first[1]:
                _refuse_mix(column, first, (where, kind))


def _refuse_mix(column: str, first: tuple[str, str], other: tuple[str, str]) -> None:
    raise DataError(
        f"The label {column!r} is {first[1]} in {first[0]} and {other[1]} in {other[0]}. Make the column of one kind."
    )


def _ids(row: Row) -> tuple[int, ...]:
    ids = row.values["input_ids"]
    if not isinstance(ids, list):
        raise DataError(f"{row.where}: 'input_ids' is {_kind(ids)}, not a list of integers. Give a list.")
    if not ids:
        raise DataError(f"{row.where}: 'input_ids' is empty and has no token to store. Remove the row.")
    for position, one in enumerate(ids):
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= _INT32_MAX:
            raise DataError(
                f"{row.where}: 'input_ids' holds {one!r} at position {position}. Token ids are integers from"
                f" 0 on, below 2**31."
            )
    return tuple(ids)


def _check_characters(row: Row, column: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row.where}: {column!r} holds a lone surrogate (\\u{ord(text[error.start]):04x}) at character"
            f" {error.start}, which is half a character and cannot be stored. Mend the text."
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} is given twice")
    return values


def _kind(value: object) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a float",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")
