"""The text around a stored token, for people who want to see what a row is."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from .run import Run

Span = tuple[int, int] | None
"""First character of a token in its document and one past its last, or None where that is not known."""


class Context(NamedTuple):
    """A token and its neighbours in the same sequence; `str()` gives them as text with the token marked.

    The pieces are what the tokenizer calls them (``##ing``, ``Ġdef``), special ones included, since the model reads
    them too; where a run was made from ids they are the ids.
    """

    before: list[str]
    token: str
    after: list[str]
    text: str
    """One line, the token between ``>>`` and ``<<``; white space stands where the document has some, as one space."""

    def __str__(self) -> str:
        return self.text


def token_context(run: Run, row: int, n: int) -> Context:
    """Give the context of a committed row: up to `n` tokens on each side, never from another sequence.

    Neighbours that the model read and the run does not store are part of it. Raises `CorruptLakeError` when the unit's
    token table is not the one that was committed, or a neighbour is to come from a plan that was changed.
    """
    unit = row // run.record.unit_rows
    table = run.unit_tokens(unit)
    own = table.slice(int(np.flatnonzero(table["row"].to_numpy() == row)[0]), 1)
    if not run.record.stores_all:
        table = run.planned_tokens(unit)
    same = table.filter(pa.array(table["seq"].to_numpy() == own["seq"][0].as_py())).sort_by("pos")
    at = int(np.flatnonzero(same["pos"].to_numpy() == own["pos"][0].as_py())[0])
    first = max(0, at - n)
    window = same.slice(first, at + n + 1 - first).to_pylist()
    at -= first
    pieces = [str(t["token_id"]) if t["token"] is None else t["token"] for t in window]
    spans = [_span(t["char_start"], t["char_end"]) for t in window]
    return Context(pieces[:at], pieces[at], pieces[at + 1 :], marked_text(pieces, spans, at))


def marked_text(pieces: Sequence[str], spans: Sequence[Span], at: int) -> str:
    """Join pieces to one line of text, the one at `at` between ``>>`` and ``<<``.

    Where the spans of two neighbours are known, white space stands between them if it does in the document;
    elsewhere they are parted by a space.
    """
    text = ""
    last: Span = None
    for piece, span, marked in _whole_characters(pieces, spans, at):
        parted = last is None or span is None or span[0] > last[1]
        shown = plain_piece(piece, span)
        text += (" " if text and parted else "") + (f">>{shown}<<" if marked else shown)
        last = span
    return text


def _whole_characters(pieces: Sequence[str], spans: Sequence[Span], at: int) -> Iterator[tuple[str, Span, bool]]:
    """Join pieces that have a character in common, the marked one excepted, so that it can be read."""
    held: tuple[str, Span, bool] | None = None
    for k, (piece, span) in enumerate(zip(pieces, spans, strict=True)):
        before = held[1] if held else None
        if held and not held[2] and k != at and before and span and span[0] < before[1]:
            held = (held[0] + piece, (before[0], max(before[1], span[1])), False)
            continue
        if held:
            yield held
        held = (piece, span, k == at)
    if held:
        yield held


def plain_piece(piece: str, span: Span) -> str:
    """Give the characters of the text that a tokenizer's piece stands for, as far as that can be told from it.

    ``##`` of WordPiece, ``▁`` of SentencePiece and the alphabet of byte-level pieces are taken back; a piece as long as
    its span is the text itself (a ``###`` of Markdown). White space in front is left out, as the spans say where it
    is; line breaks are shown as ``\\n``. Byte pieces that are no whole character stay as they are.
    """
    return _characters(piece, span).replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _characters(piece: str, span: Span) -> str:
    length = None if span is None else span[1] - span[0]
    decoded = _from_bytes(piece)
    if decoded is not None and decoded.isspace():
        return decoded
    if not piece.strip("▁"):
        return " " * len(piece)
    if length is None or length == len(piece):
        return piece
    if decoded is not None and len(decoded.lstrip()) == length:
        return decoded.lstrip()
    if piece.startswith("##") and len(piece) > 2:
        return piece[2:]
    if piece.startswith("▁"):
        return piece.lstrip("▁").replace("▁", " ")
    return piece.lstrip("Ġ") or piece


def _from_bytes(piece: str) -> str | None:
    """Decode a byte-level piece; None when it cannot be one, or is a part of a character."""
    alphabet = _byte_alphabet()
    if not all(character in alphabet for character in piece):
        return None
    try:
        return bytes(alphabet[character] for character in piece).decode()
    except UnicodeDecodeError:
        return None


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Give the byte that each character of byte-level pieces stands for.

    As in GPT-2 (Radford et al., 2019): printable Latin-1 stands for itself, the other bytes, in order, for the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _span(start: int | None, end: int | None) -> Span:
    return None if start is None or end is None or start < 0 else (start, end)
