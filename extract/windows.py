"""From documents to sequences: the token ids that the model reads at once, with text, labels and flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import DataError, RequestError
from .chat import ROLE, mark_tokens, special_ids
from .cutting import Slice, cut_text
from .document import Document
from .encoding import encode
from .labels import Labeler, token_labels

_BATCH_DOCUMENTS = 512
_BATCH_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Sequence:
    """A window of a document: what the model reads as one sequence of n tokens, some or all of which are stored."""

    document: int
    """The index of its document."""
    offset: int
    """Where it begins in the document, in characters; in tokens when the document is ids."""
    length: int
    """How much of the document it is, in the same unit."""
    input_ids: np.ndarray
    """int32 (n,)"""
    special: np.ndarray
    """bool (n,): added by the tokenizer, or written by a chat template; one that is written in the text is not."""
    start: np.ndarray
    """int32 (n,): first character of the token in the document; -1 for added special tokens and for ids."""
    end: np.ndarray
    """int32 (n,): one past its last character in the document; -1 likewise."""
    pieces: list[str] | None
    """The tokenizer's own names of the tokens, or the symbols of a task's string; None for ids."""
    labels: dict[str, list[Any]] = field(default_factory=dict)
    """Column -> n values; None for special tokens and where a label is missing."""
    sequence_labels: dict[str, Any] = field(default_factory=dict)
    """Column -> the document's label."""
    stored: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    """bool (n,): the token gets a row; False for one that is read as context only. By default all do."""

    def __post_init__(self) -> None:
        if not len(self.stored):
            object.__setattr__(self, "stored", np.ones(len(self.input_ids), bool))


