"""Reading rows of a run: which rows there are, and their stored bits."""

from __future__ import annotations

import numpy as np

from ..errors import RequestError
from .archive import ArchiveArray
from .array_rows import ArrayRows, ShardMaps
from .catalog import indexed_units
from .row_kinds import TOKENS
from .run import ArraySpec, Run
from .unit_record import rows_of_kind

_MANY_UNITS = 64
_BLOCK_ROWS = 1 << 20


class RunReader:
    """Reads one run: which of its rows there are, and the rows of its arrays."""

    def __init__(self, run: Run, maps: ShardMaps | None = None) -> None:
        self.run = run
        self._maps = maps or ShardMaps()
        self._rows: dict[ArraySpec, ArrayRows | ArchiveArray] = {}
        self._used: dict[str, np.ndarray] = {}  # by kind, rows that hold something; -1: not committed when last asked

    def check_rows(self, rows: np.ndarray, kind: str) -> None:
        """Raise `RequestError` unless every row, of this kind, belongs to a committed unit and holds something."""
        for first in range(0, len(rows), _BLOCK_ROWS):  # what is computed on the way is as large as the rows
            self._check_block(rows[first : first + _BLOCK_ROWS], kind)

    def _check_block(self, rows: np.ndarray, kind: str) -> None:
        size, planned = self.run.record.unit_size(kind), self.run.record.units
        known = self._used.setdefault(kind, np.full(planned, -1, np.int64))
        units = rows // size
        inside = (rows >= 0) & (units < planned)
        if not inside.all():
            self._refuse(int(rows[np.argmin(inside)]), kind, "the run has no such row")
        self._learn(np.flatnonzero((np.bincount(units, minlength=planned) > 0) & (known < 0)).tolist(), kind)
        used = known[units]
        bad = rows - units * size >= used
        if bad.any():
            first = int(np.argmax(bad))
            reason = f"no {kind[:-1]} stands there" if used[first] >= 0 else "its unit is not committed (extract again)"
            self._refuse(int(rows[first]), kind, reason)

    def rows(self, array: ArraySpec) -> ArrayRows | ArchiveArray:
        """Give the rows of an array; ask only for those that `check_rows` let pass."""
        if array not in self._rows:
            packed = array.codec == "archive"
            self._rows[array] = ArchiveArray(self.run, array) if packed else ArrayRows(self.run, array, self._maps)
        return self._rows[array]

    def _learn(self, units: list[int], kind: str) -> None:
        """Find out how many rows of a kind units have, if they are committed."""
        used = self._used[kind]
        if len(units) > _MANY_UNITS:
            committed, indexed = self.run.committed(), indexed_units(self.run, kind)
            for unit in units:
                if unit in committed and unit in indexed:
                    used[unit] = indexed[unit]
            units = [u for u in units if u in committed and u not in indexed]
        for unit in units:
            if self.run.unit_path(unit).is_file():
                used[unit] = rows_of_kind(self.run.unit_record(unit), kind)

    def _refuse(self, row: int, kind: str, reason: str) -> None:
        of = "" if kind == TOKENS else f" of {kind}"
        raise RequestError(f"Row {row}{of} of run {self.run.name!r} cannot be read: {reason}.")
