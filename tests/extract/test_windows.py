"""Sequences hold the ids that the tokenizer gives, the text they stand for, and every label at its token."""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layerlake.errors import DataError, ModelError, RequestError
from layerlake.extract.code_depth import code_depth
from layerlake.extract.document import Document
from layerlake.extract.windows import Sequence, make_sequences
from some_tokenizers import KINDS, tokenizer

STDLIB = Path(sysconfig.get_path("stdlib"))


def text(content: str, name: str = "d", **labels: Any) -> Document:
    return Document(name, content, None, labels, None)


def ids(*values: int, name: str = "d", **labels: Any) -> Document:
    return Document(name, None, values, labels, None)


def made(
    documents: list[Document],
    tokens: Any = None,
    *,
    window: int | None = None,
    max_length: int | None = None,
    vocab_size: int | None = None,
    **more: Any,
) -> list[Sequence]:
    sequences, warnings = make_sequences(
        documents, tokens, window=window, max_length=max_length, vocab_size=vocab_size, **more
    )
    assert warnings == []
    return sequences


def check(content: str, tokens: Any, sequences: list[Sequence], window: int | None) -> None:
    """Check all that must hold of the sequences of one text, whatever it is."""
    at = 0
    for one in sequences:
        if gap := content[at : one.offset]:  # left out: it must have no token
            assert tokens(gap, add_special_tokens=False)["input_ids"] == []
        part = content[one.offset : one.offset + one.length]
        assert part
        assert one.input_ids.tolist() == tokens(part)["input_ids"]
        assert one.input_ids.dtype == one.start.dtype == one.end.dtype == np.int32
        assert window is None or len(one.input_ids) <= window
        assert (one.special.dtype, one.special.shape) == (np.dtype(bool), one.input_ids.shape)
        real = ~one.special
        assert one.input_ids[real].tolist() == tokens(part, add_special_tokens=False)["input_ids"]
        assert one.pieces == tokens.convert_ids_to_tokens(one.input_ids.tolist())
        assert (one.start[one.special] == -1).all() and (one.end[one.special] == -1).all()
        start, end = one.start[real], one.end[real]
        assert (np.diff(start) >= 0).all() and (np.diff(end) >= 0).all()
        assert (start <= end).all()
        assert start.min() >= one.offset and end.max() <= one.offset + one.length
        at = one.offset + one.length
    assert at == len(content) or tokens(content[at:], add_special_tokens=False)["input_ids"] == []


