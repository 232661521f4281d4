"""LSTM and GRU: stacks of torch's own layers; `recurrent_steps` has the same a step at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Generator, Tensor, nn

from . import initial
from .config import ModelConfig
from .norms import LayerNorm

_STARTS = ("torch", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(ModelConfig):
    """What LSTM and GRU share: a layer is as wide as the stream, so their size follows from d_model and layers."""

    embedding_std: float = 1.0
    """As torch's own; a plain stack has no norm that would lift a smaller one, and learns several times as slowly."""
    residual: bool = False
    """False: a plain stack, each layer reads the one below. True: x = x + layer(norm(x)), and a norm at the end."""
    start: str = "torch"
    """The recurrent weights at the start: ``torch`` (uniform) or ``orthogonal`` (each gate's matrix)."""
    forget_bias: float = 0.0
    """Added to the bias of an LSTM's forget gate at the start; nothing to a GRU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_of("start", _STARTS)

    def layer(self) -> nn.RNNBase:
        """Build one recurrent layer, without values."""
        raise NotImplementedError

    def block(self) -> RecurrentBlock:
        """Build a block with one layer."""
        return RecurrentBlock(self)

    def final_norm(self) -> LayerNorm | None:
        """Build the norm before the head; a plain stack has none."""
        return LayerNorm(self.d_model) if self.residual else None


@dataclass(frozen=True, kw_only=True)
class LSTMConfig(RecurrentConfig):
    """A stack of LSTM layers."""

    architecture: ClassVar[str] = "lstm"

    def layer(self) -> nn.LSTM:
        """Build one LSTM layer, without values."""
        return nn.LSTM(self.d_model, self.d_model, batch_first=True)


@dataclass(frozen=True, kw_only=True)
class GRUConfig(RecurrentConfig):
    """A stack of GRU layers."""

    architecture: ClassVar[str] = "gru"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.forget_bias:
            raise self.refuse("forget_bias", "is for an LSTM: a GRU has no forget gate")

    def layer(self) -> nn.GRU:
        """Build one GRU layer, without values."""
        return nn.GRU(self.d_model, self.d_model, batch_first=True)


class RecurrentBlock(nn.Module):
    """One recurrent layer: (B, T, d_model) to the same; position t sees 0 to t."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = LayerNorm(config.d_model) if config.residual else None
        self.layer = config.layer()

    def initialise(self, generator: Generator) -> None:
        """Draw the weights as `start` says; biases start uniform, as torch has them."""
        width = self.config.d_model
        for name, parameter in self.layer.named_parameters():
            if name.startswith("weight_hh") and self.config.start == "orthogonal":
                for gate in parameter.split(width):
                    nn.init.orthogonal_(gate, generator=generator)
            else:
                initial.uniform_(parameter, 1 / math.sqrt(width), generator)
        if self.config.forget_bias:
            self.layer.get_parameter("bias_ih_l0")[width : 2 * width] += self.config.forget_bias

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run all positions by torch's kernel."""
        if self.norm is None:
            return self.layer(x)[0]
        return x + self.layer(self.norm(x))[0]
