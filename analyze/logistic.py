"""Logistic regression on standardised features, in the units of the features as given."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from ..errors import RequestError

BLOCK = 8192  # rows brought to float64 at a time: 64 MB at a width of 1,024


@dataclass(frozen=True, eq=False)
class LogisticFit:
    """A fitted logistic regression, binary or multinomial, for c classes and d features.

    codes       : (c,) int64, the class numbers seen in training, ascending
    coef        : (c, d) float64, or (1, d) for two classes, in raw feature units
    intercept   : (c,) float64, or (1,) for two classes
    n_iter      : iterations of the solver
    converged   : whether the solver met its tolerance
    """

    codes: np.ndarray
    coef: np.ndarray
    intercept: np.ndarray
    n_iter: int
    converged: bool

    def decision(self, X: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the linear scores of `X[rows]`, (m,) for two classes and (m, c) for more, in float64."""
        rows = np.arange(len(X)) if rows is None else rows
        parts = [X[block].astype(np.float64) @ self.coef.T + self.intercept for block in _blocks(rows)]
        scores = np.concatenate(parts) if parts else np.empty((0, len(self.intercept)))
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def choose(self, scores: np.ndarray) -> np.ndarray:
        """Return the class numbers that `scores` (from `decision`) choose, (m,) int64."""
        if scores.ndim == 1:
            return self.codes[(scores > 0).astype(np.int64)]
        return self.codes[scores.argmax(axis=1)]

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Return class probabilities (m, c) float64 for `scores` (from `decision`): sigmoid, or softmax."""
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class Solver:
    """How to fit: the loss and when to stop.

    The loss is scikit-learn's: C times the summed log loss plus half the squared norm of the coefficients (of
    the standardised features, if `standardize`), without the intercept. `tol` bounds the largest entry of the
    gradient of the mean loss.
    """

    C: float
    max_iter: int
    tol: float
    standardize: bool

    def __post_init__(self) -> None:
        if not (0 < self.C < math.inf and 0 < self.tol < math.inf and self.max_iter >= 1):
            raise RequestError(
                f"C and tol must be finite and above 0 and max_iter at least 1; they are C={self.C!r}, "
                f"tol={self.tol!r}, max_iter={self.max_iter!r}."
            )

    def fit(self, X: np.ndarray, codes: np.ndarray, rows: np.ndarray) -> LogisticFit:
        """Fit the classes `codes[rows]` from the features `X[rows]`; X is (n, d) float32 or float64.

        Means and scales are taken over `rows` in float64; the solver works in the dtype of X.
        """
        Z = X[rows]
        mean, scale = np.zeros(X.shape[1], Z.dtype), np.ones(X.shape[1], Z.dtype)
        if self.standardize:
            scaler = StandardScaler()
            for block in _blocks(rows):
                scaler.partial_fit(X[block].astype(np.float64))
            # StandardScaler gives constant features, up to rounding, the scale 1. Both are rounded to the
            # dtype of Z before use, so that what is folded back below is what the solver saw.
            mean, scale = np.array(scaler.mean_, Z.dtype), np.array(scaler.scale_, Z.dtype)
            Z -= mean
            Z /= scale
        model = LogisticRegression(C=self.C, max_iter=self.max_iter, tol=self.tol)
        # scikit-learn tells of an early stop (too few iterations, a failed line search) by a warning alone.
        # Python's warning filters are global: fit in processes, not in threads.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(Z, codes[rows])
        stopped = [w for w in caught if issubclass(w.category, ConvergenceWarning)]
        for other in (w for w in caught if w not in stopped):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
        # z = (x - mean) / scale, so w.z + b = (w / scale).x + (b - (w / scale).mean)
        coef = np.asarray(model.coef_, np.float64) / np.asarray(scale, np.float64)
        intercept = np.asarray(model.intercept_, np.float64) - coef @ np.asarray(mean, np.float64)
        return LogisticFit(np.asarray(model.classes_), coef, intercept, int(model.n_iter_[0]), not stopped)


def as_features(X: Any) -> np.ndarray:
    """Return `X` as floats (n, d): 8-byte numbers as float64, shorter ones (bfloat16, float16) as float32."""
    array = np.asarray(X)
    if array.ndim != 2:
        raise RequestError(
            f"X must be a matrix of shape (rows, features); it has {array.ndim} dimension(s), shape "
            f"{array.shape}. Give one row a token, and flatten other axes first."
        )
    if array.shape[1] == 0:
        raise RequestError(f"X has {array.shape[0]} rows and 0 features; there is nothing to read a label from.")
    if array.dtype.kind not in "fiub" and not array.dtype.name.startswith("bfloat16"):
        raise RequestError(f"X holds values of dtype {array.dtype}; a probe reads real numbers.")
    return array.astype(np.float64 if array.dtype.itemsize >= 8 else np.float32, copy=False)


def check_finite(X: np.ndarray, rows: np.ndarray) -> None:
    """Refuse NaN and infinity in `X[rows]`, with their count and the first row."""
    bad, n_values = [], 0
    for block in _blocks(rows):
        finite = np.isfinite(X[block])
        if not finite.all():
            bad.append(block[~finite.all(axis=1)])
            n_values += int(finite.size - finite.sum())
    if bad:
        found = np.concatenate(bad)
        raise RequestError(
            f"X holds {n_values} NaN or infinite value(s) in {len(found)} of {len(rows)} rows, the first in "
            f"row {found[0]}. Leave those rows out, or find out why the model gave them."
        )


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), BLOCK):
        yield rows[start : start + BLOCK]
