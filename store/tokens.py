"""The token table: one row a stored token, with what the token is and its labels; in a plan, one a token read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DataError

TOKEN_FIELDS: tuple[tuple[str, pa.DataType], ...] = (
    ("row", pa.int64()),
    ("seq", pa.int64()),
    ("pos", pa.int32()),
    ("token_id", pa.int32()),
    ("token", pa.string()),
    ("char_start", pa.int32()),
    ("char_end", pa.int32()),
    ("special", pa.bool_()),
    ("split", pa.string()),
)
SEQUENCE_FIELDS: tuple[tuple[str, pa.DataType], ...] = (
    ("seq", pa.int64()),
    ("unit", pa.int64()),
    ("document", pa.string()),
    ("document_sha256", pa.string()),
    ("char_offset", pa.int64()),
    ("length", pa.int32()),
    ("rows", pa.int32()),
    ("first_row", pa.int64()),
    ("sequence_row", pa.int64()),
    ("split", pa.string()),
)
SPAN_FIELDS: tuple[tuple[str, pa.DataType], ...] = (
    ("span_row", pa.int64()),
    ("seq", pa.int64()),
    ("unit", pa.int64()),
    ("span", pa.int32()),
    ("pos_start", pa.int32()),
    ("pos_end", pa.int32()),
    ("tokens", pa.int32()),
    ("split", pa.string()),
)
"""The table of spans, which has a column more: the label that the spans are of."""
ROW_FIELDS = ("row", "seq", "pos", "token_id")
"""The columns that say which token stands in which row."""

RESERVED_LABELS = frozenset({"run", "rowid", "text", *(n for n, _ in TOKEN_FIELDS), *(n for n, _ in SEQUENCE_FIELDS)})


def label_type(name: str, values: list[Any]) -> pa.DataType:
    """Choose the one column type that holds all non-null label values exactly.

    Booleans stay booleans, whole numbers become int64, other numbers double, text string. Mixed kinds are refused,
    as turning one into the other would change labels without a word.
    """
    kinds = {type(v) for v in values if v is not None}
    if not kinds:
        return pa.null()
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    if kinds <= {int, float}:
        return pa.float64()
    if kinds == {str}:
        return pa.string()
    shown = ", ".join(sorted(k.__name__ for k in kinds))
    raise DataError(f"Label {name!r} mixes {shown}. Give it one type: numbers, text or true/false.")


def table_hash(tables: Iterable[pa.Table], columns: tuple[str, ...] | None = None) -> str:
    """Hash the logical content of tables of one schema: names, types, nulls and values, not file bytes.

    It does not depend on how rows are cut into tables, row groups or files, nor on the library's version. One table
    is held at a time.
    """
    digests: dict[str, Any] = {}
    for table in tables:
        for name in columns or (tuple(digests) or table.column_names):
            if name not in digests:
                kind = table.schema.field(name).type
                digests[name] = hashlib.sha256(json.dumps([name, str(kind)]).encode())
            for chunk in table.column(name).chunks:
                _hash_chunk(digests[name], chunk)
    if not digests:
        return hashlib.sha256(b"empty").hexdigest()
    return hashlib.sha256(b"".join(d.digest() for d in digests.values())).hexdigest()


def _hash_chunk(digest: Any, chunk: pa.Array) -> None:
    # Values and nulls are hashed in separate streams per value kind, row by row in order, so that the cut into
    # chunks leaves no trace.
    if pa.types.is_string(chunk.type):
        for value in chunk.to_pylist():
            encoded = b"" if value is None else value.encode()
            digest.update((-1 if value is None else len(encoded)).to_bytes(8, "little", signed=True) + encoded)
        return
    valid = chunk.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
    if pa.types.is_null(chunk.type):
        digest.update(valid.tobytes())
        return
    values = np.ascontiguousarray(chunk.fill_null(False if pa.types.is_boolean(chunk.type) else 0))
    cells = np.empty(len(valid), [("valid", np.uint8), ("value", values.dtype)])
    cells["valid"], cells["value"] = valid, values
    digest.update(cells.tobytes())