def make_sequences(
    documents: Seq[Document],
    tokenizer: Any | None,
    *,
    window: int | None,
    max_length: int | None,
    vocab_size: int | None,
    overlap: int = 0,
    labelers: Mapping[str, Labeler] | None = None,
    special_tokens: bool = True,
) -> tuple[list[Sequence], list[str]]:
    """Turn documents into sequences of at most `window` tokens, and give warnings in words.

    **Ids.** The ids of a sequence equal ``tokenizer(text[offset : offset + length])["input_ids"]``: the
    tokenizer's default special tokens in every window, no padding, no truncation. A text that itself begins
    with the BOS string has two BOS tokens then; they are stored as they are, and a warning names the
    documents. Without `special_tokens` the tokenizer adds none to any text. It adds none to a rendered chat either,
    whose ids equal ``tokenizer.apply_chat_template(messages)``: the template writes its own.

    **Chats.** `mark_tokens` says which tokens of a rendered chat are special; where its contents were looked for, the
    label ``role`` says whose message a token belongs to.

    **Windows.** A document longer than `window` tokens, special ones included, is cut at the starts of lines
    (after ``\\n``): a window takes whole lines until the next would not fit. A line that does not fit into a
    window of its own is cut where tokens begin, and between characters where even one token does not fit; its
    rest opens the next window. Windows in order give back the whole document. The only slices that are left
    out are those without any token, which exist only where a cut separates a character that the tokenizer
    drops.

    **Overlap.** With `overlap`, a window after the first begins with that many tokens of the text before it as
    context. They are read and not stored, so that every token of the document is stored once; special tokens are
    stored with every window that has them, as without overlap. A cut then lies where the first token of a line
    begins, which with some tokenizers is after the indentation. A slice that begins elsewhere can be tokenized
    otherwise near its begin, so the context may be a few tokens longer, or shorter where the window would have no
    room or a token would lie on both sides of the cut: in the last resort there is none.

    **No window.** A document is one sequence. One that is longer than `max_length` is refused, never cut in
    silence.

    **Labels.** A list of labels must have one for each token that is not special (each id, when the document
    is ids). Labelers see each text once as a whole, with the spans of all its tokens.
    """
    if window is not None and window < 1:
        raise RequestError(f"A window of {window} tokens holds nothing. Ask for at least 1.")
    if window is not None and max_length is not None and window > max_length:
        raise RequestError(
            f"A window of {window} tokens is longer than the {max_length} that the model reads. Ask for"
            f" --window {max_length} or less."
        )
    if overlap < 0 or (overlap and (window is None or overlap >= window)):
        raise RequestError(
            f"An overlap of {overlap} tokens does not go with {'no window' if window is None else f'--window {window}'}"
            ". Ask for a window that is longer than its overlap."
        )
    labelers = labelers or {}
    columns = list(dict.fromkeys(column for document in documents for column in document.labels))
    if clash := sorted(set(columns) & set(labelers)):
        raise RequestError(f"{clash[0]!r} is a label of the data and a labeler. Rename one of them.")
    if any(d.chat is not None and d.chat.spans is not None for d in documents) and ROLE in {*columns, *labelers}:
        raise RequestError(f"Chats have a label {ROLE!r} of their own. Rename yours, or ask for --no-roles.")
    listed = [c for c in columns if any(isinstance(d.labels.get(c), list) for d in documents)]
    limit = window if window is not None else max_length
    chat_specials = special_ids(tokenizer) if any(d.chat is not None for d in documents) else None
    sequences: list[Sequence] = []
    twice: dict[str, str] = {}
    for index, whole, windows in _cut(documents, tokenizer, window, overlap, special_tokens):
        document = documents[index]
        windows, roles = _mark_chat(document, windows, chat_specials)
        for one in windows:
            size = len(one.input_ids)
            if limit is not None and size > limit:
                raise DataError(
                    f"The document {document.name} has {size} tokens and the model reads at most {limit}."
                    f" Cut documents into windows with --window {limit} (or less)."
                )
            _check_ids(document, one, vocab_size)
            ids, special = one.input_ids, one.special
            if size > 1 and ids[0] == ids[1] and special[0] and not special[1] and one.pieces:
                twice.setdefault(document.name, one.pieces[0])
        real = [one.stored & ~one.special for one in windows]
        per_token = {c: _listed(document, c, whole, sum(int(r.sum()) for r in real)) for c in listed}
        if roles is not None:
            per_token[ROLE] = roles
        for name, labeler in labelers.items():
            start = np.concatenate([one.start[r] for one, r in zip(windows, real, strict=True)])
            end = np.concatenate([one.end[r] for one, r in zip(windows, real, strict=True)])
            per_token[name] = token_labels(name, labeler, document.name, document.text, start, end)
        scalars = {c: document.labels.get(c) for c in columns if c not in listed}
        values = {column: iter(labels) for column, labels in per_token.items()}
        for one, mask in zip(windows, real, strict=True):
            labels = {c: [next(v) if r else None for r in mask.tolist()] for c, v in values.items()}
            sequences.append(replace(one, labels=labels, sequence_labels=dict(scalars)))
    return sequences, _warn_twice(twice)


def _cut(
    documents: Seq[Document], tokenizer: Any | None, window: int | None, overlap: int, special_tokens: bool
) -> Iterator[tuple[int, int, list[Sequence]]]:
    """Yield (index, real tokens of the whole document, its windows) of every document, in order.

    Texts are tokenized many at a time, as the call costs more than a short text.
    """
    at = 0
    while at < len(documents):
        if documents[at].text is None:
            ids, string = np.asarray(documents[at].input_ids, np.int32), documents[at].string
            yield at, len(ids), _cut_ids(at, ids, window, overlap, None if string is None else string.symbols)
            at += 1
            continue
        chats = documents[at].chat is not None
        added = special_tokens and not chats
        batch: list[str] = []
        size = 0
        for document in documents[at : at + _BATCH_DOCUMENTS]:
            if document.text is None or size > _BATCH_CHARACTERS or (document.chat is not None) != chats:
                break
            batch.append(document.text)
            size += len(document.text)
        if tokenizer is None:
            raise DataError(
                f"The document {documents[at].name} is text and the model has no tokenizer. Give data with 'input_ids'."
            )
        for text, whole in zip(batch, encode(tokenizer, batch, special_tokens=added), strict=True):
            name = documents[at].name
            if not whole.real:
                raise DataError(
                    f"The document {name} gives no token: the tokenizer drops all its text. Remove the document."
                )
            slices = [Slice(0, len(text), 0, whole)]
            if window is not None and len(whole.ids) > window:
                slices = cut_text(name, text, whole, tokenizer, window, overlap, special_tokens=added)
            yield at, whole.real, [_sequence(at, tokenizer, one) for one in slices]
            at += 1


