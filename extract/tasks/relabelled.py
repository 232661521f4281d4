"""The same inputs, another target: the strings of one task with the labels of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import RequestError
from .task import Task


@dataclass(frozen=True, kw_only=True)
class Relabelled(Task):
    """Strings of `strings`, labelled by `labels`: symbol i of the one is read as symbol i modulo the other's number.

    Sides and lengths are those of the strings, so that a model of the one task and a model of this see the same.
    """

    name: ClassVar[str] = ""

    strings: Task
    labels: Task

    def __post_init__(self) -> None:
        if isinstance(self.strings, Relabelled) or isinstance(self.labels, Relabelled):
            raise RequestError("A task takes the labels of one other task, not of a task that is relabelled itself.")
        if not self.labels.pure:
            raise RequestError(f"Labels of {self.labels.name} follow from more than a string: no other task has them.")

    @property
    def spec(self) -> str:
        """The spec of the strings, with ``labels=`` and that of the labels, in which ``&`` is written ``;``."""
        first = self.strings.spec
        return f"{first}{'&' if '?' in first else '?'}labels={self.labels.spec.replace('&', ';')}"

    @property
    def symbols(self) -> tuple[str, ...]:
        """The alphabet of the strings."""
        return self.strings.symbols

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets of the labels."""
        return self.labels.targets

    def classes(self, target: str) -> tuple[Any, ...]:
        """Give the classes of the labels."""
        return self.labels.classes(target)

    def label(self, strings: np.ndarray, target: str) -> np.ndarray:
        """Label the strings as the other task would."""
        return self.labels.label(strings % len(self.labels.symbols), target)

    def draw(self, n: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Draw strings as the first task does."""
        return self.strings.draw(n, length, generator)

    def sample(self, n: int, length: int, generator: np.random.Generator, split: str = "train") -> np.ndarray:
        """Draw strings of one of the sides that the first task has."""
        return self.strings.sample(n, length, generator, split)

    def check_length(self, length: int) -> None:
        """Refuse the lengths that the strings do not have."""
        self.strings.check_length(length)
