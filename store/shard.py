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

    The disk space is reserved first, so that a full disk is an `OSError` here and not a fault in the middle of a
    memory-mapped write. Rows live in the page cache, not in the process: memory does not grow with the shard.
    """

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self.path = path
        self.layout = layout
        self.checksums: list[int] = []
        self._written = np.zeros(layout.rows, bool)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, layout.file_bytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self._rows = map_rows(path, layout, "r+")

    def write(self, row: int, bits: np.ndarray) -> None:
        """Store `bits`, shaped (n, *trailing), at the shard's rows [row, row + n); each row once."""
        expected = (len(bits), *self.layout.trailing)
        if bits.dtype != self.layout.dtype.bits or bits.shape != expected:
            raise ValueError(f"rows of {bits.dtype} {bits.shape} do not fit {self.layout.dtype.bits} {expected}")
        if row < 0 or row + len(bits) > self.layout.rows:
            raise ValueError(f"rows {row} to {row + len(bits)} are outside a shard of {self.layout.rows} rows")
        if self._written[row : row + len(bits)].any():
            raise ValueError(f"rows {row} to {row + len(bits)} of {self.path.name} were written before")
        self._rows[row : row + len(bits)] = bits
        self._written[row : row + len(bits)] = True

    def finish(self, used: int) -> tuple[dict[str, Any], np.ndarray]:
        """Fill the tail with NaN, write the index, make the file durable.

        All of the first `used` rows must have been written and none after them. Returns what the unit's record says
        of the shard, its bytes and the crc32c of every inner chunk, and a view of the used rows (for statistics).
        """
        rows = self._fill_tail(used)
        rows.flush()
        with self.path.open("r+b") as file:
            file.seek(self.layout.data_bytes)
            file.write(self.layout.index)
            file.flush()
            os.fsync(file.fileno())
        return {"bytes": self.layout.file_bytes, "crc32c": self.checksums}, rows[:used]

    def same(self, published: Path) -> bool:
        """Say whether a published shard is what this one is, finished."""
        try:
            return chunk_checksums(open_shard(published, self.layout), self.layout) == self.checksums
        except CorruptLakeError:
            return False

    def _fill_tail(self, used: int) -> np.memmap:
        if not self._written[:used].all():
            raise ValueError(f"row {int(np.argmin(self._written[:used]))} of {self.path.name} was never written")
        if self._written[used:].any():
            raise ValueError(f"rows after the {used} of the unit were written in {self.path.name}")
        self._rows[used:] = self.layout.dtype.bits.type(self.layout.dtype.nan)
        self.checksums = chunk_checksums(self._rows, self.layout)
        return self._rows

    def abandon(self) -> None:
        """Remove the temporary file, if it is still there."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


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
