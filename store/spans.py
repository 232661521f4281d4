"""Spans: neighbouring tokens of a sequence with one value of a label, found in a plan's table of tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .tokens import SPAN_FIELDS

_OWN = frozenset(name for name, _ in SPAN_FIELDS)


def pooled_tokens(planned: pa.Table) -> np.ndarray:
    """Say which tokens of a planned table go into means: those that are to be stored and not special, bool (n,)."""
    return planned["row"].is_valid().to_numpy() & ~planned["special"].to_numpy()


def label_spans(planned: pa.Table, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Number the runs of tokens of one sequence with one value of a label, in a planned table of whole sequences.

    Returns the number of each token's run, int64 (n,), and which tokens have a value, bool (n,). A token without one
    (NULL) is in a run, but in no span. NaN is a value.
    """
    coded = planned[label].combine_chunks().dictionary_encode().indices
    codes = coded.fill_null(-1).to_numpy(zero_copy_only=False)
    seqs = planned["seq"].to_numpy()
    starts = np.ones(len(codes), bool)
    starts[1:] = (codes[1:] != codes[:-1]) | (seqs[1:] != seqs[:-1])
    return np.cumsum(starts) - 1, codes >= 0


def find_spans(planned: pa.Table, label: str) -> pa.Table:
    """Give the spans of a planned table of whole sequences of which a token goes into a mean, in order.

    They have the columns of `SPAN_FIELDS` but for `row` and `unit`, and the label. `span` counts those of a sequence.
    """
    runs, labelled = label_spans(planned, label)
    borders = np.flatnonzero(np.diff(runs, prepend=-1))
    pooled = np.bincount(runs, weights=pooled_tokens(planned) & labelled, minlength=len(borders)).astype(np.int64)
    there = np.flatnonzero(pooled)
    at = borders[there]
    seqs, start = planned["seq"].to_numpy()[at], planned["pos"].to_numpy()[at]
    found = planned.select(["seq", "split", label]).take(pa.array(at))
    for name, values in (
        ("span", np.arange(len(at)) - np.searchsorted(seqs, seqs)),
        ("pos_start", start),
        ("pos_end", start + np.diff(borders, append=len(runs))[there]),
        ("tokens", pooled[there]),
    ):
        found = found.append_column(name, pa.array(values, pa.int32()))
    return found


def span_table(spans: pa.Table, units: Sequence[int] | np.ndarray, rows: Sequence[int] | np.ndarray) -> pa.Table:
    """Give spans their units and rows, and all columns their order."""
    spans = spans.append_column("span_row", pa.array(rows, pa.int64()))
    spans = spans.append_column("unit", pa.array(units, pa.int64()))
    return spans.select([*(name for name, _ in SPAN_FIELDS), *(n for n in spans.column_names if n not in _OWN)])


def unit_spans(planned: pa.Table, label: str, unit: int, unit_rows: int) -> pa.Table:
    """Give the spans of a unit as the plan's table has them, `unit_rows` being a unit's rows of spans."""
    found = find_spans(planned, label)
    rows = unit * unit_rows + np.arange(found.num_rows)
    return span_table(found, np.full(found.num_rows, unit), rows)


def spans_bytes(spans: pa.Table) -> bytes:
    """Encode the table of spans of a plan; the same table gives the same bytes, however it was put together."""
    sink = io.BytesIO()
    pq.write_table(spans.combine_chunks(), sink, compression="zstd")
    return sink.getvalue()
