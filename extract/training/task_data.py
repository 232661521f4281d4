"""The strings of a task as a training sees them: a batch is decided by the seed and the step, and by nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...errors import RequestError
from ..tasks import Task

_TRAIN, _OFFSETS, _LOOK, _VALIDATION, _TEST = range(5)
_LOOKED_AT = 256


class TaskData:
    """Batches of a task's strings with the classes of one of its targets.

    Each draw has a generator of its own, made from what the draw is for: `numpy.random.default_rng([seed, step,
    purpose])`. So there is no state of a generator that a resumed training would have to find again. Validation and
    test strings are the same for all seeds and architectures.
    """

    def __init__(self, task: Task, target: str | None = None) -> None:
        self.task = task
        self.target = task.known(task.targets[0] if target is None else target)
        self.classes = tuple(task.classes(self.target))

    def train(self, seed: int, step: int, strings: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw the strings of a training step: ids and classes, each (strings, length) int64."""
        return self._draw([seed, step, _TRAIN], strings, length, "train")

    def offsets(self, seed: int, step: int, strings: int, highest: int) -> Tensor:
        """Draw where each string of a step begins: (strings, 1) int64, from 0 to `highest`."""
        drawn = np.random.default_rng([seed, step, _OFFSETS]).integers(0, highest, (strings, 1), endpoint=True)
        return torch.from_numpy(drawn)

    def validation(self, strings: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw the validation strings of a length: ids and classes, each (strings, length) int64."""
        return self._draw([0, length, _VALIDATION], strings, length, "validation")

    def test(self, strings: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw the test strings of a length: ids and classes, each (strings, length) int64."""
        return self._draw([0, length, _TEST], strings, length, "test")

    def majority(self, length: int) -> int:
        """Give the most frequent class of training strings of a length.

        `RequestError` when they have one class only: a model that learned nothing would be right everywhere.
        """
        _, labels = self._draw([0, length, _LOOK], _LOOKED_AT, length, "train")
        counts = torch.bincount(labels.flatten(), minlength=len(self.classes))
        if int((counts > 0).sum()) < 2:
            only = self.classes[int(counts.argmax())]
            raise RequestError(
                f"There is nothing to learn: in {_LOOKED_AT} training strings of {self.task.spec!r}, length {length}, "
                f"every label of the target {self.target!r} is {only!r}. Take another task, target or length."
            )
        return int(counts.argmax())

    def check_lengths(self, train: Sequence[int], test: Sequence[int]) -> None:
        """Raise what the task itself says of a length that it has no strings of, before any work."""
        for length in train:
            self.train(0, 0, 1, length)
            self.validation(1, length)
        for length in test:
            self.test(1, length)

    def _draw(self, words: list[int], strings: int, length: int, split: str) -> tuple[Tensor, Tensor]:
        ids, labels = self.task.sample_labelled(strings, length, np.random.default_rng(words), split, [self.target])
        return torch.from_numpy(ids), torch.from_numpy(labels[self.target])
