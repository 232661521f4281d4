"""Many shards of an array as one array of rows: their files mapped into memory side by side."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..errors import WorldError
from .locks import new_lock
from .shard import ShardLayout, check_shard, named_shard

_MAP_FIXED = 0x10  # Linux; the mmap module does not name it
_OPEN_FILES = 128
_FIRST_BYTES = 1 << 18
_GROUP_BYTES = 16 << 20  # large ones, as a large copy goes around the caches and takes half as long
_ASK_BYTES = 4 << 20  # one advice reaches no further than what a device takes at once
_BLOCK_ROWS = 4096
_LOOK_ROWS = 32
_RUN_ROWS = 8
_SLOW_ROW_S = 20e-6  # a row in memory takes well below a microsecond

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]


class ShardRegion:
    """Address space for `shards` consecutive shards of an array, into which their files are mapped as needed.

    The rows of all of them are one array, so that gathering scattered rows is one call and not one a shard. Nothing
    is copied and no file stays open. Only rows of mapped shards may be touched: the rest is no readable memory, so
    that a mistake here ends the process and cannot come out as zeros. The mappings live as long as any view of them.
    """

    def __init__(self, layout: ShardLayout, shards: int) -> None:
        if shards > 1 and not self.fit_together(layout):
            raise ValueError(f"shards of {layout.data_bytes} bytes cannot lie side by side")
        self.layout = layout
        self.mapped = np.zeros(shards, bool)
        """Which shards are mapped."""
        self.full = False
        """Whether all of them are."""
        self.used = 0
        """When it was used last, by its keeper's count."""
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, shards * layout.data_bytes, flags=flags, prot=0)
        except OSError as error:
            raise WorldError(
                f"This process is not given addresses for {shards * layout.data_bytes:,} bytes of an array "
                f"({error.strerror}). Raise its limit of virtual memory (ulimit -v): memory is not used by it."
            ) from error
        flat = np.frombuffer(self._memory, layout.dtype.bits)
        self._rows = flat.reshape(shards * layout.rows, *layout.trailing)
        self._address = int(flat.ctypes.data)
        self._row_bytes = math.prod(layout.trailing) * layout.dtype.itemsize
        self._lock = new_lock()

    @staticmethod
    def fit_together(layout: ShardLayout) -> bool:
        """Say whether several shards can lie side by side: their rows must end where a page of memory ends."""
        return layout.data_bytes % mmap.PAGESIZE == 0

    def map(self, shards: Sequence[int], paths: Sequence[Path], check: Callable[[], object]) -> None:
        """Map the files of shards into their places, after checking sizes and indexes.

        `check` is called when files are open and none is mapped yet, to raise if they cannot be the right ones. Raises
        `CorruptLakeError` for a file that is not the shard, `WorldError` when the process has too many maps.
        """
        with self._lock:
            for first in range(0, len(shards), _OPEN_FILES):
                some = slice(first, first + _OPEN_FILES)
                self._map_some(shards[some], paths[some], check)
            self.full = bool(self.mapped.all())

    def _map_some(self, shards: Sequence[int], paths: Sequence[Path], check: Callable[[], object]) -> None:
        # All indexes are asked for before the first is read: from a cold disk, one by one takes many times as long.
        opened: list[int] = []
        try:
            for path in paths:
                with named_shard(path):
                    opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                    if len(paths) > 1:
                        tail = self.layout.data_bytes
                        os.posix_fadvise(opened[-1], tail, self.layout.file_bytes - tail, os.POSIX_FADV_WILLNEED)
            check()
            for shard, path, fd in zip(shards, paths, opened, strict=True):
                with named_shard(path):
                    check_shard(fd, path, self.layout)
                    self._map_one(shard, path, fd)
        finally:
            for fd in opened:
                os.close(fd)

    def _map_one(self, shard: int, path: Path, fd: int) -> None:
        size = self.layout.data_bytes
        place = self._address + shard * size
        if _libc.mmap(place, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != place:
            raise WorldError(
                f"{path} cannot be mapped into memory ({os.strerror(ctypes.get_errno())}). Read fewer arrays at a "
                "time, or raise the limits of the process (ulimit -v, vm.max_map_count)."
            )
        # Scattered reads are the rule. The kernel's guess of what is read next would read the whole file.
        self._memory.madvise(mmap.MADV_RANDOM, shard * size, size)
        self.mapped[shard] = True

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy `rows`, int64 row numbers of the region within mapped shards, into `out`, (n, *trailing)."""
        if (starts := _run_starts(rows)) is not None:
            self._copy_runs(starts, rows, out)
        elif len(rows) <= 2 * _LOOK_ROWS:
            self._rows.take(rows, axis=0, out=out, mode="clip")
        else:
            self._copy_scattered(rows, out)

    def _copy_runs(self, starts: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy runs of consecutive rows; when some come from the disk, the next ones are asked for meanwhile."""
        begin, firsts, ends = rows[starts].tolist(), starts.tolist(), [*starts[1:].tolist(), len(rows)]
        group_rows = max(1, _GROUP_BYTES // self._row_bytes)
        room = max(1, _FIRST_BYTES // self._row_bytes)
        faults, cold, done = _disk_faults(), False, 0
        for row, first, last in zip(begin, firsts, ends, strict=True):
            if cold or last - first > group_rows:
                break
            out[first:last] = self._rows[row : row + last - first]
            done, room = done + 1, room - (last - first)
            if room <= 0:
                cold, room = _disk_faults() > faults, group_rows
        if done == len(begin):
            return
        groups, asked = self._grouped(begin[done:], firsts[done:], ends[done:]), 0
        for i, group in enumerate(groups):
            if cold:
                for row, first, last in itertools.chain.from_iterable(groups[max(asked, i) : i + 2]):
                    self._ask(row, last - first)
                asked = i + 2
            for row, first, last in group:
                out[first:last] = self._rows[row : row + last - first]
            cold = cold or _disk_faults() > faults

    def _grouped(self, rows: list[int], starts: list[int], ends: list[int]) -> list[list[tuple[int, int, int]]]:
        """Cut runs into pieces (row, first, last), and put pieces into groups of 16 MiB; the first group is small."""
        groups: list[list[tuple[int, int, int]]] = [[]]
        room = max(1, _FIRST_BYTES // self._row_bytes)
        for row, first, last in zip(rows, starts, ends, strict=True):
            at = first
            while at < last:
                end = min(at + room, last)
                groups[-1].append((row + at - first, at, end))
                room -= end - at
                at = end
                if not room:
                    room = max(1, _GROUP_BYTES // self._row_bytes)
                    groups.append([])
        return groups

    def _copy_scattered(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows; where the first of them come from the disk, a block is asked for before any of it is read."""
        first, n = 0, len(rows)
        while first < n:
            look = min(first + _LOOK_ROWS, n)
            start = time.perf_counter()
            self._take(rows, out, first, look)
            cold = False
            if time.perf_counter() - start > _LOOK_ROWS * _SLOW_ROW_S:  # the disk, or another process had its turn
                faults = _disk_faults()
                first, look = look, min(look + _LOOK_ROWS, n)
                self._take(rows, out, first, look)
                cold = _disk_faults() > faults
            last = min(look + (_BLOCK_ROWS if cold else 4 * _BLOCK_ROWS), n)
            if cold:
                for row in rows[look:last].tolist():
                    self._ask(row, 1)
            self._take(rows, out, look, last)
            first = last

    def _take(self, rows: np.ndarray, out: np.ndarray, first: int, last: int) -> None:
        self._rows.take(rows[first:last], axis=0, out=out[first:last], mode="clip")

    def _ask(self, row: int, count: int) -> None:
        """Ask the kernel to read rows from the disk, without waiting for them."""
        start, end = row * self._row_bytes, (row + count) * self._row_bytes
        for at in range(start - start % mmap.PAGESIZE, end, _ASK_BYTES):
            self._memory.madvise(mmap.MADV_WILLNEED, at, min(_ASK_BYTES, end - at))


def _disk_faults() -> int:
    """Count the pages for which this thread had to wait for a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _run_starts(rows: np.ndarray) -> np.ndarray | None:
    """Find where runs of consecutive rows start; None when there are hardly any."""
    n = len(rows)
    if n < _RUN_ROWS:
        return None
    middle = n // 2
    if rows[1] - rows[0] != 1 and rows[-1] - rows[-2] != 1 and rows[middle] - rows[middle - 1] != 1:
        return None  # what three neighbours look like is enough: it costs time only
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    return starts if len(starts) * _RUN_ROWS <= n else None
