"""`layerlake train --from MODEL TASK`: pretrained models on tasks, as folders that are models like any other."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from built_models import save as save_built
from dying import die_at_each_step
from layerlake.__main__ import main
from layerlake.errors import (
    JobError,
    LayerlakeError,
    MissingExtraError,
    ModelError,
    RequestError,
    SettingsDifferError,
    UnknownNameError,
)
from layerlake.extract.driver import extract
from layerlake.extract.loaded_model import ModelSource
from layerlake.extract.loading import load_model
from layerlake.extract.self_test import SelfTest
from layerlake.extract.task_model import TaskModel, load_task_model, save_task_model
from layerlake.extract.tasks import parse_task
from layerlake.extract.training import Recipe, TaskData, Trainer
from layerlake.extract.training.optimizer import decaying
from layerlake.extract.training.pretrained import PretrainedModel
from layerlake.extract.training.train_job import TrainReport, fine_tuning_cell, train_cell
from layerlake.store.lake import Lake
from pretrained_models import save_pretrained_model
from safetensors.torch import load_file
from some_tokenizers import byte_level_bpe
from toy_models import save_model

TASKS = {"pythia": "flip-flop", "mamba": "parity"}
LEARNS = Recipe(
    steps=150, batch_size=32, length=8, lr=0.01, warmup=10, stop_at=0.93, evaluate_every=10, validation_strings=64
)
FEW = replace(LEARNS, steps=4, batch_size=4, evaluate_every=2, validation_strings=8, stop_at=None)
WRITTEN = {"config.json", "model.safetensors", "head.safetensors", "task.json", "tokenizer.json"}


def few(out: Path, model: Path, task: str = "parity", recipe: Recipe = FEW, **asked) -> TrainReport:
    cell = fine_tuning_cell(str(model), task, recipe=recipe, options=asked.pop("options", None))
    return train_cell(cell, out, lengths=[8], strings=20, **asked)


def trained(folder: Path) -> dict[str, bytes]:
    return {n: (folder / "seed-0" / n).read_bytes() for n in WRITTEN}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Models to begin with. The first has dropout in its configuration, which training must not use."""
    root = tmp_path_factory.mktemp("bases")
    dropout = {"hidden_dropout": 0.4, "attention_dropout": 0.4}
    return {
        "pythia": save_pretrained_model(root / "pythia", "pythia", **dropout),
        "mamba": save_pretrained_model(root / "mamba", "mamba"),
    }


@pytest.fixture(scope="module")
def cells(tmp_path_factory, bases) -> dict[str, tuple[Path, dict]]:
    """A model of each kind, fine-tuned until it has learned its task: the folder of its seed, and its result."""
    found = {}
    for name, base in bases.items():
        out = tmp_path_factory.mktemp("cells") / name
        report = few(out, base, TASKS[name], LEARNS)
        found[name] = out / "seed-0", report.results[0]
    return found


@pytest.fixture(params=["pythia", "mamba"])
def name(request) -> str:
    return request.param


def test_a_pretrained_model_learns_a_task(cells, name):
    _, result = cells[name]
    at_8 = result["evaluation"]["lengths"][0]
    assert result["stopped"] == "accuracy" and at_8["token"] > 0.85 > 0.6 > at_8["majority"]
    assert result["cell"]["model"]["pretrained"]["kind"] == {"pythia": "gpt_neox", "mamba": "mamba"}[name]
    assert result["compute"]["transformers"] == transformers.__version__


def test_what_is_trained_is_all_of_the_model_and_no_row_of_other_tokens(cells, bases, name):
    folder, result = cells[name]
    before = {n.partition(".")[2]: t.float() for n, t in load_file(bases[name] / "model.safetensors").items()}
    after = load_file(folder / "model.safetensors")
    assert {t.dtype for t in after.values()} == {torch.float32}
    table = {"pythia": "embed_in.weight", "mamba": "embeddings.weight"}[name]
    assert set(after) <= set(before)  # the language-modelling head is left behind
    for tensor in set(after) - {table}:
        assert not torch.equal(after[tensor], before[tensor]), tensor
    moved = (after[table] != before[table]).any(1).nonzero().flatten().tolist()
    assert moved == sorted(result["cell"]["model"]["symbol_ids"])
    head = load_file(folder / "head.safetensors")
    assert {n: tuple(t.shape) for n, t in head.items()} == {
        "weight": (len(result["cell"]["classes"]), 32), "bias": (len(result["cell"]["classes"]),)
    }  # fmt: skip


