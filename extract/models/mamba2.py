"""Mamba-2: Mamba with one decay a head, all of x, B and C through the convolution (Dao and Gu 2024, arXiv 2405.21060).

code        paper   what it is
d_inner     E D     channels inside the mixer, heads times head size
head_dim    P       channels of a head
d_state     N       numbers of state a channel
groups      G       groups of heads that share B and C
delta       Delta   the step, a number a head and token
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from . import initial
from .backbone import Block
from .backend import run_ssd
from .convolution import CausalConv
from .norms import GatedRMSNorm, RMSNorm
from .ssd import ssd_steps
from .state_space import StateSpaceConfig


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(StateSpaceConfig):
    """Mamba-2; its other options are those of `StateSpaceConfig`."""

    architecture: ClassVar[str] = "mamba2"

    d_state: int = 128
    head_dim: int = 64
    groups: int = 1
    a_max: float = 16.0
    """The largest rate of decay at the start; a head's is drawn uniformly from 1 to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.a_max < 1:
            raise self.refuse("a_max", f"is {self.a_max}, and must be at least 1")
        if self.d_inner % self.head_dim:
            raise self.refuse("d_inner", f"is {self.d_inner}, no multiple of head_dim ({self.head_dim})")
        if self.heads % self.groups:
            raise self.refuse("groups", f"is {self.groups}, which does not divide the {self.heads} heads")

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.d_inner // self.head_dim

    def block(self) -> Block:
        """Build a block with one mixer."""
        return Block(RMSNorm(self.d_model), Mamba2Mixer(self))


class Mamba2Steps(NamedTuple):
    """What the mixer computes at each position, from its sequential form."""

    conv: Tensor
    """(B, T, d_inner + 2 G N): the convolution's output, that is x, B and C."""
    state: Tensor
    """(B, T, H, P, N): the state after each token."""
    out: Tensor
    """(B, T, d_model): what the mixer returns."""


class Mamba2Mixer(nn.Module):
    """(B, T, d_model) to the same; position t sees 0 to t."""

    no_weight_decay = ("A_log", "D")
    """Parameters that an optimizer lets be; by name, as a mark on a tensor does not outlive moving or loading it."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.config = config
        mixed = config.d_inner + 2 * config.groups * config.d_state
        self.widths = [config.d_inner, mixed, config.heads]
        self.in_proj = nn.Linear(config.d_model, sum(self.widths), bias=False)
        self.conv = CausalConv(mixed, config.d_conv)
        self.dt_bias = nn.Parameter(torch.empty(config.heads))
        self.A_log = nn.Parameter(torch.empty(config.heads))
        self.D = nn.Parameter(torch.empty(config.heads))
        self.norm = GatedRMSNorm(config.d_inner, config.groups)
        self.out_proj = nn.Linear(config.d_inner, config.d_model, bias=False)

    def initialise(self, generator: Generator) -> None:
        """Draw weights as the authors' code does: A uniform from 1 to a_max, log-uniform steps."""
        config = self.config
        for linear in (self.in_proj, self.out_proj):
            initial.linear_(linear, generator)
        self.out_proj.weight /= math.sqrt(config.layers)
        initial.time_step_bias_(self.dt_bias, config.dt_min, config.dt_max, generator)
        rates = 1 + (config.a_max - 1) * torch.rand(config.heads, generator=generator, dtype=torch.float64)
        self.A_log.copy_(rates.log())
        self.D.fill_(1.0)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Mix all positions by the scan in chunks."""
        gate, mixed, step = self.in_proj(x).split(self.widths, dim=-1)
        u, b, c = self._parted(self.conv(mixed))
        y = run_ssd(self.config.backend, u, functional.softplus(step + self.dt_bias), self._rates(), b, c)
        return self.out_proj(self.norm((y + self.D[:, None] * u).flatten(2), gate))

    def steps(self, x: Tensor) -> Mamba2Steps:
        """Mix one position after the other; no module inside is called, so whoever hooks one sees nothing of this."""
        gate, mixed, step = functional.linear(x, self.in_proj.weight).split(self.widths, dim=-1)
        conv = self.conv.steps(mixed)
        u, b, c = self._parted(conv)
        y, state = ssd_steps(u, functional.softplus(step + self.dt_bias), self._rates(), b, c)
        return Mamba2Steps(conv, state, self._out(u, gate, y))

    def from_states(self, x: Tensor, state: Tensor) -> Tensor:
        """Give what the mixer returns, from its input and its states, (B, T, H, P, N)."""
        gate, mixed, _ = functional.linear(x, self.in_proj.weight).split(self.widths, dim=-1)
        u, _, c = self._parted(self.conv.steps(mixed))
        c = c.repeat_interleave(self.config.heads // self.config.groups, dim=2)
        return self._out(u, gate, torch.einsum("bthpn,bthn->bthp", state, c))

    def _out(self, u: Tensor, gate: Tensor, y: Tensor) -> Tensor:
        y = self.norm.forward((y + self.D[:, None] * u).flatten(2), gate)
        return functional.linear(y, self.out_proj.weight)

    def _parted(self, conv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give x, (B, T, H, P), and B and C, (B, T, G, N)."""
        config = self.config
        size = config.groups * config.d_state
        u, b, c = conv.split([config.d_inner, size, size], dim=-1)
        b, c = (v.unflatten(-1, (config.groups, config.d_state)) for v in (b, c))
        return u.unflatten(-1, (config.heads, config.head_dim)), b, c

    def _rates(self) -> Tensor:
        return -torch.exp(self.A_log)
