"""The one backbone of all architectures: an embedding, blocks that add to a residual stream, a norm and a head."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn

from . import initial
from .config import ModelConfig
from .positions import sinusoidal


class Block(nn.Module):
    """x = x + mixer(norm(x)), and where there is an MLP also x = x + mlp(mlp_norm(x))."""

    def __init__(
        self, norm: nn.Module, mixer: nn.Module, mlp_norm: nn.Module | None = None, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run (B, T, d_model) through the block."""
        x = x + self.mixer(self.norm(x), positions)
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x


class Backbone(nn.Module):
    """From ids to the residual stream after the last norm, or as the last block leaves it where there is no norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        longest = config.max_length
        self.position_table = None if longest is None else nn.Embedding(longest, config.d_model)
        self.layers = nn.ModuleList(config.block() for _ in range(config.layers))
        self.norm = config.final_norm()

    def embed(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Give what enters the first block: rows of the table, with the code of their positions."""
        x = self.embedding(input_ids)
        at = torch.arange(input_ids.shape[1], device=x.device) if positions is None else positions
        if self.position_table is not None:
            return x + self.position_table(at)
        if self.config.positions == "sinusoidal":
            return x + sinusoidal(at, x.shape[-1]).to(x.dtype)
        return x

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run ids, (B, T) int64, with positions 0, 1, ... or as given, (B, T); returns (B, T, d_model)."""
        x = self.embed(input_ids, positions)
        for block in self.layers:
            x = block(x, positions)
        return x if self.norm is None else self.norm(x)

    def get_input_embeddings(self) -> nn.Embedding:
        """Give the table of token embeddings."""
        return self.embedding


class SequenceModel(nn.Module):
    """A model that gives the classes of every position of a sequence, from what came before it and itself.

    All values at the start are drawn from `generator`; without one the model is left without values, to load them.
    """

    def __init__(self, config: ModelConfig, generator: Generator | None = None) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):  # torch's own constructors would draw from the global generator
            self.backbone = Backbone(config)
            self.head = nn.Linear(config.d_model, config.outputs)
        self.to_empty(device="cpu")
        if generator is not None:
            self._initialise(generator)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Give the logits, (B, T, outputs), of ids, (B, T) int64; `positions`, (B, T), default to 0, 1, ..."""
        return self.head(self.backbone(input_ids, positions))

    def get_output_embeddings(self) -> nn.Linear:
        """Give the head."""
        return self.head

    @property
    def parameter_count(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def _initialise(self, generator: Generator) -> None:
        for parameter in self.parameters():
            parameter.fill_(math.nan)
        config = self.config
        initial.normal_(self.backbone.embedding.weight, config.embedding_std, generator)
        if self.backbone.position_table is not None:
            initial.normal_(self.backbone.position_table.weight, getattr(config, "position_std", 0.02), generator)
        for module in self.modules():
            start = getattr(module, "initialise", None)
            if start is not None:
                start(generator)
        initial.linear_(self.head, generator)
        left = [name for name, p in self.named_parameters() if p.isnan().any()]
        assert not left, f"no values were drawn for {left}"
