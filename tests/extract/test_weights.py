"""What is said of two models' weights: whether they are the same, and which tensors differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import odd_models
import pytest
import torch
from layerlake.errors import CorruptLakeError, ModelError, SettingsDifferError
from layerlake.extract.driver import extract
from layerlake.extract.loaded_model import ModelSource
from layerlake.extract.loading import load_model
from layerlake.extract.repair import repair
from layerlake.extract.settings import other_model
from layerlake.extract.weights import kept_weights, weight_digests, weights_difference, weights_fingerprint
from layerlake.store.lake import Lake
from safetensors.torch import load_file, save_file
from torch import nn
from toy_models import make_model, save_model


def differs(one: nn.Module, other: nn.Module) -> str:
    kept, found = weight_digests(one), weight_digests(other)
    said = weights_difference(kept, found)
    assert (weights_fingerprint(kept) == weights_fingerprint(found)) == (said == "")
    assert bool(weights_difference(found, kept)) == bool(said)
    return said


def in_order(*names: str) -> nn.Module:
    model = nn.Module()
    for name in names:
        setattr(model, name, nn.Parameter(torch.full((2, 3), float(len(name)))))
    model.register_buffer("scale", torch.ones(1), persistent=False)
    return model


def test_the_same_weights_are_the_same_in_any_order_and_place():
    assert differs(in_order("a", "bb", "ccc"), in_order("ccc", "a", "bb")) == ""
    model = make_model("gpt2")
    again = make_model("gpt2")
    for parameter in again.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 2:  # the same values lie otherwise in memory
            parameter.data = parameter.data.t().contiguous().t()
    assert differs(model, again) == ""


def test_one_last_bit_of_one_tensor_is_named_and_so_is_a_buffer():
    model, other = make_model("gpt2"), make_model("gpt2")
    with torch.no_grad():
        one = other.transformer.h[1].mlp.c_fc.weight.view(-1)
        one[5] = torch.nextafter(one[5], torch.tensor(9.0))
    total = len(weight_digests(model))
    expected = f"weights: transformer.h.1.mlp.c_fc.weight has other values (1 of {total} tensors)"
    assert differs(model, other) == expected
    one, two = in_order("a"), in_order("a")
    two.scale.fill_(2)
    assert differs(one, two) == "weights: scale has other values (1 of 2 tensors)"
    two.scale.fill_(1)
    with torch.no_grad():
        one.a.fill_(0.0)
        two.a.fill_(-0.0)  # equal as numbers, other bits
    assert differs(one, two) == "weights: a has other values (1 of 2 tensors)"


def test_what_is_missing_new_or_of_another_shape_or_dtype_is_said():
    assert differs(in_order("a", "bb"), in_order("a")) == "weights: bb is missing (1 of 3 tensors)"
    assert differs(in_order("a"), in_order("a", "bb")) == "weights: bb is new (1 of 3 tensors)"
    one, two = in_order("a"), in_order("a")
    two.a = nn.Parameter(one.a.detach().reshape(3, 2))  # the same bytes
    assert differs(one, two) == "weights: a has shape (3, 2), not (2, 3) (1 of 2 tensors)"
    two.a = nn.Parameter(one.a.detach().view(torch.int32), requires_grad=False)
    assert differs(one, two) == "weights: a is int32, not float32 (1 of 2 tensors)"
    said = differs(make_model("llama"), make_model("llama").to(torch.bfloat16))
    assert said.count(" is bfloat16, not float32") == 3
    total = len(weight_digests(make_model("llama")))
    assert said.endswith(f"({total} of {total} tensors)")


def test_tied_weights_count_once_and_copies_of_equal_values_twice():
    tied, other, untied = odd_models.Tied(), odd_models.Tied(), odd_models.Tied()
    assert len(weight_digests(tied)) == len(weight_digests(odd_models.Base()))
    assert "embed.weight" in weight_digests(tied)
    assert differs(tied, other) == ""
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    assert differs(tied, untied) == "weights: head.weight is new (1 of 7 tensors)"
    assert differs(untied, tied) == "weights: head.weight is missing (1 of 7 tensors)"
    # Two names of a part and of the whole are two tensors, and so are two empty ones.
    model = in_order("a", "b")
    model.register_buffer("part", model.a.detach()[:1])
    model.register_buffer("none", torch.empty(0))
    model.register_buffer("nothing", torch.empty(0))
    assert set(weight_digests(model)) == {"a", "b", "none", "nothing", "part", "scale"}
    same = in_order("b")  # whichever name was registered first, the first in the alphabet stands for both
    same.a = same.b
    assert set(weight_digests(same)) == {"a", "scale"}


def test_scalars_empty_tensors_and_odd_dtypes_are_hashed():
    model = nn.Module()
    for name, value in {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor([True]),
        "complex": torch.ones(2, dtype=torch.complex64),
        "eight": torch.ones(2).to(torch.float8_e4m3fn),
    }.items():
        model.register_buffer(name, value)
    found = weight_digests(model)
    assert {n: (d["dtype"], d["shape"]) for n, d in found.items()} == {
        "scalar": ("float32", []),
        "empty": ("float32", [0, 3]),
        "flag": ("bool", [1]),
        "complex": ("complex64", [2]),
        "eight": ("float8_e4m3fn", [2]),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A model and a lake of one run of it."""
    folder = tmp_path_factory.mktemp("weights")
    save_model(folder / "model", "gpt2", layers=2)
    rows = [{"input_ids": np.random.default_rng(0).integers(0, 50, n).tolist()} for n in (5, 9, 3)]
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    extract(str(folder / "model"), folder / "d.jsonl", folder / "lake", run="r")
    return folder


