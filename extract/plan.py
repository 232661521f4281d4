"""Packing sequences into units: which token stands in which row, decided before the first forward."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ..errors import DataError, RequestError
from ..store.tokens import ROW_FIELDS, table_hash
from .data import Document
from .keep import Keep
from .plan_tables import PlanTables
from .windows import Sequence

SMALLEST_UNIT_FACTOR = 8
LARGEST_UNIT = 1 << 20
_LARGEST_DEFAULT_UNIT = 16_384
_SMALLEST_DEFAULT_UNIT = 256
_DEFAULT_UNITS = 16
_MOST_READ = 1 << 18


@dataclass(frozen=True)
class ExtractionPlan:
    """Every sequence in its unit, and the token table of each unit: all that is read, with a row where it is stored."""

    unit_rows: int
    sequences: pa.Table
    units: list[pa.Table]
    tokens: int
    """Stored tokens."""
    read: int
    """Tokens that the model reads."""
    left_out: int
    """Sequences that are not run, as nothing of them is stored."""
    plan_hash: str
    tokens_hash: str

    @property
    def waste(self) -> float:
        """The share of planned rows that stay unused."""
        return 1 - self.tokens / (len(self.units) * self.unit_rows)


def choose_unit_rows(rows: SequenceOf[int], asked: int | None = None, lengths: SequenceOf[int] | None = None) -> int:
    """Choose the rows of a unit: a power of two, at least 8 times those of the sequence with the most.

    Less than that wastes more than a tenth of the rows. By default large enough that small data make about 16 units,
    and at most 16,384 rows, above which scattered reads become slower. Where fewer tokens are stored than read,
    `lengths` being the tokens that are read of each sequence, the default is halved until no unit reads more than
    262,144 tokens, as a unit is made and retried whole.
    """
    smallest = _power_of_two(SMALLEST_UNIT_FACTOR * max(rows))
    largest = max(LARGEST_UNIT, smallest)
    if asked is None:
        share = _power_of_two(max(1, sum(rows) // _DEFAULT_UNITS))
        size = max(smallest, min(_LARGEST_DEFAULT_UNIT, max(_SMALLEST_DEFAULT_UNIT, share)))
        while size > smallest and lengths is not None and _most_read(rows, lengths, size) > _MOST_READ:
            size //= 2
        return size
    if asked < 1 or asked & (asked - 1):
        raise RequestError(f"A unit has a power of two of rows, not {asked}.")
    if asked > largest:
        raise RequestError(
            f"A unit of {asked} rows is too large to be written and retried whole; use at most {largest}."
        )
    if asked < smallest:
        raise RequestError(
            f"A unit of {asked} rows is less than {SMALLEST_UNIT_FACTOR} times the longest sequence "
            f"({max(rows)} tokens); use at least {smallest}."
        )
    return asked


def _most_read(rows: SequenceOf[int], lengths: SequenceOf[int], unit_rows: int) -> int:
    units = [unit for unit, _ in pack(rows, unit_rows)]
    return int(np.bincount(units, weights=np.asarray(lengths)).max())


def pack(lengths: SequenceOf[int], unit_rows: int) -> list[tuple[int, int]]:
    """Place sequences of `lengths` rows in order, each into the current unit until it would overflow, then a fresh one.

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
    documents: SequenceOf[Document],
    sequences: SequenceOf[Sequence],
    unit_rows: int | None = None,
    keep: Keep | None = None,
) -> ExtractionPlan:
    """Pack sequences into units and build their tables.

    With `keep`, only tokens that it names are stored. A sequence without a stored token is left out; the others keep
    the number that they have without `keep`. Label columns get one type over the whole run. A label named like a
    column of the token table is refused.
    """
    if not sequences:
        raise DataError("The data hold no tokens: there is nothing to extract.")
    builder = PlanTables(documents, sequences)
    if keep is not None:
        sequences = builder.apply(keep)
    rows = [int(s.stored.sum()) for s in sequences]
    chosen = [i for i, n in enumerate(rows) if n]
    if not chosen:
        raise RequestError(
            f"None of the {sum(len(s.input_ids) for s in sequences):,} tokens would be stored"
            f"{f': no token meets {keep.text!r}' if keep else ''}. Ask for others."
        )
    rows, lengths = [rows[i] for i in chosen], [len(sequences[i].input_ids) for i in chosen]
    size = choose_unit_rows(rows, unit_rows, lengths)
    places = pack(rows, size)
    table = builder.sequence_table(chosen, places, rows)
    members: list[list[int]] = [[] for _ in range(places[-1][0] + 1)]
    for i, (unit, _) in zip(chosen, places, strict=True):
        members[unit].append(i)
    units = [builder.token_table(m, first_row=u * size) for u, m in enumerate(members)]
    return ExtractionPlan(
        unit_rows=size,
        sequences=table,
        units=units,
        tokens=sum(rows),
        read=sum(lengths),
        left_out=len(sequences) - len(chosen),
        plan_hash=table_hash(units, ROW_FIELDS),
        tokens_hash=table_hash([*units]),
    )


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
