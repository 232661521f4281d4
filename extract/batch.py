"""Batches: which sequences run together, and how they are padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

Padding = Literal["right", "left", "none"]


@dataclass(frozen=True)
class Batch:
    """Sequences of token ids as one rectangle.

    `input_ids`, `attention_mask` and `position_ids` are (batch, time) int64. The mask comes from the lengths, never
    from the ids: a padding id that also stands in the text stays a token. Positions count from 0 at each sequence's
    own first token, on whichever side the padding is.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    padding: Padding

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], padding: Padding, device: str = "cpu") -> Batch:
        """Build the batch of `sequences` of ids; with padding ``none`` they must be of equal length."""
        lengths = tuple(len(s) for s in sequences)
        width = max(lengths)
        if padding == "none" and min(lengths) != width:
            raise ValueError(f"sequences of lengths {min(lengths)} to {width} cannot share a batch without padding")
        ids = np.zeros((len(sequences), width), np.int64)
        mask = np.zeros_like(ids)
        positions = np.zeros_like(ids)
        for i, sequence in enumerate(sequences):
            real = slice(width - len(sequence), width) if padding == "left" else slice(0, len(sequence))
            ids[i, real] = sequence
            mask[i, real] = 1
            positions[i, real] = np.arange(len(sequence))
        ids_t, mask_t, positions_t = (torch.from_numpy(a).to(device) for a in (ids, mask, positions))
        return cls(ids_t, mask_t, positions_t, lengths, padding)

    def rows(self, values: Any, index: int, *, keys: bool = False) -> Any:
        """Cut sequence `index`'s own tokens out of `values`, a tensor or array of (batch, time, ...).

        With `keys` the last axis is over tokens too, and is cut likewise.
        """
        length = self.lengths[index]
        own = slice(-length, None) if self.padding == "left" else slice(0, length)
        return values[index, own, ..., own] if keys else values[index, own]


def split_sequences(tokens: pa.Table) -> list[np.ndarray]:
    """Give the token ids of each sequence of a unit's token table, in order."""
    ids, seqs = tokens["token_id"].to_numpy(), tokens["seq"].to_numpy()
    return np.split(ids, np.flatnonzero(np.diff(seqs)) + 1)


_SHORTER = 0.75
_FULL_ENOUGH = 256


def plan_batches(lengths: Sequence[int], batch_tokens: int, padding: Padding) -> list[list[int]]:
    """Group sequences, longest first, so that each batch holds at most `batch_tokens` tokens, padding included.

    The grouping depends on the lengths of this unit's sequences alone: a retried unit gets the same batches. With
    padding ``none`` only equal lengths share a batch. A sequence longer than `batch_tokens` is a batch of its own. A
    batch that holds 256 real tokens, and a sixteenth of `batch_tokens`, takes no sequence shorter than three quarters
    of its longest: a unit of short documents has few batches, and would else be padding for the greater part.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    real = 0
    for i in order:
        if batches:
            width = lengths[batches[-1][0]]
            fits = (len(batches[-1]) + 1) * width <= batch_tokens
            alike = lengths[i] >= _SHORTER * width or real < max(_FULL_ENOUGH, batch_tokens // 16)
            if fits and (lengths[i] == width if padding == "none" else alike):
                batches[-1].append(i)
                real += lengths[i]
                continue
        batches.append([i])
        real = lengths[i]
    return batches
