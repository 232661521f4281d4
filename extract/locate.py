"""Finding in a rendered chat where its messages stand, exactly or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from .failure import one_line

Render = Callable[[Sequence[dict[str, Any]]], str]
"""Gives the text that a chat template makes of messages."""

_THINKING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


def locate(
    name: str, text: str, messages: Sequence[dict[str, Any]], render: Render
) -> tuple[tuple[int, int, str], ...]:
    """Find (start, end, role) of each content in the `text` that `render` made of `messages`, in order.

    The template is rendered again with marks in place of the contents, which shows what it writes around them; the
    text must be that with the contents put back, whole or without the white space at their ends. Where it is not, and
    contents begin with ``<think>...</think>``, reasoning and answer get a mark each, as some templates write the tags
    anew and leave old reasoning out; the tags are the template's then. `DataError` where both fail: never a guess.
    """
    whole = [_Piece(i, m["content"]) for i, m in enumerate(messages)]
    try:
        return _Marked(name, messages, whole, render).spans(text)
    except DataError:
        thinking = [_THINKING.fullmatch(m["content"]) for m in messages]
        if not any(thinking):
            raise
        parts: list[_Piece] = []
        for i, match in enumerate(thinking):
            parts += [_Piece(i, match[1], reasoning=True), _Piece(i, match[2])] if match else [whole[i]]
        return _Marked(name, messages, parts, render).spans(text)


@dataclass(frozen=True)
class _Piece:
    """A part of a message's content that gets a mark of its own."""

    message: int
    text: str
    reasoning: bool = False


class _Marked:
    """What a template writes around marks that stand in place of pieces of the contents."""

    def __init__(self, name: str, messages: Sequence[dict[str, Any]], pieces: Sequence[_Piece], render: Render) -> None:
        self.name, self.messages = name, messages
        salt = "qz"
        while any(salt in m["content"] for m in messages):
            salt += "z"
        marks = [f"{salt}{number:06d}x" for number in range(len(pieces))]
        contents = [""] * len(messages)
        for piece, mark in zip(pieces, marks, strict=True):
            contents[piece.message] += f"<think>\n{mark}\n</think>\n\n" if piece.reasoning else mark
        try:
            probe = render([m | {"content": c} for m, c in zip(messages, contents, strict=True)])
        except Exception as error:  # it reads the contents, and raises what it likes
            raise self._error(f"it fails on other contents ({one_line(error)})") from error
        found = []
        for piece, mark in zip(pieces, marks, strict=True):
            count = probe.count(mark)
            if count == 1:
                found.append((probe.index(mark), piece, len(mark)))
            elif count or not piece.reasoning:  # old reasoning may be left out
                times = "does not write" if not count else f"writes {count} times"
                raise self._error(f"it {times} the content of {self._message(piece)}")
        found.sort(key=lambda one: one[0])
        self.pieces = [piece for _, piece, _ in found]
        ends = [0, *(at + size for at, _, size in found)]
        self.around = [probe[a:b] for a, b in zip(ends, [*(at for at, _, _ in found), len(probe)], strict=True)]

    def spans(self, text: str) -> tuple[tuple[int, int, str], ...]:
        """Find (start, end, role) of the pieces in `text`, in order."""
        # where the text can have got to -> the spans so far, linked; None: in more than one way
        ways: dict[int, Any] = {len(self.around[0]): ()} if text.startswith(self.around[0]) else {}
        for piece, after in zip(self.pieces, self.around[1:], strict=True):
            found: dict[int, Any] = {}
            for begin, before in ways.items():
                for written in _variants(piece.text):
                    end = begin + len(written)
                    if text.startswith(written, begin) and text.startswith(after, end):
                        way = None if before is None or end + len(after) in found else (before, begin, end, piece)
                        found[end + len(after)] = way
            if not found:
                raise self._error(f"it changes {self._message(piece)} or what is around it")
            ways = found
        way = ways.get(len(text))
        if way is None:
            raise self._error("its messages can be found in the text in more than one way, or in none")
        spans = []
        while way:
            way, begin, end, piece = way
            spans.append((begin, end, self.messages[piece.message]["role"]))
        return tuple(reversed(spans))

    def _message(self, piece: _Piece) -> str:
        return f"message {piece.message + 1} ({self.messages[piece.message]['role']})"

    def _error(self, why: str) -> DataError:
        return DataError(
            f"Which tokens of the document {self.name} belong to which message cannot be said exactly, because of what "
            f"the chat template does: {why}. Leave the roles out with --no-roles, or the document."
        )


def _variants(content: str) -> list[str]:
    """Give what templates write of a content: all of it, or without white space or line ends at its ends."""
    each = [content, content.strip(), content.lstrip(), content.rstrip()]
    each += [content.strip("\n"), content.lstrip("\n"), content.rstrip("\n")]
    return list(dict.fromkeys(each))
