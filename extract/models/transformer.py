"""A causal Transformer with norms before attention and MLP, as GPT-2 (Vaswani et al. 2017; Radford et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from . import initial
from .backbone import Block
from .config import ModelConfig
from .norms import LayerNorm
from .positions import POSITIONS, rotate

_STARTS = ("gpt2", "torch")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """A causal Transformer; `positions` and the deviations at the start are factors of a study, not constants."""

    architecture: ClassVar[str] = "transformer"

    heads: int = 4
    d_ff: int = 512
    """The width of the MLP inside a block."""
    positions: str = "learned"  # pyright: ignore[reportIncompatibleVariableOverride]
    """``learned``, ``sinusoidal`` (both added to the tokens), ``rotary`` (turns queries and keys) or ``none``."""
    longest: int = 128
    """How many positions a learned table has."""
    position_std: float = 0.02
    """The standard deviation of learned positions at the start."""
    start: str = "gpt2"
    """The linear layers at the start: ``gpt2`` (normal, 0.02, smaller where a block writes) or ``torch`` (uniform)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_of("positions", POSITIONS)
        self.one_of("start", _STARTS)
        if self.d_model % self.heads:
            raise self.refuse("heads", f"is {self.heads}, which does not divide d_model ({self.d_model})")
        if self.positions == "rotary" and (self.d_model // self.heads) % 2:
            raise self.refuse("positions", f"turns pairs of channels, and a head has {self.d_model // self.heads}")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise self.refuse("positions", f"needs an even d_model, not {self.d_model}")

    @property
    def max_length(self) -> int | None:
        """The rows of a learned table; the other codes have no end."""
        return self.longest if self.positions == "learned" else None

    def block(self) -> Block:
        """Build a block with attention and MLP."""
        return Block(LayerNorm(self.d_model), Attention(self), LayerNorm(self.d_model), MLP(self))

    def final_norm(self) -> LayerNorm:
        """Build the norm before the head."""
        return LayerNorm(self.d_model)


class Attention(nn.Module):
    """Causal self-attention: (B, T, d_model) to the same; position t sees 0 to t."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.in_proj = nn.Linear(config.d_model, 3 * config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def initialise(self, generator: Generator) -> None:
        """Draw the weights as `start` says."""
        _start(self.config, self.in_proj, self.out_proj, generator)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Attend at all positions at once."""
        q, k, v = self._heads(self.in_proj(x), positions)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def pattern(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Give how much each head attends to each token, (B, T, H, T)."""
        q, k, _ = self._heads(self._projected(x), positions)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(-1).transpose(1, 2)

    def output(self, x: Tensor, pattern: Tensor, positions: Tensor | None = None) -> Tensor:
        """Give what attention returns, from its pattern, (B, T, H, T)."""
        _, _, v = self._heads(self._projected(x), positions)
        mixed = torch.einsum("bths,bhsp->bthp", pattern, v).flatten(2)
        return functional.linear(mixed, self.out_proj.weight, self.out_proj.bias)

    def steps(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Attend at one position after the other: the plain form of `forward`."""
        q, k, v = self._heads(self._projected(x), positions)
        out = []
        for t in range(x.shape[1]):
            scores = torch.einsum("bhp,bhsp->bhs", q[:, :, t], k[:, :, : t + 1]) / math.sqrt(q.shape[-1])
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            weights = weights / weights.sum(-1, keepdim=True)
            out.append(torch.einsum("bhs,bhsp->bhp", weights, v[:, :, : t + 1]).flatten(1))
        return functional.linear(torch.stack(out, 1), self.out_proj.weight, self.out_proj.bias)

    def _projected(self, x: Tensor) -> Tensor:
        # The weights are read and the module not called: a call would run the hooks of whoever reads it.
        return functional.linear(x, self.in_proj.weight, self.in_proj.bias)

    def _heads(self, projected: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Give queries, keys and values, each (B, H, T, P)."""
        q, k, v = (p.unflatten(-1, (self.config.heads, -1)).transpose(1, 2) for p in projected.chunk(3, dim=-1))
        if self.config.positions == "rotary":
            at = torch.arange(q.shape[2], device=q.device) if positions is None else positions
            q, k = rotate(q, at), rotate(k, at)
        return q, k, v


class MLP(nn.Module):
    """The half of a block that looks at one position: (B, T, d_model) to the same."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.in_proj = nn.Linear(config.d_model, config.d_ff)
        self.out_proj = nn.Linear(config.d_ff, config.d_model)

    def initialise(self, generator: Generator) -> None:
        """Draw the weights as `start` says."""
        _start(self.config, self.in_proj, self.out_proj, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Widen, bend (GELU) and narrow."""
        return self.out_proj(functional.gelu(self.in_proj(x)))


def _start(config: TransformerConfig, reads: nn.Linear, writes: nn.Linear, generator: Generator) -> None:
    """Draw a branch of a block: what `writes` to the residual stream is smaller, the more branches there are."""
    if config.start == "torch":
        initial.linear_(reads, generator)
        initial.linear_(writes, generator)
        return
    initial.normal_(reads.weight, 0.02, generator)
    initial.normal_(writes.weight, 0.02 / math.sqrt(2 * config.layers), generator)
    reads.bias.zero_()
    writes.bias.zero_()
