"""The norms that the models take their residual stream through."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from . import initial


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm with a weight, as Mamba has it: x / sqrt(mean(x^2) + 1e-5), times the weight."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-5)

    def initialise(self, generator: Generator) -> None:
        """Start from weight 1."""
        initial.ones_(self)


class LayerNorm(nn.LayerNorm):
    """Layer norm with weight and bias."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-5)

    def initialise(self, generator: Generator) -> None:
        """Start from weight 1 and bias 0."""
        initial.ones_(self)


class GatedRMSNorm(nn.Module):
    """Mamba-2's norm of what the scan gives, gated before it: RMSNorm(y silu(z)) (Dao and Gu 2024, figure 6).

    Each group of channels is normalised on its own, as in the authors' code.
    """

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(width))

    def initialise(self, generator: Generator) -> None:
        """Start from weight 1."""
        initial.ones_(self)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate and normalise (B, T, D)."""
        gated = (y * nn.functional.silu(gate)).unflatten(-1, (self.groups, -1))
        return nn.functional.rms_norm(gated, gated.shape[-1:], eps=1e-5).flatten(-2) * self.weight
