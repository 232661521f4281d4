"""Composition in a finite group: which element is the product of everything so far?"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import UnknownNameError
from .finite_groups import FiniteGroup, named_group
from .task import Task

_GENERATORS = ("all", "minimal")


@dataclass(frozen=True, kw_only=True)
class GroupComposition(Task):
    """Elements of a group, each drawn evenly; the label is their product, the newest on the left.

    state_t = g_t state_(t-1), from the identity: of permutations, what the newest does comes after what was done
    before. In S3, whose elements are named by where they send 1, 2 and 3 (213 exchanges the first two):

        symbols   213 231 213
        element   213 321 312

    The second is 231 after 213: 1 goes to 2 and on to 3, 2 to 1 and on to 2, 3 to 3 and on to 1. With
    ``generators=minimal`` the symbols are a generating set of the group only; `named_group` says which.
    """

    name: ClassVar[str] = "group"

    group: str = "s3"
    """``zN``, ``sN`` or ``aN``."""
    generators: str = "all"
    """``all``: every element is a symbol. ``minimal``: those of the named group's generating set are."""

    def __post_init__(self) -> None:
        if self.generators not in _GENERATORS:
            raise UnknownNameError.of("generators", self.generators, _GENERATORS)
        self.table_of()

    def table_of(self) -> FiniteGroup:
        """Give the group; a task of a group of one's own returns it here."""
        return named_group(self.group)

    @functools.cached_property
    def _used(self) -> np.ndarray:
        group = self.table_of()
        return np.array(range(len(group.elements)) if self.generators == "all" else group.generators)

    @functools.cached_property
    def _table(self) -> np.ndarray:
        return np.array(self.table_of().table)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The elements that are drawn."""
        elements = self.table_of().elements
        return tuple(elements[i] for i in self._used)

    @property
    def targets(self) -> tuple[str, ...]:
        """The product alone."""
        return ("element",)

    def classes(self, target: str) -> tuple[str, ...]:
        """Give the elements of the group by name."""
        self.known(target)
        return self.table_of().elements

    def label(self, strings: np.ndarray, target: str) -> np.ndarray:
        """Give the product up to and with each position."""
        self.known(target)
        state = np.full(len(strings), self.table_of().identity)
        out = np.empty(strings.shape, np.int64)
        for t, column in enumerate(self._used[strings].T):
            state = self._table[column, state]
            out[:, t] = state
        return out

    def draw(self, n: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Draw symbols evenly."""
        return generator.integers(0, len(self._used), (n, length))


@dataclass(frozen=True, kw_only=True)
class S3(GroupComposition):
    """Composition of the permutations of three things; `GroupComposition` says how."""

    name: ClassVar[str] = "s3"

    group: str = "s3"


@dataclass(frozen=True, kw_only=True)
class ModularAddition(Task):
    """Numbers below `modulus`, each drawn evenly; the label is their sum so far modulo that.

    symbols   3 6 1      (modulus 7)
    sum       3 2 3
    """

    name: ClassVar[str] = "modular-addition"

    modulus: int = 7

    def __post_init__(self) -> None:
        named_group(f"z{self.modulus}")  # refuses what it cannot be

    @property
    def symbols(self) -> tuple[str, ...]:
        """The numbers."""
        return tuple(map(str, range(self.modulus)))

    @property
    def targets(self) -> tuple[str, ...]:
        """The sum alone."""
        return ("sum",)

    def classes(self, target: str) -> tuple[int, ...]:
        """Give the numbers below the modulus."""
        self.known(target)
        return tuple(range(self.modulus))

    def label(self, strings: np.ndarray, target: str) -> np.ndarray:
        """Give the running sum."""
        self.known(target)
        return np.cumsum(strings, axis=1) % self.modulus

    def draw(self, n: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Draw numbers evenly."""
        return generator.integers(0, self.modulus, (n, length))
