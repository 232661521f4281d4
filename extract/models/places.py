"""Where the sites of the models built here lie, and how those that no module returns follow from a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..architectures import Architecture, Place
from ..derived import gates_output, lstm_cell, lstm_output, rnn_gates
from ..hooks import Call
from .config import ModelConfig
from .recurrent import RecurrentConfig


def architecture_of(config: ModelConfig) -> Architecture:
    """Give the sites of a model; its blocks lie in `layers` of its backbone.

    Padding is on the right only: every model here is causal, so that what follows a sequence cannot change it.
    """
    if isinstance(config, RecurrentConfig):
        places = _recurrent(config)
    elif config.architecture == "transformer":
        places = _TRANSFORMER
    else:
        places = _MAMBA
    plain = isinstance(config, RecurrentConfig) and not config.residual
    return Architecture(
        "layers", places, None if plain else "norm", embedding=_embed, additive=not plain, padding=("right",)
    )


def _embed(backbone: Any, ids: Tensor, positions: Tensor) -> Tensor:
    return backbone.embed(ids[None], positions[None])[0]


def _positions(call: Call) -> Any:
    return call.input("positions", 1)


def _pattern(attention: Any, call: Call) -> Tensor:
    return attention.pattern(call.input("x"), _positions(call))


def _pattern_output(attention: Any, call: Call, pattern: Tensor) -> Tensor:
    return attention.output(call.input("x"), pattern, _positions(call))


def _state(mixer: Any, call: Call) -> Tensor:
    return mixer.steps(call.input("x")).state


def _state_output(mixer: Any, call: Call, state: Tensor) -> Tensor:
    return mixer.from_states(call.input("x"), state)


def _recurrent(config: RecurrentConfig) -> dict[str, Place]:
    places = {"gates": Place("layer", derive=rnn_gates, gives_back=gates_output), "hidden": Place("layer")}
    if config.architecture == "lstm":
        places["cell"] = Place("layer", derive=lstm_cell, gives_back=lstm_output)
    if config.residual:
        places["mixer_out"] = Place("layer")  # the same as hidden: what the layer returns is what is added
    return places


_TRANSFORMER = {
    "z": Place("mixer.out_proj", "input", heads=True),
    "pattern": Place("mixer", derive=_pattern, keys=True, gives_back=_pattern_output),
    "attn_out": Place("mixer"),
    "resid_mid": Place("mlp_norm", "input", read_only=True),
    "mlp_out": Place("mlp"),
}
_MAMBA = {
    "conv_out": Place("mixer.conv"),
    "ssm_state": Place("mixer", derive=_state, gives_back=_state_output),
    "mixer_out": Place("mixer"),
}
