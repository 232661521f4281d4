"""Values to start from, drawn from a generator that is given and from nothing else."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn


def normal_(weight: Tensor, std: float, generator: Generator) -> None:
    """Draw `weight` from a normal distribution around 0."""
    nn.init.normal_(weight, std=std, generator=generator)


def linear_(linear: nn.Linear, generator: Generator) -> None:
    """Draw a linear layer as torch does: weight and bias uniform within 1 / sqrt(inputs)."""
    uniform_(linear.weight, 1 / math.sqrt(linear.in_features), generator)
    if linear.bias is not None:
        uniform_(linear.bias, 1 / math.sqrt(linear.in_features), generator)


def uniform_(weight: Tensor, bound: float, generator: Generator) -> None:
    """Draw `weight` uniformly from -bound to bound."""
    nn.init.uniform_(weight, -bound, bound, generator=generator)


def time_step_bias_(bias: Tensor, least: float, most: float, generator: Generator) -> None:
    """Draw a bias so that softplus(bias), a Mamba's time step, is log-uniform from `least` to `most`.

    As the authors' code has it (Gu and Dao 2023, section 3.6); steps below 1e-4 are lifted to it.
    """
    drawn = torch.rand(bias.shape, generator=generator, dtype=torch.float64)
    step = torch.exp(drawn * (math.log(most) - math.log(least)) + math.log(least)).clamp(min=1e-4)
    bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def ones_(norm: nn.Module) -> None:
    """Start a norm from the identity."""
    for name, parameter in norm.named_parameters(recurse=False):
        parameter.fill_(1.0 if name == "weight" else 0.0)
