"""Lakes for benchmarks, made through the store's own writing path (without fsync, which only takes time here)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
from layerlake.store.catalog import publish_catalog
from layerlake.store.create import create_run
from layerlake.store.dtypes import stored_dtype
from layerlake.store.record import ArraySpec, RunRecord
from layerlake.store.run import Run
from layerlake.store.tokens import SEQUENCE_FIELDS, TOKEN_FIELDS, table_hash
from layerlake.store.unit import UnitWriter

SEQUENCE = 64


@contextlib.contextmanager
def no_fsync() -> Iterator[None]:
    """Make lakes without waiting for the disk."""
    with mock.patch.object(os, "fsync", lambda fd: None):
        yield


def token_table(first_row: int, rows: int) -> pa.Table:
    """Make the token table of a unit whose every row is used: sequences of 64 tokens, one after another."""
    row = np.arange(first_row, first_row + rows)
    words = pa.array([f"token{i}" for i in range(1000)])
    ids = (row * 2654435761 % 30_011).astype(np.int32)
    columns = {
        "row": row,
        "seq": row // SEQUENCE,
        "pos": (row % SEQUENCE).astype(np.int32),
        "token_id": ids,
        "token": words.take(pa.array(ids % 1000)),
        "char_start": (row % SEQUENCE * 5).astype(np.int32),
        "char_end": (row % SEQUENCE * 5 + 4).astype(np.int32),
        "special": row % SEQUENCE == 0,
        "split": pa.array(np.where(row // SEQUENCE % 5 == 0, "test", "train")),
        "depth": ids.astype(np.int64) % 100,
    }
    schema = pa.schema([*(pa.field(n, t) for n, t in TOKEN_FIELDS), pa.field("depth", pa.int64())])
    return pa.table({f.name: pa.array(columns[f.name], f.type) for f in schema}, schema)


def sequence_table(rows: int, unit_rows: int) -> pa.Table:
    """Make the table of sequences that belongs to `token_table`."""
    seq = np.arange(rows // SEQUENCE)
    columns = {
        "seq": seq,
        "unit": seq * SEQUENCE // unit_rows,
        "document": pa.array([f"doc{s // 10}" for s in seq.tolist()]),
        "document_sha256": pa.array(["0"] * len(seq)),
        "char_offset": seq * 0,
        "length": np.full(len(seq), SEQUENCE, np.int32),
        "rows": np.full(len(seq), SEQUENCE, np.int32),
        "first_row": seq * SEQUENCE,
        "sequence_row": pa.nulls(len(seq)),  # no means are stored
        "split": pa.array(np.where(seq % 5 == 0, "test", "train")),
    }
    schema = pa.schema(list(SEQUENCE_FIELDS))
    return pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema)


def make_empty(root: Path, name: str, rows: int, units: int, arrays: tuple[ArraySpec, ...]) -> Run:
    """Make a run with nothing committed."""
    unit_rows = rows // units
    tables = [token_table(u * unit_rows, unit_rows) for u in range(units)]
    record = RunRecord(
        name=name,
        settings={"model": {"fingerprint": name}},
        arrays=arrays,
        unit_rows=unit_rows,
        units=units,
        sequences=rows // SEQUENCE,
        tokens=rows,
        plan_hash=table_hash(tables, ("row", "seq", "pos", "token_id")),
        tokens_hash="0" * 64,
        source={"model": "none", "data": "made up"},
        created="2026-01-01T00:00:00+00:00",
        created_by="bench",
    )
    return create_run(root, record, sequence_table(rows, unit_rows), tables)


def fill(run: Run, seed: int = 0) -> None:
    """Commit every unit of a run with normal random values, the same ones for the same seed."""
    for unit in range(run.record.units):
        rng = np.random.default_rng([seed, unit])
        tokens = run.planned_tokens(unit)
        with UnitWriter(run, unit) as writer:
            for array in run.record.arrays:
                values = rng.standard_normal((run.record.unit_rows, *array.shape), np.float32)
                writer.write(array.name, 0, bits_of(values, array.dtype))
            writer.commit(tokens, tokens.num_rows // SEQUENCE, {"seconds": 0.0})


def bits_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round float32 values to a stored dtype (bfloat16 by cutting, which is enough here) and give the bits."""
    bits = values.view(np.uint32)
    if dtype == "float32":
        return bits
    return (bits >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(np.float16).view(np.uint16)


def make_lake(root: Path, rows: int, units: int, width: int, dtype: str, layers: int = 1) -> Run:
    """Make a lake of one run, or take the one that is there."""
    if (root / "catalog.json").exists():
        return Run(root, "bench")
    stored_dtype(dtype)
    arrays = tuple(ArraySpec("resid_post", i, dtype, (width,)) for i in range(layers))
    with no_fsync():
        run = make_empty(root, "bench", rows, units, arrays)
        fill(run)
        publish_catalog(root)
    return run


def raw_copy(run: Run, layer: int, path: Path) -> np.memmap:
    """Give the rows of an array as one raw file: what a person without a store would have."""
    array = run.array("resid_post", layer)
    layout = run.layout(array)
    if not path.exists():
        with path.open("wb") as file:
            for unit in range(run.record.units):
                file.write(run.shard_path(array, unit).read_bytes()[: layout.data_bytes])
    shape = (run.record.units * layout.rows, *array.shape)
    return np.memmap(path, layout.dtype.bits, "r", shape=shape)