def test_symbols_are_their_tokens_and_nothing_else(cells, name):
    folder, result = cells[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    task = json.loads((folder / "task.json").read_text())
    symbols = parse_task(TASKS[name]).symbols
    assert task["about"]["vocabulary"] == list(symbols)
    assert tokenizer.convert_ids_to_tokens(task["symbol_ids"]) == list(symbols)


def test_the_folder_is_a_model_with_the_task_as_its_logits(cells, name):
    folder, result = cells[name]
    model = load_model(ModelSource(str(folder)))
    failed = [c for c in SelfTest(model).run() if c.passed is False]
    assert not failed
    sites = {p.site for p in model.points}
    own = {"pythia": {"z", "attn_out", "mlp_out"}, "mamba": {"conv_out", "ssm_state", "mixer_out"}}[name]
    assert sites == {"embed", "resid_pre", "resid_post", "final_norm", "logits"} | own
    assert model.shapes["logits"] == (len(result["cell"]["classes"]),)
    half = load_model(ModelSource(str(folder), dtype="bfloat16"))
    half.settled(half.points)
    assert half.dtypes["logits"] == half.identity["dtype"] == "bfloat16"


def test_an_extraction_of_the_task_is_proved_and_gives_the_accuracy_that_was_measured(cells, name, tmp_path):
    folder, result = cells[name]
    data = f"task:{TASKS[name]}{'&' if '?' in TASKS[name] else '?'}length=8&n=60&split=test"
    extract(str(folder), data, tmp_path / "lake", run="r", sites=("resid_post", "final_norm", "logits"))
    lake = Lake.open(tmp_path / "lake")
    (proof,) = lake.sql(
        "SELECT replayed, replay_values, replay_head, replay_patch FROM units WHERE unit = 0"
    ).to_pylist()
    assert proof["replayed"] >= 1
    assert all(proof[f"replay_{what}"] < 1e-5 for what in ("values", "head", "patch"))
    target = result["cell"]["target"]
    found = lake.select(f"SELECT run, row, {target} FROM tokens ORDER BY row")
    logits, hidden = (found.array(site=s) for s in ("logits", "final_norm"))
    head = load_file(folder / "head.safetensors")
    by_hand = hidden @ head["weight"].numpy().T + head["bias"].numpy()
    np.testing.assert_allclose(logits, by_hand, atol=1e-4)
    classes = np.array(result["cell"]["classes"])
    share = (classes[logits.argmax(1)] == found.table[target].to_numpy()).mean()
    assert abs(share - result["evaluation"]["lengths"][0]["token"]) < 0.06  # other strings


def test_a_mamba_trains_by_another_scan_with_the_same_values_and_gradients(bases):
    data = TaskData(parse_task("parity"))
    made = PretrainedModel.of(str(bases["mamba"]), {}, data).build(0)
    ids, labels = data.test(5, 12)
    found = []
    for logits in (made(ids), made.model(made.ids[ids], use_cache=False)):
        made.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        found.append({"logits": logits.detach()} | {n: p.grad.clone() for n, p in made.named_parameters()})
    assert len(found[0]) == 1 + len(list(made.parameters()))
    for name, value in found[0].items():
        assert float((value - found[1][name]).norm() / found[1][name].norm()) < 1e-5, name


def test_what_does_not_decay_is_the_table_of_tokens_norms_and_biases_and_the_state_space(bases, name):
    made = PretrainedModel.of(str(bases[name]), {}, TaskData(parse_task("parity"))).build(0)
    still = {n.rpartition("base.")[2] for n, p in made.named_parameters() if n not in decaying(made) and p.ndim > 1}
    layers = {f"layers.{i}.mixer.A_log" for i in range(2)}
    assert still == {"pythia": {"embed_in.weight"}, "mamba": {"embeddings.weight"} | layers}[name]


def test_reloaded_it_gives_the_same_bits(bases, name, tmp_path):
    data = TaskData(parse_task(TASKS[name]))
    source = PretrainedModel.of(str(bases[name]), {}, data)
    trainer = Trainer(source.build(3), data, FEW, seed=3, max_length=source.max_length)
    trainer.run()
    source.save(tmp_path / "m", trainer.model, {"seed": 3})
    again, about = PretrainedModel.from_json(json.loads(json.dumps(source.to_json()))).load(tmp_path / "m")
    assert about == {"seed": 3}
    ids, _ = data.test(5, 12)
    with torch.inference_mode():
        assert torch.equal(again(ids), trainer.model(ids))
    other = source.build(4)
    assert not torch.equal(other.model.head.weight, source.build(3).model.head.weight)
    assert torch.equal(other.model.head.weight, source.build(4).model.head.weight)


def stopped_by_kill(out: Path, base: Path) -> Path:
    """Kill a training with SIGKILL after some of its states were saved, and give the folder of its seed."""
    child = os.fork()
    if not child:
        from dying import _count_down

        _count_down([(os, "fsync")], 9)
        few(out, base, save_every_s=0)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and (out / "seed-0" / "state.safetensors").is_file()
    return out / "seed-0"


def test_killed_and_gone_on_with_it_ends_at_the_same_bytes(bases, name, tmp_path, monkeypatch):
    torch.manual_seed(1)
    few(tmp_path / "whole", bases[name])
    folder = stopped_by_kill(tmp_path / "torn", bases[name])
    assert not (folder / "config.json").exists()
    with monkeypatch.context() as patch, pytest.raises(SettingsDifferError, match="transformers: there it is 5"):
        patch.setattr(PretrainedModel, "compute", {"transformers": "6.0.0"})
        few(tmp_path / "torn", bases[name])
    torch.manual_seed(2)  # nothing of torch's global generator may matter
    (folder / "model.1.abc.tmp").mkdir()  # what a kill in the midst of writing leaves
    few(tmp_path / "torn", bases[name])
    assert trained(tmp_path / "torn") == trained(tmp_path / "whole")
    assert {p.name for p in folder.iterdir()} == WRITTEN | {"tokenizer_config.json", "training.json"}
    assert few(tmp_path / "torn", bases[name]).trained == []


def test_death_at_any_step_of_writing_leaves_no_model_or_all_of_it(bases, tmp_path):
    data = TaskData(parse_task("parity"))
    made = PretrainedModel.of(str(bases["pythia"]), {}, data).build(0)
    folder, whole = tmp_path / "torn", 0

    def prepare(moment: int) -> Callable[[], object]:
        nonlocal whole
        try:
            assert torch.equal(load_model(ModelSource(str(folder))).module.head.weight, made.model.head.weight)
            whole += 1
        except LayerlakeError as error:
            assert re.search("is not a model folder|cannot be read|names no model|does not load", str(error)), error
        shutil.rmtree(folder, ignore_errors=True)
        return lambda: save_task_model(folder, made.model, made.tokenizer, {})

    assert die_at_each_step([(Path, "replace"), (os, "fsync")], prepare) > 10
    assert isinstance(load_model(ModelSource(str(folder))).module, TaskModel) and whole < 4


def test_the_head_alone_can_be_trained(bases, tmp_path):
    few(tmp_path / "cell", bases["pythia"], options={"freeze": True})
    before = load_file(bases["pythia"] / "model.safetensors")
    for name, tensor in load_file(tmp_path / "cell" / "seed-0" / "model.safetensors").items():
        assert torch.equal(tensor, before[f"gpt_neox.{name}"].float()), name
    cell = fine_tuning_cell(str(bases["pythia"]), "parity", recipe=FEW)
    start = cell.source.build(0).model.head.weight
    assert not torch.equal(load_file(tmp_path / "cell" / "seed-0" / "head.safetensors")["weight"], start)


def test_another_model_under_the_same_path_is_refused_by_name(tmp_path):
    base = save_pretrained_model(tmp_path / "base", "pythia")
    few(tmp_path / "cell", base)
    planned = fine_tuning_cell(str(base), "parity", recipe=FEW)
    save_pretrained_model(base, "pythia", seed=1)
    with pytest.raises(SettingsDifferError, match=r"model\.pretrained\.weights: there it is \w+, asked was \w+"):
        few(tmp_path / "cell", base)
    with pytest.raises(JobError, match="is another model than this training was begun with: it has other weights"):
        train_cell(planned, tmp_path / "later", lengths=[8], strings=20)


def test_a_trained_folder_that_was_changed_is_not_called_finished(bases, tmp_path):
    few(tmp_path, bases["mamba"], seeds=(0, 1))
    for damage in ("head.safetensors", "model.safetensors"):
        path = tmp_path / "seed-0" / damage
        kept = path.read_bytes()
        path.write_bytes((tmp_path / "seed-1" / damage).read_bytes())
        with pytest.raises(ModelError, match=rf"{damage} is not what task.json was written for"):
            few(tmp_path, bases["mamba"])
        path.write_bytes(kept)
    (tmp_path / "seed-0" / "head.safetensors").unlink()
    with pytest.raises(ModelError, match="head.safetensors cannot be read"):
        load_task_model(ModelSource(str(tmp_path / "seed-0")))


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "opt", "mamba2", "phi"])
def test_other_causal_models_can_be_fine_tuned_too(family, tmp_path):
    """With a cap on its logits, with another norm, and of no registered architecture."""
    base = save_model(tmp_path / "base", family, layers=2, vocab_size=384)
    byte_level_bpe().save_pretrained(base)
    data = TaskData(parse_task("parity"))
    source = PretrainedModel.of(str(base), {}, data)
    model = source.build(0)
    with torch.no_grad():
        model.model.head.weight.mul_(500)  # far into what a cap would cut
    source.save(tmp_path / "made", model, {})
    ids, _ = data.test(5, 12)
    with torch.inference_mode():
        assert torch.equal(source.load(tmp_path / "made")[0](ids), model(ids))
    loaded = load_model(ModelSource(str(tmp_path / "made")))
    checks = {c.name: c.passed for c in SelfTest(loaded).run()}
    assert False not in checks.values() and checks["head"] and loaded.shapes["logits"] == (2,)


