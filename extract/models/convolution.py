"""The short causal convolution in front of a Mamba's scan."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from . import initial


class _Convolve(torch.autograd.Function):
    """A sum of shifted products, and its gradient: torch's depthwise convolution takes longer than that on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        """Convolve (B, T, D) by taps, (width, D), the last of which is the token's own."""
        out = torch.addcmul(bias, x, taps[-1])
        for back in range(1, min(len(taps), x.shape[1])):
            out[:, back:].addcmul_(x[:, :-back], taps[-1 - back])
        ctx.save_for_backward(x, taps)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Carry the gradient back to where each product came from."""
        (grad,) = grads
        x, taps = ctx.saved_tensors
        d_x, d_taps = grad * taps[-1], torch.zeros_like(taps)
        d_taps[-1] = (grad * x).sum((0, 1))
        for back in range(1, min(len(taps), x.shape[1])):
            d_x[:, :-back].addcmul_(grad[:, back:], taps[-1 - back])
            d_taps[-1 - back] = (grad[:, back:] * x[:, :-back]).sum((0, 1))
        return d_x, d_taps, grad.sum((0, 1))


class CausalConv(nn.Module):
    """A depthwise convolution over the last `width` tokens, followed by SiLU: (B, T, D) to the same.

    Tap `width` - 1 of a channel's weights is the token itself, tap 0 the one farthest back. With `width` 0 there is no
    convolution and only the SiLU is left, for studies of what the convolution does.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        if width:
            self.weight = nn.Parameter(torch.empty(channels, 1, width))
            self.bias = nn.Parameter(torch.empty(channels))

    def initialise(self, generator: Generator) -> None:
        """Draw weights and bias as torch does for a convolution."""
        if self.width:
            initial.uniform_(self.weight, 1 / math.sqrt(self.width), generator)
            initial.uniform_(self.bias, 1 / math.sqrt(self.width), generator)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve all positions."""
        if not self.width:
            return functional.silu(x)
        mixed: Tensor = _Convolve.apply(x, self.weight[:, 0].t(), self.bias)  # pyright: ignore[reportAssignmentType]
        return functional.silu(mixed)

    def steps(self, x: Tensor) -> Tensor:
        """Convolve one position after the other: the plain form of `forward`."""
        if not self.width:
            return functional.silu(x)
        out = []
        for t in range(x.shape[1]):
            sum_ = self.bias.expand(len(x), -1)
            for back in range(min(self.width, t + 1)):
                sum_ = sum_ + x[:, t - back] * self.weight[:, 0, self.width - 1 - back]
            out.append(functional.silu(sum_))
        return torch.stack(out, 1)
