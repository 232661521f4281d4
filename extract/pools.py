"""Pooled rows: which tokens of a sequence each of them is the mean of, and the mean, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from ..store.row_kinds import POOLED, SPANS, RowKinds
from ..store.spans import label_spans, pooled_tokens
from .batch import Batch


@dataclass(frozen=True)
class Pool:
    """The rows of one kind in a unit: of each sequence, which tokens each of its rows is the mean of."""

    positions: list[np.ndarray]
    """Of each sequence, the positions of the tokens that are in a row of it, in order."""
    starts: list[np.ndarray]
    """Of each sequence, where in its `positions` each row begins."""
    first: list[int]
    """Of each sequence, the first of its rows in the unit."""
    rows: int
    """All rows in the unit."""

    def groups(self, sequence: int) -> list[np.ndarray]:
        """Give the positions of the tokens of each row of a sequence."""
        starts = self.starts[sequence]
        return np.split(self.positions[sequence], starts[1:]) if len(starts) else []


def unit_pools(planned: pa.Table, kinds: RowKinds) -> dict[str, Pool]:
    """Give the pooled rows of a unit by its planned tokens."""
    if not kinds.pooled:
        return {}
    seqs = planned["seq"].to_numpy()
    borders = np.flatnonzero(np.diff(seqs)) + 1
    chosen = pooled_tokens(planned)
    pools = {}
    for kind in kinds.pooled:
        group = seqs
        if kind == SPANS:
            assert kinds.label is not None
            group, labelled = label_spans(planned, kinds.label)
            chosen = chosen & labelled
        masks, groups = np.split(chosen, borders), np.split(group, borders)
        positions = [np.flatnonzero(mask) for mask in masks]
        starts = [np.flatnonzero(np.diff(g[at], prepend=-1) != 0) for g, at in zip(groups, positions, strict=True)]
        first = np.cumsum([0, *map(len, starts)])
        pools[kind] = Pool(positions, starts, first[:-1].tolist(), int(first[-1]))
    return {kind: pools[kind] for kind in POOLED if kind in pools}


class BatchPools:
    """The means of one batch, made of the sequences `members` of a unit in that order."""

    def __init__(self, batch: Batch, pools: dict[str, Pool], members: Sequence[int]) -> None:
        self._pools, self._members, self._lengths = pools, members, batch.lengths
        width = batch.input_ids.shape[1]
        self._shifts = [width - n if batch.padding == "left" else 0 for n in batch.lengths]
        device = batch.input_ids.device
        self._where: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for kind, pool in pools.items():
            parts = [pool.positions[m] for m in members]
            index = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
            times = np.concatenate([part + shift for part, shift in zip(parts, self._shifts, strict=True)])
            self._where[kind] = torch.from_numpy(index).to(device), torch.from_numpy(times).to(device)

    def select(self, value: torch.Tensor, kind: str) -> torch.Tensor:
        """Take the tokens that go into means of this kind out of `value`, (batch, time, ...): (tokens, ...)."""
        return value[self._where[kind]]

    def means(
        self, selected: torch.Tensor, kind: str, keys: int | None = None
    ) -> tuple[list[tuple[int, int]], np.ndarray]:
        """Give (first row in the unit, rows) of each sequence that has some, and all their means, float64 (rows, ...).

        `selected` is what `select` gave, on the host. Sums are of the model's own values, in float64. With `keys` the
        last axis is over tokens: it is cut to the sequence's own and widened with zeros to that many.
        """
        pool, places, found = self._pools[kind], [], []
        at = 0
        for member, length, shift in zip(self._members, self._lengths, self._shifts, strict=True):
            n, starts = len(pool.positions[member]), pool.starts[member]
            if not n:
                continue
            rows = selected[at : at + n].double().numpy()
            at += n
            if keys is not None:
                rows = rows[..., shift : shift + length]
                rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, keys - length)])
            counts = np.diff(starts, append=n).reshape(-1, *[1] * (rows.ndim - 1))
            places.append((pool.first[member], len(starts)))
            found.append(np.add.reduceat(rows, starts, axis=0) / counts)
        return places, np.concatenate(found) if found else np.empty(0)


def rounded_once(values: np.ndarray, dtype: str) -> torch.Tensor:
    """Give float64 numbers in a form that a conversion to `dtype` rounds as if it saw them: in float32, to odd.

    Rounding to float32 and then to a narrower dtype would round twice. A float32 that is not exact gets its last bit
    set, so that it lies on the same side of every number of the narrower dtype, and of every tie (Boldo and Melquiond,
    2008). For float32 it is rounded to nearest.
    """
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused where it is stored
        near = np.asarray(values, np.float64).astype(np.float32)
    if dtype != "float32":
        wide = near.astype(np.float64)
        inexact = np.isfinite(wide) & (wide != values)
        bits = near.view(np.uint32)
        bits = np.where(inexact & (np.abs(wide) > np.abs(values)), bits - np.uint32(1), bits)
        near = np.where(inexact, bits | np.uint32(1), bits).astype(np.uint32).view(np.float32)
    return torch.from_numpy(np.ascontiguousarray(near))