@pytest.fixture
def work(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "work"))


def nudge(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["transformer.h.1.attn.c_attn.weight"][2, 3] += 1e-3
    save_file(weights, model / "model.safetensors", {"format": "pt"})


NUDGED = r"weights: transformer\.h\.1\.attn\.c_attn\.weight has other values \(1 of \d+ tensors\)"


def test_the_run_keeps_a_digest_of_each_tensor_and_they_make_its_fingerprint(work):
    run = Lake.open(work / "lake").run("r")
    model = load_model(ModelSource(str(work / "model")))
    assert kept_weights(run) == weight_digests(model.module) == model.weights
    assert weights_fingerprint(kept_weights(run)) == run.record.settings["model"]["fingerprint"]
    assert "weights.json" in run.record.files
    assert "tensors" not in json.dumps(run.record.settings)


def test_a_resume_with_other_weights_says_which(work):
    nudge(work / "model")
    with pytest.raises(SettingsDifferError, match=NUDGED):
        extract(str(work / "model"), work / "d.jsonl", work / "lake", run="r")


def test_a_value_of_the_config_is_the_config_and_no_weight(work):
    path = work / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_norm_epsilon": 1e-3}))
    with pytest.raises(SettingsDifferError, match=r"\(model\.config is another\)"):
        extract(str(work / "model"), work / "d.jsonl", work / "lake", run="r")
    run = Lake.open(work / "lake").run("r")
    assert other_model(load_model(ModelSource(str(work / "model"))).identity, run.record.settings) == ["config"]


def test_a_worker_whose_function_gives_other_weights_says_which(work):
    with pytest.raises(ModelError, match=r"other weights in the worker .*\(weights: .* has other values.*\)\. A func"):
        extract("toy_models:unseeded", work / "d.jsonl", work / "lake", run="other")


def test_a_repair_with_other_weights_says_which_and_moves_nothing(work):
    shard = next((work / "lake").rglob("activations.zarr/embed/c.*"))
    shard.write_bytes(shard.read_bytes()[:-9])
    nudge(work / "model")
    (outcome,) = repair(work / "lake", model=str(work / "model")).outcomes
    assert outcome.done == "cannot be recreated"
    assert "than the model that made the run (weights: transformer.h.1.attn" in outcome.why


@pytest.mark.parametrize("spoil", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes().replace(b"1", b"2"))])
def test_digests_that_are_gone_or_changed_are_found_and_made_again_from_the_same_model(work, spoil):
    path = work / "lake" / "runs" / "r" / "weights.json"
    before = path.read_bytes()
    spoil(path)
    lake = Lake.open(work / "lake")
    assert [p.path for p in lake.verify()] == ["runs/r/weights.json"]
    assert kept_weights(lake.run("r")) == {}
    with pytest.raises(CorruptLakeError):
        lake.run("r").intact("weights.json")
    right = (work / "model" / "model.safetensors").read_bytes()
    nudge(work / "model")
    left = repair(work / "lake", model=str(work / "model"))
    assert [(o.path, o.done) for o in left.outcomes] == [("runs/r/weights.json", "cannot be recreated")]
    assert "other weights than the model that made the run" in left.outcomes[0].why
    # The fingerprint still tells, though not which tensor.
    with pytest.raises(SettingsDifferError, match=r"model\.fingerprint is another"):
        extract(str(work / "model"), work / "d.jsonl", work / "lake", run="r")
    (work / "model" / "model.safetensors").write_bytes(right)
    assert repair(work / "lake", model=str(work / "model"), dry_run=True).whole
    assert [(o.path, o.done) for o in repair(work / "lake", model=str(work / "model")).outcomes] == [
        ("runs/r/weights.json", "recreated")
    ]
    assert path.read_bytes() == before
    assert lake.verify() == []
