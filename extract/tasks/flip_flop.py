"""Flip-flop: remember the bit that was written last, whatever comes between (Liu et al. 2023, arXiv 2306.00946)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import RequestError
from .task import Task

_WRITE, _READ, _IGNORE, _BIT = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class FlipFlop(Task):
    """Instructions, each followed by a bit: w writes it, i is followed by any bit, r by the one that was written last.

        symbols   w 1 i 0 r 1 w 0
        stored    - 1 1 1 1 1 1 0

    The first instruction writes. Each later one ignores with the chance `ignore`, and else writes or reads, evenly; the
    bits of w and i are fair. The label is the bit that is stored after the symbol, ``-`` before the first is. Of any
    other string, a bit is stored where the symbol before it is w.
    """

    name: ClassVar[str] = "flip-flop"

    ignore: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.ignore < 1:
            raise RequestError(f"The chance to ignore is from 0 to below 1, not {self.ignore}.")

    @property
    def symbols(self) -> tuple[str, ...]:
        """The three instructions and the two bits."""
        return ("w", "r", "i", "0", "1")

    @property
    def targets(self) -> tuple[str, ...]:
        """The stored bit alone."""
        return ("stored",)

    def classes(self, target: str) -> tuple[str, ...]:
        """Give nothing stored, 0 and 1."""
        self.known(target)
        return ("-", "0", "1")

    def check_length(self, length: int) -> None:
        """Refuse odd lengths: an instruction would have no bit."""
        if length % 2:
            raise RequestError(f"A flip-flop string has an even length, not {length}: each instruction has a bit.")

    def label(self, strings: np.ndarray, target: str) -> np.ndarray:
        """Give the stored bit after each symbol."""
        self.known(target)
        stored = np.zeros(len(strings), np.int64)
        out = np.empty(strings.shape, np.int64)
        before = np.full(len(strings), _IGNORE)
        for t, column in enumerate(strings.T):
            stored = np.where((before == _WRITE) & (column >= _BIT), column - _BIT + 1, stored)
            out[:, t], before = stored, column
        return out

    def draw(self, n: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Draw instructions and bits."""
        strings = np.empty((n, length), np.int64)
        chance = generator.random((n, length // 2))
        instruction = np.where(chance < self.ignore, _IGNORE, np.where(chance < (1 + self.ignore) / 2, _WRITE, _READ))
        instruction[:, :1] = _WRITE
        strings[:, ::2] = instruction
        strings[:, 1::2] = _BIT + generator.integers(0, 2, (n, length // 2))
        stored = self.label(strings, "stored")
        reads = strings[:, ::2] == _READ
        strings[:, 1::2][reads] = _BIT - 1 + stored[:, ::2][reads]
        return strings
