"""An array in each of the runs that a selection has rows of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .archive import ArchiveArray
from .array_rows import ArrayRows
from .dtypes import StoredDtype
from .verified import ChunkVerifier


class Source(NamedTuple):
    """An array of one dtype and trailing shape in each run of a selection."""

    dtype: StoredDtype
    shape: tuple[int, ...]
    runs: list[ArrayRows | ArchiveArray]

    def gather(
        self, rows: np.ndarray, codes: np.ndarray, out: np.ndarray, verifiers: Sequence[ChunkVerifier] = ()
    ) -> None:
        """Copy the bits of rows, each of the run that its code says, into `out`; checked where there are verifiers."""
        if len(self.runs) == 1:
            self._gather_run(0, rows, out, verifiers)
            return
        for code in range(len(self.runs)):
            where = np.flatnonzero(codes == code)
            part = np.empty((len(where), *out.shape[1:]), out.dtype)
            self._gather_run(code, rows[where], part, verifiers)
            out[where] = part

    def _gather_run(self, code: int, rows: np.ndarray, out: np.ndarray, verifiers: Sequence[ChunkVerifier]) -> None:
        source = self.runs[code]
        if verifiers and isinstance(source, ArrayRows):  # the others are checked whenever they are read
            verifiers[code].check(source, rows)
        source.gather(rows, out)
