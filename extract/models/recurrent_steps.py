"""What an LSTM and a GRU layer compute, a step at a time.

Equations and the order of the gates are those in torch's documentation of `nn.LSTM` and `nn.GRU` (Hochreiter and
Schmidhuber 1997; Cho et al. 2014 (arXiv 1406.1078), with the reset gate after the product as in cuDNN).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class RecurrentSteps(NamedTuple):
    """What a recurrent layer computes at each position."""

    hidden: Tensor
    """(B, T, D): what the layer returns."""
    gates: Tensor
    """(B, T, 4, D): i, f, g, o of an LSTM; (B, T, 3, D): r, z, n of a GRU."""
    cell: Tensor | None = None
    """(B, T, D): an LSTM's cell state after each token."""


Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""From the input and from the state, and the biases of the two; gates one below the other."""


def lstm_steps(x: Tensor, weights: Weights, start: tuple[Tensor, Tensor] | None = None) -> RecurrentSteps:
    """Run an LSTM layer over (B, T, inputs): c = f c + i g, h = o tanh(c), from `start`, (h, c), or zeros."""
    w_ih, w_hh, b_ih, b_hh = weights
    h, c = start or (x.new_zeros(len(x), w_hh.shape[1]),) * 2
    hidden, cells, gates = [], [], []
    for t in range(x.shape[1]):
        i, f, g, o = (functional.linear(x[:, t], w_ih, b_ih) + functional.linear(h, w_hh, b_hh)).chunk(4, dim=1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = o * c.tanh()
        hidden.append(h)
        cells.append(c)
        gates.append(torch.stack((i, f, g, o), 1))
    return RecurrentSteps(torch.stack(hidden, 1), torch.stack(gates, 1), torch.stack(cells, 1))


def gru_steps(x: Tensor, weights: Weights, start: Tensor | None = None) -> RecurrentSteps:
    """Run a GRU layer over (B, T, inputs): h = (1 - z) n + z h, from `start` or zeros."""
    w_ih, w_hh, b_ih, b_hh = weights
    h = x.new_zeros(len(x), w_hh.shape[1]) if start is None else start
    hidden, gates = [], []
    for t in range(x.shape[1]):
        r_x, z_x, n_x = functional.linear(x[:, t], w_ih, b_ih).chunk(3, dim=1)
        r_h, z_h, n_h = functional.linear(h, w_hh, b_hh).chunk(3, dim=1)
        r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
        n = (n_x + r * n_h).tanh()
        h = (1 - z) * n + z * h
        hidden.append(h)
        gates.append(torch.stack((r, z, n), 1))
    return RecurrentSteps(torch.stack(hidden, 1), torch.stack(gates, 1))
