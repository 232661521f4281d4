"""Parity: is the number of ones so far odd?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .task import Task


@dataclass(frozen=True, kw_only=True)
class Parity(Task):
    """Bits, each drawn fairly; the label is the running parity, the bit's own included.

    symbols   1 0 1 1
    parity    1 1 0 1
    """

    name: ClassVar[str] = "parity"

    @property
    def symbols(self) -> tuple[str, ...]:
        """The two bits."""
        return ("0", "1")

    @property
    def targets(self) -> tuple[str, ...]:
        """The parity alone."""
        return ("parity",)

    def classes(self, target: str) -> tuple[int, ...]:
        """Give even and odd as 0 and 1."""
        self.known(target)
        return (0, 1)

    def label(self, strings: np.ndarray, target: str) -> np.ndarray:
        """Give the running parity."""
        self.known(target)
        return np.cumsum(strings, axis=1) % 2

    def draw(self, n: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Draw fair bits."""
        return generator.integers(0, 2, (n, length))
