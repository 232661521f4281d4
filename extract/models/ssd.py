"""Mamba-2's scan: one decay a head, so that a stretch of time is a masked matrix product.

    h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t^T      y_t = h_t C_t

Dao and Gu 2024 (arXiv 2405.21060), equation 4 (the recurrence) and section 6 (chunks of it as matrix products). Axes: B
sequences, T time, H heads, P head size, G groups of heads that share B and C, N numbers of state.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 64


def ssd(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, *, chunk: int = _CHUNK) -> Tensor:
    """Scan in chunks: inside a chunk by a matrix product, from chunk to chunk by the state.

    `x` is (B, T, H, P), `delta` (B, T, H), `a` (H,) and negative, `b` and `c` (B, T, G, N). Returns y, (B, T, H, P).
    Equal to `ssd_steps`, which says the same a step at a time.
    """
    heads, groups = x.shape[2], b.shape[2]
    state = None
    parts = []
    for first in range(0, x.shape[1], chunk):
        xs, ds, bs, cs = (v[:, first : first + chunk] for v in (x, delta, b, c))
        time = torch.cumsum(ds * a, dim=1).transpose(1, 2)  # (B, H, t): the logarithm of the decay so far
        past = torch.ones(ds.shape[1], ds.shape[1], dtype=torch.bool, device=x.device).tril()
        between = (time[:, :, :, None] - time[:, :, None, :]).masked_fill(~past, float("-inf")).exp()
        scores = torch.einsum("btgn,bsgn->bgts", cs, bs).repeat_interleave(heads // groups, dim=1)
        driven = xs * ds[..., None]
        y = torch.einsum("bhts,bshp->bthp", scores * between, driven)
        wide_b, wide_c = (v.repeat_interleave(heads // groups, dim=2) for v in (bs, cs))
        if state is not None:
            y = y + torch.einsum("bthn,bhpn->bthp", wide_c * time.exp().transpose(1, 2)[..., None], state)
        parts.append(y)
        if first + chunk < x.shape[1]:
            left = (time[:, :, -1:] - time).exp().transpose(1, 2)[..., None]
            added = torch.einsum("bshn,bshp->bhpn", wide_b, driven * left)
            state = added if state is None else added + state * time[:, :, -1].exp()[:, :, None, None]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def ssd_steps(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Scan one step after the other, as the equations stand; returns y, (B, T, H, P), and states, (B, T, H, P, N)."""
    repeat = x.shape[2] // b.shape[2]
    state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3])
    states, y = [], []
    for t in range(x.shape[1]):
        b_t, c_t = (v[:, t].repeat_interleave(repeat, dim=1) for v in (b, c))  # (B, H, N)
        decay = torch.exp(delta[:, t] * a)[:, :, None, None]
        state = decay * state + (delta[:, t, :, None] * x[:, t])[..., None] * b_t[:, :, None, :]
        states.append(state)
        y.append(torch.einsum("bhpn,bhn->bhp", state, c_t))
    return torch.stack(y, 1), torch.stack(states, 1)
