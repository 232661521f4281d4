"""What a task is: strings over an alphabet, and labels at every position of a string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np

from ...errors import RequestError, UnknownNameError
from .sides import draw_on_side


@dataclass(frozen=True, kw_only=True)
class Task:
    """Strings drawn from a generator that is given, with a label at every position.

    A task is a frozen dataclass whose fields are its options. What is drawn is int64 (n, length), each an index into
    `symbols`; labels are int64 of the same shape, each an index into the classes of a target.
    """

    name: ClassVar[str] = ""
    pure: ClassVar[bool] = True
    """Whether labels follow from the string alone."""

    @property
    def spec(self) -> str:
        """The task as text, options that are not the default written out: `parse_task` reads it."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        options = [f"{name}={quote(str(value), safe='/:,+@ ')}" for name, value in given.items()]
        return self.name + ("?" + "&".join(options) if options else "")

    @property
    def symbols(self) -> tuple[str, ...]:
        """The alphabet."""
        raise NotImplementedError

    @property
    def targets(self) -> tuple[str, ...]:
        """What can be asked of every position; the first is meant where nothing is said."""
        raise NotImplementedError

    def classes(self, target: str) -> tuple[Any, ...]:
        """Give the values that a target's labels can have, in the order of their classes."""
        raise NotImplementedError

    def label(self, strings: np.ndarray, target: str) -> np.ndarray:
        """Give the class of every position, (n, length): a function of the strings alone, for any strings at all."""
        raise NotImplementedError

    def draw(self, n: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Draw `n` strings of a length from the task's distribution, whatever side they are on."""
        raise NotImplementedError

    def check_length(self, length: int) -> None:
        """Raise `RequestError` for a length that the task has no strings of."""

    def sample(self, n: int, length: int, generator: np.random.Generator, split: str = "train") -> np.ndarray:
        """Draw `n` strings of one side: ``train`` (8 of 10), ``validation`` or ``test``; no string is on two sides.

        The same state of the generator gives the same strings. A string may be drawn more than once.
        """
        if n < 0 or length < 1:
            raise RequestError(f"{n} strings of length {length} cannot be drawn: both are whole numbers, from 1 on.")
        self.check_length(length)
        what = f"the strings of length {length} of the task {self.spec!r}"
        return draw_on_side(lambda k: self.draw(k, length, generator), n, split, what)

    def sample_labelled(
        self, n: int, length: int, generator: np.random.Generator, split: str, targets: Sequence[str]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Draw strings with the classes of some targets: the one way for tasks whose labels need more than a string."""
        strings = self.sample(n, length, generator, split)
        return strings, {t: self.label(strings, t) for t in targets}

    def known(self, target: str) -> str:
        """Give the target back; `UnknownNameError` for one that the task has not."""
        if target not in self.targets:
            raise UnknownNameError.of("target", target, self.targets, f" of the task {self.spec!r}")
        return target
