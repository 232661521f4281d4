"""Models that are built here: what they are made of, that they start the same, and that they are read as any other."""

from __future__ import annotations

import json
from pathlib import Path

import built_models
import numpy as np
import pytest
import torch
from layerlake import Lake, extract
from layerlake.errors import ModelError, RequestError, UnknownNameError
from layerlake.extract.batch import Batch
from layerlake.extract.loaded_model import ModelSource
from layerlake.extract.loading import load_model
from layerlake.extract.models import ARCHITECTURES, SequenceModel, load_checkpoint, make_config
from layerlake.extract.self_test import SelfTest

IDS = torch.randint(0, 7, (4, 9), generator=torch.Generator().manual_seed(8))

SITES = {
    "transformer": "embed resid_pre z pattern attn_out resid_mid mlp_out resid_post final_norm logits",
    "mamba": "embed resid_pre conv_out ssm_state mixer_out resid_post final_norm logits",
    "mamba2": "embed resid_pre conv_out ssm_state mixer_out resid_post final_norm logits",
    "lstm": "embed resid_pre gates cell hidden resid_post logits",
    "gru": "embed resid_pre gates hidden resid_post logits",
    "lstm-residual": "embed resid_pre mixer_out gates cell hidden resid_post final_norm logits",
    "gru-residual": "embed resid_pre mixer_out gates hidden resid_post final_norm logits",
}