ODD = st.text(st.sampled_from(list("ab the.([\"'\t\r\n\n\n  é漢😀\0\u0301ﬁ<s>")), min_size=1, max_size=80)
PLAIN = st.text(min_size=1, max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(content=ODD | PLAIN, window=st.integers(8, 24))
def test_windows_give_back_the_text_and_equal_the_tokenizer(kind: str, content: str, window: int) -> None:
    tokens = tokenizer(kind)
    if not tokens(content, add_special_tokens=False)["input_ids"]:
        with pytest.raises(DataError, match="gives no token"):
            make_sequences([text(content)], tokens, window=window, max_length=None, vocab_size=None)
        return
    sequences, _ = make_sequences([text(content)], tokens, window=window, max_length=None, vocab_size=None)
    check(content, tokens, sequences, window)
    whole, _ = make_sequences([text(content)], tokens, window=None, max_length=None, vocab_size=None)
    assert len(whole) == 1
    check(content, tokens, whole, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [32, 100])
def test_windows_of_source_take_whole_lines_until_the_next_does_not_fit(kind: str, window: int) -> None:
    content = (STDLIB / "textwrap.py").read_text()[:9000]
    tokens = tokenizer(kind)
    sequences = made([text(content)], tokens, window=window)
    check(content, tokens, sequences, window)
    line_starts = {0, len(content)} | {k + 1 for k, c in enumerate(content) if c == "\n"}
    cut = 0
    for one in sequences:
        begin, end = one.offset, one.offset + one.length
        if end not in line_starts:  # only a line that does not fit alone is cut
            cut += 1
            line_end = content.find("\n", end) + 1 or len(content)
            assert not set(range(begin + 1, end)) & line_starts
            assert len(tokens(content[begin:line_end])["input_ids"]) > window
        elif end < len(content):
            next_end = content.find("\n", end) + 1 or len(content)
            assert len(tokens(content[begin:next_end])["input_ids"]) > window
    assert window == 32 or cut == 0


def test_a_line_longer_than_a_window_is_cut_where_tokens_begin() -> None:
    content = "hello\nthe cat sat on the mat the cat\nworld\n"
    tokens = tokenizer("bytes")
    assert tokens.tokenize(content)[2:6] == ["the", "Ġcat", "Ġsat", "Ġon"]
    sequences = made([text(content)], tokens, window=4)
    parts = [content[one.offset : one.offset + one.length] for one in sequences]
    assert parts == ["hello\n", "the cat sat on", " the mat the cat", "\nworld\n"]


def test_blank_lines_without_tokens_stay_with_the_window_before() -> None:
    content = "\n \nthe cat\n\n\n\nsat on\n\n"
    sequences = made([text(content)], tokenizer("wordpiece"), window=4)
    parts = [content[one.offset : one.offset + one.length] for one in sequences]
    assert parts == ["\n \nthe cat\n\n\n\n", "sat on\n\n"]


def test_a_text_that_fits_is_one_sequence() -> None:
    tokens = tokenizer("wordpiece")
    (one,) = made([text("the cat\nsat")], tokens, window=5)
    assert one.pieces == ["[CLS]", "the", "cat", "sat", "[SEP]"]
    assert (one.document, one.offset, one.length) == (0, 0, 11)
    assert one.special.tolist() == [True, False, False, False, True]
    assert (one.start.tolist(), one.end.tolist()) == ([-1, 0, 4, 8, -1], [-1, 3, 7, 11, -1])


def test_a_character_is_never_cut_and_a_window_without_room_for_it_is_refused() -> None:
    tokens = tokenizer("bytes, bos")
    content = "漢字😀"
    sequences = made([text(content)], tokens, window=5)
    assert [(one.offset, one.length) for one in sequences] == [(0, 1), (1, 1), (2, 1)]
    with pytest.raises(DataError, match=r"document d: the character 2 alone has 5 tokens .* window of 4"):
        made([text(content)], tokens, window=4)
    with pytest.raises(RequestError, match="window of 2 tokens has no room beside the 2 special tokens"):
        made([text(content)], tokenizer("wordpiece"), window=2)


def test_windows_are_fast_and_never_quadratic() -> None:
    source = "".join((STDLIB / name).read_text() for name in ("argparse.py", "typing.py", "dataclasses.py"))
    tokens = tokenizer("wordpiece")
    began = time.perf_counter()
    sequences = made([text(source)], tokens, window=128)
    took = time.perf_counter() - began
    count = sum(int((~one.special).sum()) for one in sequences)
    assert count > 50_000
    assert took < 10, f"{took:.1f} s for {count} tokens"  # about 0.7 s on one idle core


@pytest.mark.parametrize("kind", ["bytes, bos", "wordpiece", "metaspace"])
def test_U06_a_million_characters_without_a_space(kind: str) -> None:
    content = "valueother0" * 91_000
    tokens = tokenizer(kind)
    began = time.perf_counter()
    sequences = made([text(content)], tokens, window=512)
    assert time.perf_counter() - began < 30  # a few seconds; quadratic work would take an hour
    assert "".join(content[one.offset : one.offset + one.length] for one in sequences) == content
    assert max(len(one.input_ids) for one in sequences) <= 512
    for one in (sequences[0], sequences[-1]):
        assert one.input_ids.tolist() == tokens(content[one.offset : one.offset + one.length])["input_ids"]


def test_U06_odd_characters_keep_their_place() -> None:
    content = "a\0b\tc\x07\x1f\ufeffd"
    tokens = tokenizer("bytes")
    (one,) = made([text(content)], tokens)
    covered = {k for a, b in zip(one.start, one.end, strict=True) for k in range(a, b)}
    assert covered == set(range(len(content)))


def test_E07_real_eos_tokens_are_kept_when_pad_is_eos() -> None:
    tokens = tokenizer("bytes, pad is eos")
    documents = [text("the cat</s> sat on the mat"), text("hi")]
    long, short = made(documents, tokens)
    assert long.input_ids.tolist() == tokens(documents[0].text)["input_ids"]
    assert short.input_ids.tolist() == tokens(documents[1].text)["input_ids"]
    assert long.input_ids.tolist().count(tokens.eos_token_id) == 1
    assert not long.special.any()
    assert tokens.eos_token_id not in short.input_ids


def test_special_tokens_written_in_the_text_are_text() -> None:
    (one,) = made([text("the [SEP] cat [MASK]")], tokenizer("wordpiece"))
    assert one.pieces == ["[CLS]", "the", "[SEP]", "cat", "[MASK]", "[SEP]"]
    assert one.special.tolist() == [True, False, False, False, False, True]
    assert (int(one.start[2]), int(one.end[2])) == (4, 9)


def test_E11_a_bos_written_in_the_text_is_stored_twice_with_a_warning() -> None:
    tokens = tokenizer("bytes, bos")
    documents = [text("<s>the cat", "first"), text("the cat", "second"), text("the <s> cat", "third")]
    sequences, warnings = make_sequences(documents, tokens, window=None, max_length=None, vocab_size=None)
    assert [one.input_ids.tolist().count(tokens.bos_token_id) for one in sequences] == [2, 1, 2]
    assert sequences[0].special.tolist() == [True, False, False, False]
    (warning,) = warnings
    assert "'<s>' in front of every text, and 1 document(s) already begin with it" in warning
    assert "twice there: first. " in warning


def test_E11_one_warning_names_the_first_documents_and_counts_the_rest() -> None:
    documents = [text(f"<s>{k}", f"d{k}") for k in range(7)]
    tokens = tokenizer("bytes, bos")
    _, warnings = make_sequences(documents, tokens, window=None, max_length=None, vocab_size=None)
    (warning,) = warnings
    assert "7 document(s)" in warning
    assert "d0, d1, d2, d3, d4 and 2 more" in warning


@pytest.mark.parametrize("kind", ["bytes", "bytes, roberta", "bytes, prefix space"])
def test_E13_spans_cover_their_token_and_pieces_of_a_character_share_its_span(kind: str) -> None:
    tokens = tokenizer(kind)
    content = "café the 😀 cat 漢字  sat"
    (one,) = made([text(content)], tokens)
    spans = [(a, b) for a, b, s in zip(one.start.tolist(), one.end.tolist(), one.special, strict=True) if not s]
    pieces = [tokens.decode([i]) for i in one.input_ids[~one.special]]
    for (a, b), piece in zip(spans, pieces, strict=True):
        cut = content[a:b]
        assert piece.strip() in cut or "\N{REPLACEMENT CHARACTER}" in piece
        assert not cut.strip() or cut[0] != " "
    emoji, han = content.index("😀"), content.index("漢")
    assert spans.count((emoji, emoji + 1)) == 4
    assert spans.count((han, han + 1)) == spans.count((han + 1, han + 2)) == 3
    assert (5, 8) in spans  # "Ġthe" without its space


def test_E13_white_space_that_the_tokenizer_trims_gets_its_span_back() -> None:
    (one,) = made([text("the   cat ")], tokenizer("bytes, roberta"))
    assert one.pieces == ["<s>", "the", "ĠĠ", "Ġcat", "Ġ", "</s>"]
    assert list(zip(one.start.tolist(), one.end.tolist(), strict=True)) == [
        *[(-1, -1), (0, 3), (3, 5), (6, 9), (9, 10), (-1, -1)],
    ]


def test_E13_spans_are_those_of_the_document_not_of_the_window() -> None:
    content = "".join(f"the café {k}\n" for k in range(40))
    for one in made([text(content)], tokenizer("wordpiece"), window=12):
        words = [content[a:b] for a, b in zip(one.start, one.end, strict=True) if a >= 0]
        assert [w.lower().replace("é", "e") for w in words] == [
            p for p in one.pieces or [] if p not in ("[CLS]", "[SEP]")
        ]


def test_E14_a_tokenizer_without_pad_token_is_left_as_it_is() -> None:
    tokens = tokenizer("bytes")
    assert tokens.pad_token is None
    size = len(tokens)
    assert [len(one.input_ids) for one in made([text("the"), text("the cat sat")], tokens)] == [1, 3]
    assert (len(tokens), tokens.pad_token) == (size, None)


def test_E15_ids_work_without_a_tokenizer() -> None:
    documents = [ids(3, 1, 4, 1, 5), ids(9, name="e", y=2)]
    first, second, third = made(documents, window=4, vocab_size=10)
    assert [one.input_ids.tolist() for one in (first, second, third)] == [[3, 1, 4, 1], [5], [9]]
    assert [(one.document, one.offset, one.length) for one in (first, second, third)] == [
        (0, 0, 4),
        (0, 4, 1),
        (1, 0, 1),
    ]
    assert first.pieces is None
    assert (first.start.tolist(), first.end.tolist(), first.special.tolist()) == (
        [-1] * 4,
        [-1] * 4,
        [False] * 4,
    )
    assert [one.sequence_labels for one in (first, second, third)] == [{"y": None}, {"y": None}, {"y": 2}]


def test_texts_and_ids_go_together_in_order() -> None:
    documents = [ids(1, 2), text("the cat"), text("sat"), ids(3)]
    sequences = made(documents, tokenizer("bytes"))
    assert [one.document for one in sequences] == [0, 1, 2, 3]
    assert [one.pieces for one in sequences] == [None, ["the", "Ġcat"], ["sat"], None]


def test_text_without_a_tokenizer_and_a_slow_tokenizer_are_refused() -> None:
    with pytest.raises(DataError, match="document d is text and the model has no tokenizer"):
        made([text("a")])

    class Slow:
        is_fast = False

    with pytest.raises(ModelError, match="tokenizer Slow cannot say which characters"):
        made([text("a")], Slow())


def test_a_text_without_a_token_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"document a\.txt:2 gives no token"):
        made([text("a", "a.txt:1"), text(" \n", "a.txt:2")], tokenizer("wordpiece"))


