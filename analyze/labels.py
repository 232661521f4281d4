"""Labels as they come out of SQL, read into classes."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from ..errors import RequestError


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of some rows as classes, without the rows whose label is null.

    classes     : (k,) the values, numbers in numeric order, text in text order, False before True
    codes       : (n,) int64, the class of each kept row as a position in `classes`
    rows        : (n,) int64, where the kept rows stand in what was read
    n_dropped   : how many rows had a null label
    """

    classes: np.ndarray
    codes: np.ndarray
    rows: np.ndarray
    n_dropped: int

    @classmethod
    def read(cls, y: np.ndarray, name: str = "y") -> Labels:
        """Read `y`, an array of shape (n,), as the classes of a label called `name`.

        None and NaN are null: their rows are dropped and counted. Booleans, integers, whole floats (they
        become integers) and text are classes; integers written as text stay text. Fewer than two classes,
        real values, infinities, and values of more than one type raise RequestError.
        """
        values, rows, n_read = _without_nulls(y, name)
        dropped = n_read - len(values)
        nulls = f" ({dropped} of {n_read} rows are null)" if dropped else ""
        if not values:
            raise RequestError(
                f"Label {name!r} has no value in any of its {n_read} rows{nulls}; select rows that carry the label."
            )
        values = _one_type(values, name)
        found = sorted(set(values))
        if len(found) < 2:
            raise RequestError(
                f"Label {name!r} has only one class, {found[0]!r}, in all {len(values)} rows{nulls}; "
                "a probe needs at least two. Widen the query so that it returns another class."
            )
        place = {value: i for i, value in enumerate(found)}
        codes = np.fromiter((place[v] for v in values), dtype=np.int64, count=len(values))
        return cls(class_array(found), codes, rows, dropped)

    def names(self) -> list[str]:
        """Return the classes as text, in class order."""
        return [str(c) for c in self.classes.tolist()]


def class_array(values: Sequence[Any]) -> np.ndarray:
    """Return classes of one type as an array: bool, int64, or object for text.

    Text is kept as objects because NumPy's fixed-width text drops trailing NUL characters.
    """
    return np.array(values, dtype=object if isinstance(values[0], str) else None)


def label_values(y: np.ndarray, name: str = "y") -> tuple[list[Any], np.ndarray]:
    """Return the values of `y` that are not null, in one type, and where they stand; for scoring."""
    values, rows, _ = _without_nulls(y, name)
    return (_one_type(values, name) if values else values), rows


def as_column(values: Any, what: str, n_rows: int) -> np.ndarray:
    """Return `values` as an array of shape (n_rows,), or say by the name `what` why they are none."""
    # A list goes in as objects: np.asarray([1, "a"]) would turn the number into text without a word.
    array = np.asarray(values, dtype=object) if isinstance(values, list | tuple) else np.asarray(values)
    if array.ndim != 1:
        raise RequestError(f"{what} must be one value a row, shape ({n_rows},); it has shape {array.shape}.")
    if len(array) != n_rows:
        raise RequestError(f"X has {n_rows} rows and {what} has {len(array)}; they must be the same rows.")
    return array


def _without_nulls(y: np.ndarray, name: str) -> tuple[list[Any], np.ndarray, int]:
    values = y.tolist()
    values = [v.item() if isinstance(v, np.generic) else v for v in values]
    rows = [i for i, v in enumerate(values) if not _is_null(v)]
    return [values[i] for i in rows], np.array(rows, dtype=np.int64), len(values)


def _is_null(value: Any) -> bool:
    # NaN is the one kind of number that differs from itself; Decimal("NaN") is found this way too.
    return value is None or (isinstance(value, float | Decimal) and value != value)


def _one_type(values: list[Any], name: str) -> list[Any]:
    """Return `values` as all bool, all int or all text, or say why they cannot be classes."""
    kinds = Counter(_kind(v) for v in values)
    if len(kinds) > 1:
        parts = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
        raise RequestError(
            f"Label {name!r} mixes types: {parts}. Cast it to one type in the query, e.g. CAST(... AS VARCHAR)."
        )
    (kind,) = kinds
    if kind in ("boolean", "text"):
        return values
    if kind != "number":
        raise RequestError(
            f"Label {name!r} holds values of type {kind}; a class is a boolean, a whole number or text. "
            "Cast it to text in the query."
        )
    odd = [v for v in values if not _is_whole(v)]
    if odd:
        raise RequestError(
            f"Label {name!r} holds real values ({len(odd)} of {len(values)} are not whole numbers, the first "
            f"is {odd[0]}), and a classification probe needs classes. Bin them first, for example with "
            "np.digitize or a CASE in the query, or fit a regression (ridge) instead."
        )
    return [int(v) for v in values]


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "text"
    if isinstance(value, numbers.Real | Decimal):
        return "number"
    return type(value).__name__


def _is_whole(value: Any) -> bool:
    return math.isfinite(value) and value == int(value)


def count_by_class(codes: Iterable[int], names: Sequence[str]) -> dict[str, int]:
    """Return how many of `codes` fall on each class, every class named, also those with none."""
    counts = np.bincount(np.asarray(codes, dtype=np.int64), minlength=len(names))
    return dict(zip(names, counts.tolist(), strict=True))