def _sequence(document: int, tokenizer: Any, one: Slice) -> Sequence:
    encoding = one.encoding
    shift = np.where(encoding.special, 0, one.begin).astype(np.int32)
    pieces = tokenizer.convert_ids_to_tokens(encoding.ids.tolist())
    spans = (encoding.start + shift, encoding.end + shift)
    length = one.end - one.begin
    return Sequence(document, one.begin, length, encoding.ids, encoding.special, *spans, pieces, stored=one.own)


def _mark_chat(
    document: Document, windows: list[Sequence], specials: np.ndarray | None
) -> tuple[list[Sequence], list[str | None] | None]:
    """Flag the special tokens of a chat's windows, and give the roles of all other tokens, in order."""
    if document.chat is None or specials is None:
        return windows, None
    marked, roles = [], []
    for one in windows:
        special, names = mark_tokens(document.chat, one.input_ids, one.start, one.end, specials)
        marked.append(replace(one, special=special))
        labelled = one.stored & ~special
        roles += [name for name, has_label in zip(names, labelled.tolist(), strict=True) if has_label]
    return marked, roles if document.chat.spans is not None else None


def _cut_ids(
    document: int, ids: np.ndarray, window: int | None, overlap: int, symbols: Seq[str] | None
) -> list[Sequence]:
    size = window or len(ids)
    windows = []
    for at in range(0, max(1, len(ids) - overlap), size - overlap):
        w = ids[at : at + size]
        spans = np.full((2, len(w)), -1, np.int32)
        stored = np.arange(len(w)) >= (overlap if at else 0)
        pieces = None if symbols is None else list(symbols[at : at + size])
        windows.append(Sequence(document, at, len(w), w, np.zeros(len(w), bool), *spans, pieces=pieces, stored=stored))
    return windows


def _check_ids(document: Document, sequence: Sequence, vocab_size: int | None) -> None:
    if vocab_size is None or int(sequence.input_ids.max()) < vocab_size:
        return
    position = int(np.argmax(sequence.input_ids >= vocab_size))
    where = f"token {position}" + (f" of the window at {sequence.offset}" if sequence.offset else "")
    raise DataError(
        f"The document {document.name}: {where} has the id {sequence.input_ids[position]}, and the model's"
        f" embedding table has {vocab_size} rows. Use the tokenizer that the model was made with, or mend"
        f" the ids."
    )


def _listed(document: Document, column: str, whole: int, real: int) -> list[Any]:
    labels = document.labels.get(column)
    if labels is None:
        return [None] * real
    if len(labels) == real:
        return labels
    cut = f" ({whole} before it was cut into windows)" if real != whole else ""
    raise DataError(
        f"The document {document.name} has {len(labels)} labels {column!r} and {real} tokens{cut}. Give one"
        f" label a token, special tokens left out."
    )


def _warn_twice(twice: Mapping[str, str]) -> list[str]:
    if not twice:
        return []
    piece = next(iter(twice.values()))
    shown = ", ".join(list(twice)[:5]) + (f" and {len(twice) - 5} more" if len(twice) > 5 else "")
    return [
        f"The tokenizer, or its chat template, puts {piece!r} in front of every text, and {len(twice)} document(s)"
        f" already begin with it, so it is stored twice there: {shown}. Take it out of the text if one is meant."
    ]