def test_a_long_document_is_never_cut_in_silence() -> None:
    tokens = tokenizer("wordpiece")
    content = "the cat sat"
    made([text(content)], tokens, max_length=5)
    with pytest.raises(DataError, match=r"document d has 5 tokens .* at most 4\. .*--window 4"):
        made([text(content)], tokens, max_length=4)
    with pytest.raises(DataError, match=r"document d has 3 tokens .* at most 2"):
        made([ids(1, 2, 3)], max_length=2)


@pytest.mark.parametrize(("window", "says"), [(9, "window of 9 .* the 8"), (0, "window of 0"), (-1, "window of -1")])
def test_a_window_that_cannot_be_is_refused(window: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        made([ids(1)], window=window, max_length=8)


def test_ids_beyond_the_embedding_table_are_refused() -> None:
    made([ids(0, 9)], vocab_size=10)
    with pytest.raises(DataError, match=r"document e: token 1 has the id 10, .* table has 10 rows"):
        made([ids(1), ids(0, 10, name="e")], vocab_size=10)
    with pytest.raises(DataError, match="token 0 of the window at 2 has the id 11"):
        made([ids(1, 2, 11)], window=2, vocab_size=10)
    with pytest.raises(DataError, match=r"token 0 has the id 101, .* table has 50 rows"):
        made([text("the")], tokenizer("wordpiece"), vocab_size=50)


def test_token_labels_lie_on_their_tokens_and_special_tokens_have_none() -> None:
    content = "the cat\nsat on\nthe mat"
    document = text(content, pos=["D", "N", "V", None, "D", "N"], y=0.5)
    sequences = made([document, text("cat", "e", pos=None, y=None)], tokenizer("wordpiece"), window=4)
    assert [(one.pieces, one.labels["pos"]) for one in sequences] == [
        (["[CLS]", "the", "cat", "[SEP]"], [None, "D", "N", None]),
        (["[CLS]", "sat", "on", "[SEP]"], [None, "V", None, None]),
        (["[CLS]", "the", "mat", "[SEP]"], [None, "D", "N", None]),
        (["[CLS]", "cat", "[SEP]"], [None, None, None]),
    ]
    assert [one.sequence_labels for one in sequences] == [{"y": 0.5}] * 3 + [{"y": None}]


def test_token_labels_of_ids_lie_on_every_id() -> None:
    sequences = made([ids(5, 6, 7, y=[1, 2, 3])], window=2)
    assert [one.labels["y"] for one in sequences] == [[1, 2], [3]]


def test_a_wrong_number_of_token_labels_is_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match="document d has 3 labels 'y' and 2 tokens"):
        made([text("the cat", y=[1, 2, 3])], tokenizer("wordpiece"))
    with pytest.raises(DataError, match="document d has 1 labels 'y' and 2 tokens"):
        made([ids(1, 2, y=[1])])


