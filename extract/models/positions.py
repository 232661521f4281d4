"""Codes of positions: sinusoidal vectors, and rotations of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

POSITIONS = ("learned", "rotary", "sinusoidal", "none")
_BASE = 10_000.0


def _angles(positions: Tensor, pairs: int) -> Tensor:
    """Give the angle of each position and pair of channels, (..., pairs) float64: position / base^(pair / pairs)."""
    rates = _BASE ** (-torch.arange(pairs, dtype=torch.float64, device=positions.device) / pairs)
    return positions[..., None].double() * rates


def sinusoidal(positions: Tensor, width: int) -> Tensor:
    """Give the code of each position, (..., width) float64: sines in the first half, cosines in the second.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.5, with the channels in another order.
    """
    angles = _angles(positions, width // 2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + half) by its position's angle: Su et al. 2021 (arXiv 2104.09864), as GPT-NeoX.

    `x` is (B, H, T, P) with P even, `positions` (T,) or (B, T). A product of two turned vectors depends on the
    difference of their positions alone.
    """
    half = x.shape[-1] // 2
    angles = _angles(positions, half)
    if angles.ndim == 3:
        angles = angles[:, None]  # the same for all heads
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
