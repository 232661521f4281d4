"""The plan of a run: which tokens stand in which rows, fixed before the first forward."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import CorruptLakeError
from .durable import fsync_folder

UNITS_A_FILE = 64


def write_plan(folder: Path, sequences: pa.Table, units: Iterator[pa.Table] | list[pa.Table]) -> None:
    """Write a plan: the table of sequences, and the token table of each unit as one row group of a few files."""
    folder.mkdir()
    pq.write_table(sequences, folder / "sequences.parquet", compression="zstd")
    writer: pq.ParquetWriter | None = None
    for unit, table in enumerate(units):
        if unit % UNITS_A_FILE == 0:
            if writer:
                writer.close()
            writer = pq.ParquetWriter(_tokens_file(folder, unit), table.schema, compression="zstd")
        assert writer is not None
        writer.write_table(table.combine_chunks(), row_group_size=max(1, table.num_rows))
    if writer:
        writer.close()
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)


def read_unit_tokens(folder: Path, unit: int) -> pa.Table:
    """Read the token table that the plan gives a unit."""
    path = _tokens_file(folder, unit)
    try:
        with pq.ParquetFile(path) as file:
            return file.read_row_group(unit % UNITS_A_FILE)
    except (OSError, pa.ArrowException) as error:
        raise CorruptLakeError(f"The plan file {path} cannot be read: {error}") from error


def read_sequences(folder: Path) -> pa.Table:
    """Read the table of all sequences of a run, committed or not."""
    path = folder / "sequences.parquet"
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise CorruptLakeError(f"The plan file {path} cannot be read: {error}") from error


def _tokens_file(folder: Path, unit: int) -> Path:
    return folder / f"tokens-{unit // UNITS_A_FILE:05d}.parquet"
