"""Dyck-k: words of matched brackets of k kinds, with what is open at every position."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import RequestError
from .task import Task

PAIRS = ("()", "[]", "{}", "<>")


@dataclass(frozen=True, kw_only=True)
class Dyck(Task):
    """Matched brackets of `k` kinds, at most `max_depth` open at once; every word ends with none open.

        symbols   (   [   ]   (   )   )
        depth     1   2   1   2   1   0
        top       (   [   (   (   (   -
        next      all all all all all open

    `depth` is how many brackets are open after the symbol, `top` the last of them that was opened (``-``: none), and
    `next` the brackets that may follow: those that open, unless the depth is at its most, and the one that closes the
    top. That a word has to end is not counted in. In `next` above, "all" stands for ``([)`` or ``([]`` and "open"
    for ``([``.

    A word is drawn evenly among all words of its length and depth, its kinds of brackets evenly too (up to the
    rounding of float64): at each position it opens with the share of the words that go on so. Of any other string,
    a bracket that closes what is not on top, and one that opens at the greatest depth, change nothing.
    """

    name: ClassVar[str] = "dyck"

    k: int = 2
    max_depth: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.k <= len(PAIRS):
            raise RequestError(f"Dyck words have 1 to {len(PAIRS)} kinds of brackets here, not {self.k}.")
        if self.max_depth < 1:
            raise RequestError(f"The greatest depth of a Dyck word is at least 1, not {self.max_depth}.")

    @property
    def symbols(self) -> tuple[str, ...]:
        """The brackets, each that opens before the one that closes it."""
        return tuple("".join(PAIRS[: self.k]))

    @property
    def targets(self) -> tuple[str, ...]:
        """The depth, the top of the stack, and the brackets that may come next."""
        return ("depth", "top", "next")

    def classes(self, target: str) -> tuple[Any, ...]:
        """Give depths from 0 to the greatest; the empty stack and the brackets; the sets of brackets as text."""
        if self.known(target) == "depth":
            return tuple(range(self.max_depth + 1))
        opens, closes = self.symbols[::2], self.symbols[1::2]
        if target == "top":
            return ("-", *opens)
        every = "".join(opens)
        return (every, *(every + c for c in closes), *closes)

    def label(self, strings: np.ndarray, target: str) -> np.ndarray:
        """Give the classes of a target at every position."""
        depth, top = self._walk(strings)
        if self.known(target) == "depth":
            return depth
        if target == "top":
            return top
        return np.where((depth == self.max_depth) & (top > 0), top + self.k, top)

    def check_length(self, length: int) -> None:
        """Refuse odd lengths: a bracket would be left open."""
        if length % 2:
            raise RequestError(f"A Dyck word has an even length, not {length}: every bracket that opens is closed.")

    def draw(self, n: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Draw words evenly among all of this length and depth."""
        opening = _opening_shares(length, self.max_depth)
        strings = np.empty((n, length), np.int64)
        stack = np.zeros((n, self.max_depth + 1), np.int64)
        depth = np.zeros(n, np.int64)
        kinds = generator.integers(0, self.k, (length, n))
        chances = generator.random((length, n))
        every = np.arange(n)
        for t in range(length):
            opens = chances[t] < opening[t, depth]
            depth = depth + np.where(opens, 1, -1)
            level = np.where(opens, depth, depth + 1)  # of the bracket that opens or closes now
            stack[every, level] = np.where(opens, kinds[t], stack[every, level])
            strings[:, t] = 2 * stack[every, level] + ~opens
        return strings

    def _walk(self, strings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Follow the stack: the depth after each symbol, and the kind on top, from 1; 0 where nothing is open."""
        every = np.arange(len(strings))
        stack = np.zeros((len(strings), self.max_depth + 1), np.int64)
        depth = np.zeros(len(strings), np.int64)
        depths, tops = np.empty(strings.shape, np.int64), np.empty(strings.shape, np.int64)
        for t, column in enumerate(strings.T):
            kind, closes = column // 2 + 1, column % 2 == 1
            opened = ~closes & (depth < self.max_depth)
            closed = closes & (stack[every, depth] == kind)  # level 0 holds no kind
            depth = depth + opened - closed
            stack[every[opened], depth[opened]] = kind[opened]
            depths[:, t], tops[:, t] = depth, stack[every, depth]
        return depths, tops


@functools.cache
def _opening_shares(length: int, max_depth: int) -> np.ndarray:
    """Give the share of words that open a bracket at each position and depth, (length, max_depth + 1).

    ways[r, d] counts how r more symbols lead from depth d to 0, kinds of brackets left out.
    """
    ways = np.zeros((length + 1, max_depth + 2))
    ways[0, 0] = 1.0
    for r in range(1, length + 1):
        ways[r, 1:-1] = ways[r - 1, :-2]
        ways[r, :-1] += np.append(ways[r - 1, 1:-1], 0.0)
    ahead = ways[::-1][1:]  # after the symbol at t, length - 1 - t are left
    up = np.zeros((length, max_depth + 1))
    up[:, :-1] = ahead[:, 1 : max_depth + 1]
    down = np.zeros((length, max_depth + 1))
    down[:, 1:] = ahead[:, :max_depth]
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(up / (up + down))
