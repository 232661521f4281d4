"""What a tokenizer makes of a text: ids, which of them it added, and the characters that each stands for."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ModelError


@dataclass(frozen=True)
class Encoding:
    """The tokens of one text, with spans in characters of that text.

    A span is what the tokenizer reports, with three changes: white space in front of anything else is not part
    of it (a byte-level " world" stands for "world"); white space whose span the tokenizer trimmed to nothing gets
    it back; and combining accents that it drops, or joins with their letter, belong to the letter. All byte pieces
    of one character have its span. Special tokens have none: -1, -1.
    """

    ids: np.ndarray
    """int32 (n,)"""
    special: np.ndarray
    """bool (n,): added by the tokenizer; a special token that is written in the text is not."""
    start: np.ndarray
    """int32 (n,)"""
    end: np.ndarray
    """int32 (n,)"""
    raw_start: np.ndarray
    """int32 (n,): the start before white space is taken off, never falling; of no meaning for special tokens."""

    @property
    def real(self) -> int:
        """The number of tokens that stand for text."""
        return len(self.ids) - int(self.special.sum())


def encode(tokenizer: Any, texts: Sequence[str], *, special_tokens: bool = True) -> list[Encoding]:
    """Tokenize `texts` as ``tokenizer(text)`` does: its own special tokens, no padding, no truncation.

    Without `special_tokens` as ``tokenizer(text, add_special_tokens=False)`` does: none are added.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"The tokenizer {type(tokenizer).__name__} cannot say which characters a token stands for,"
            f" because it is not a fast one. Use a model with a fast tokenizer (tokenizer.json), or give"
            f" data with 'input_ids'."
        )
    batch = tokenizer(
        list(texts),
        add_special_tokens=special_tokens,
        padding=False,
        truncation=False,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,  # the warning about texts longer than the model reads is ours to give, as an error
    )
    parts = (batch["input_ids"], batch["special_tokens_mask"], batch["offset_mapping"])
    return [_encoding(text, *part) for text, *part in zip(texts, *parts, strict=True)]


def _encoding(text: str, ids: list[int], mask: list[int], offsets: list[tuple[int, int]]) -> Encoding:
    special = np.asarray(mask, bool)
    spans = np.asarray(offsets, np.int32).reshape(-1, 2)
    start, end = spans[:, 0].copy(), spans[:, 1].copy()
    raw = start.copy()
    raw[special] = 0
    raw = np.maximum.accumulate(raw)
    last = 0  # where the token before ended
    for i in np.flatnonzero(~special).tolist():
        first, stop = int(start[i]), int(end[i])
        if first == stop and text[last:first].isspace():
            start[i] = last
        elif first < stop and text[first].isspace():
            rest = len(text[first:stop].lstrip())
            start[i] = stop - rest if rest else first
        last = stop
    if not text.isascii():
        _take_accents(text, start, end, np.flatnonzero(~special).tolist())
    start[special] = end[special] = -1
    return Encoding(np.asarray(ids, np.int32), special, start, end, raw)


def _take_accents(text: str, start: np.ndarray, end: np.ndarray, real: Sequence[int]) -> None:
    """Extend spans over the combining characters behind them that no token stands for."""
    begins = {int(start[i]) for i in real}
    for i in real:
        stop = int(end[i])
        while stop < len(text) and stop not in begins and unicodedata.combining(text[stop]):
            stop += 1
        end[i] = stop
