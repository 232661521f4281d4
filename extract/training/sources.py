"""Where a model that is trained comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ...errors import RequestError
from ..models import ModelConfig, SequenceModel, load_checkpoint, make_config, save_checkpoint
from .recipe import Recipe
from .task_data import TaskData

_FROM_TASK = {"vocab_size": "symbols", "outputs": "classes"}


class TrainedModelSource(Protocol):
    """What gives a model to train: logits, (B, T, classes), of symbols, (B, T), and its way into a folder and back."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def max_length(self) -> int | None:
        """The longest string that the model has positions for; None where there is no such end."""
        ...

    def longest_trained(self, recipe: Recipe) -> int | None:
        """Give the longest string whose positions a training by `recipe` reaches; None where there is no such end."""
        ...

    @property
    def compute(self) -> Mapping[str, str | None]:
        """What moves the last bits of a training step, beside torch: versions of the libraries that compute it."""
        ...

    def check(self, data: TaskData) -> None:
        """Raise `RequestError` unless the model has the symbols and classes of a task."""
        ...

    def build(self, seed: int) -> nn.Module:
        """Make the model as it is before the first step; what is random in it follows from the seed."""
        ...

    def save(self, folder: Path, model: nn.Module, about: Mapping[str, Any]) -> None:
        """Write a trained model into a folder, as a MODEL of the other commands."""
        ...

    def load(self, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
        """Read back what `save` wrote."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Give what says which model it is, as plain data, for `source_from_json`."""
        ...


@dataclass(frozen=True)
class NewModel:
    """A `SequenceModel` of a configuration, with random weights."""

    config: ModelConfig

    @classmethod
    def of(cls, architecture: str, options: Mapping[str, Any], data: TaskData) -> NewModel:
        """Configure an architecture for a task: as many symbols and outputs as the task has."""
        for name, what in _FROM_TASK.items():
            if name in options:
                raise RequestError(f"The option {name} follows from the task, which has its {what}: leave it out.")
        sizes = {"vocab_size": len(data.task.symbols), "outputs": len(data.classes)}
        return cls(make_config(architecture, **sizes, **options))

    @property
    def name(self) -> str:
        return self.config.architecture

    @property
    def max_length(self) -> int | None:
        return self.config.max_length

    def longest_trained(self, recipe: Recipe) -> int | None:
        # rows of a table of positions that no training string reached are as random as they were at the start
        return self.max_length if self.max_length is None or recipe.random_offset else recipe.length

    @property
    def compute(self) -> dict[str, str | None]:
        return {}

    def check(self, data: TaskData) -> None:
        for (option, what), known in zip(_FROM_TASK.items(), (data.task.symbols, data.classes), strict=True):
            if (found := getattr(self.config, option)) != len(known):
                raise RequestError(
                    f"The model has {option} {found}, and the task {data.task.spec!r} has {len(known)} {what} (target "
                    f"{data.target!r}). Take the model's own task, or a new model."
                )

    def build(self, seed: int) -> nn.Module:
        return SequenceModel(self.config, generator=torch.Generator().manual_seed(seed))

    def save(self, folder: Path, model: nn.Module, about: Mapping[str, Any]) -> None:
        assert isinstance(model, SequenceModel)
        save_checkpoint(folder, model, dict(about))

    def load(self, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
        return load_checkpoint(folder)

    def to_json(self) -> dict[str, Any]:
        return self.config.to_json()


def source_from_json(found: Mapping[str, Any]) -> TrainedModelSource:
    """Read what a source's `to_json` gave."""
    if "pretrained" in found:
        from .pretrained import PretrainedModel  # it loads models of all kinds, which a new one does not need

        return PretrainedModel.from_json(found)
    return NewModel(make_config(**found))


def parameter_count(model: nn.Module) -> int:
    """Count the parameters of a model, shared ones once."""
    return sum(p.numel() for p in model.parameters())
