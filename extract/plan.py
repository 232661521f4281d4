"""The plan of an extraction: which token stands in which row, decided before the first forward."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from ..errors import DataError, RequestError
from ..store.row_kinds import SEQUENCES, SPANS, TOKENS, RowKinds
from ..store.spans import span_table
from ..store.tokens import ROW_FIELDS, table_hash
from .document import Document
from .keep import Keep
from .packing import MOST_READ, choose_pooled_rows, choose_unit_rows, pack_kinds
from .plan_tables import PlanTables
from .windows import Sequence


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
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of a unit by pooled kind."""
    pooled: dict[str, int] = field(default_factory=dict)
    """All rows by pooled kind."""
    spans: pa.Table | None = None

    @property
    def waste(self) -> float:
        """The share of planned rows of tokens that stay unused."""
        return 1 - self.tokens / (len(self.units) * self.unit_rows)


def make_plan(
    documents: SequenceOf[Document],
    sequences: SequenceOf[Sequence],
    unit_rows: int | None = None,
    keep: Keep | None = None,
    kinds: RowKinds | None = None,
) -> ExtractionPlan:
    """Pack sequences into units and build their tables.

    With `keep`, only tokens that it names are stored. A sequence without a stored token is left out; the others keep
    the number that they have without `keep`. Label columns get one type over the whole run. A label named like a
    column of the token table is refused. `kinds` are the kinds of rows that are stored (default: tokens).
    """
    kinds = kinds or RowKinds()
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
    needs = {TOKENS: rows}
    spans = None
    if SEQUENCES in kinds.kinds:
        needs[SEQUENCES] = [int((sequences[i].stored & ~sequences[i].special).any()) for i in chosen]
    if kinds.label is not None:
        needs[SPANS], spans = builder.spans(chosen, kinds.label)
    for kind in kinds.pooled:
        if not any(needs[kind]):
            why = f"no token that is stored has a value of {kinds.label!r}" if kind == SPANS else "all are special"
            raise RequestError(f"There would be no row of {kind}: {why}. Ask for other rows.")
    more = {} if TOKENS in kinds.kinds else {"largest": MOST_READ}  # the shards are small, so units can be large
    size = choose_unit_rows(rows, unit_rows, lengths, **more)
    pooled = choose_pooled_rows(needs, size, kinds) if kinds.pooled else {}
    places, first = pack_kinds(needs, {TOKENS: size, **pooled})
    of_sequences = [f if n else None for f, n in zip(first.get(SEQUENCES, ()), needs.get(SEQUENCES, ()), strict=True)]
    table = builder.sequence_table(chosen, places, first[TOKENS], rows, of_sequences or [None] * len(chosen))
    members: list[list[int]] = [[] for _ in range(places[-1] + 1)]
    for i, unit in zip(chosen, places, strict=True):
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
        rows=pooled,
        pooled={kind: sum(needs[kind]) for kind in kinds.pooled},
        spans=None if spans is None else _placed(spans, needs[SPANS], places, first[SPANS]),
    )


def _placed(spans: pa.Table, counts: SequenceOf[int], units: SequenceOf[int], first: SequenceOf[int]) -> pa.Table:
    """Give spans their places: how many each sequence has, the sequence's unit, and the first of its rows of spans."""
    rows = np.repeat(np.asarray(first), counts) + spans["span"].to_numpy()
    return span_table(spans, np.repeat(np.asarray(units), counts), rows)
