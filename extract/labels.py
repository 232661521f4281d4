"""Labelers: functions that give every token of a text a label."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

import numpy as np

from ..errors import DataError, LayerlakeError, RequestError, UnknownNameError
from .code_depth import code_depth


class Labeler(Protocol):
    """Gives a label to every token of a text.

    `start` and `end` are int32 (n,): the characters ``text[start[i]:end[i]]`` that token i stands for, in
    order, special tokens left out. The answer is a list of n booleans, numbers, strings or None (no label).
    Called once a document.
    """

    def __call__(self, document_name: str, text: str, start: np.ndarray, end: np.ndarray, /) -> list[Any]: ...


BUILT_IN: dict[str, Labeler] = {"code-depth": code_depth}


def load_labeler(name: str) -> Labeler:
    """Give the labeler of a `name`: a built-in one, or "package.module:function" for one of the user's own."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise UnknownNameError.of("labeler", name, [*BUILT_IN, "package.module:function"])
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs code of the user's own
        raise RequestError(
            f"The labeler {name!r} cannot be imported: {error}. Install its package or add its folder to PYTHONPATH."
        ) from error
    labeler = getattr(module, function_name, None)
    if labeler is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownNameError.of("function", function_name, known, f" in the module {module_name}")
    if not callable(labeler):
        raise RequestError(f"The labeler {name!r} is not a function. Name one that takes (name, text, start, end).")
    return cast(Labeler, labeler)


def token_labels(
    name: str, labeler: Labeler, document: str, text: str | None, start: np.ndarray, end: np.ndarray
) -> list[Any]:
    """Call a labeler on one document and check its answer; NumPy scalars become Python ones."""
    if text is None:
        raise DataError(f"The document {document} is token ids, and the labeler {name!r} reads text. Give text.")
    try:
        labels = list(labeler(document, text, start, end))
    except LayerlakeError:
        raise
    except Exception as error:
        raise DataError(f"The labeler {name!r} failed on {document} with {type(error).__name__}: {error}") from error
    if len(labels) != len(start):
        raise RequestError(
            f"The labeler {name!r} gave {len(labels)} labels for the {len(start)} tokens of {document}. It"
            f" must give one a token."
        )
    labels = [label.item() if isinstance(label, np.generic) else label for label in labels]
    for position, label in enumerate(labels):
        if label is not None and not isinstance(label, bool | int | float | str):
            raise RequestError(
                f"The labeler {name!r} gave a {type(label).__name__} for token {position} of {document}. A"
                f" label is a boolean, a number, a string or None."
            )
    return labels
