"""Checkpoints in the form of mamba-ssm: loaded as the same weights in transformers' own form, and never by a pickle."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import some_tokenizers
import torch
import transformers
from layerlake.__main__ import main
from layerlake.errors import ModelError, RequestError, WorldError
from layerlake.extract.convert import convert
from layerlake.extract.driver import extract
from layerlake.extract.loaded_model import ModelSource
from layerlake.extract.loading import load_model
from layerlake.extract.models import SequenceModel, make_config
from layerlake.extract.self_test import SelfTest
from layerlake.extract.verify_replay import verify_replay
from layerlake.store.lake import Lake
from processes import environment, run_layerlake

# What the authors write for mamba-130m and mamba2-130m, with the sizes cut down.
MAMBA = {
    "d_model": 32, "n_layer": 2, "vocab_size": 61, "ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": True,
    "fused_add_norm": True, "pad_vocab_size_multiple": 8,
}  # fmt: skip
MAMBA2 = MAMBA | {
    "d_intermediate": 0, "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [], "attn_cfg": {},
    "pad_vocab_size_multiple": 16, "tie_embeddings": True,
}  # fmt: skip

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mamba": (MAMBA, {}),
    "mamba-options": (
        MAMBA | {"tie_embeddings": False, "residual_in_fp32": False, "ssm_cfg": {
            "layer": "Mamba1", "d_state": 5, "d_conv": 3, "expand": 3, "dt_rank": 7, "bias": True, "conv_bias": False,
            "dt_init": "constant", "use_fast_path": False,
        }},
        {"tie_word_embeddings": False, "residual_in_fp32": False, "state_size": 5, "conv_kernel": 3, "expand": 3,
         "time_step_rank": 7, "use_bias": True, "use_conv_bias": False},
    ),
    "mamba2": (MAMBA2, {}),
    "mamba2-options": (
        MAMBA2 | {"tie_embeddings": False, "ssm_cfg": {
            "layer": "Mamba2", "d_state": 6, "d_conv": 3, "expand": 3, "headdim": 8, "ngroups": 3, "bias": True,
            "conv_bias": False, "chunk_size": 4, "dt_limit": [0.01, 0.4], "d_ssm": 96, "A_init_range": [1, 3],
        }},
        {"tie_word_embeddings": False, "state_size": 6, "conv_kernel": 3, "expand": 3, "head_dim": 8, "num_heads": 12,
         "n_groups": 3, "use_bias": True, "use_conv_bias": False, "chunk_size": 4, "time_step_limit": (0.01, 0.4)},
    ),
}  # fmt: skip
"""The authors' config.json, and what differs in transformers' from the defaults of `original`."""

IDS = torch.randint(0, 61, (3, 11), generator=torch.Generator().manual_seed(5))
Weights = dict[str, torch.Tensor]


def original(case: str) -> Any:
    """Make the model of a case from transformers' own configuration, every weight away from its start."""
    _, options = CASES[case]
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "tie_word_embeddings": True}
    if case.startswith("mamba2"):
        shape = {"state_size": 128, "num_heads": 1, "head_dim": 64, "n_groups": 1}
        model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**(sizes | shape | options)))
    else:
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**(sizes | {"state_size": 16} | options)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def theirs(model: Any) -> Weights:
    """Give a model's weights under the authors' names; a tied head under both of its names, as torch.save writes it."""
    return {n.replace("backbone.embeddings.", "backbone.embedding."): t for n, t in model.state_dict().items()}


def write(folder: Path, config: dict[str, Any], weights: Weights, *, pickled: bool = False) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        safetensors.torch.save_file({n: t.clone() for n, t in weights.items()}, folder / "model.safetensors")
    return folder


def load(folder: Path, **options: Any) -> Any:
    return load_model(ModelSource(str(folder), **options))


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(IDS).logits


def configured(loaded: Any) -> dict[str, Any]:
    """Give a model's configuration without the ids of special tokens, which the authors' config.json does not name."""
    return {k: v for k, v in loaded.module.config.to_dict().items() if not k.endswith("token_id") and k[0] != "_"}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_the_same_weights_do_in_transformers_form(case, tmp_path):
    model = original(case)
    loaded = load(write(tmp_path / "m", CASES[case][0], theirs(model)))
    assert torch.equal(logits(loaded.module), logits(model))
    assert loaded.vocab_size == 64
    model.save_pretrained(tmp_path / "hf")
    known = load(tmp_path / "hf")
    assert loaded.weights == known.weights
    assert {p.name for p in loaded.points} == {p.name for p in known.points}
    assert configured(loaded) == configured(known)
    assert loaded.identity | {"config": ""} == known.identity | {"config": ""}
    checks = SelfTest(loaded).run()
    assert [c.name for c in checks if c.passed is False] == []
    assert sum(c.passed is True for c in checks) >= 8


