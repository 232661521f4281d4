"""Packing sequences into units: which token stands in which row, decided before the first forward."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DataError, RequestError
from ..store.tokens import RESERVED_LABELS, ROW_FIELDS, SEQUENCE_FIELDS, TOKEN_FIELDS, label_type, table_hash
from .data import Document, default_split
from .windows import Sequence

SMALLEST_UNIT_FACTOR = 8
LARGEST_UNIT = 1 << 20
_LARGEST_DEFAULT_UNIT = 16_384
_SMALLEST_DEFAULT_UNIT = 256
_DEFAULT_UNITS = 16


@dataclass(frozen=True)
class ExtractionPlan:
    """Every sequence in its unit, and the token table of each unit."""

    unit_rows: int
    sequences: pa.Table
    units: list[pa.Table]
    tokens: int
    plan_hash: str
    tokens_hash: str

    @property
    def waste(self) -> float:
        """The share of planned rows that stay unused."""
        return 1 - self.tokens / (len(self.units) * self.unit_rows)


def choose_unit_rows(lengths: SequenceOf[int], asked: int | None = None) -> int:
    """Choose the rows of a unit: a power of two, at least 8 times the longest sequence.

    Less than that wastes more than a tenth of the rows. By default large enough that small data make about 16 units,
    and at most 16,384 rows, above which scattered reads become slower.
    """
    smallest = _power_of_two(SMALLEST_UNIT_FACTOR * max(lengths))
    largest = max(LARGEST_UNIT, smallest)
    if asked is None:
        share = _power_of_two(max(1, sum(lengths) // _DEFAULT_UNITS))
        return max(smallest, min(_LARGEST_DEFAULT_UNIT, max(_SMALLEST_DEFAULT_UNIT, share)))
    if asked < 1 or asked & (asked - 1):
        raise RequestError(f"A unit has a power of two of rows, not {asked}.")
    if asked > largest:
        raise RequestError(
            f"A unit of {asked} rows is too large to be written and retried whole; use at most {largest}."
        )
    if asked < smallest:
        raise RequestError(
            f"A unit of {asked} rows is less than {SMALLEST_UNIT_FACTOR} times the longest sequence "
            f"({max(lengths)} tokens); use at least {smallest}."
        )
    return asked


def pack(lengths: SequenceOf[int], unit_rows: int) -> list[tuple[int, int]]:
    """Place sequences in order, each into the current unit until it would overflow, then into a fresh one.

    Returns the unit and the first row (counted over the whole array) of each sequence.
    """
    places: list[tuple[int, int]] = []
    unit, used = 0, 0
    for length in lengths:
        if used + length > unit_rows:
            unit, used = unit + 1, 0
        places.append((unit, unit * unit_rows + used))
        used += length
    return places


def make_plan(
    documents: SequenceOf[Document], sequences: SequenceOf[Sequence], unit_rows: int | None = None
) -> ExtractionPlan:
    """Pack sequences into units and build their tables.

    Label columns get one type over the whole run. A label named like a column of the token table is refused.
    """
    if not sequences:
        raise DataError("The data hold no tokens: there is nothing to extract.")
    lengths = [len(s.input_ids) for s in sequences]
    size = choose_unit_rows(lengths, unit_rows)
    places = pack(lengths, size)
    token_labels = _label_names(s.labels for s in sequences)
    document_labels = [n for n in _label_names(s.sequence_labels for s in sequences)]
    types = {n: label_type(n, [v for s in sequences for v in s.labels.get(n, ())]) for n in token_labels}
    own = {n: label_type(n, [s.sequence_labels.get(n) for s in sequences]) for n in document_labels}
    splits = [documents[s.document].split or default_split(documents[s.document].digest) for s in sequences]
    rows = [
        {
            "seq": i,
            "unit": unit,
            "document": documents[s.document].name,
            "document_sha256": documents[s.document].digest,
            "char_offset": s.offset,
            "length": len(s.input_ids),
            "first_row": first,
            "split": split,
            **{n: s.sequence_labels.get(n) for n in document_labels},
        }
        for i, (s, (unit, first), split) in enumerate(zip(sequences, places, splits, strict=True))
    ]
    table = pa.Table.from_pylist(rows, pa.schema([*(pa.field(n, t) for n, t in SEQUENCE_FIELDS), *_fields(own)]))
    schema = pa.schema([*(pa.field(n, t) for n, t in TOKEN_FIELDS), *_fields(types), *_fields(own)])
    members: list[list[int]] = [[] for _ in range(places[-1][0] + 1)]
    for i, (unit, _) in enumerate(places):
        members[unit].append(i)
    units = [_unit_table([sequences[i] for i in m], [rows[i] for i in m], schema, types, own) for m in members]
    return ExtractionPlan(size, table, units, sum(lengths), table_hash(units, ROW_FIELDS), table_hash([*units]))


def _unit_table(
    sequences: SequenceOf[Sequence],
    rows: SequenceOf[Mapping[str, Any]],
    schema: pa.Schema,
    types: Mapping[str, pa.DataType],
    own: Mapping[str, pa.DataType],
) -> pa.Table:
    lengths = np.array([len(s.input_ids) for s in sequences])
    first = np.array([r["first_row"] for r in rows])
    pos = np.concatenate([np.arange(n) for n in lengths])

    def spans(name: str) -> pa.Array:
        values = np.concatenate([getattr(s, name) for s in sequences])
        return pa.array(values, pa.int32(), mask=values < 0)

    def each(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array(values, kind).take(pa.array(np.repeat(np.arange(len(sequences)), lengths)))

    columns: dict[str, Any] = {
        "row": pa.array(np.repeat(first, lengths) + pos, pa.int64()),
        "seq": each([r["seq"] for r in rows], pa.int64()),
        "pos": pa.array(pos, pa.int32()),
        "token_id": pa.array(np.concatenate([s.input_ids for s in sequences]), pa.int32()),
        "token": pa.array([p for s in sequences for p in (s.pieces or [None] * len(s.input_ids))], pa.string()),
        "char_start": spans("start"),
        "char_end": spans("end"),
        "special": pa.array(np.concatenate([s.special for s in sequences])),
        "split": each([r["split"] for r in rows], pa.string()),
    }
    for name, kind in types.items():
        values = [v for s in sequences for v in s.labels.get(name, [None] * len(s.input_ids))]
        columns[name] = pa.array(values, kind)
    for name, kind in own.items():
        columns[name] = each([r[name] for r in rows], kind)
    return pa.table(columns, schema=schema)


def _label_names(labels: Any) -> list[str]:
    names = list(dict.fromkeys(n for each in labels for n in each))
    taken = [n for n in names if n.lower() in RESERVED_LABELS]
    lowered = [n.lower() for n in names]
    taken += [n for n in names if lowered.count(n.lower()) > 1]
    if taken:
        raise RequestError(
            f"{taken[0]!r} cannot name a label: the tables have a column of that name already "
            "(SQL does not tell upper from lower case). Rename it in the data."
        )
    return names


def _fields(types: Mapping[str, pa.DataType]) -> list[pa.Field]:
    return [pa.field(n, t) for n, t in types.items()]


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
