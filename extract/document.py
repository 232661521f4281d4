"""What one document of the data is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..store.durable import canonical_json


@dataclass(frozen=True)
class Chat:
    """The messages of a document, and where they stand in the text that the chat template made of them."""

    messages: tuple[dict[str, Any], ...]
    """Each with a role and a content, both strings, and perhaps more that a template reads."""
    spans: tuple[tuple[int, int, str], ...] | None = None
    """(start, end, role) of each content in the rendered text, in order; None: not rendered, or not asked for."""


@dataclass(frozen=True)
class SymbolString:
    """A string over an alphabet, as a task draws it; which ids stand for it follows from the model."""

    alphabet: tuple[str, ...]
    indices: tuple[int, ...]
    """Of each position its symbol, an index into the alphabet."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbol of each position."""
        return tuple(self.alphabet[i] for i in self.indices)


@dataclass(frozen=True)
class Document:
    """One document of the data: a text or a sequence of token ids, with its labels.

    A label that is missing is None; a label that the data gives as NaN stays the float NaN.
    """

    name: str
    """Unique within the data: a relative posix path, or ``file.jsonl:12`` with the row counted from 1."""
    text: str | None
    """None for ids and strings of a task, and for messages until a chat template renders them."""
    input_ids: tuple[int, ...] | None
    """None for text, and for a string of a task until the model is known."""
    labels: dict[str, Any]
    """Column -> a scalar (a label of the whole document) or a list (a label a token)."""
    split: str | None
    chat: Chat | None = None
    string: SymbolString | None = None

    @cached_property
    def digest(self) -> str:
        """The content's identity, a SHA-256: of the text in UTF-8, of the ids, of the messages or of the symbols.

        Ids are hashed as a byte 0xff and little-endian int64, messages as a byte 0xfe and JSON, symbols as a byte
        0xfd and JSON; no UTF-8 text holds these bytes. Messages and symbols count and not what a template or a
        vocabulary makes of them, so that a document has one identity for all models.
        """
        if self.string is not None:
            return hashlib.sha256(b"\xfd" + canonical_json(list(self.string.symbols))).hexdigest()
        if self.chat is not None:
            return hashlib.sha256(b"\xfe" + canonical_json(list(self.chat.messages))).hexdigest()
        if self.text is not None:
            return hashlib.sha256(self.text.encode()).hexdigest()
        return hashlib.sha256(b"\xff" + np.asarray(self.input_ids, "<i8").tobytes()).hexdigest()
