"""Which side of a split a string is on: a function of the string alone, so that no string is on two."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import RequestError, UnknownNameError

SIDES = ("train", "validation", "test")
SHARES = (8, 1, 1)
"""Of ten strings, how many are on each side."""
_IDLE_ROUNDS = 40
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def side_of(strings: np.ndarray) -> np.ndarray:
    """Give the side of each string, an index into `SIDES`, (n,): of its symbols (n, length) and their order.

    A hash of 64 bits: each symbol is mixed with what came before it, as in splitmix64 (Steele et al. 2014).
    """
    state = np.full(len(strings), strings.shape[1], np.uint64)
    for column in strings.T.astype(np.uint64):
        state = _mixed(state + (column + np.uint64(1)) * _MULTIPLIERS[0])
    tenths = (state >> np.uint64(32)) % np.uint64(sum(SHARES))
    return np.searchsorted(np.cumsum(SHARES), tenths, side="right")


def _mixed(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIERS[1]
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIERS[2]
    return state ^ (state >> np.uint64(31))


def draw_on_side(draw: Callable[[int], np.ndarray], n: int, split: str, what: str) -> np.ndarray:
    """Draw until `n` strings are on the side `split`; `draw(k)` gives k strings of the task's distribution.

    So a side has the task's distribution, given the side; a string may come more than once. `RequestError` when no
    drawn string is on the side, as happens where there are few strings in all; `what` names them.
    """
    if split not in SIDES:
        raise UnknownNameError.of("side", split, SIDES)
    wanted, share = SIDES.index(split), SHARES[SIDES.index(split)] / sum(SHARES)
    found: list[np.ndarray] = []
    have = idle = 0
    while have < n:
        strings = draw(int((n - have) / share * 1.1) + 16)
        found.append(strings[side_of(strings) == wanted])
        have += len(found[-1])
        idle = 0 if len(found[-1]) else idle + 1
        if idle == _IDLE_ROUNDS:
            raise RequestError(
                f"None of {what} is on the {split} side: there are few strings of that length. Take a longer one."
            )
    return np.concatenate(found)[:n] if found else draw(0)
