"""The rows of an array, gathered through memory maps that are made when they are needed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import numpy as np

from ..errors import CorruptLakeError
from .locks import new_lock
from .record import ArraySpec
from .run import Run
from .shard_region import ShardRegion

MOST_MAPS = 32_768  # half of what the kernel grants a process by default (vm.max_map_count); no descriptor is held
REGION_SHARDS = 4096
_REGION_BYTES = 1 << 40  # of a process's 128 TiB of addresses


class ArrayRows:
    """The rows of one array of a run, by number."""

    def __init__(self, run: Run, array: ArraySpec, maps: ShardMaps) -> None:
        self.run = run
        self.array = array
        self.layout = run.layout(array)
        self.regions: dict[int, ShardRegion] = {}
        """What is mapped, by number of the region; `ShardMaps` takes away what was not used for longest."""
        together = min(REGION_SHARDS, _REGION_BYTES // self.layout.data_bytes)
        self._shards = max(1, together) if ShardRegion.fit_together(self.layout) else 1
        self._maps = maps
        maps.watch(self)

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy the stored bits of `rows`, all of committed units, into `out`; any order, duplicates allowed.

        Raises `CorruptLakeError` for a shard that is missing, cut or replaced, `WorldError` when the run is another
        one by now.
        """
        if not len(rows):
            return
        if self.run.record.units <= self._shards:
            self._region(0, rows).gather(rows, out)
            return
        for index, where, local in _parts(rows, self._shards * self.layout.rows):
            part = np.empty((len(local), *out.shape[1:]), out.dtype)
            self._region(index, local).gather(local, part)
            out[where] = part

    def _region(self, index: int, rows: np.ndarray) -> ShardRegion:
        """Give a region in which every shard that `rows` touch is mapped."""
        region = self.regions.get(index)
        if region is None:
            shards = min(self._shards, self.run.record.units - index * self._shards)
            region = self.regions.setdefault(index, ShardRegion(self.layout, shards))
        region.used = self._maps.tick()
        if not region.full:
            touched = rows // self.layout.rows
            here = region.mapped[touched]
            if not here.all():
                missing = np.unique(touched[~here]).tolist()
                first = index * self._shards
                paths = [self.run.shard_path(self.array, first + shard) for shard in missing]
                try:
                    region.map(missing, paths, self.run.check_same)
                except CorruptLakeError:
                    self.run.check_same()  # files that went with their run are no damage
                    raise
                self._maps.bound(region, len(missing))
        return region


class ShardMaps:
    """Bounds how many shards of a lake are mapped at once, over all its arrays that are being read.

    There is one for a lake, as the bound is the process's; threads may share it. It keeps nothing alive itself. A
    copy in another process, made by pickling, starts empty.
    """

    def __init__(self) -> None:
        self._arrays: weakref.WeakSet[ArrayRows] = weakref.WeakSet()
        self._lock = new_lock()
        self._clock = itertools.count(1)
        self._at_most = 0  # maps there are, unless some were dropped with their array since they were counted

    def __reduce__(self) -> tuple[type[ShardMaps], tuple[()]]:
        return ShardMaps, ()

    def watch(self, array: ArrayRows) -> None:
        """Count the maps of an array from now on."""
        with self._lock:
            self._arrays.add(array)

    def tick(self) -> int:
        """Count a use."""
        return next(self._clock)

    def bound(self, needed: ShardRegion, added: int) -> None:
        """Count `added` maps, and drop what was not used for longest when there are too many, but never `needed`.

        Whoever still reads what is dropped keeps it alive meanwhile.
        """
        with self._lock:
            self._at_most += added
            if self._at_most <= MOST_MAPS:
                return
            regions = [
                (array, index, region) for array in self._arrays for index, region in list(array.regions.items())
            ]
            held = {id(region): int(region.mapped.sum()) for _, _, region in regions}
            self._at_most = sum(held.values())
            if self._at_most <= MOST_MAPS:
                return
            for array, index, region in sorted(regions, key=lambda r: r[2].used):
                if self._at_most <= MOST_MAPS * 3 // 4:  # not to count again at the next map
                    break
                if region is not needed and array.regions.pop(index, None):
                    self._at_most -= held[id(region)]


def _parts(rows: np.ndarray, size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Sort rows into parts of `size`: give each part's number, where its rows stand, and their numbers within it."""
    parts = rows // size
    order = np.argsort(parts, kind="stable")
    ordered = parts[order]
    borders = np.flatnonzero(np.diff(ordered, prepend=-1))
    for first, last in zip(borders, [*borders[1:], len(rows)], strict=True):
        part, where = int(ordered[first]), order[first:last]
        yield part, where, rows[where] - part * size
