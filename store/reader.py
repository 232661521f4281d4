"""Reading rows of a run: which rows there are, and their stored bits."""

from __future__ import annotations

import numpy as np

from ..errors import RequestError
from .archive import ArchiveArray
from .array_rows import ArrayRows, ShardMaps
from .catalog import indexed_units
from .run import ArraySpec, Run

_MANY_UNITS = 64
_BLOCK_ROWS = 1 << 20


class RunReader:
    """Reads one run: which of its rows there are, and the rows of its arrays."""

    def __init__(self, run: Run, maps: ShardMaps | None = None) -> None:
        self.run = run
        self._maps = maps or ShardMaps()
        self._rows: dict[ArraySpec, ArrayRows | ArchiveArray] = {}
        self._used = np.full(run.record.units, -1, np.int64)  # rows with a token; -1: not committed when last asked

    def check_rows(self, rows: np.ndarray) -> None:
        """Raise `RequestError` unless every row belongs to a committed unit and holds a token."""
        for first in range(0, len(rows), _BLOCK_ROWS):  # what is computed on the way is as large as the rows
            self._check_block(rows[first : first + _BLOCK_ROWS])

    def _check_block(self, rows: np.ndarray) -> None:
        size, planned = self.run.record.unit_rows, self.run.record.units
        units = rows // size
        inside = (rows >= 0) & (units < planned)
        if not inside.all():
            self._refuse(int(rows[np.argmin(inside)]), "the run has no such row")
        self._learn(np.flatnonzero((np.bincount(units, minlength=planned) > 0) & (self._used < 0)).tolist())
        used = self._used[units]
        bad = rows - units * size >= used
        if bad.any():
            first = int(np.argmax(bad))
            reason = "no token stands there" if used[first] >= 0 else "its unit is not committed (extract again)"
            self._refuse(int(rows[first]), reason)

    def rows(self, array: ArraySpec) -> ArrayRows | ArchiveArray:
        """Give the rows of an array; ask only for those that `check_rows` let pass."""
        if array not in self._rows:
            packed = array.codec == "archive"
            self._rows[array] = ArchiveArray(self.run, array) if packed else ArrayRows(self.run, array, self._maps)
        return self._rows[array]

    def _learn(self, units: list[int]) -> None:
        """Find out how many rows units have, if they are committed."""
        if len(units) > _MANY_UNITS:
            committed, indexed = self.run.committed(), indexed_units(self.run)
            for unit in units:
                if unit in committed and unit in indexed:
                    self._used[unit] = indexed[unit]
            units = [u for u in units if u in committed and u not in indexed]
        for unit in units:
            if self.run.unit_path(unit).is_file():
                self._used[unit] = self.run.unit_record(unit)["rows"]

    def _refuse(self, row: int, reason: str) -> None:
        raise RequestError(f"Row {row} of run {self.run.name!r} cannot be read: {reason}.")