def test_a_fine_tuned_model_can_be_fine_tuned_again(cells, tmp_path):
    folder, result = cells["mamba"]
    report = few(tmp_path / "cell", folder, "flip-flop")
    model = report.results[0]["cell"]["model"]
    assert model["pretrained"]["weights"] == load_task_model(ModelSource(str(folder))).identity["fingerprint"]
    assert model["outputs"] == len(parse_task("flip-flop").classes("stored")) != result["cell"]["model"]["outputs"]


def test_positions_end_where_the_model_has_no_more(tmp_path):
    base = save_pretrained_model(tmp_path / "base", "pythia", max_position_embeddings=10)
    cell = fine_tuning_cell(str(base), "parity", recipe=replace(FEW, random_offset=True))
    assert cell.source.max_length == 10
    report = train_cell(cell, tmp_path / "cell", lengths=[8, 10, 12], strings=20)
    assert [m["measured"] for m in report.results[0]["evaluation"]["lengths"]] == [True, True, False]
    with pytest.raises(RequestError, match="has 10 positions: strings of 12 cannot be trained"):
        few(tmp_path / "other", base, recipe=replace(FEW, length=12))


@pytest.mark.parametrize(
    ("model", "task", "options", "error", "says"),
    [
        ("pythia", "modular-addition?modulus=120", {}, RequestError, "'10' is no single token of the tokenizer"),
        ("pythia", "parity", {"layers": 2}, UnknownNameError, "no option 'layers' of a pretrained model.*freeze"),
        ("pythia", "parity", {"freeze": "yes"}, RequestError, "freeze is true or false, not 'yes'"),
        ("toy_models:tuples", "parity", {}, RequestError, "toy_models:tuples is no pretrained model"),
        ("built", "parity", {}, RequestError, "is no pretrained model in Hugging Face form"),
        ("no-tokenizer", "parity", {}, RequestError, "no-tokenizer has no fast tokenizer"),
        ("bert", "parity", {}, RequestError, "is not causal"),
        ("small", "dyck", {}, RequestError, "a tokenizer with more tokens than the model: token 62 is none"),
        ("nowhere/at-all", "parity", {}, ModelError, "nowhere/at-all does not load"),
    ],
)
def test_what_cannot_be_fine_tuned_is_refused_before_anything_is_written(
    bases, tmp_path, model, task, options, error, says
):
    if model == "built":
        save_built(tmp_path / "built", "gru")
    elif model == "no-tokenizer":
        save_pretrained_model(tmp_path / model, "pythia", tokenizer=False)
    elif model in ("bert", "small"):
        save_model(tmp_path / model, "bert" if model == "bert" else "gpt2", vocab_size=384 if model == "bert" else 50)
        byte_level_bpe().save_pretrained(tmp_path / model)
    here = bases.get(model, tmp_path / model)
    with pytest.raises(error, match=says):
        few(tmp_path / "cell", here if here.exists() else model, task, options=options)
    assert not (tmp_path / "cell").exists()


