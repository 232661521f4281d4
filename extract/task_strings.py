"""Strings of a task as data: what ``task:`` and its options mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import RequestError, UnknownNameError
from .document import Document, SymbolString
from .tasks.parse import parse_task_with
from .tasks.sides import SHARES, SIDES
from .tasks.task import Task

TASK_PREFIX = "task:"
_OPTIONS = {"n": "int", "length": "int", "seed": "int", "split": "str"}


@dataclass(frozen=True, kw_only=True)
class TaskStrings:
    """Strings of a task, each a document with a label at every position of every target.

        task:dyck?k=2&length=80&n=2000&seed=7             1,600 train, 200 validation and 200 test strings
        task:dyck?k=2&length=80&n=500&seed=7&split=test   500 test strings
        task:parity?labels=dyck?k=1;max_depth=5           the strings of the first, the labels of the second

    Without `split` a tenth of the strings, rounded down, is of the side validation, as many are of the side test, and
    all others of the side train. A document is called ``dyck/test:3``, counted from 1 on each side; its `split` is the
    side that the task itself gives the string. Strings of a side are drawn from NumPy's
    ``default_rng([seed, number of the side])``. Labels are the values of the classes.
    """

    task: Task
    n: int = 1000
    length: int = 40
    seed: int = 0
    split: str | None = None

    def __post_init__(self) -> None:
        if self.n < 1 or self.length < 1:
            raise RequestError(f"{self.n} strings of length {self.length} are no data: ask for at least one of each.")
        if self.seed < 0:
            raise RequestError(f"The seed of a task's strings is a whole number from 0 on, not {self.seed}.")
        if self.split is not None and self.split not in SIDES:
            raise UnknownNameError.of("side", self.split, SIDES)
        self.task.check_length(self.length)

    @classmethod
    def parse(cls, spec: str) -> TaskStrings:
        """Read ``task:`` data; what is no task or no option is refused by name."""
        task, options = parse_task_with(spec.removeprefix(TASK_PREFIX), _OPTIONS)
        return cls(task=task, **options)

    @property
    def title(self) -> str:
        """The data as text, with all that decides the strings written out: `parse` reads it."""
        spec = self.task.spec
        options = {name: getattr(self, name) for name in _OPTIONS if getattr(self, name) is not None}
        written = "&".join(f"{name}={value}" for name, value in options.items())
        return f"{TASK_PREFIX}{spec}{'&' if '?' in spec else '?'}{written}"

    @property
    def counts(self) -> dict[str, int]:
        """How many strings of each side there are."""
        if self.split is not None:
            return {self.split: self.n}
        held_out = {side: self.n * share // sum(SHARES) for side, share in zip(SIDES[1:], SHARES[1:], strict=True)}
        return {SIDES[0]: self.n - sum(held_out.values())} | held_out

    def documents(self, targets: Sequence[str] = ()) -> list[Document]:
        """Draw the strings, with the labels of some targets (default: all), which are columns of those names."""
        chosen = [self.task.known(target) for target in targets] or list(self.task.targets)
        return [d for side, n in self.counts.items() for d in self._of_side(side, n, chosen)]

    def _of_side(self, side: str, n: int, targets: Sequence[str]) -> Iterator[Document]:
        generator = np.random.default_rng([self.seed, SIDES.index(side)])
        strings, labels = self.task.sample_labelled(n, self.length, generator, side, targets)
        alphabet, name = self.task.symbols, self.task.spec.partition("?")[0]
        values = {target: np.array(self.task.classes(target), object) for target in targets}
        for i in range(n):
            own = {target: values[target][labels[target][i]].tolist() for target in targets}
            string = SymbolString(alphabet, tuple(strings[i].tolist()))
            yield Document(f"{name}/{side}:{i + 1}", None, None, own, side, string=string)