AUTHORS = {
    "mamba": (-0.12164, 0.03926, -0.07967, 0.14251, 0.02245, -0.00126),
    "mamba-options": (0.16298, 0.10484, 0.10263, 0.32879, 0.00901, -0.06224),
    "mamba2": (-0.22146, -0.7028, -0.65506, -0.13482, 0.26553, -0.03689),
    "mamba2-options": (0.00833, -0.7957, -0.5398, -0.61096, 0.50009, -0.45025),
}
"""The first logits after the last of the ids below, by mamba-ssm 2.3.2.post1's own MambaLMHeadModel with `waves` as its
weights: on a CPU, in float32, without its fused kernels, their scans being its selective_scan_ref and
ssd_chunk_scan_combined_ref and their norms its rms_norm_refs."""


def waves(weights: Weights) -> Weights:
    """Give every weight values that follow from the order of the names alone."""
    made = {}
    for k, (name, tensor) in enumerate(sorted(weights.items())):
        made[name] = (0.5 * torch.sin(k + 0.7 * torch.arange(tensor.numel(), dtype=torch.float64) ** 1.1)).float()
        made[name] = made[name].view(tensor.shape)
    return made


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_the_code_of_the_authors_gave(case, tmp_path):
    config, _ = CASES[case]
    tied = config.get("tie_embeddings", True)
    names = {n: t for n, t in theirs(original(case)).items() if not (tied and n == "lm_head.weight")}
    loaded = load(write(tmp_path / "m", config, waves(names)))
    with torch.no_grad():
        found = loaded.module((torch.arange(11) * 7 + 3)[None] % 61).logits[0, -1, :6]
    assert torch.allclose(found, torch.tensor(AUTHORS[case]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["mamba", "mamba2"])
def test_it_computes_what_the_models_built_here_do(case, tmp_path):
    """Weights of a model of `extract.models`, written under the authors' names: another implementation of both."""
    small = {"d_state": 16, "d_inner": 64} if case == "mamba" else {"d_state": 6, "d_inner": 64, "head_dim": 8}
    small |= {"groups": 2} if case == "mamba2" else {}
    options = make_config(case, vocab_size=64, outputs=64, layers=2, d_model=32, embedding_std=0.5, **small)
    model = SequenceModel(options, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.head.bias.zero_()
    named: Weights = {"lm_head.weight": model.head.weight.detach()}
    for name, value in model.backbone.state_dict().items():
        first, _, rest = name.partition(".")
        named[f"backbone.{'norm_f' if first == 'norm' else first}.{rest}".replace(".conv.", ".conv1d.")] = value
    ssm = {} if case == "mamba" else {"layer": "Mamba2", "d_state": 6, "headdim": 8, "ngroups": 2}
    loaded = load(write(tmp_path / "m", MAMBA | {"ssm_cfg": ssm, "tie_embeddings": False}, named))
    with torch.no_grad():
        expected = model(IDS)
    assert float((logits(loaded.module) - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("kept", ["both", "embedding", "head"])
def test_a_tied_head_may_stand_in_the_file_under_either_name(kept, tmp_path):
    model = original("mamba")
    weights = theirs(model)
    if kept != "both":
        del weights["lm_head.weight" if kept == "embedding" else "backbone.embedding.weight"]
    loaded = load(write(tmp_path / "m", MAMBA, weights))
    assert torch.equal(logits(loaded.module), logits(model))
    assert loaded.module.lm_head.weight is loaded.module.backbone.embeddings.weight


def test_weights_in_half_precision_beside_float32_ones_keep_all_their_bits(tmp_path):
    model = original("mamba2")
    weights = {n: t if n.endswith(("A_log", ".D")) else t.bfloat16() for n, t in theirs(model).items()}
    folder = write(tmp_path / "m", MAMBA2, weights)
    whole = load(folder)
    assert whole.identity["dtype"] == "float32"
    state = theirs(whole.module)
    assert all(torch.equal(state[n], t.float()) for n, t in weights.items())
    assert load(folder, dtype="bfloat16").identity["dtype"] == "bfloat16"
    one = write(tmp_path / "one", MAMBA2, {n: t.bfloat16() for n, t in weights.items()})
    assert load(one).identity["dtype"] == "bfloat16"


@pytest.mark.parametrize("case", ["mamba", "mamba2-options"])
def test_a_run_of_it_is_proved_and_is_that_of_the_converted_folder(case, tmp_path):
    model = original(case)
    folder = write(tmp_path / "m", CASES[case][0], theirs(model))
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row[: 4 + 3 * i].tolist()}) + "\n" for i, row in enumerate(IDS)))
    lake = tmp_path / "lake"
    extract(str(folder), data, lake, run="r", sites="resid_post,conv_out,ssm_state,mixer_out,final_norm,logits")
    run = Lake.open(lake).run("r")
    identity = run.record.settings["model"]
    assert identity["kind"] == case.partition("-")[0]
    assert identity["fingerprint"]
    assert identity["config"]
    assert min(Lake.open(lake).sql("SELECT replayed FROM units")["replayed"].to_pylist()) > 0
    out = tmp_path / "out"
    convert(str(folder), out)
    assert load(out).identity == load(folder).identity
    assert verify_replay(lake, model=str(out), share=1.0).problems == []


