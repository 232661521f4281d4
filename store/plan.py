"""The plan of a run: which tokens are read, and which of them stand in which rows, fixed before the first forward."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .parquet import read_row_group, read_schema, read_table
from .spans import spans_bytes
from .tokens import SEQUENCE_FIELDS, SPAN_FIELDS, TOKEN_FIELDS

UNITS_A_FILE = 64
SPANS_FILE = "spans.parquet"


def write_plan(
    folder: Path,
    sequences: pa.Table,
    units: Iterator[pa.Table] | list[pa.Table],
    spans: pa.Table | None = None,
) -> None:
    """Write a plan: the tables of sequences and spans, and each unit's token table as a row group of a few files."""
    folder.mkdir()
    pq.write_table(sequences, folder / "sequences.parquet", compression="zstd")
    if spans is not None:
        (folder / SPANS_FILE).write_bytes(spans_bytes(spans))
    left = iter(units)
    first = 0
    while tables := list(itertools.islice(left, UNITS_A_FILE)):
        _write_tokens(tokens_file(folder, first), tables)
        first += UNITS_A_FILE


def tokens_file_bytes(tables: list[pa.Table]) -> bytes:
    """Encode the token tables of the units of one file of a plan, as `write_plan` writes them."""
    sink = io.BytesIO()
    _write_tokens(sink, tables)
    return sink.getvalue()


def _write_tokens(where: Path | io.BytesIO, tables: list[pa.Table]) -> None:
    with pq.ParquetWriter(where, tables[0].schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.combine_chunks(), row_group_size=max(1, table.num_rows))


def read_unit_tokens(folder: Path, unit: int) -> pa.Table:
    """Read the tokens that the plan has a unit read; `row` is NULL where they are not stored."""
    return read_row_group(tokens_file(folder, unit), unit % UNITS_A_FILE)


def stored_tokens(planned: pa.Table) -> pa.Table:
    """Give the tokens of a plan's table that are stored: those that have a row."""
    return planned.filter(planned["row"].is_valid()) if planned["row"].null_count else planned


def read_sequences(folder: Path) -> pa.Table:
    """Read the table of all sequences of a run, committed or not."""
    return read_table(folder / "sequences.parquet")


def read_spans(folder: Path) -> pa.Table:
    """Read the table of all spans of a run that has rows of them, committed or not."""
    return read_table(folder / SPANS_FILE)


def label_columns(folder: Path) -> dict[str, list[pa.Field]]:
    """Give the label columns of a run's tables, in their order: `sequences`, `tokens` and, if it has any, `spans`."""
    found = {}
    tables = [
        ("sequences", folder / "sequences.parquet", SEQUENCE_FIELDS),
        ("tokens", tokens_file(folder, 0), TOKEN_FIELDS),
    ]
    if (folder / SPANS_FILE).exists():
        tables.append(("spans", folder / SPANS_FILE, SPAN_FIELDS))
    for table, path, own in tables:
        known = {name for name, _ in own}
        found[table] = [f for f in read_schema(path) if f.name not in known]
    return found


def tokens_file(folder: Path, unit: int) -> Path:
    """Give the file of a plan that holds a unit's token table."""
    return folder / f"tokens-{unit // UNITS_A_FILE:05d}.parquet"
