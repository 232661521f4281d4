"""The sequences of a unit: what is read of each, which of its tokens are stored, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch

from ..store.row_kinds import TOKENS, RowKinds
from .batch import Batch, split_sequences
from .pools import unit_pools


class UnitSequences:
    """The sequences of a unit's planned table, with the rows that their stored tokens have in the unit."""

    def __init__(self, planned: pa.Table, kinds: RowKinds | None = None) -> None:
        self.ids = split_sequences(planned)
        self.lengths = [len(s) for s in self.ids]
        ends = np.cumsum([0, *self.lengths])
        self.names: list[int] = planned["seq"].to_numpy()[ends[:-1]].tolist()
        """The sequences' numbers in the run."""
        stored = planned["row"].is_valid().to_numpy()
        self.kept = [np.flatnonzero(one) for one in np.split(stored, ends[1:-1])]
        """The positions of each sequence's stored tokens."""
        self.first: list[int] = np.cumsum([0, *map(len, self.kept)])[:-1].tolist()
        """The first row of tokens of each sequence in the unit; the others follow it."""
        self.kinds = kinds or RowKinds()
        self.pools = unit_pools(planned, self.kinds)
        """Its pooled rows, by kind."""

    @property
    def pooled_rows(self) -> dict[str, int]:
        """How many pooled rows the unit has, by kind."""
        return {kind: pool.rows for kind, pool in self.pools.items()}

    def has_rows(self, sequence: int) -> bool:
        """Say whether anything of a sequence is stored."""
        return TOKENS in self.kinds.kinds or any(len(pool.starts[sequence]) for pool in self.pools.values())

    def batch_rows(self, batch: Batch, members: Sequence[int]) -> BatchRows:
        """Say which tokens of `batch`, made of the sequences `members` in that order, go to which rows of the unit."""
        return BatchRows(batch, [self.kept[i] for i in members], [self.first[i] for i in members])


class BatchRows:
    """Which tokens of a batch are stored, and the rows of the unit that they go to."""

    def __init__(self, batch: Batch, kept: Sequence[np.ndarray], first: Sequence[int]) -> None:
        self._batch, self._kept, self._first = batch, kept, first
        self._where: tuple[torch.Tensor, torch.Tensor] | None = None
        if any(len(positions) < length for positions, length in zip(kept, batch.lengths, strict=True)):
            width = batch.input_ids.shape[1]
            shifts = [width - n if batch.padding == "left" else 0 for n in batch.lengths]
            times = np.concatenate([positions + shift for positions, shift in zip(kept, shifts, strict=True)])
            index = np.repeat(np.arange(len(kept)), [len(positions) for positions in kept])
            device = batch.input_ids.device
            self._where = torch.from_numpy(index).to(device), torch.from_numpy(times).to(device)

    def select(self, value: torch.Tensor) -> torch.Tensor:
        """Take what is stored out of `value`, (batch, time, ...): (tokens, ...); all of it, as it is, where all is."""
        return value if self._where is None else value[self._where]

    def runs(self, selected: np.ndarray, keys: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first row of each sequence in the unit and the values of its rows, out of what `select` gave.

        With `keys` the last axis is over the batch's tokens, as in an attention pattern: it is cut to the sequence's
        own and widened with zeros to that many.
        """
        at = 0
        for k, (positions, first) in enumerate(zip(self._kept, self._first, strict=True)):
            if self._where is None:
                rows = self._batch.rows(selected, k)
            else:
                rows = selected[at : at + len(positions)]
                at += len(positions)
            if keys is not None:
                length = self._batch.lengths[k]
                own = slice(-length, None) if self._batch.padding == "left" else slice(0, length)
                rows = np.pad(rows[..., own], [(0, 0)] * (rows.ndim - 1) + [(0, keys - length)])
            yield first, rows