# Counted by hand from the shapes in the papers: a block, times four, and what lies around the blocks, at d_model 128.
_AROUND = 6 * 128 + (128 * 6 + 6)  # embedding of six symbols, head of six classes with bias
PARAMETERS = {
    "transformer": 4 * (4 * (128 * 128 + 128) + 2 * 128 * 512 + 512 + 128 + 4 * 128) + 128 * 128 + 2 * 128 + _AROUND,
    "mamba": 4 * (128 * 896 + 448 * 5 + 448 * (8 + 32) + 8 * 448 + 448 + 448 * 16 + 448 + 448 * 128 + 128)
    + 128 + _AROUND,
    "mamba2": 4 * (128 * (2 * 448 + 2 * 128 + 7) + (448 + 256) * 5 + 3 * 7 + 448 + 448 * 128 + 128) + 128 + _AROUND,
    "lstm": 4 * 4 * (2 * 128 * 128 + 2 * 128) + _AROUND,
    "gru": 4 * 3 * (2 * 128 * 128 + 2 * 128) + _AROUND,
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sizes_are_those_of_the_papers_and_matched_where_the_shape_allows(name):
    model = SequenceModel(make_config(name, vocab_size=6, outputs=6))
    assert model.parameter_count == PARAMETERS[name]
    if name not in ("lstm", "gru"):  # one width is all that these have
        assert 0.80e6 < model.parameter_count < 0.86e6


@pytest.mark.parametrize("variant", built_models.VARIANTS)
def test_a_seed_decides_every_value_and_nothing_else_does(variant):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    model = built_models.build(variant)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = built_models.build(variant), built_models.build(variant, seed=1)
    weights = model.state_dict()
    assert all(torch.equal(weights[n], v) for n, v in again.state_dict().items())
    assert all(v.isfinite().all() for v in weights.values())
    drawn = [n for n, v in other.state_dict().items() if not torch.equal(weights[n], v)]
    constant = {"norm", "mlp_norm", "D", "A_log", "bias"}
    assert {n for n in weights if n not in drawn} <= {n for n in weights if constant & set(n.split("."))}


@pytest.mark.parametrize("variant", built_models.VARIANTS)
def test_a_position_sees_itself_and_what_came_before(variant):
    model = built_models.build(variant)
    other = IDS.clone()
    other[:, 5] = (other[:, 5] + 1) % 7
    with torch.no_grad():
        before, after = model(IDS), model(other)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert (before[:, 5] - after[:, 5]).abs().amax(-1).min() > 1e-5
    assert (before[:, 8] - after[:, 8]).abs().amax() > 0


@pytest.mark.parametrize("variant", built_models.VARIANTS)
def test_every_model_passes_its_self_test_and_has_every_site(tmp_path, variant):
    model = load_model(ModelSource(str(built_models.save(tmp_path / "model", variant))))
    failed = [(c.name, c.worst, c.where) for c in SelfTest(model).run() if c.passed is False]
    assert not failed
    expected = SITES.get(variant) or SITES[variant.split("-")[0]]
    assert list(dict.fromkeys(p.site for p in model.points)) == expected.split()
    assert {p.layer for p in model.points if p.site == "resid_post"} == {0, 1}


def test_states_are_those_of_the_recurrence_written_out(tmp_path):
    """One channel of one sequence, by hand from the weights: nothing of the package's own but the model's values."""
    model = load_model(ModelSource(str(built_models.save(tmp_path / "model", "mamba"))))
    batch = Batch.of([IDS[0].numpy()], "none", "cpu")
    points = [model.point(s, 1) for s in ("conv_out", "ssm_state")]
    values, _ = model.run(batch, points)
    conv, state = values["conv_out-1"][0].double(), values["ssm_state-1"][0].double()
    mixer = model.module.get_submodule("backbone.layers.1.mixer")
    weights = {n: p.detach().double() for n, p in mixer.named_parameters()}
    h = torch.zeros(4, dtype=torch.float64)
    for t in range(9):
        low, b = (weights["x_proj.weight"] @ conv[t]).split([1, 8])
        delta = torch.log1p(torch.exp(weights["dt_proj.weight"] @ low + weights["dt_proj.bias"]))[3]
        h = torch.exp(delta * -torch.exp(weights["A_log"][3])) * h + delta * b[:4] * conv[t, 3]
        torch.testing.assert_close(state[t, 3], h, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("variant", ["transformer", "transformer-rotary", "transformer-sinusoidal"])
def test_positions_can_start_anywhere(variant):
    model = built_models.build(variant)
    with torch.no_grad():
        plain = model(IDS)
        same = model(IDS, positions=torch.arange(9).expand(4, 9))
        moved = model(IDS, positions=torch.arange(9).expand(4, 9) + 5)
    torch.testing.assert_close(plain, same, rtol=0, atol=1e-6)
    moves = (plain - moved).abs().max() > 1e-4
    assert moves == (variant != "transformer-rotary")  # which knows distances only


def test_a_sequence_longer_than_the_positions_is_refused_by_extraction(tmp_path):
    folder = built_models.save(tmp_path / "model", "transformer")
    data = tmp_path / "ids.jsonl"
    data.write_text(json.dumps({"input_ids": [1] * 17}) + "\n")
    with pytest.raises(RequestError, match="16"):
        extract(str(folder), data, tmp_path / "lake")


def test_extraction_stores_what_the_model_gives_and_proves_it(tmp_path):
    lengths = [3, 9, 1, 6, 9, 2]
    rows = [np.random.default_rng(i).integers(0, 7, n).tolist() for i, n in enumerate(lengths)]
    data = tmp_path / "ids.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    for variant in ("transformer", "mamba", "mamba2", "lstm", "gru-residual"):
        folder = built_models.save(tmp_path / variant, variant)
        name = {"transformer": "pattern"}.get(variant, "gates" if variant[:2] in ("ls", "gr") else "ssm_state")
        extract(str(folder), data, tmp_path / "lake", run=variant, sites=("resid_post", "logits", name))
        sel = Lake.open(tmp_path / "lake").select(
            f"SELECT run, row, seq FROM tokens WHERE run = '{variant}' ORDER BY seq, pos"
        )
        model, _ = load_checkpoint(folder)
        with torch.no_grad():
            expected = torch.cat([model(torch.tensor([row]))[0] for row in rows])
        torch.testing.assert_close(torch.from_numpy(sel.array(site="logits")), expected, rtol=1e-4, atol=1e-5)
        proved = Lake.open(tmp_path / "lake").sql(f"SELECT replayed FROM units WHERE run = '{variant}'")
        assert min(proved["replayed"].to_pylist()) > 0


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("mamba", {"d_stat": 4}, "d_state"),
        ("mamba", {"d_inner": 0}, "at least 1"),
        ("mamba", {"backend": "cuda"}, "mamba_ssm"),
        ("mamba", {"dt_min": 1.0}, "dt_max"),
        ("mamba2", {"head_dim": 60}, "multiple"),
        ("mamba2", {"groups": 2}, "divide"),
        ("transformer", {"heads": 3}, "divide"),
        ("transformer", {"positions": "absolute"}, "rotary"),
        ("transformer", {"heads": 2.0}, "no int"),
        ("lstm", {"residual": "yes"}, "no bool"),
        ("gru", {"forget_bias": 1.0}, "LSTM"),
        ("gru", {"embedding_std": float("nan")}, "number"),
        ("rnn", {}, "gru"),
        ("gru", {"vocab_size": True}, "no int"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(name, options, says):
    with pytest.raises(RequestError, match=says):
        make_config(name, **({"vocab_size": 2, "outputs": 2} | options))


def test_a_missing_size_is_named():
    with pytest.raises(RequestError, match="outputs"):
        make_config("gru", vocab_size=2)


@pytest.mark.parametrize("variant", ["mamba", "mamba2"])
def test_the_cuda_kernel_is_never_taken_on_a_cpu(tmp_path, variant):
    folder = built_models.save(tmp_path / "model", variant, backend="mamba_ssm")
    assert json.loads((folder / "config.json").read_text())["options"]["backend"] == "mamba_ssm"
    with pytest.raises(ModelError, match="runs on CUDA"):
        load_model(ModelSource(str(folder)))


@pytest.mark.parametrize("variant", built_models.VARIANTS)
def test_a_checkpoint_gives_the_same_model(tmp_path, variant):
    folder = built_models.save(tmp_path / "model", variant)
    model, about = load_checkpoint(folder)
    assert about == {"vocabulary": list("abcdefg"), "task": "letters", "target": "kind", "classes": [0, 1, 2]}
    assert model.config == built_models.build(variant).config
    with torch.no_grad():
        assert torch.equal(model(IDS), built_models.build(variant)(IDS))
    assert json.loads((folder / "config.json").read_text())["parameters"] == model.parameter_count


def _flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-7] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def _cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-4])


def _gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _other_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["options"]["layers"] = 3
    (folder / "config.json").write_text(json.dumps(config))


def _other_option(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["options"]["dropout"] = 0.1
    (folder / "config.json").write_text(json.dumps(config))


def _newer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"format": 2}))


@pytest.mark.parametrize("damage", [_flip, _cut, _gone, _other_size, _other_option, _newer])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, damage):
    folder = built_models.save(tmp_path / "model", "gru")
    damage(folder)
    with pytest.raises(ModelError, match="model"):
        load_model(ModelSource(str(folder)))


def test_weights_of_one_save_are_not_read_with_the_configuration_of_another(tmp_path):
    folder = built_models.save(tmp_path / "model", "gru")
    other = built_models.save(tmp_path / "other", "gru", seed=1)
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())  # killed between the two
    with pytest.raises(ModelError, match="not those that its config.json was written for"):
        load_checkpoint(folder)


def test_a_folder_without_such_a_model_is_said_to_be_none(tmp_path):
    with pytest.raises(RequestError, match="holds no model"):
        load_checkpoint(tmp_path)
    with pytest.raises(UnknownNameError, match="d_model"):
        make_config("gru", vocab_size=2, outputs=2, d_modle=3)
