"""Pretrained models as what is trained: symbols go in as single tokens, classes come out of a new head."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError, RequestError, UnknownNameError
from ..batch import Batch
from ..batch_check import row_distance
from ..loaded_model import LoadedModel, ModelSource
from ..loading import load_model, read_model
from ..models.mamba import MambaMixer
from ..own_model import is_own
from ..reference import first_tensor
from ..settings import libraries, loadable
from ..symbol_ids import symbol_ids
from ..task_model import TaskModel, load_task_model, read_task, save_task_model
from .mamba_scan import fast_mamba_scan
from .recipe import Recipe
from .task_data import TaskData

_IDENTITY = ("kind", "revision", "config", "tokenizer", "dtype", "attention", "found")
_HEAD_STD = 0.02
_SEEN_AHEAD = 1e-4


class SymbolModel(nn.Module):
    """A `TaskModel` that takes a task's symbols, by their numbers, in place of tokens. Nothing is put before them."""

    def __init__(self, model: TaskModel, ids: tuple[int, ...], tokenizer: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.register_buffer("ids", torch.tensor(ids), persistent=False)
        takes = inspect.signature(model.base.forward).parameters
        self._options = {"use_cache": False} if "use_cache" in takes else {}

    def forward(self, symbols: Tensor, positions: Tensor | None = None) -> Tensor:
        """Give the logits, (B, T, classes), of symbols, (B, T) int64, at `positions`, (B, T), default 0, 1, ..."""
        options = self._options if positions is None else self._options | {"position_ids": positions}
        is_mamba = self.model.config.model_type == "mamba"
        with fast_mamba_scan() if is_mamba else contextlib.nullcontext():
            return self.model(self.get_buffer("ids")[symbols], **options)


@dataclass(frozen=True)
class PretrainedModel:
    """A model of a folder or a hub, in float32, with a new linear head for the classes of a task."""

    model: str
    """The full path of a folder, or a hub name."""
    pretrained: Mapping[str, Any]
    """What tells this model from any other: kind, revision, hashes of its weights, configuration and tokenizer, ..."""
    symbol_ids: tuple[int, ...]
    """The token that stands for each of the task's symbols."""
    outputs: int
    width: int
    """How long the vectors are that the head reads."""
    max_length: int | None
    freeze: bool = False
    """Whether the head alone is trained."""

    @classmethod
    def of(
        cls, model: str, options: Mapping[str, Any], data: TaskData, *, revision: str | None = None
    ) -> PretrainedModel:
        """Load a model, and find the tokens of a task's symbols; the only one of the `options` is freeze.

        `RequestError` for a model that cannot be fine-tuned: one without a fast tokenizer, one that has a symbol in
        several tokens, one whose positions see what follows them.
        """
        for name in options:
            if name != "freeze":
                raise UnknownNameError.of("option", name, ("freeze",), " of a pretrained model")
        freeze = options.get("freeze", False)
        if not isinstance(freeze, bool):
            raise RequestError(f"The option freeze is true or false, not {freeze!r}.")
        source = ModelSource(**loadable(ModelSource(model, revision, "float32")))
        if source.is_function or is_own(source):
            raise RequestError(
                f"{model} is no pretrained model in Hugging Face form. Name a folder or a hub model in that form, or "
                "an architecture in place of --from."
            )
        loaded = load_model(source)
        if loaded.identity["tokenizer"] is None:
            raise RequestError(f"{model} has no fast tokenizer, so no tokens stand for the symbols of a task.")
        ids = symbol_ids(loaded.tokenizer, data.task.symbols)
        if loaded.vocab_size is not None and max(ids) >= loaded.vocab_size:
            raise RequestError(f"{model} has a tokenizer with more tokens than the model: token {max(ids)} is none.")
        return cls(
            source.name,
            _identity(loaded),
            ids,
            len(data.classes),
            _width(loaded, ids),
            loaded.max_length,
            freeze,
        )

    @property
    def name(self) -> str:
        return ModelSource(self.model).title

    def longest_trained(self, recipe: Recipe) -> int | None:
        return self.max_length  # its positions were trained before

    @property
    def compute(self) -> dict[str, str | None]:
        return libraries(self.pretrained["kind"])

    def check(self, data: TaskData) -> None:
        for found, known, what in (
            (len(self.symbol_ids), data.task.symbols, "symbols"),
            (self.outputs, data.classes, "classes"),
        ):
            if found != len(known):
                raise RequestError(
                    f"The model was made for {found} {what}, and the task {data.task.spec!r} has {len(known)} (target "
                    f"{data.target!r}). Make it for this task."
                )

    def build(self, seed: int) -> nn.Module:
        loaded = read_model(ModelSource(self.model, self.pretrained["revision"], "float32"))
        if (found := _identity(loaded)) != self.pretrained:
            other = ", ".join(k for k in found if found[k] != self.pretrained.get(k))
            raise ModelError(f"{self.model} is another model than this training was begun with: it has other {other}.")
        base = loaded.module.get_submodule(loaded.prefix)
        model = TaskModel(base, self.width, self.outputs)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(model.head.weight, std=_HEAD_STD, generator=generator)
        nn.init.zeros_(model.head.bias)
        base.requires_grad_(not self.freeze)
        for module in base.modules():
            # The rows of tokens that no string has would do nothing but decay.
            table = isinstance(module, nn.Embedding)
            names = [n for n, _ in module.named_parameters(recurse=False) if table or n in MambaMixer.no_weight_decay]
            module.no_weight_decay = tuple(names)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        return SymbolModel(model, self.symbol_ids, loaded.tokenizer)

    def save(self, folder: Path, model: nn.Module, about: Mapping[str, Any]) -> None:
        assert isinstance(model, SymbolModel)
        save_task_model(folder, model.model, model.tokenizer, {"about": dict(about), **self._said()})

    def load(self, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
        loaded = load_task_model(ModelSource(str(folder)))
        task = read_task(folder)
        if task is None or any(task.get(k) != v for k, v in self._said().items()):
            raise ModelError(f"The model in {folder} was made from another one. Train into another folder.")
        assert isinstance(loaded.module, TaskModel)
        return SymbolModel(loaded.module, self.symbol_ids, loaded.tokenizer), task["about"]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"symbol_ids": list(self.symbol_ids), "pretrained": dict(self.pretrained)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> PretrainedModel:
        """Read what `to_json` gave."""
        return cls(**{**found, "symbol_ids": tuple(found["symbol_ids"])})

    def _said(self) -> dict[str, Any]:
        """Give what a trained folder says of the model that it was made from."""
        return {"symbol_ids": list(self.symbol_ids), "from": {"name": self.name, **self.pretrained}}


def _identity(loaded: LoadedModel) -> dict[str, Any]:
    found = {k: loaded.identity[k] for k in _IDENTITY if k in loaded.identity}
    return found | {"weights": loaded.identity["fingerprint"]}


def _width(loaded: LoadedModel, ids: tuple[int, ...]) -> int:
    """Give the width of what comes after the final norm; `RequestError` where a position sees what follows it."""
    strings = [np.array([ids[0], ids[-1], ids[0], last]) for last in (ids[0], ids[-1])]
    hidden = first_tensor(loaded.run(Batch.of(strings, "none"), [])[1])
    if row_distance(hidden[0, :-1], hidden[1, :-1]) > _SEEN_AHEAD:
        raise RequestError(
            f"{loaded.source.name} is not causal: what follows a position changes what is computed there, and it could "
            "read the answer. Take a causal language model."
        )
    return hidden.shape[-1]