def test_symbols_and_classes_that_do_not_fit_are_refused(bases):
    source = PretrainedModel.of(str(bases["pythia"]), {}, TaskData(parse_task("parity")))
    for task, says in (("dyck?k=2", "made for 2 symbols, .* has 4"), ("dyck?k=1", "made for 2 classes, .* has 11")):
        with pytest.raises(RequestError, match=says):
            source.check(TaskData(parse_task(task)))


def test_a_missing_extra_is_named(bases, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"layerlake\[hf\]"):
        few(tmp_path / "cell", bases["pythia"])
    assert not (tmp_path / "cell").exists()


def test_the_command_takes_a_model_in_place_of_an_architecture(bases, tmp_path, capsys):
    options = ["--out", tmp_path / "cell", "--steps", 4, "--length", 8, "--test-lengths", 8, "--test-strings", 20]
    command = ["train", "--from", bases["mamba"], "parity", *options]
    for says in ("trained 1 seed", "all was trained already"):
        assert main([str(c) for c in command]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[-1].endswith(f"mamba on parity, target parity: {says}, in {tmp_path / 'cell'}/seed-N.")
    made = json.loads((tmp_path / "cell" / "cell.json").read_text())["recipe"]
    assert {k: made[k] for k in ("lr", "warmup", "clip", "steps")} == {
        "lr": 1e-4, "warmup": 100, "clip": 1.0, "steps": 4
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["gru", "parity", "--from", "MODEL"], "Give an architecture (gru) or --from, not both"),
        (["--from", "MODEL"], "Name a task: `layerlake train ARCH TASK`, or `layerlake train --from MODEL TASK`"),
        (["gru"], "Name a task:"),
        (["parity"], "Name an architecture and a task:"),
        ([], "Name an architecture and a task:"),
        (["gru", "parity", "--revision", "main"], "--revision is for a hub model"),
        (["--from", "MODEL", "parity", "--set", "freeze=1"], "freeze is true or false, not 1"),
        (["--from", "MODEL", "paritty"], "Did you mean 'parity'"),
    ],
)
def test_neither_or_both_is_exit_code_2(bases, tmp_path, capsys, names, says):
    given = [str(bases["mamba"]) if n == "MODEL" else n for n in names]
    assert main(["train", *given, "--out", str(tmp_path / "cell")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("layerlake: ") and says in err
    assert not (tmp_path / "cell").exists()


def test_the_example_of_the_documentation_applies_the_head(cells):
    page = Path(__file__).parents[2] / "docs" / "training.md"
    if not page.is_file():
        pytest.skip("the tests stand alone, without the documentation beside them")
    folder, _ = cells["mamba"]
    (example,) = (b for b in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "AutoModel" in b)
    names: dict = {}
    exec(example.replace("cell/seed-0", str(folder)), names)
    module = load_task_model(ModelSource(str(folder))).module
    with torch.inference_mode():
        expected = module(names["ids"])
    torch.testing.assert_close(expected, names["logits"])
    assert names["answers"] == expected[0].argmax(-1).tolist()  # a class of parity is its own number
