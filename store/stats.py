"""Statistics of the stored values of one unit and array, made so that units merge exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .dtypes import StoredDtype

_BLOCK_VALUES = 1 << 16  # what fits into a core's cache as float64

STATISTICS: dict[str, type] = {
    "count": int,
    "nonfinite": int,
    "mean": float,
    "variance": float,
    "min": float,
    "max": float,
    "norm": float,
    "rows": int,
}
"""What `value_statistics` gives; numbers that are not counts may be None."""


def value_statistics(bits: np.ndarray, dtype: StoredDtype) -> dict[str, Any]:
    """Summarise stored values, (rows, *trailing) raw bits, in float64.

    Count, mean, population variance, minimum and maximum are over finite values; `nonfinite` counts NaN and
    infinities; `norm` is the mean L2 norm of the rows whose values are all finite. A value that does not exist
    (no finite value at all) is None. Blocks are merged by the pairwise rule of Chan, Golub and LeVeque (1979).
    """
    count, mean, m2 = 0, 0.0, 0.0
    low, high = math.inf, -math.inf
    nonfinite, norms, normed_rows = 0, 0.0, 0
    flat = bits.reshape(len(bits), math.prod(bits.shape[1:]))
    step = max(1, _BLOCK_VALUES // max(1, flat.shape[1]))
    for first in range(0, len(flat), step):
        with np.errstate(invalid="ignore"):  # a signalling NaN is counted below, not worth a warning
            numbers = dtype.to_float32(np.ascontiguousarray(flat[first : first + step]))
            least, most = float(numbers.min(initial=math.inf)), float(numbers.max(initial=-math.inf))
            block = numbers.astype(np.float64)
        if math.isfinite(least) and math.isfinite(most):  # NaN would be both
            values = whole = block
        else:
            finite = np.isfinite(block)
            values, whole = block[finite], block[finite.all(axis=1)]
            nonfinite += block.size - values.size
            least, most = float(values.min(initial=math.inf)), float(values.max(initial=-math.inf))
        squares = np.einsum("ij,ij->i", whole, whole)
        norms += float(np.sqrt(squares).sum())
        normed_rows += len(whole)
        if not values.size:
            continue
        n, block_mean = values.size, float(values.mean())
        delta, total = block_mean - mean, count + n
        m2 += _squared_deviations(values, block_mean, squares if values is block else None)
        m2 += delta * delta * count * n / total
        mean += delta * n / total
        count = total
        low, high = min(low, least), max(high, most)
    return {
        "count": count,
        "nonfinite": nonfinite,
        "mean": mean if count else None,
        "variance": m2 / count if count else None,
        "min": low if count else None,
        "max": high if count else None,
        "norm": norms / normed_rows if normed_rows else None,
        "rows": normed_rows,
    }


def _squared_deviations(values: np.ndarray, mean: float, squares: np.ndarray | None) -> float:
    """Sum the squared deviations from `mean`; `squares` are sums of squares that are there already.

    With them one subtraction does it, unless the mean is so far from zero that it would cost digits.
    """
    if squares is not None:
        total, offset = float(squares.sum()), values.size * mean * mean
        if offset < 0.5 * total:
            return total - offset
    return float(np.square(values - mean).sum())
