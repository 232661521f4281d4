"""Stacked recurrent layers taken apart, so that each layer's output can be read and edited."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn


class LayeredRNN(nn.Module):
    """A stacked `nn.LSTM`, `nn.GRU` or `nn.RNN` as a chain of single layers with the same weights.

    torch runs all layers of a stack in one fused call, whose inner outputs no hook can see. This module takes the
    same arguments and gives the same outputs in evaluation mode (dropout between layers is off there), and has one
    module a layer: `layers.0`, `layers.1`, ... It has the wrapped module's `batch_first`, `num_layers` and the other
    facts that a model asks its recurrent module for, to make an initial state.
    """

    FACTS = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size")

    def __init__(self, stacked: nn.RNNBase) -> None:
        super().__init__()
        self.mode = stacked.mode
        for fact in self.FACTS:
            setattr(self, fact, getattr(stacked, fact))
        self.directions = 2 if stacked.bidirectional else 1
        self.layers = nn.ModuleList(_single(stacked, i) for i in range(stacked.num_layers))

    def flatten_parameters(self) -> None:
        """Do nothing, as the wrapped module does on a CPU: it is about how weights lie in a GPU's memory."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Run all layers on `input`, (batch, time, features) or as `batch_first` says; packed sequences too."""
        x, finals = input, []
        for i, layer in enumerate(self.layers):
            part = slice(i * self.directions, (i + 1) * self.directions)
            own = None if hx is None else tuple(s[part] for s in hx) if self.mode == "LSTM" else hx[part]
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
    """Replace every stacked recurrent module inside `model` by a `LayeredRNN`; returns the model.

    Left whole are those that do more than torch's own: a subclass, one with hooks, one with reparametrized weights.
    """
    if _is_plain_stack(model):
        return LayeredRNN(model)
    made: dict[nn.Module, LayeredRNN] = {}  # a module under two names stays one module
    for parent, name, module in stacks(model):
        made[module] = made.get(module) or LayeredRNN(module)
        setattr(parent, name, made[module])
    return model


def stacks(model: nn.Module) -> list[tuple[nn.Module, str, nn.RNNBase]]:
    """Give the stacks inside `model` that `take_apart` replaces: the module that has each, its name there, itself."""
    return [
        (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], module)
        for path, module in model.named_modules(remove_duplicate=False)
        if path and _is_plain_stack(module)
    ]


def _is_plain_stack(module: nn.Module) -> TypeGuard[nn.RNNBase]:
    if type(module) not in (nn.LSTM, nn.GRU, nn.RNN) or not isinstance(module, nn.RNNBase):
        return False
    return module.num_layers > 1 and not (module._forward_hooks or module._forward_pre_hooks)
