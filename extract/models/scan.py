"""Mamba's selective scan: the recurrence of a diagonal state whose step, input and output depend on the token.

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t        y_t = C_t h_t

Gu and Dao 2023 (arXiv 2312.00752), algorithm 2, with B discretised by delta B as the authors' code has it. Axes: B
sequences, T time, D inner channels, N numbers of state a channel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_SEQUENCES = 16
"""Sequences that are scanned together: few enough that their state stays in a core's cache."""


def selective_scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Scan all sequences; gradients flow to every argument, and not to gradients of gradients.

    `x` and `delta` are (B, T, D), `a` is (D, N) and negative, `b` and `c` are (B, T, N). Returns y, (B, T, D). Equal to
    `selective_scan_steps`, which says the same a step at a time. States are kept for the way back only where a
    gradient is asked for.
    """
    parts = [
        _Scan.apply(*(v[i : i + _SEQUENCES] for v in (x, delta)), a, *(v[i : i + _SEQUENCES] for v in (b, c)))
        for i in range(0, len(x), _SEQUENCES)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # pyright: ignore[reportArgumentType]


def selective_scan_steps(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Scan one step after the other, as the equations stand; returns y, (B, T, D), and all states, (B, T, D, N)."""
    state = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
    states, y = [], []
    for t in range(x.shape[1]):
        decay = torch.exp(delta[:, t, :, None] * a)
        state = decay * state + (delta[:, t] * x[:, t])[:, :, None] * b[:, t, None, :]
        states.append(state)
        y.append(torch.einsum("bdn,bn->bd", state, c[:, t]))
    return torch.stack(y, 1), torch.stack(states, 1)


class _Scan(torch.autograd.Function):
    """The scan and its gradient by hand: autograd through the loop would keep, and go through, five tensors a step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Run the recurrence; the state is laid out (B, N, D), so that the innermost axis is the long one."""
        steps, width, size = x.shape[1], x.shape[2], a.shape[1]
        keep = any(ctx.needs_input_grad)
        rates = a.t().contiguous()
        powers = rates * math.log2(math.e)  # exp2 takes a third of the time of exp
        delta_t, b_t, c_t = (v.transpose(0, 1).contiguous() for v in (delta, b, c))
        drive = delta_t * x.transpose(0, 1)
        shape = (len(x), size, width)
        decays = x.new_empty((steps if keep else 1, *shape))
        states = x.new_empty((steps + 1 if keep else 1, *shape))
        y, work = x.new_empty(steps, len(x), width), x.new_empty(shape)
        state = states[0].zero_()
        along = zip(delta_t[:, :, None].unbind(), drive[:, :, None].unbind(), _columns(b_t), _columns(c_t), strict=True)
        for t, (step, driven, reads, writes) in enumerate(along):
            decay = torch.exp2(torch.mul(step, powers, out=work), out=decays[t if keep else 0])
            state = torch.mul(decay, state, out=states[t + 1 if keep else 0]).addcmul_(reads, driven)
            torch.sum(torch.mul(state, writes, out=work), dim=1, out=y[t])
        if keep:
            ctx.save_for_backward(x, delta_t, rates, b_t, c_t, drive, decays, states)
        return y.transpose(0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the recurrence of the gradient of the state, from the last step to the first."""
        x, delta_t, rates, b_t, c_t, drive, decays, states = ctx.saved_tensors
        dy = grads[0].transpose(0, 1).contiguous()
        d_drive, d_delta = torch.empty_like(drive), torch.empty_like(drive)
        d_b, d_c = torch.empty_like(b_t), torch.empty_like(c_t)
        d_rates = torch.zeros_like(states[0])
        d_state, work = torch.zeros_like(states[0]), torch.empty_like(states[0])
        steps, drives, dys = (v[:, :, None].unbind() for v in (delta_t, drive, dy))
        reads, writes = _columns(b_t), _columns(c_t)
        for t in reversed(range(len(dy))):
            d_state.addcmul_(writes[t], dys[t])
            # A product and a sum: many small products of a matrix and a vector are slower than that.
            torch.sum(torch.mul(states[t + 1], dys[t], out=work), dim=2, out=d_c[t])
            torch.sum(torch.mul(d_state, reads[t], out=work), dim=1, out=d_drive[t])
            torch.sum(torch.mul(d_state, drives[t], out=work), dim=2, out=d_b[t])
            torch.mul(d_state.mul_(decays[t]), states[t], out=work)  # the gradient of delta_t A
            d_rates.addcmul_(work, steps[t])
            torch.sum(work.mul_(rates), dim=1, out=d_delta[t])
        x_t = x.transpose(0, 1)
        d_delta.addcmul_(d_drive, x_t)
        d_x = d_drive.mul_(delta_t)
        back = [v.transpose(0, 1) for v in (d_x, d_delta, d_b, d_c)]
        return back[0], back[1], d_rates.sum(0).t(), back[2], back[3]


def _columns(v: Tensor) -> tuple[Tensor, ...]:
    """Cut (T, B, N) into steps of (B, N, 1)."""
    return v[..., None].unbind()
