"""Reading rows of a run's arrays through memory maps of its shards."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ..errors import RequestError
from .run import ArraySpec, Run
from .shard import open_shard

_OPEN_SHARDS = 4096  # each map costs address space and a kernel entry (65,530 a process by default), no descriptor


class RunReader:
    """Gathers rows of one run; keeps a bounded number of shards mapped, least recently used first to go."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._used: dict[int, int] = {}
        self._maps: OrderedDict[tuple[str, int], np.memmap] = OrderedDict()

    def check_rows(self, rows: np.ndarray) -> None:
        """Raise `RequestError` unless every row belongs to a committed unit and holds a token."""
        if not len(rows):
            return
        size = self.run.record.unit_rows
        units, of_row = np.unique(rows // size, return_inverse=True)
        used = np.array([self._used_rows(int(u)) for u in units])[of_row]
        local = rows % size
        bad = np.flatnonzero(local >= used)
        if len(bad):
            reason = "no token stands there" if used[bad[0]] else "its unit is not committed"
            raise RequestError(f"Row {rows[bad[0]]} of run {self.run.name!r} cannot be read: {reason}.")

    def gather(self, array: ArraySpec, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Copy the stored bits of `rows` into `out[where]`; any order, duplicates allowed."""
        size = self.run.record.unit_rows
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        units = ordered // size
        borders = np.flatnonzero(np.diff(units, prepend=-1)) if len(rows) else np.empty(0, int)
        for first, last in zip(borders, [*borders[1:], len(rows)], strict=True):
            unit = int(units[first])
            local = ordered[first:last] - unit * size
            out[where[order[first:last]]] = self._map(array, unit)[local]

    def _used_rows(self, unit: int) -> int:
        if unit not in self._used:
            committed = unit >= 0 and self.run.unit_path(unit).is_file()
            used = self.run.unit_record(unit)["rows"] if committed else 0
            if not committed:
                return 0  # not remembered: it may be committed a moment later
            self._used[unit] = used
        return self._used[unit]

    def _map(self, array: ArraySpec, unit: int) -> np.memmap:
        key = (array.name, unit)
        if key in self._maps:
            self._maps.move_to_end(key)
            return self._maps[key]
        mapped = open_shard(self.run.shard_path(array, unit), self.run.layout(array))
        self._maps[key] = mapped
        if len(self._maps) > _OPEN_SHARDS:
            self._maps.popitem(last=False)
        return mapped
