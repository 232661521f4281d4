"""Reading Parquet files of a lake: what cannot be read is named, whatever is wrong with it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import CorruptLakeError


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a Parquet file, or some of its columns; `CorruptLakeError` names one that cannot be read."""
    with _named(path), pq.ParquetFile(path) as file:
        return file.read(columns)


def read_row_group(path: Path, group: int) -> pa.Table:
    """Read one row group of a Parquet file; `CorruptLakeError` names a file that cannot be read."""
    with _named(path), pq.ParquetFile(path) as file:
        return file.read_row_group(group)


def read_schema(path: Path) -> pa.Schema:
    """Read the columns of a Parquet file; `CorruptLakeError` names one that cannot be read."""
    with _named(path):
        return pq.read_schema(path)


def table_bytes(table: pa.Table) -> bytes:
    """Encode a table as a Parquet file; the same table gives the same bytes with the same pyarrow."""
    sink = io.BytesIO()
    pq.write_table(table.combine_chunks(), sink, compression="zstd", version="2.6", write_statistics=True)
    return sink.getvalue()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, MemoryError) as error:
        raise CorruptLakeError(f"{path} cannot be read ({error}). Run `layerlake verify`.") from error
