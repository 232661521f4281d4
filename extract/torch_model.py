"""What a user's function returns to have a model of their own extracted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ModelError, RequestError, UnknownNameError
from .batch import Batch
from .derived import gates_output, lstm_cell, lstm_output, rnn_gates
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
    - `sites` names more places: a site of the vocabulary, or a name of your own, to a module path, with ``{}`` for the
      layer: ``{"mlp_out": "blocks.{}.mlp", "keys": "blocks.{}.attn.key"}``. What a module returns is the value; for
      what enters it, write the path with ``:in``. Layers that lack the module lack the site.
    - `padding` lists the sides ("right", "left") on which padding leaves real tokens unchanged. Left empty, only
      sequences of equal length share a batch, which is right for every model.
    - `vocab_size` bounds the ids; default: the rows of the embedding table. `max_length` bounds a sequence.
    - `tokenizer` is a Hugging Face fast tokenizer, for data that is text.
    """

    module: torch.nn.Module
    call: Call | None = None
    embed: str | None = None
    blocks: tuple[str, ...] | None = None
    sites: Mapping[str, str] = field(default_factory=dict)
    padding: tuple[str, ...] = ()
    vocab_size: int | None = None
    max_length: int | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if other := [side for side in self.padding if side not in ("right", "left")]:
            raise RequestError(f"`padding` of a TorchModel lists {other[0]!r}; the sides are 'right' and 'left'.")
        self.module = take_apart(self.module)

    def points(self) -> list[SitePoint]:
        """Find `embed`, `resid_post` and the declared sites; an error says what to declare when that is not clear.

        Recurrent layers of torch's own, in one direction, have `hidden`, `gates` and (LSTM) `cell` too.
        """
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
        if twice := [b for i, b in enumerate(blocks) if b in blocks[:i]]:
            raise ModelError(f"`blocks` names {twice[0]!r} twice: a layer is what one module returns. Name each once.")
        for path in (embed, *blocks):
            if path not in names:
                raise UnknownNameError.of("module", path, [n for n in names if n], " in the model")
        points = [SitePoint("embed", None, embed)]
        points += [p for site, path in self.sites.items() if "{}" not in path for p in _named(site, None, path, names)]
        for layer, block in enumerate(blocks):
            for site, path in self.sites.items():
                if "{}" in path:
                    points += _named(site, layer, path.format(layer), names)
            points += _recurrent(once.get(block), layer, block)
            points.append(SitePoint("resid_post", layer, block))
        for site, path in self.sites.items():
            if not any(p.site == site for p in points):
                raise UnknownNameError.of("module", path, [n for n in names if n], f" in the model, for site {site!r}")
        return points

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


def _named(site: str, layer: int | None, path: str, modules: Mapping[str, torch.nn.Module]) -> list[SitePoint]:
    if site in ("embed", "resid_post"):
        raise RequestError(f"`sites` names {site!r}, which `embed` and `blocks` say already. Leave it out there.")
    module = path.removesuffix(":in")
    if module not in modules:
        return []
    return [SitePoint(site, layer, module, side="input" if path.endswith(":in") else "output")]


def _recurrent(block: torch.nn.Module | None, layer: int, path: str) -> list[SitePoint]:
    """Give the sites inside a recurrent layer whose steps can be followed: torch's own, one direction, unprojected."""
    if type(block) not in (torch.nn.LSTM, torch.nn.GRU) or not isinstance(block, torch.nn.RNNBase):
        return []
    if block.bidirectional or block.num_layers > 1 or block.proj_size or block._forward_hooks:
        return []
    points = [SitePoint("gates", layer, path, derive=rnn_gates, gives_back=gates_output)]
    if block.mode == "LSTM":
        points.append(SitePoint("cell", layer, path, derive=lstm_cell, gives_back=lstm_output))
    return [*points, SitePoint("hidden", layer, path)]