def test_texts_are_read_by_the_tokenizer_beside_it(tmp_path):
    model = original("mamba")
    folder = write(tmp_path / "m", MAMBA, theirs(model))
    assert load(folder).tokenizer is None
    tokenizer = some_tokenizers.byte_level_bpe()
    tokenizer.save_pretrained(folder)
    expected = tokenizer("the cat")["input_ids"]
    loaded = load(folder)
    assert loaded.tokenizer("the cat")["input_ids"] == expected
    made = convert(str(folder), tmp_path / "out")
    assert set(made.tokenizer) == {"tokenizer.json", "tokenizer_config.json"}
    assert load(tmp_path / "out").identity == loaded.identity
    for file in made.tokenizer:
        (folder / file).unlink()
    tokenizer.backend_tokenizer.model.save(
        str(folder)
    )  # vocab.json and merges.txt: the architecture says what they are
    assert load(folder).tokenizer("the cat")["input_ids"] == expected


def without(weights: Weights, part: str) -> Weights:
    return {n: t for n, t in weights.items() if part not in n}


def renamed(weights: Weights, old: str, new: str) -> Weights:
    return weights | {n.replace(old, new): t for n, t in weights.items() if old in n}


def unpadded(weights: Weights) -> Weights:
    return {n: t if "layers" in n or t.ndim == 1 else t[:61] for n, t in weights.items()}


LAYER = r"layers\.{}\.mixer\.A_log"
FITTING_NOT: dict[str, tuple[str, Any, str]] = {
    "a missing layer": ("mamba", lambda w: without(w, "layers.1."), "lacks weights.*" + LAYER.format(1)),
    "a missing table": ("mamba-options", lambda w: without(w, "embedding"), r"lacks.*backbone\.embedding\.weight"),
    "a missing head": ("mamba-options", lambda w: without(w, "lm_head"), r"lacks.*lm_head\.weight"),
    "an extra layer": ("mamba", lambda w: renamed(w, "layers.1.", "layers.2."), "no place for.*" + LAYER.format(2)),
    "an MLP": ("mamba2", lambda w: w | {"backbone.layers.0.mlp.fc1.weight": torch.ones(4, 4)}, r"layers\.0\.mlp\.fc1"),
    "a stray weight": ("mamba", lambda w: w | {"value_head.weight": torch.ones(3)}, r"no place.*value_head\.weight"),
    "another name": ("mamba", lambda w: renamed(w, "embedding", "embeddings"), r"no place for"),
    "a table without the padding": ("mamba", unpadded, r"other sizes.*embedding\.weight \(61, 32\) for \(64, 32\)"),
    "a head of its own": (
        "mamba",
        lambda w: w | {"lm_head.weight": w["lm_head.weight"] + 1},
        r"lm_head.*tie_embeddings",
    ),
    "whole numbers": (
        "mamba",
        lambda w: w | {"backbone.norm_f.weight": torch.ones(32).int()},
        r"dense.*norm_f\.weight",
    ),
}


