"""Symbols of a task as single tokens of a pretrained model's tokenizer, or refused by name."""

from __future__ import annotations

import pytest
from layerlake.errors import RequestError
from layerlake.extract.symbol_ids import symbol_ids
from layerlake.extract.tasks import parse_task
from some_tokenizers import tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "bytes, bos", "bytes, roberta"])
@pytest.mark.parametrize("task", ["parity", "dyck?k=4", "flip-flop", "modular-addition"])
def test_each_symbol_is_a_token_that_reads_as_it(kind, task):
    symbols = parse_task(task).symbols
    ids = symbol_ids(tokenizer(kind), symbols)
    assert len(set(ids)) == len(symbols)
    assert tuple(tokenizer(kind).decode([i]).strip() for i in ids) == symbols


def test_the_token_with_a_space_in_front_is_taken_where_there_is_one():
    tokens = tokenizer("bytes, bos")
    pieces = tokens.convert_ids_to_tokens(list(symbol_ids(tokens, ("the", "val", "self", "("))))
    assert pieces == ["Ġthe", "val", "Ġself", "("]


@pytest.mark.parametrize(
    ("kind", "symbols", "says"),
    [
        ("bytes", ("0", "213"), r"'213' is no single token of the tokenizer, which makes \['2', '1', '3'\]"),
        ("wordpiece", ("a", "\n"), r"'\\n' is no single token of the tokenizer, which makes \[\]"),
        ("wordpiece", ("a", "A"), "'a' and 'A' are one token of the tokenizer, 'a'"),
        ("metaspace", ("the", "Ω"), "'Ω' is no single token"),
    ],
)
def test_a_symbol_that_is_no_token_of_its_own_is_refused_by_name(kind, symbols, says):
    with pytest.raises(RequestError, match=says):
        symbol_ids(tokenizer(kind), symbols)


def test_the_unknown_token_stands_for_no_symbol():
    with pytest.raises(RequestError, match="'☃' is no single token"):
        symbol_ids(tokenizer("wordpiece"), ("0", "☃"))