def test_windows_that_change_the_number_of_tokens_do_not_shift_labels() -> None:
    tokens = tokenizer("bytes, prefix space")
    content = "cat\n\n\n\nthe"
    count = len(tokens(content)["input_ids"])
    sequences = made([text(content)], tokens, window=4)
    cut = sum(len(one.input_ids) for one in sequences)
    assert (len(sequences) > 1, cut != count) == (True, True)
    with pytest.raises(DataError, match=rf"{count} labels 'y' and {cut} tokens \({count} before it was cut"):
        made([text(content, y=[0] * count)], tokens, window=4)


def test_labelers_see_a_document_once_and_label_its_real_tokens() -> None:
    calls: list[tuple[str, str, list[str]]] = []

    def last_character(name: str, content: str, start: np.ndarray, end: np.ndarray) -> list[str]:
        words = [content[a:b] for a, b in zip(start, end, strict=True)]
        calls.append((name, content, words))
        return [word[-1] for word in words]

    content = "the cat\nsat on"
    sequences = made([text(content, y=1)], tokenizer("wordpiece"), window=4, labelers={"last": last_character})
    assert calls == [("d", content, ["the", "cat", "sat", "on"])]
    assert [one.labels for one in sequences] == [
        {"last": [None, "e", "t", None]},
        {"last": [None, "t", "n", None]},
    ]
    with pytest.raises(RequestError, match="'y' is a label of the data and a labeler"):
        made([text("a", y=1)], tokenizer("wordpiece"), labelers={"y": last_character})
    with pytest.raises(DataError, match="document d is token ids, and the labeler 'last' reads text"):
        made([ids(1)], labelers={"last": last_character})


def test_code_depth_counts_blocks_that_an_earlier_window_opened() -> None:
    content = "def value(self):\n    return [self,\n        self.value(other)]\nvalue\n"
    sequences = made([text(content)], tokenizer("wordpiece"), window=10, labelers={"depth": code_depth})
    assert len(sequences) > 2
    seen = [
        (content[a:b], label)
        for one in sequences
        for a, b, label in zip(one.start, one.end, one.labels["depth"], strict=True)
        if content[a:b] in ("def", "return", "self", "other", "value")
    ]
    assert seen == [
        *[("def", 0), ("value", 0), ("self", 1), ("return", 1), ("self", 2), ("self", 2), ("value", 2)],
        *[("other", 3), ("value", 0)],
    ]
