"""Stacked recurrent layers taken apart, so that each layer's output can be read and edited."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class LayeredRNN(nn.Module):
    """A stacked `nn.LSTM`, `nn.GRU` or `nn.RNN` as a chain of single layers with the same weights.

    torch runs all layers of a stack in one fused call, whose inner outputs no hook can see. This module takes the
    same arguments and gives the same outputs in evaluation mode (dropout between layers is off there), and has one
    module a layer: `layers.0`, `layers.1`, ... It has the wrapped module's `batch_first`.
    """

    def __init__(self, stacked: nn.RNNBase) -> None:
        super().__init__()
        self.mode = stacked.mode
        self.batch_first = stacked.batch_first
        self.directions = 2 if stacked.bidirectional else 1
        self.layers = nn.ModuleList(_single(stacked, i) for i in range(stacked.num_layers))

    def forward(self, x: Any, state: Any = None) -> Any:
        """Run all layers on `x`, (batch, time, features) or as `batch_first` says; packed sequences too."""
        finals = []
        for i, layer in enumerate(self.layers):
            part = slice(i * self.directions, (i + 1) * self.directions)
            own = None if state is None else tuple(s[part] for s in state) if self.mode == "LSTM" else state[part]
            x, final = layer(x, own)
            finals.append(final)
        if self.mode == "LSTM":
            return x, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))
        return x, torch.cat(finals)


def _single(stacked: nn.RNNBase, layer: int) -> nn.RNNBase:
    first = stacked.weight_ih_l0
    assert isinstance(first, torch.Tensor)
    hidden = stacked.proj_size or stacked.hidden_size
    size = stacked.input_size if layer == 0 else hidden * (2 if stacked.bidirectional else 1)
    options: dict[str, Any] = {"proj_size": stacked.proj_size} if stacked.mode == "LSTM" else {}
    if stacked.mode.startswith("RNN"):
        options["nonlinearity"] = stacked.mode.removeprefix("RNN_").lower()
    kind = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(stacked.mode, nn.RNN)
    single = kind(
        size,
        stacked.hidden_size,
        bias=stacked.bias,
        batch_first=stacked.batch_first,
        bidirectional=stacked.bidirectional,
        device=first.device,
        dtype=first.dtype,
        **options,
    )
    own = {n.replace(f"_l{layer}", "_l0"): p for n, p in stacked.named_parameters() if _layer_of(n) == layer}
    for name, parameter in own.items():
        setattr(single, name, parameter)
    return single


def _layer_of(name: str) -> int:
    return int(name.split("_l")[-1].removesuffix("_reverse"))


def take_apart(model: nn.Module) -> nn.Module:
    """Replace every stacked recurrent module inside `model` by a `LayeredRNN`; returns the model."""
    if isinstance(model, nn.RNNBase) and model.num_layers > 1:
        return LayeredRNN(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.RNNBase) and module.num_layers > 1:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, LayeredRNN(module))
    return model
