"""Texts and ids as a caller hands them over: in any form, or refused by their index."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy_models
from layerlake import capture
from layerlake.errors import (
    DataError,
    LakeWarning,
    RequestError,
)
from live_models import state_of
from some_tokenizers import byte_level_bpe
from toy_models import make_model


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2, 3], (4,)], [[1, 2, 3], [4]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        (np.array([[1, 2]], np.uint8), [[1, 2]]),
        ([torch.tensor([1, 2]), np.array([3])], [[1, 2], [3]]),
    ],
)
def test_ids_come_in_any_form(texts, expected):
    cache = capture(toy_models.tuples(), texts)
    assert cache.sequences == len(expected)
    assert [cache.sequence(n).tokens["token_id"].to_pylist() for n in range(len(expected))] == expected
    assert cache.texts == (None,) * len(expected)
    assert cache.tokens["token"].null_count == cache.tokens["char_start"].null_count == len(cache)


@pytest.mark.parametrize(
    ("texts", "error", "pattern"),
    [
        ([], DataError, "There are no texts"),
        ("", DataError, r"texts\[0\] gives no token: it is empty"),
        (["hello", ""], DataError, r"texts\[1\] gives no token"),
        (["hello", "a\ud800b"], DataError, r"texts\[1\] has '\\ud800' at 1, half of a character"),
        (["hello", [1]], RequestError, "mixes texts and ids"),
        ([[1], []], DataError, r"texts\[1\] has no ids"),
        ([[1], [2, 400]], DataError, r"texts\[1\]: token 1 has the id 400, and .* table has 400 rows"),
        ([[1], [2, -1]], DataError, r"texts\[1\]: token 1 has the id -1"),
        ([[1], [2**40]], DataError, r"texts\[1\]: token 0 has the id 1099511627776"),
        ([[1], [1.5]], RequestError, r"texts\[1\] is neither a text nor a list of ids"),
        ([[1], [True]], RequestError, r"texts\[1\] is neither"),
        ([[1], [[2], [3, 4]]], RequestError, r"texts\[1\] is neither"),
        ([[1], None], RequestError, r"texts\[1\] is neither"),
        ([[1], [5] * 65], DataError, r"texts\[1\] has 65 tokens and the model reads at most 64"),
        (torch.zeros(2, 2, 2, dtype=torch.long), RequestError, r"not \(2, 2, 2\)"),
        ({"input_ids": [[1]]}, RequestError, "what a tokenizer made of them"),
        (3, RequestError, "not int"),
        (torch.zeros(2, 2, dtype=torch.long, device="meta"), RequestError, "ids are on meta and the model is on cpu"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_index(texts, error, pattern):
    model = make_model("gpt2", layers=1, vocab_size=400)
    before = state_of(model)
    with pytest.raises(error, match=pattern):
        capture(model, texts, tokenizer=byte_level_bpe())
    assert state_of(model) == before


def test_texts_come_as_columns_too():
    import pandas as pd
    import pyarrow as pa

    model, tokenizer, texts = make_model("gpt2", layers=1, vocab_size=400), byte_level_bpe(), ["hello", "the cat"]
    expected = capture(model, texts, tokenizer=tokenizer)
    for given in (
        np.array(texts),
        np.array(texts, object),
        pd.Series(texts),
        pa.table({"t": texts})["t"],
        tuple(texts),
    ):
        found = capture(model, given, tokenizer=tokenizer)
        assert found.texts == expected.texts
        assert torch.equal(found["embed"], expected["embed"])


def test_what_a_tokenizer_gives_is_refused_with_what_to_give():
    tokenizer = byte_level_bpe(pad_token="</s>", eos_token="</s>")
    encoded = tokenizer(["hello", "hello world"], padding=True, return_tensors="pt")
    with pytest.raises(RequestError, match="what a tokenizer made of them"):
        capture(make_model("gpt2", layers=1, vocab_size=400), encoded, tokenizer=tokenizer)


def test_E11_a_text_that_begins_with_the_token_that_is_put_in_front_is_told():
    tokenizer = byte_level_bpe(bos=True, bos_token="<s>")
    model = make_model("gpt2", layers=1, vocab_size=400)
    with pytest.warns(LakeWarning, match=r"puts '<s>' in front .* and 1 already begin with it .*texts\[1\]") as caught:
        cache = capture(model, ["hello", "<s>hello"], tokenizer=tokenizer)
    assert caught[0].filename == __file__
    assert cache.sequence(1).tokens["token_id"].to_pylist()[:2] == [0, 0]
    assert cache.sequence(1).tokens["special"].to_pylist()[:2] == [True, False]
