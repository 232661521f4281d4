"""One shard of a Zarr array: raw rows in C order, then the index of its inner chunks and the index's crc32c.

This is the ``sharding_indexed`` codec of Zarr v3 with the ``bytes`` codec inside and the index at the end
(https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/). All inner chunks are written, in order
and without gaps, so the rows of a shard are one C-contiguous block that can be memory-mapped.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from ..errors import CorruptLakeError
from .dtypes import StoredDtype

_CHECKSUM_BYTES = 4
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardLayout:
    """The geometry of every shard of an array: `rows` rows of shape `trailing`, `chunk_rows` to an inner chunk."""

    rows: int
    chunk_rows: int
    trailing: tuple[int, ...]
    dtype: StoredDtype

    @functools.cached_property
    def chunks(self) -> int:
        """Inner chunks a shard."""
        return self.rows // self.chunk_rows

    @functools.cached_property
    def chunk_bytes(self) -> int:
        """Bytes of an inner chunk."""
        return self.chunk_rows * math.prod(self.trailing) * self.dtype.itemsize

    @functools.cached_property
    def data_bytes(self) -> int:
        """Bytes of all rows, which the index follows."""
        return self.chunks * self.chunk_bytes

    @functools.cached_property
    def file_bytes(self) -> int:
        """Bytes of a shard file."""
        return self.data_bytes + self.chunks * 16 + _CHECKSUM_BYTES

    @functools.cached_property
    def index(self) -> bytes:
        """The index: (offset, length) of each inner chunk as little-endian uint64, then its crc32c."""
        pairs = np.empty((self.chunks, 2), "<u8")
        pairs[:, 0] = np.arange(self.chunks, dtype=np.uint64) * np.uint64(self.chunk_bytes)
        pairs[:, 1] = self.chunk_bytes
        body = pairs.tobytes()
        return body + google_crc32c.value(body).to_bytes(_CHECKSUM_BYTES, "little")


class ShardWriter:
    """Writes the rows of one shard, in any order, into a preallocated temporary file.

    The disk space is reserved first, so that a full disk is an `OSError` before the model runs. Rows live in the page
    cache, not in the process: memory does not grow with the shard.
    """

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self.path = path
        self.layout = layout
        self.checksums: list[int] = []
        self._written = np.zeros(layout.rows, bool)
        self._row_bytes = layout.data_bytes // layout.rows
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(self._file, 0, layout.file_bytes)
        except OSError:
            self.abandon()
            raise

    def write(self, row: int, bits: np.ndarray) -> None:
        """Store `bits`, shaped (n, *trailing), at the shard's rows [row, row + n); each row once."""
        expected = (len(bits), *self.layout.trailing)
        if bits.dtype != self.layout.dtype.bits or bits.shape != expected:
            raise ValueError(f"rows of {bits.dtype} {bits.shape} do not fit {self.layout.dtype.bits} {expected}")
        if row < 0 or row + len(bits) > self.layout.rows:
            raise ValueError(f"rows {row} to {row + len(bits)} are outside a shard of {self.layout.rows} rows")
        if self._written[row : row + len(bits)].any():
            raise ValueError(f"rows {row} to {row + len(bits)} of {self.path.name} were written before")
        _write_at(self._file, np.ascontiguousarray(bits), row * self._row_bytes)
        self._written[row : row + len(bits)] = True

    def read(self, row: int, rows: int) -> np.ndarray:
        """Read back raw bits, (rows, *trailing), that were written; before `finish`."""
        if not self._written[row : row + rows].all():
            raise ValueError(f"rows {row} to {row + rows} of {self.path.name} were not written yet")
        data = os.pread(self._file, rows * self._row_bytes, row * self._row_bytes)
        return np.frombuffer(data, self.layout.dtype.bits).reshape(rows, *self.layout.trailing)

    def finish(self, used: int) -> np.ndarray:
        """Fill the tail with NaN, write the index, and return a view of the used rows, for statistics.

        All of the first `used` rows must have been written and none after them. The file is durable after `sync`.
        """
        rows = self._fill_tail(used)
        _write_at(self._file, np.frombuffer(self.layout.index, np.uint8), self.layout.data_bytes)
        return rows[:used]

    def sync(self) -> None:
        """Make the finished file durable."""
        os.fsync(self._file)

    def facts(self) -> dict[str, Any]:
        """Give what the unit's record says of the finished shard: its bytes, and the crc32c of every inner chunk."""
        if not self.checksums:
            self.checksums = chunk_checksums(map_rows(self.path, self.layout), self.layout)
        return {"bytes": self.layout.file_bytes, "crc32c": self.checksums}

    def same(self, published: Path) -> bool:
        """Say whether a published shard is what this one is, finished."""
        try:
            return chunk_checksums(open_shard(published, self.layout), self.layout) == self.checksums
        except CorruptLakeError:
            return False

    def abandon(self) -> None:
        """Close and remove the temporary file, if it is still there."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _fill_tail(self, used: int) -> np.memmap:
        if not self._written[:used].all():
            raise ValueError(f"row {int(np.argmin(self._written[:used]))} of {self.path.name} was never written")
        if self._written[used:].any():
            raise ValueError(f"rows after the {used} of the unit were written in {self.path.name}")
        block = max(1, _TAIL_BYTES // self._row_bytes)
        nan = np.full((min(block, self.layout.rows - used), *self.layout.trailing), self.layout.dtype.nan)
        nan = nan.astype(self.layout.dtype.bits)
        for row in range(used, self.layout.rows, block):
            _write_at(self._file, nan[: self.layout.rows - row], row * self._row_bytes)
        return map_rows(self.path, self.layout)


def _write_at(file: int, content: np.ndarray, offset: int) -> None:
    left = content.reshape(-1).view(np.uint8).data
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def map_rows(path: Path, layout: ShardLayout, mode: str = "r") -> np.memmap:
    """Memory-map the rows of a shard file as raw bits, (rows, *trailing); nothing is checked."""
    return np.memmap(path, layout.dtype.bits, mode, shape=(layout.rows, *layout.trailing))  # pyright: ignore[reportArgumentType, reportCallIssue]


@contextlib.contextmanager
def named_shard(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a `CorruptLakeError` that names the shard."""
    try:
        yield
    except FileNotFoundError:
        raise CorruptLakeError(f"{path} is missing, although its unit is committed. Run `layerlake verify`.") from None
    except OSError as error:
        raise CorruptLakeError(f"{path} cannot be read ({error.strerror}). Run `layerlake verify`.") from error


