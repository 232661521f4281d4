"""The training loop: one model, one task, one recipe and one seed, which together decide every bit of the weights."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import RequestError, TrainingError
from .evaluation import accuracy
from .optimizer import Optimizer
from .recipe import Recipe
from .task_data import TaskData

ACCURACY, STEPS = "accuracy", "steps"
"""Why a training ended: it reached the recipe's `stop_at`, or all of its steps were done."""


@dataclass
class TrainerState:
    """What a training knows beside its weights and moments, as plain data."""

    step: int = 0
    """Steps that are done."""
    length: int = 0
    """The length of training strings, where an accuracy decides it."""
    stopped: str | None = None
    loss: float | None = None
    """The loss of the last step, in nats a position."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Every look at the validation strings: step, length, accuracy (token, last, string), loss and CPU time so far."""
    cpu_seconds: float = 0.0


class Trainer:
    """Trains a model that gives logits, (B, T, classes), of ids, (B, T), and of ``positions=`` where those are random.

    The model is trained in place. `max_length` is how many positions it has, None where there is no such end.

        trainer = Trainer(model, TaskData(task), recipe, seed=0, max_length=model.config.max_length)
        trainer.run()
        trainer.state.history[-1]["token"]
    """

    def __init__(
        self, model: nn.Module, data: TaskData, recipe: Recipe, *, seed: int, max_length: int | None = None
    ) -> None:
        if seed < 0:
            raise RequestError(f"A seed is a whole number from 0 on, not {seed}.")
        check_positions(recipe, max_length)
        self.model = model.train()
        self.data = data
        self.recipe = recipe
        self.seed = seed
        self.max_length = max_length
        self.optimizer = Optimizer(model, recipe)
        self.state = TrainerState(length=recipe.lengths[0])
        self._validation: tuple[int, tuple[Tensor, Tensor]] | None = None

    def run(self, after_step: Callable[[], None] | None = None) -> TrainerState:
        """Train to the end from where the state is, calling `after_step` after each step and look.

        `TrainingError` at the first step whose loss or gradient is no finite number, before it changes a weight.
        """
        state, recipe = self.state, self.recipe
        with deterministic():
            while state.stopped is None:
                started = time.process_time()
                self._step()
                if state.step % recipe.evaluate_every == 0 or state.step == recipe.steps:
                    self._look()
                state.cpu_seconds += time.process_time() - started
                if after_step is not None:
                    after_step()
        return state

    @property
    def length(self) -> int:
        """The length of the strings of the next step."""
        planned = self.recipe.planned_length(self.state.step)
        return self.state.length if planned is None else planned

    def tensors(self) -> dict[str, Tensor]:
        """Give the weights (``model.NAME``) and what AdamW keeps (``optimizer.NAME.KEY``)."""
        weights = {f"model.{n}": t.detach() for n, t in self.model.state_dict().items()}
        return weights | {f"optimizer.{n}": t for n, t in self.optimizer.state().items()}

    def restore(self, tensors: Mapping[str, Tensor], state: TrainerState) -> None:
        """Go back to what `tensors` and `state` were: what follows is what followed then, bit for bit."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self.model.load_state_dict(parts["model"])
        self.optimizer.restore(parts["optimizer"])
        self.state = state

    def _step(self) -> None:
        state, recipe = self.state, self.recipe
        ids, labels = self.data.train(self.seed, state.step, recipe.batch_size, self.length)
        if recipe.random_offset and self.max_length is not None:
            highest = self.max_length - ids.shape[1]
            offsets = self.data.offsets(self.seed, state.step, recipe.batch_size, highest)
            logits = self.model(ids, positions=offsets + torch.arange(ids.shape[1]))
        else:
            logits = self.model(ids)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        value = float(loss.detach())
        if not math.isfinite(value):
            raise self._diverged("loss", value)
        loss.backward()
        norm = self.optimizer.step(state.step)
        if not math.isfinite(norm):
            raise self._diverged("gradient's norm", norm)
        state.step += 1
        state.loss = round(value, 6)

    def _look(self) -> None:
        """Measure the validation accuracy at the present length, and draw the conclusions: stop, or grow."""
        state, recipe = self.state, self.recipe
        trained = recipe.planned_length(state.step - 1) or state.length
        if self._validation is None or self._validation[0] != trained:
            self._validation = (trained, self.data.validation(recipe.validation_strings, trained))
        found = accuracy(self.model, *self._validation[1])
        seen = {"step": state.step, "length": trained, "loss": state.loss, "cpu_seconds": round(state.cpu_seconds, 1)}
        state.history.append(seen | vars(found))
        if recipe.stop_at is not None and trained == recipe.length and found.token >= recipe.stop_at:
            state.stopped = ACCURACY
        elif state.step == recipe.steps:
            state.stopped = STEPS
        wanted = recipe.curriculum.accuracy if recipe.curriculum else None
        if wanted is not None and found.token >= wanted:
            state.length = next((n for n in recipe.lengths if n > trained), recipe.length)

    def _diverged(self, what: str, value: float) -> TrainingError:
        return TrainingError(
            f"The {what} is {value} at step {self.state.step + 1} of seed {self.seed}, which changed nothing. "
            "Train with a lower lr, a longer warmup or a smaller clip, in another folder."
        )


def check_positions(recipe: Recipe, max_length: int | None) -> None:
    """Raise `RequestError` where a recipe needs positions that a model with `max_length` of them does not have."""
    if max_length is not None and recipe.length > max_length:
        raise RequestError(f"The model has {max_length} positions: strings of {recipe.length} cannot be trained.")
    if recipe.random_offset and max_length is None:
        raise RequestError("random_offset is for models with a table of positions, which this one has not.")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Have torch refuse operations whose result may be another one each time, for a while."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
