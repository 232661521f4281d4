"""Windows that overlap: every token of a document is stored once, with the text before it as context."""

from __future__ import annotations

import difflib
import itertools
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layerlake.errors import RequestError
from layerlake.extract.document import Document
from layerlake.extract.windows import Sequence, make_sequences
from some_tokenizers import KINDS, tokenizer

STDLIB = Path(sysconfig.get_path("stdlib"))
ODD = st.text(st.sampled_from(list("ab the.([\"'\t\r\n\n\n  é漢😀\0\u0301ﬁ<s>")), min_size=1, max_size=120)
PLAIN = st.text(min_size=1, max_size=60)


def made(content: str | tuple[int, ...], tokens: Any, window: int, overlap: int, **labels: Any) -> list[Sequence]:
    text, ids = (content, None) if isinstance(content, str) else (None, content)
    document = Document("d", text, ids, labels, None)
    sequences, _ = make_sequences([document], tokens, window=window, max_length=None, vocab_size=None, overlap=overlap)
    return sequences


def spans(one: Sequence, which: np.ndarray) -> list[tuple[int, int]]:
    return list(dict.fromkeys(zip(one.start[which].tolist(), one.end[which].tolist(), strict=True)))


def check(content: str, tokens: Any, sequences: list[Sequence], window: int) -> None:
    """Check all that must hold of the overlapping windows of one text, whatever it is."""
    taken = np.zeros(len(content), int)
    for k, one in enumerate(sequences):
        part = content[one.offset : one.offset + one.length]
        assert one.input_ids.tolist() == tokens(part)["input_ids"]
        assert len(one.input_ids) <= window
        assert one.stored[one.special].all()
        real = ~one.special
        own = one.stored & real
        assert own.any()
        if k == 0:
            assert one.stored.all()
        kept = np.flatnonzero(real)
        assert (np.diff(one.stored[kept].astype(int)) >= 0).all()  # the context, then the window's own tokens
        for start, end in spans(one, own):
            taken[start:end] += 1
        read = {i for start, end in spans(one, real) for i in range(start, end)}
        assert read <= set(range(one.offset, one.offset + one.length))
    (whole,) = [tokens(content, add_special_tokens=False, return_offsets_mapping=True)]
    covered = {i for a, b in whole["offset_mapping"] for i in range(a, b) if not content[i].isspace()}
    assert covered <= set(np.flatnonzero(taken).tolist())


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(content=ODD | PLAIN, window=st.integers(9, 24), overlap=st.integers(1, 8))
@example(content="    a\n        b\n    c\n" * 6, window=12, overlap=4)
def test_every_token_of_a_text_is_stored_once(kind: str, content: str, window: int, overlap: int) -> None:
    tokens = tokenizer(kind)
    if not tokens(content, add_special_tokens=False)["input_ids"]:
        return
    added = len(tokens("")["input_ids"])
    if overlap >= window - added:
        return
    sequences = made(content, tokens, window, overlap)
    check(content, tokens, sequences, window)
    taken = np.zeros(len(content), int)
    for one in sequences:
        mine = np.zeros(len(content), int)
        for start, end in spans(one, one.stored & ~one.special):
            mine[start:end] = 1
        taken += mine
    assert taken.max() <= 1  # no character is stored by two windows
    if kind in ("bytes", "bytes, bos", "bytes, pad is eos"):  # the others add or drop white space at a window's begin
        pieces = [p for one in sequences for p, own in zip(one.pieces, one.stored & ~one.special, strict=True) if own]
        assert tokens.convert_tokens_to_string(pieces) == content


@pytest.mark.parametrize(
    ("kind", "window", "overlap"),
    [*((kind, 100, 64) for kind in KINDS), ("wordpiece", 32, 8), ("bytes", 32, 8)],
)
def test_windows_of_source_read_the_text_before_them(kind: str, window: int, overlap: int) -> None:
    content = (STDLIB / "textwrap.py").read_text()[:5000]
    tokens = tokenizer(kind)
    sequences = made(content, tokens, window, overlap)
    check(content, tokens, sequences, window)
    lines = {k + 1 for k, c in enumerate(content) if c == "\n"}
    at_lines = 0
    for before, one in itertools.pairwise(sequences):
        own = np.flatnonzero(one.stored & ~one.special)
        context = int((~one.stored).sum())
        assert overlap <= context <= overlap + 4
        assert before.offset + before.length <= one.start[own[0]]
        first = content[: int(one.start[own[0]])].rstrip(" \n")
        at_lines += bool(lines & set(range(len(first), int(one.start[own[0]]) + 1)))
    assert at_lines > len(sequences) / 2 or window == 32
    stored = [i for one in sequences for i in one.input_ids[one.stored & ~one.special].tolist()]
    whole = tokens(content, add_special_tokens=False)["input_ids"]
    if kind == "wordpiece":
        assert stored == whole
    else:  # white space at a slice's end or begin can be tokenized otherwise than in the middle
        same = sum(m.size for m in difflib.SequenceMatcher(None, stored, whole, autojunk=False).get_matching_blocks())
        assert max(len(stored), len(whole)) - same <= 3 * len(sequences)


@given(n=st.integers(1, 60), window=st.integers(1, 20), overlap=st.integers(0, 19))
def test_every_id_is_stored_once_with_the_ids_before_it_as_context(n: int, window: int, overlap: int) -> None:
    ids = tuple(range(n))
    if overlap and overlap >= window:
        with pytest.raises(RequestError, match=f"overlap of {overlap} tokens does not go with --window {window}"):
            made(ids, None, window, overlap)
        return
    sequences = made(ids, None, window, overlap, y=list(range(n)))
    assert [i for one in sequences for i in one.input_ids[one.stored].tolist()] == list(ids)
    for k, one in enumerate(sequences):
        assert one.input_ids.tolist() == list(ids[one.offset : one.offset + one.length])
        assert len(one.input_ids) <= window
        assert int((~one.stored).sum()) == (overlap if k else 0)
        assert one.labels["y"] == [
            i if own else None for i, own in zip(one.input_ids.tolist(), one.stored, strict=True)
        ]
    assert sum(len(one.input_ids) == window for one in sequences) >= len(sequences) - 1


def test_special_tokens_are_stored_with_each_window_and_labels_lie_on_stored_tokens() -> None:
    content = "the cat\nsat on\nthe mat\n"
    sequences = made(content, tokenizer("wordpiece"), 5, 1, y=list("abcdef"))
    assert [(one.pieces, one.stored.tolist(), one.labels["y"]) for one in sequences] == [
        (["[CLS]", "the", "cat", "[SEP]"], [True] * 4, [None, "a", "b", None]),
        (["[CLS]", "cat", "sat", "on", "[SEP]"], [True, False, True, True, True], [None, None, "c", "d", None]),
        (["[CLS]", "on", "the", "mat", "[SEP]"], [True, False, True, True, True], [None, None, "e", "f", None]),
    ]
    assert [one.offset for one in sequences] == [0, 4, 12]


@pytest.mark.parametrize(
    ("window", "overlap", "says"),
    [(None, 3, "no window"), (8, -1, "overlap of -1"), (8, 8, "--window 8"), (8, 6, "no room .* 2 are special")],
)
def test_an_overlap_that_leaves_no_room_is_refused(window: int | None, overlap: int, says: str) -> None:
    document = Document("d", "the cat sat on the mat " * 9, None, {}, None)
    with pytest.raises(RequestError, match=says):
        make_sequences(
            [document], tokenizer("wordpiece"), window=window, max_length=None, vocab_size=None, overlap=overlap
        )