def check_shard(fd: int, path: Path, layout: ShardLayout) -> None:
    """Raise `CorruptLakeError` unless an open shard has its size and the index it must have."""
    check_size(fd, path, layout.file_bytes)
    if os.pread(fd, len(layout.index), layout.data_bytes) != layout.index:
        raise damaged_index(path)


def check_size(fd: int, path: Path, size: int) -> None:
    """Raise `CorruptLakeError` unless an open shard has `size` bytes."""
    found = os.fstat(fd).st_size
    if found != size:
        raise CorruptLakeError(
            f"{path} has {found} bytes, not {size}: it was cut or replaced. "
            "Run `layerlake verify` to see what else is damaged."
        )


def damaged_index(path: Path) -> CorruptLakeError:
    """Give the error for a shard whose index of inner chunks is not the one it must have."""
    return CorruptLakeError(f"The chunk index of {path} is damaged. Run `layerlake verify` to see what else is.")


def open_shard(path: Path, layout: ShardLayout) -> np.memmap:
    """Memory-map the rows of a published shard after checking its size and its index.

    Raises `CorruptLakeError` when the file is missing, has another size, or its index is not the one it must have.
    """
    with named_shard(path), path.open("rb") as file:
        check_shard(file.fileno(), path, layout)
        return map_rows(path, layout)


def chunk_checksums(rows: np.ndarray, layout: ShardLayout) -> list[int]:
    """Compute the crc32c of every inner chunk of a shard's rows."""
    flat = rows.reshape(layout.chunks, -1).view(np.uint8)
    return [google_crc32c.value(np.asarray(chunk)) for chunk in flat]
