"""Mamba: a residual block around a convolution and a selective scan (Gu and Dao 2023, arXiv 2312.00752).

code        paper   what it is
d_inner     E D     channels inside the mixer
d_state     N       numbers of state a channel
dt_rank     R       rank of the projection that gives the step
delta       Delta   the step, a number a channel and token
A_log       log -A  the rates at which states decay, a number a channel and state
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
from .backend import run_selective_scan
from .convolution import CausalConv
from .norms import RMSNorm
from .scan import selective_scan_steps
from .state_space import StateSpaceConfig


@dataclass(frozen=True, kw_only=True)
class MambaConfig(StateSpaceConfig):
    """Mamba; its other options are those of `StateSpaceConfig`."""

    architecture: ClassVar[str] = "mamba"

    d_state: int = 16

    @property
    def dt_rank(self) -> int:
        """The rank of the step's projection."""
        return math.ceil(self.d_model / 16)

    def block(self) -> Block:
        """Build a block with one mixer."""
        return Block(RMSNorm(self.d_model), MambaMixer(self))


class MambaSteps(NamedTuple):
    """What the mixer computes at each position, from its sequential form."""

    conv: Tensor
    """(B, T, D): the convolution's output."""
    state: Tensor
    """(B, T, D, N): the state after each token."""
    out: Tensor
    """(B, T, d_model): what the mixer returns."""


class MambaMixer(nn.Module):
    """(B, T, d_model) to the same; position t sees 0 to t."""

    no_weight_decay = ("A_log", "D")
    """Parameters that an optimizer lets be; by name, as a mark on a tensor does not outlive moving or loading it."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.in_proj = nn.Linear(config.d_model, 2 * config.d_inner, bias=False)
        self.conv = CausalConv(config.d_inner, config.d_conv)
        self.x_proj = nn.Linear(config.d_inner, config.dt_rank + 2 * config.d_state, bias=False)
        self.dt_proj = nn.Linear(config.dt_rank, config.d_inner)
        self.A_log = nn.Parameter(torch.empty(config.d_inner, config.d_state))
        self.D = nn.Parameter(torch.empty(config.d_inner))
        self.out_proj = nn.Linear(config.d_inner, config.d_model, bias=False)

    def initialise(self, generator: Generator) -> None:
        """Draw weights as the authors do (section 3.6): A from 1 to N in every channel, log-uniform steps."""
        config = self.config
        for linear in (self.in_proj, self.x_proj, self.dt_proj, self.out_proj):
            initial.linear_(linear, generator)
        self.out_proj.weight /= math.sqrt(config.layers)
        initial.uniform_(self.dt_proj.weight, config.dt_rank**-0.5, generator)
        initial.time_step_bias_(self.dt_proj.bias, config.dt_min, config.dt_max, generator)
        rates = torch.arange(1, config.d_state + 1, dtype=torch.float64)
        self.A_log.copy_(rates.log().expand(config.d_inner, -1))
        self.D.fill_(1.0)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Mix all positions by the fast scan."""
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u = self.conv(u)
        delta, b, c = self._selected(u, self.x_proj(u))
        y = run_selective_scan(self.config.backend, u, delta, self._rates(), b, c)
        return self.out_proj((y + self.D * u) * functional.silu(gate))

    def steps(self, x: Tensor) -> MambaSteps:
        """Mix one position after the other; no module inside is called, so whoever hooks one sees nothing of this."""
        u, gate = functional.linear(x, self.in_proj.weight).chunk(2, dim=-1)
        u = self.conv.steps(u)
        delta, b, c = self._selected(u, functional.linear(u, self.x_proj.weight))
        y, state = selective_scan_steps(u, delta, self._rates(), b, c)
        return MambaSteps(u, state, self._out(u, gate, y))

    def from_states(self, x: Tensor, state: Tensor) -> Tensor:
        """Give what the mixer returns, from its input and its states, (B, T, D, N)."""
        u, gate = functional.linear(x, self.in_proj.weight).chunk(2, dim=-1)
        u = self.conv.steps(u)
        _, _, c = self._selected(u, functional.linear(u, self.x_proj.weight))
        return self._out(u, gate, torch.einsum("btdn,btn->btd", state, c))

    def _out(self, u: Tensor, gate: Tensor, y: Tensor) -> Tensor:
        return functional.linear((y + self.D * u) * functional.silu(gate), self.out_proj.weight)

    def _selected(self, u: Tensor, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give the step, (B, T, D), and B and C, (B, T, N), that the tokens select."""
        config = self.config
        low, b, c = projected.split([config.dt_rank, config.d_state, config.d_state], dim=-1)
        delta = functional.softplus(functional.linear(low, self.dt_proj.weight, self.dt_proj.bias))
        return delta, b, c

    def _rates(self) -> Tensor:
        return -torch.exp(self.A_log)
