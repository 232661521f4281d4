"""Rows of data with columns: what a row must hold to be a document, each complaint with its file and row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DataError

_INT64 = range(-(2**63), 2**63)
_INT32_MAX = 2**31 - 1
_MESSAGES = "messages"
_IDS = "input_ids"


@dataclass(frozen=True)
class Row:
    """One row: a line of a .jsonl, a record of a .csv, a row of a .parquet or of a dataset."""

    where: str
    """The file and the row in words, for messages."""
    number: int
    """Counted from 1, of lines in a .jsonl and of data rows elsewhere."""
    values: dict[str, Any]


@dataclass(frozen=True)
class RowTable:
    """The rows of one file, or of one split of a dataset."""

    name: str
    """The document of row 12 is called ``NAME:12``."""
    columns: tuple[str, ...]
    """All columns there are, whether they were read or not."""
    rows: Sequence[Row]
    split: str | None = None
    """The split that all these rows belong to, when the data say so."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a row make a document."""

    text: str = "text"
    messages: str | None = None
    """The column of messages that every row is taken from; None: ``messages``, where a row has no text."""
    labels: tuple[str, ...] = ()
    split: str | None = None

    @property
    def content(self) -> tuple[str, ...]:
        """The columns of the content; the first that is not null in a row is the row's."""
        if self.messages is not None:
            return (self.messages,)
        return (_IDS,) if self.text == _IDS else (self.text, *(c for c in (_MESSAGES, _IDS) if c != self.text))

    @property
    def others(self) -> tuple[str, ...]:
        """The columns of labels and the split."""
        return tuple(dict.fromkeys([*self.labels, *([self.split] if self.split else [])]))


@dataclass(frozen=True)
class Content:
    """What a row holds: one of the three is there."""

    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None


def read_content(row: Row, columns: Columns) -> Content:
    """Give the text, messages or token ids of a row; a null counts as none."""
    column = next((c for c in columns.content if row.values.get(c) is not None), None)
    if column is None:
        first, *more = columns.content
        rest = f" and no {' or '.join(map(repr, more))}" if more else ""
        what = "token ids" if first == _IDS else "messages" if columns.messages is not None else "text"
        raise DataError(f"{row.where}: no {what} in column {first!r}{rest}. Give one, or remove the row.")
    if column == columns.messages or (column == _MESSAGES != columns.text):
        return Content(messages=_messages(row, column))
    if column == _IDS:
        return Content(input_ids=_ids(row))
    text = row.values[column]
    if not isinstance(text, str):
        raise DataError(f"{row.where}: {column!r} is {kind_of(text)}, not a string. Give text, or 'input_ids'.")
    if not text:
        raise DataError(f"{row.where}: {column!r} is empty and has no token to store. Remove the row.")
    _check_characters(row, column, text)
    return Content(text=text)


def _messages(row: Row, column: str) -> tuple[dict[str, Any], ...]:
    """Check a list of messages; fields that are null count as left out, as in a column of structs."""
    messages = row.values[column]
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{row.where}: {column!r} is {'an empty list' if messages == [] else kind_of(messages)}, not a list of "
            "messages. Give a list of objects with 'role' and 'content'."
        )
    found = []
    for number, message in enumerate(messages, 1):
        where = f"{row.where}: message {number} of {column!r}"
        if not isinstance(message, dict):
            raise DataError(f"{where} is {kind_of(message)}, not an object. Give objects with 'role' and 'content'.")
        kept = {key: value for key, value in message.items() if value is not None}
        for key in ("role", "content"):
            value = kept.get(key)
            if key == "content" and isinstance(value, list):
                raise DataError(
                    f"{where} has a list of parts as its content (text, images, ...). Only text is run: write its "
                    "content as a string, or leave the row out."
                )
            if not isinstance(value, str) or (key == "role" and not value):
                shown = f"is {kind_of(value)}" if key in message and value != "" else "is missing or empty"
                raise DataError(f"{where}: its {key!r} {shown}. It must be a string.")
        _check_json(where, kept)
        found.append(kept)
    return tuple(found)


def _check_json(where: str, value: Any) -> None:
    """Refuse what JSON cannot say, and half characters, wherever they stand in a message."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(f"{where} holds a lone surrogate, which is half a character. Mend the text.") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where} holds what JSON cannot say ({error}). Leave it out.") from None


def read_split(row: Row, column: str) -> str:
    """Give the split of a row, which must be a string."""
    split = row.values.get(column)
    if not isinstance(split, str) or not split:
        raise DataError(
            f"{row.where}: the split {column!r} is {kind_of(split) if split != '' else 'empty'}. Give every"
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
                f"{row.where}: the label {column!r} holds {kind_of(one)}. A label is a boolean, a number, a"
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
            kind = "a number" if kind_of(one) in ("an integer", "a float") else kind_of(one)
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
        raise DataError(f"{row.where}: 'input_ids' is {kind_of(ids)}, not a list of integers. Give a list.")
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


def kind_of(value: object) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a float",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")
