"""Finite groups by their tables."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import RequestError, UnknownNameError

_MOST_ELEMENTS = 720


@dataclass(frozen=True)
class FiniteGroup:
    """A group: the names of its elements, and its table, where `table[a][b]` is the product a b.

    Of permutations the product a b is "first b, then a", as functions compose: (a b)(i) = a(b(i)). `generators` are
    elements whose products are all of them. A table that is no group's is a `RequestError` saying what fails.
    """

    elements: tuple[str, ...]
    table: tuple[tuple[int, ...], ...]
    generators: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.elements)
        table = np.array(self.table)
        if not n or table.shape != (n, n) or table.min() < 0 or table.max() >= n:
            raise RequestError(f"A group of {n} elements has a table of {n} rows of {n} of their numbers.")
        if len(set(self.elements)) < n:
            raise RequestError("Two elements of the group have the same name.")
        everything = np.arange(n)
        if not any((table[e] == everything).all() and (table[:, e] == everything).all() for e in range(n)):
            raise RequestError("The table is no group's: no element leaves all others as they are.")
        if any((np.sort(table, axis=a) != (everything if a else everything[:, None])).any() for a in (0, 1)):
            raise RequestError("The table is no group's: an element has no inverse.")
        for a in range(n):
            if (table[table[a]] != table[a][table]).any():
                raise RequestError(f"The table is no group's: products that begin with {self.elements[a]!r} depend on "
                                   "where the brackets stand.")  # fmt: skip

    @property
    def identity(self) -> int:
        """The number of the element that leaves all others as they are."""
        table = np.array(self.table)
        return int(np.flatnonzero((table == np.arange(len(table))).all(1))[0])


@functools.cache
def named_group(name: str) -> FiniteGroup:
    """Give a group by name: ``zN`` (adding modulo N), ``sN`` and ``aN`` (all and the even permutations of N things).

    A permutation is named by where it sends 1, 2, 3, ...: 213 exchanges the first two things. Generators are 0 and
    1 of zN; an exchange and a cycle of sN; cycles of three of aN.
    """
    found = re.fullmatch(r"([zsa])([1-9]\d{0,2})", name)
    if not found:
        raise UnknownNameError.of("group", name, ("z2", "z5", "s3", "s5", "a5", "zN", "sN", "aN"))
    kind, n = found[1], int(found[2])
    if kind == "z":
        _check_size(name, n)
        elements = tuple(map(str, range(n)))
        table = tuple(tuple((a + b) % n for b in range(n)) for a in range(n))
        return FiniteGroup(elements, table, tuple(range(min(n, 2))))
    if n > 9:
        raise RequestError(f"The group {name} has too many elements: permutations of up to 6 things are made.")
    permutations = [p for p in itertools.permutations(range(n)) if kind == "s" or _is_even(p)]
    _check_size(name, len(permutations))
    number = {p: i for i, p in enumerate(permutations)}
    table = tuple(tuple(number[tuple(a[i] for i in b)] for b in permutations) for a in permutations)
    if kind == "s":
        cycles: Sequence[tuple[int, ...]] = [(1, 0, *range(2, n)), (*range(1, n), 0)] if n > 1 else [(0,)]
    else:
        cycles = [_cycle(n, (0, 1, i)) for i in range(2, n)] or [tuple(range(n))]
    generators = tuple(dict.fromkeys(number[c] for c in cycles))
    return FiniteGroup(tuple("".join(str(i + 1) for i in p) for p in permutations), table, generators)


def _check_size(name: str, size: int) -> None:
    if size > _MOST_ELEMENTS:
        raise RequestError(f"The group {name} has {size} elements; those of up to {_MOST_ELEMENTS} are made.")


def _is_even(permutation: Sequence[int]) -> bool:
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


def _cycle(n: int, moved: Sequence[int]) -> tuple[int, ...]:
    to = dict(zip(moved, (*moved[1:], moved[0]), strict=True))
    return tuple(to.get(i, i) for i in range(n))
