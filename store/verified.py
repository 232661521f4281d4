"""Checked reading: the checksum of each inner chunk is compared before a value of it is given out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import google_crc32c
import numpy as np

from ..errors import CorruptLakeError
from .record import ArraySpec
from .run import Run
from .shard import open_shard

_KEPT_RECORDS = 256


class ChunkVerifier:
    """Checks the inner chunks of one run that are about to be read, each once.

    A chunk that was found whole is not looked at again as long as this object lives: what happens to the file after
    that is not noticed.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._whole: dict[tuple[str, int], np.ndarray] = {}
        self._sums: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()

    def check(self, array: ArraySpec, rows: np.ndarray) -> None:
        """Check every chunk of `array` that holds one of `rows`, which belong to committed units.

        Raises `CorruptLakeError`, naming the file and the rows, at the first chunk whose bytes are not those written.
        """
        layout = self.run.layout(array)
        chunks = np.unique(rows // layout.chunk_rows)
        units = chunks // layout.chunks
        for unit in np.unique(units).tolist():
            whole = self._whole.setdefault((array.name, unit), np.zeros(layout.chunks, bool))
            local = chunks[units == unit] - unit * layout.chunks
            todo = local[~whole[local]]
            if not len(todo):
                continue
            path = self.run.shard_path(array, unit)
            flat = open_shard(path, layout).reshape(layout.chunks, -1).view(np.uint8)
            sums = self._checksums(unit)[array.name]
            for chunk in todo.tolist():
                if google_crc32c.value(np.asarray(flat[chunk])) != sums[chunk]:
                    first = unit * layout.rows + chunk * layout.chunk_rows
                    raise CorruptLakeError(
                        f"{path} holds other bytes than were written: the checksum of rows {first} to "
                        f"{first + layout.chunk_rows - 1} of run {self.run.name!r} does not match. Nothing of them was "
                        "given out. Run `layerlake verify` to see what else is damaged."
                    )
                whole[chunk] = True

    def _checksums(self, unit: int) -> dict[str, np.ndarray]:
        if unit not in self._sums:
            arrays = self.run.unit_record(unit)["arrays"]
            self._sums[unit] = {name: np.array(held["crc32c"], np.uint32) for name, held in arrays.items()}
            if len(self._sums) > _KEPT_RECORDS:
                self._sums.popitem(last=False)
        self._sums.move_to_end(unit)
        return self._sums[unit]


def verify_chunks(
    verifiers: Sequence[ChunkVerifier], arrays: Sequence[ArraySpec], rows: np.ndarray, codes: np.ndarray
) -> None:
    """Check what `rows` touch, row k belonging to run `codes[k]`; without verifiers nothing is checked."""
    for code, verifier in enumerate(verifiers):
        verifier.check(arrays[code], rows[codes == code])
