"""Reading rows of a compressed array through tensorstore."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np

from ..errors import CorruptLakeError, MissingExtraError, UnknownNameError, WorldError
from .locks import new_lock
from .record import CODECS, ArraySpec
from .run import Run
from .shard import check_size, named_shard

_CACHE_BYTES = 64 << 20
_AHEAD_BYTES = 16 << 20
_THREADS = min(4, os.cpu_count() or 1)
_KNOWN_SHARDS = 4096
_REFUSALS = (ValueError, LookupError, OSError, RuntimeError)  # what tensorstore raises, having no errors of its own


class ArchiveArray:
    """One compressed array of a run, opened once: each inner chunk it gives is as it was written, or an error.

    Whether a shard is there, and of the size that its unit's record says, is looked at once; a chunk is held to its
    checksum whenever it is read. Threads may share it. `MissingExtraError` without tensorstore.
    """

    def __init__(self, run: Run, array: ArraySpec) -> None:
        self.run = run
        self.array = array
        self.layout = run.layout(array)
        self._checksums: OrderedDict[int, np.ndarray] = OrderedDict()
        self._opened: Any = None
        self._lock = new_lock()
        _tensorstore(f"Reading run {run.name!r}, which is stored with --codec archive,")

    def __reduce__(self) -> tuple[type[ArchiveArray], tuple[Run, ArraySpec]]:
        return ArchiveArray, (self.run, self.array)  # a copy in another process opens the array itself

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy the stored bits of `rows`, all of committed units, into `out`; any order, duplicates allowed.

        Each inner chunk that holds one of the rows is read once. Raises `CorruptLakeError`, naming the shard, for
        what is missing or is not what was written, `WorldError` when the run is another one by now.
        """
        if not len(rows):
            return
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        chunks = ordered // self.layout.chunk_rows
        starts = np.flatnonzero(np.diff(chunks, prepend=-1))
        wanted = chunks[starts]
        try:
            for bits, start, end in zip(self._read(wanted), starts, [*starts[1:], len(rows)], strict=True):
                out[order[start:end]] = bits[ordered[start:end] % self.layout.chunk_rows]
        except CorruptLakeError:
            self.run.check_same()  # files that went with their run are no damage
            raise

    def _read(self, chunks: np.ndarray) -> Iterator[np.ndarray]:
        """Read whole inner chunks, counted from the array's start, a few of them ahead of the one that is asked for."""
        ahead: deque[tuple[int, Any]] = deque()
        for chunk in chunks.tolist():
            ahead.append((chunk, self._ask(chunk)))
            if len(ahead) * self.layout.chunk_bytes >= _AHEAD_BYTES:
                yield self._take(*ahead.popleft())
        while ahead:
            yield self._take(*ahead.popleft())

    def _ask(self, chunk: int) -> Any:
        self._expected(chunk)  # before anything is asked of a shard that is not there
        store, size = self._store(), self.layout.chunk_rows
        return store[chunk * size : (chunk + 1) * size].read()

    def _take(self, chunk: int, asked: Any) -> np.ndarray:
        try:
            return self._checked(chunk, asked)
        except CorruptLakeError:
            # What tensorstore has in memory may be from before the shard was mended. Opened anew, it looks again.
            self._opened = None
            return self._checked(chunk, self._ask(chunk))

    def _checked(self, chunk: int, asked: Any) -> np.ndarray:
        """Wait for an inner chunk and give its bits, (chunk_rows, *trailing)."""
        first = chunk * self.layout.chunk_rows
        path = self.run.shard_path(self.array, first // self.layout.rows)
        try:
            bits = np.ascontiguousarray(asked.result()).view(self.layout.dtype.bits)
        except _REFUSALS as error:
            raise CorruptLakeError(
                f"Row {first} and those after it cannot be read from {path} ({_short(error)}). Run `layerlake verify`."
            ) from error
        if google_crc32c.value(bits.reshape(-1).view(np.uint8)) != self._expected(chunk):
            raise CorruptLakeError(
                f"{path} holds other values than were written, from row {first} on. Run `layerlake verify`."
            )
        return bits

    def _expected(self, chunk: int) -> int:
        """Give the checksum that an inner chunk must have; its shard is looked at when it is the first of it."""
        unit, place = divmod(chunk, self.layout.chunks)
        known = self._checksums.get(unit)
        if known is None:
            held = self.run.unit_record(unit)["arrays"][self.array.name]
            path = self.run.shard_path(self.array, unit)
            with named_shard(path), path.open("rb") as file:
                check_size(file.fileno(), path, held["bytes"])
            known = np.array(held["crc32c"], np.uint32)
            with self._lock:
                self._checksums[unit] = known
                if len(self._checksums) > _KNOWN_SHARDS:
                    self._checksums.popitem(last=False)
        return int(known[place])

    def _store(self) -> Any:
        tensorstore = _tensorstore(f"Reading run {self.run.name!r}, which is stored with --codec archive,")
        process, context = _context()
        if process != os.getpid():  # tensorstore would end this process without an error
            raise WorldError(
                "A process that was forked from one that has read a run stored with --codec archive cannot read such "
                "runs. Start it with the method spawn, as in DataLoader(multiprocessing_context='spawn')."
            )
        opened = self._opened
        if opened is None:
            folder = self.run.intact(f"activations.zarr/{self.array.name}/zarr.json").parent
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": f"{folder}/"},
                "recheck_cached_data": "open",
                "recheck_cached_metadata": "open",
                "fill_missing_data_reads": False,  # a chunk that is not there is an error, not NaN
            }
            try:
                asked = tensorstore.open(spec, open=True, read=True, write=False, context=context)
                opened = self._opened = asked.result()
            except _REFUSALS as error:
                raise CorruptLakeError(
                    f"{folder} cannot be opened ({_short(error)}). Run `layerlake verify`."
                ) from error
        return opened


def check_codec(codec: str) -> str:
    """Return `codec` if it is one and what it needs is installed: it must be possible to read what is stored."""
    if codec not in CODECS:
        raise UnknownNameError.of("codec", codec, CODECS)
    if codec == "archive":
        _tensorstore("--codec archive")
    return codec


def _tensorstore(what: str) -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise MissingExtraError.of("archive", what) from error
    return tensorstore


@functools.cache
def _context() -> tuple[int, Any]:
    """Make what all arrays of a process share: a bounded cache, a few threads, no lock files; and say which process."""
    import tensorstore

    context = {
        "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
        "data_copy_concurrency": {"limit": _THREADS},
        "file_io_concurrency": {"limit": _THREADS},
        "file_io_locking": {"mode": "none"},
    }
    return os.getpid(), tensorstore.Context(context)


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
