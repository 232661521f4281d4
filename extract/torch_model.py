"""What a user's function returns to have a model of their own extracted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ModelError, UnknownNameError
from .batch import Batch
from .hooks import SitePoint
from .rnn import take_apart

Call = Callable[[torch.nn.Module, Batch], Any]


@dataclass
class TorchModel:
    """Any torch module, and how to call it.

    A function that returns a bare module is enough when the module takes `input_ids`, (batch, time) int64, has one
    `nn.Embedding`, and its blocks are its recurrent layers. Otherwise return a `TorchModel`:

    - `call(module, batch)` runs a forward; default `module(batch.input_ids)`.
    - `embed` and `blocks` are module paths; layer i is the output of `blocks[i]`, (batch, time, ...) or
      (time, batch, ...): which of the two is found out by a trial forward, not assumed. Blocks stand in the order
      in which they run.
    - `padding` lists the sides ("right", "left") on which padding leaves real tokens unchanged. Left empty, only
      sequences of equal length share a batch, which is right for every model.
    - `vocab_size` bounds the ids; default: the rows of the embedding table. `max_length` bounds a sequence.
    - `tokenizer` is a Hugging Face fast tokenizer, for data that is text.
    """

    module: torch.nn.Module
    call: Call | None = None
    embed: str | None = None
    blocks: tuple[str, ...] | None = None
    padding: tuple[str, ...] = ()
    vocab_size: int | None = None
    max_length: int | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        self.module = take_apart(self.module)

    def points(self) -> list[SitePoint]:
        """Find the sites `embed` and `resid_post`; an error says what to declare when that is not clear."""
        names = dict(self.module.named_modules(remove_duplicate=False))
        once = dict(self.module.named_modules())
        embed = self.embed
        if embed is None:
            tables = [n for n, m in once.items() if isinstance(m, torch.nn.Embedding)]
            if len(tables) != 1:
                raise ModelError(
                    f"The model has {len(tables)} embedding tables, so `embed` is not clear. "
                    "Return a TorchModel with embed='path.of.module'."
                )
            embed = tables[0]
        blocks = self.blocks
        if blocks is None:
            blocks = tuple(n for n, m in once.items() if isinstance(m, torch.nn.RNNBase))
            if not blocks:
                raise ModelError(
                    "The model has no recurrent layers, so its blocks are not clear. "
                    "Return a TorchModel with blocks=('path.of.block.0', ...)."
                )
            for name in blocks:
                stacked = once[name]
                if isinstance(stacked, torch.nn.RNNBase) and stacked.num_layers > 1:
                    raise ModelError(
                        f"{name!r} is a stack of {stacked.num_layers} recurrent layers that cannot be taken apart "
                        "(a subclass, or one with hooks or reparametrized weights), so only its last layer can be "
                        f"read. Return a TorchModel with blocks=({name!r},) if that is meant."
                    )
        for path in (embed, *blocks):
            if path not in names:
                raise UnknownNameError.of("module", path, [n for n in names if n], " in the model")
        return [
            SitePoint("embed", None, embed),
            *(SitePoint("resid_post", i, b) for i, b in enumerate(blocks)),
        ]

    def table_size(self) -> int | None:
        """Give the number of ids the model knows, where that can be told."""
        if self.vocab_size is not None:
            return self.vocab_size
        modules = dict(self.module.named_modules(remove_duplicate=False))
        tables = [m for m in self.module.modules() if isinstance(m, torch.nn.Embedding)]
        named = modules.get(self.embed or "")
        if isinstance(named, torch.nn.Embedding):
            tables = [named]
        return tables[0].num_embeddings if len(tables) == 1 else None

    def forward(self, batch: Batch) -> Any:
        """Run one forward."""
        return self.call(self.module, batch) if self.call else self.module(batch.input_ids)
