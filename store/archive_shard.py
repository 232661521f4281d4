"""One compressed shard of a Zarr array: the inner chunks one after another, then their index and its crc32c.

It is the shard of `store.shard` with the codec ``blosc`` (lz4, bitshuffle) behind ``bytes``, so that any reader of
Zarr v3 can read it: inner chunk i is what Blosc makes of it, at the place that the index gives.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from ..errors import CorruptLakeError
from .shard import ShardLayout, ShardWriter, check_size, chunk_checksums, damaged_index, named_shard

_LEVEL = 5
_BLOCK = 1 << 20


class ArchiveShardWriter(ShardWriter):
    """Writes the rows of one shard, in any order, and compresses them at the end.

    Rows go into an uncompressed temporary file first, as they come batch by batch and a compressed chunk cannot be
    added to: memory does not grow with the shard, and disk space for both is needed for a while.
    """

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self._raw = path
        self._bytes = self._file_crc = 0
        super().__init__(path, layout)

    def finish(self, used: int) -> np.ndarray:
        """Fill the tail with NaN, compress into a second file, and remove the first.

        As `ShardWriter.finish`; the space of the first file is free once the view of the used rows is dropped.
        """
        rows = self._fill_tail(used)
        self.checksums = chunk_checksums(rows, self.layout)
        self.path = self._raw.with_name(f"{self._raw.name.removesuffix('.tmp')}.archive.tmp")
        with self.path.open("xb") as file:
            places, crc = [], 0
            for chunk in rows.reshape(self.layout.chunks, -1):
                data = _compress(chunk)
                places.append((file.tell(), len(data)))
                file.write(data)
                crc = google_crc32c.extend(crc, data)
            index = np.array(places, "<u8").tobytes()
            index += google_crc32c.value(index).to_bytes(4, "little")
            file.write(index)
            self._bytes, self._file_crc = file.tell(), google_crc32c.extend(crc, index)
            file.flush()
            os.dup2(file.fileno(), self._file, inheritable=False)  # from now on `sync` is of this one
        self._raw.unlink()
        return rows[:used]

    def facts(self) -> dict[str, Any]:
        """Give what the unit's record says of the finished shard: its bytes, the crc32c of every decoded inner chunk.

        And that of the whole file as ``file_crc32c``: a damaged byte need not change what its chunk decodes to.
        """
        return {"bytes": self._bytes, "crc32c": self.checksums, "file_crc32c": self._file_crc}

    def same(self, published: Path) -> bool:
        """Say whether a published shard has the bytes of this one, finished."""
        try:
            with self.path.open("rb") as mine, named_shard(published), published.open("rb") as other:
                check_size(other.fileno(), published, self.path.stat().st_size)
                return all(block == other.read(_BLOCK) for block in iter(lambda: mine.read(_BLOCK), b""))
        except CorruptLakeError:
            return False

    def abandon(self) -> None:
        """Remove both temporary files, if they are still there."""
        super().abandon()
        with contextlib.suppress(FileNotFoundError):
            self._raw.unlink()


def archive_checksums(path: Path, layout: ShardLayout, held: dict[str, Any]) -> list[int | None]:
    """Compute the crc32c of every decoded inner chunk of a published shard; None for one that does not decode.

    `held` is what the unit's record says of the shard. Raises `CorruptLakeError` when the file is missing, has another
    size, its index is damaged, or its bytes are others that decode to the same values.
    """
    index_bytes = layout.chunks * 16
    with named_shard(path), path.open("rb") as file:
        check_size(file.fileno(), path, held["bytes"])
        data_bytes = held["bytes"] - index_bytes - 4
        file.seek(max(0, data_bytes))
        index, index_crc = file.read(index_bytes), file.read()
        if google_crc32c.value(index).to_bytes(4, "little") != index_crc:
            raise damaged_index(path)
        found: list[int | None] = []
        decoded = np.empty(layout.chunk_bytes, np.uint8)
        for offset, size in np.frombuffer(index, "<u8").reshape(-1, 2).tolist():
            if offset + size > data_bytes:
                raise damaged_index(path)
            file.seek(offset)
            found.append(google_crc32c.value(decoded) if _decompress(file.read(size), decoded) else None)
        file.seek(0)
        crc = 0
        for block in iter(lambda: file.read(_BLOCK), b""):
            crc = google_crc32c.extend(crc, block)
        if crc != held["file_crc32c"] and found == held["crc32c"]:
            raise CorruptLakeError(
                f"{path} holds other bytes than were written, though they decode to the same values."
            )
    return found


def _blosc() -> Any:
    from numcodecs import blosc  # pyright: ignore[reportAttributeAccessIssue]  # a compiled module

    blosc.use_threads = False  # threads write their blocks in the order in which they end: the bytes would vary
    return blosc


def _compress(chunk: np.ndarray) -> bytes:
    blosc = _blosc()
    return blosc.compress(np.ascontiguousarray(chunk), b"lz4", _LEVEL, blosc.BITSHUFFLE)


def _decompress(data: bytes, out: np.ndarray) -> bool:
    """Decode one chunk into `out`, (bytes,) uint8; says whether it is one that decodes to so many bytes."""
    if len(data) < 16 or int.from_bytes(data[4:8], "little") != len(out):
        return False
    if int.from_bytes(data[12:16], "little") != len(data):
        return False
    try:
        _blosc().decompress(data, out)
    except RuntimeError:
        return False
    return True
