"""The order in which a selection is read: one function for every way of reading it in batches."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ..errors import RequestError


def row_order(rows: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0) -> np.ndarray:
    """Give the positions 0 to `rows` - 1 as int64 in the order to read them: each once.

    With `shuffle` it is a permutation that depends on the number of rows, `seed` and `epoch` alone. It takes 8 bytes
    a row.
    """
    if not shuffle:
        return np.arange(rows, dtype=np.int64)
    return np.random.default_rng([seed, epoch] if epoch else seed).permutation(rows)


def count_batches(rows: int, size: int, *, drop_last: bool) -> int:
    """Count the batches of `size` rows; a last one with fewer counts unless `drop_last`."""
    return rows // size if drop_last else -(-rows // size)


def check_whole(what: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int; `RequestError` unless it is a whole number of at least `least`."""
    try:
        whole = operator.index(value)
    except TypeError:
        raise RequestError(f"{what} is {value!r}; it must be a whole number.") from None
    if isinstance(value, bool) or whole < least:
        raise RequestError(f"{what} is {value}; it must be a whole number of at least {least}.")
    return whole
