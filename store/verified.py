"""Checked reading: the checksum of each inner chunk is compared before a value of it is given out."""

from __future__ import annotations

import threading
from collections import OrderedDict

import google_crc32c
import numpy as np

from ..errors import CorruptLakeError
from .array_rows import ArrayRows
from .run import Run

_KEPT_RECORDS = 256


class ChunkVerifier:
    """Checks the inner chunks of one run that are about to be read, each once.

    A chunk that was found whole is not looked at again as long as this object lives: what happens to the file after
    that is not noticed. Threads may share it.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._whole: dict[tuple[str, int], np.ndarray] = {}
        self._sums: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, array: ArrayRows, rows: np.ndarray) -> None:
        """Check every chunk of `array` that holds one of `rows`, which belong to committed units.

        Raises `CorruptLakeError`, naming the file and the rows, at the first chunk whose bytes are not those written.
        """
        layout, name = array.layout, array.array.name
        chunks = np.unique(rows // layout.chunk_rows)
        units = chunks // layout.chunks
        content = np.empty((layout.chunk_rows, *layout.trailing), layout.dtype.bits)
        for unit in np.unique(units).tolist():
            whole = self._whole.setdefault((name, unit), np.zeros(layout.chunks, bool))
            local = chunks[units == unit] - unit * layout.chunks
            for chunk in local[~whole[local]].tolist():
                first = unit * layout.rows + chunk * layout.chunk_rows
                array.gather(np.arange(first, first + layout.chunk_rows), content)  # what the reader will give out
                if google_crc32c.value(content.view(np.uint8)) != self._checksums(unit)[name][chunk]:
                    raise CorruptLakeError(
                        f"{self.run.shard_path(array.array, unit)} holds other bytes than were written: the checksum "
                        f"of rows {first} to {first + layout.chunk_rows - 1} of run {self.run.name!r} does not match. "
                        "Nothing of them was given out. Run `layerlake verify` to see what else is damaged."
                    )
                whole[chunk] = True

    def _checksums(self, unit: int) -> dict[str, np.ndarray]:
        sums = self._sums.get(unit)
        if sums is None:
            arrays = self.run.unit_record(unit)["arrays"]
            sums = {name: np.array(held["crc32c"], np.uint32) for name, held in arrays.items()}
            with self._lock:
                self._sums[unit] = sums
                if len(self._sums) > _KEPT_RECORDS:
                    self._sums.popitem(last=False)
        return sums