@pytest.mark.parametrize("what", FITTING_NOT)
def test_weights_that_do_not_fit_are_refused_by_name_and_not_converted_either(what, tmp_path):
    case, change, said = FITTING_NOT[what]
    weights = change(theirs(original(case)))
    with pytest.raises(ModelError, match=said):
        load(write(tmp_path / "m", CASES[case][0], weights))
    pickled = write(tmp_path / "p", CASES[case][0], weights, pickled=True)
    with pytest.raises(ModelError, match=said):
        convert(str(pickled), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "p"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key of ssm_cfg": (MAMBA | {"ssm_cfg": {"d_stat": 16}}, r"'d_stat' in ssm_cfg for Mamba1"),
    "a key of the other layer": (MAMBA | {"ssm_cfg": {"headdim": 64}}, r"'headdim' in ssm_cfg for Mamba1"),
    "an unknown key": (MAMBA | {"sliding_window": 8}, r"'sliding_window', which the code of mamba-ssm"),
    "a hybrid": (MAMBA2 | {"attn_layer_idx": [1]}, r"attn_layer_idx: \[1\], attention in these layers: a hybrid"),
    "MLPs": (MAMBA2 | {"d_intermediate": 64}, r"d_intermediate: 64, an MLP in each block"),
    "LayerNorm": (MAMBA | {"rms_norm": False}, r"rms_norm: False, LayerNorm"),
    "Mamba-3": (MAMBA | {"ssm_cfg": {"layer": "Mamba3"}}, r"layer: Mamba3, and transformers has classes for"),
    "no layer": (MAMBA | {"ssm_cfg": {"layer": []}}, r"layer: \[\]"),
    "no gated norm": (MAMBA2 | {"ssm_cfg": {"layer": "Mamba2", "rmsnorm": False}}, r"rmsnorm: False"),
    "a norm before the gate": (MAMBA2 | {"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}}, r"norm_before"),
    "a D a channel": (MAMBA2 | {"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, r"D_has_hdim: True"),
    "channels without a scan": (MAMBA2 | {"ssm_cfg": {"layer": "Mamba2", "d_ssm": 32}}, r"d_ssm: 32"),
    "heads that do not fit": (MAMBA2 | {"ssm_cfg": {"layer": "Mamba2", "headdim": 48}}, r"heads of 48 \(headdim\)"),
    "groups that do not fit": (MAMBA2 | {"ssm_cfg": {"layer": "Mamba2", "ngroups": 2}}, r"in 2 groups"),
    "half a channel": (MAMBA | {"ssm_cfg": {"expand": 1.5}}, r"expand: 1\.5, and it must be a whole number"),
    "limits in no order": (MAMBA2 | {"ssm_cfg": {"layer": "Mamba2", "dt_limit": [1, 0]}}, r"dt_limit"),
    "a word": (MAMBA | {"residual_in_fp32": "yes"}, r"residual_in_fp32: 'yes', and it must be true or false"),
    "nothing for a norm": (MAMBA | {"rms_norm": None}, r"rms_norm: None, and it must be true or false"),
    "no vocabulary": ({k: v for k, v in MAMBA.items() if k != "vocab_size"}, r"has no vocab_size"),
    "no layers": (MAMBA | {"n_layer": 0}, r"n_layer: 0"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_configuration_that_cannot_be_had_is_refused_by_name(what, tmp_path):
    config, said = REFUSED[what]
    folder = write(tmp_path / "m", config, {"backbone.norm_f.weight": torch.ones(32)})
    with pytest.raises(ModelError, match=said):
        load(folder)
    with pytest.raises(ModelError, match=said):
        convert(str(folder), tmp_path / "out")


def test_a_file_cut_short_is_refused(tmp_path):
    folder = write(tmp_path / "m", MAMBA, theirs(original("mamba")))
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for length in (0, 4, 200, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
            load(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"there is no model\.safetensors beside its config\.json"):
        load(folder)
    with pytest.raises(ModelError, match=r"no model\.safetensors and no pytorch_model\.bin"):
        convert(str(folder), tmp_path / "out")


@pytest.mark.parametrize("case", ["mamba", "mamba2-options"])
def test_a_pickle_is_no_model_and_is_converted_on_purpose(case, tmp_path):
    model = original(case)
    folder = write(tmp_path / "my model", CASES[case][0], theirs(model), pickled=True)
    out = tmp_path / "a" / "out"
    with pytest.raises(ModelError, match=r"in a pickle.*layerlake convert '.*my model' --out DIR"):
        load(folder)
    out.mkdir(parents=True)  # an empty folder may be there
    made = convert(str(folder), out)
    assert (made.kind, made.layers, made.dtype, made.read) == (
        case.partition("-")[0],
        2,
        "float32",
        "pytorch_model.bin",
    )
    assert made.parameters == sum(p.numel() for p in model.parameters())
    loaded = load(out)
    assert torch.equal(logits(loaded.module), logits(model))
    assert loaded.identity["fingerprint"] == made.fingerprint
    again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.equal(logits(again), logits(model))
    assert {p.stat().st_mode & 0o777 for p in out.iterdir()} == {0o666 & ~_umask()}
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(RequestError, match="not an empty folder"):
        convert(str(folder), out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    with pytest.raises(RequestError, match=r"not in the form of mamba-ssm"):
        convert(str(out), tmp_path / "other")
    with pytest.raises(RequestError, match=r"has no config\.json"):
        convert(str(tmp_path / "nowhere"), tmp_path / "other")
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


class Malicious:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("form", ["bare", "bare, of a newer protocol", "beside tensors", "in an archive of torch"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(form, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # of a user who reads old files in another program
    folder = write(tmp_path / "m", MAMBA, {}, pickled=True)
    file, planted = folder / "pytorch_model.bin", tmp_path / "planted"
    weights = theirs(original("mamba"))
    if form.startswith("bare"):
        file.write_bytes(pickle.dumps(Malicious(planted), protocol=2 if form == "bare" else 4))
    else:
        content = weights | {"backbone.norm_f.weight": Malicious(planted)}
        torch.save(content, file, _use_new_zipfile_serialization=form != "beside tensors")
    with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
        torch.load(file, weights_only=False)  # it is what it says
    assert planted.exists()
    planted.rmdir()
    with pytest.raises(ModelError, match=r"made to do more than to give tensors.*Nothing that it names was") as error:
        convert(str(folder), tmp_path / "out")
    assert ("it names posix.mkdir" in str(error.value)) == (form != "bare, of a newer protocol")
    with pytest.raises(ModelError, match="in a pickle"):
        load(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_pickle_of_anything_else_is_refused(tmp_path):
    weights = theirs(original("mamba"))
    folder = write(tmp_path / "m", MAMBA, weights, pickled=True)
    file = folder / "pytorch_model.bin"
    whole = file.read_bytes()
    odd: list[tuple[Any, str]] = [
        ({"state_dict": weights}, r"holds a dict under 'state_dict'"),
        (list(weights.values()), r"holds a list, no named tensors"),
        (weights | {"step": 3}, r"holds a int under 'step'"),
        (weights | {"backbone.norm_f.weight": torch.ones(32).to_sparse()}, r"not dense.*norm_f\.weight"),
        (weights | {"backbone.norm_f.weight": torch.ones(32, device="meta")}, r"norm_f\.weight"),
    ]
    for content, said in odd:
        torch.save(content, file)
        with pytest.raises(ModelError, match=said):
            convert(str(folder), tmp_path / "out")
    for content in (b"", b"no pickle", whole[: len(whole) // 2], whole[:-1], b"\x80\x02}q\x00."):
        file.write_bytes(content)
        with pytest.raises(ModelError):
            convert(str(folder), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_full_disk_leaves_nothing(tmp_path, small_disk):
    folder = write(tmp_path / "m", MAMBA, theirs(original("mamba")), pickled=True)
    disk = small_disk(64 * 1024)
    with pytest.raises(WorldError, match="cannot be written"):
        convert(str(folder), disk / "out")
    assert list(disk.iterdir()) == []


def test_the_command_that_a_refusal_names_does_it(tmp_path, capsys):
    folder = write(tmp_path / "m", MAMBA, theirs(original("mamba")), pickled=True)
    assert main(["sites", str(folder)]) == 1
    command = capsys.readouterr().err.strip().partition("convert it once: layerlake ")[2].split()
    arguments = [a if a != "DIR" else str(tmp_path / "out") for a in command]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Wrote {tmp_path / 'out'}: mamba, 2 layers, ")
    assert "from pytorch_model.bin; read back, 22 tensors compared.\nThere is no tokenizer beside it" in said
    assert main(arguments) == 2
    assert capsys.readouterr().out == ""
    assert main([*arguments[:-1], str(tmp_path / "other"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fingerprint"] == load(tmp_path / "out").identity["fingerprint"]


@pytest.mark.slow
def test_a_name_is_looked_up_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    """A cache as the hub's client fills it; the hub itself is not asked."""
    commit = "0123456789" * 4
    cached = tmp_path / "hub" / "models--authors--tiny"
    model = original("mamba")
    write(cached / "snapshots" / commit, MAMBA, theirs(model), pickled=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert environment()["HF_HUB_CACHE"] == str(tmp_path / "hub")
    refused = run_layerlake("sites", "authors/tiny")
    assert "layerlake convert authors/tiny --out DIR" in refused.stderr
    found = run_layerlake("convert", "authors/tiny", "--out", tmp_path / "out")
    assert found.returncode == 0, found.stderr
    assert torch.equal(logits(load(tmp_path / "out").module), logits(model))
    safetensors.torch.save_file(
        {n: t.clone() for n, t in theirs(model).items()}, cached / "snapshots" / commit / "model.safetensors"
    )
    assert run_layerlake("sites", "authors/tiny", "--json").returncode == 0
