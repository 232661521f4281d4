"""`layerlake train`: seeds of a cell in folders of their own, killed and gone on with, refused, measured."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dying import die_at_each_step
from layerlake import capture
from layerlake.__main__ import main
from layerlake.errors import JobError, ModelError, RequestError, SettingsDifferError, TrainingError, UnknownNameError
from layerlake.extract.models import load_checkpoint, make_config
from layerlake.extract.tasks import parse_task
from layerlake.extract.train_cli import recipe_of
from layerlake.extract.training import Curriculum, Recipe, TaskData, train
from layerlake.extract.training.cell import Cell
from layerlake.extract.training.sources import NewModel
from layerlake.extract.training.watch import PROGRESS_FILE, TrainingWatch
from layerlake.store.durable import exclusive_lock
from processes import started, wait_until

SMALL = {"layers": 1, "d_model": 16}
QUICK = Recipe(
    steps=40, batch_size=16, length=8, lr=0.01, warmup=4, stop_at=None, evaluate_every=10, validation_strings=32
)
OPTIONS = [
    *("--length", 8, "--lr", 0.01, "--stop-at", "none", "--set", "layers=1", "--set", "d_model=16"),
    *("--recipe", "batch_size=16", "--recipe", "warmup=4", "--recipe", "evaluate_every=10"),
    *("--recipe", "validation_strings=32", "--test-lengths", "8,12", "--test-strings", 50),
]


def quick(out: Path, architecture: str = "gru", task: str = "parity", recipe: Recipe = QUICK, **asked):
    asked = {"options": SMALL, "lengths": [8, 12], "strings": 50} | asked
    return train(architecture, task, out, recipe=recipe, **asked)


def weights(folder: Path) -> bytes:
    return (folder / "seed-0" / "model.safetensors").read_bytes()


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_trained_seed_is_a_model_that_says_how_it_was_made(tmp_path):
    recipe = replace(QUICK, steps=400, lr=0.02, stop_at=0.99, evaluate_every=50)
    report = quick(tmp_path / "cell", recipe=recipe, seeds=(3, 0))
    assert names(tmp_path / "cell" / "seed-3") == {"config.json", "model.safetensors", "training.json"}
    first = report.results[0]
    assert (first["seed"], first["stopped"]) == (3, "accuracy")
    assert first["steps"] == first["history"][-1]["step"] < 400
    assert Recipe.from_json(first["cell"]["recipe"]) == recipe
    assert first["cpu_seconds"] > 0 and first["compute"]["threads"] == 1
    model, about = load_checkpoint(tmp_path / "cell" / "seed-3")
    assert first["parameters"] == sum(p.numel() for p in model.parameters())
    assert (about["task"], about["classes"], len(about["vocabulary"])) == ("parity", [0, 1], 2)
    assert (about["seed"], Recipe.from_json(about["recipe"])) == (3, recipe)
    cache = capture(str(tmp_path / "cell" / "seed-3"), [[0, 1, 1, 0]])
    assert torch.equal(cache[0, "resid_post"], model.backbone(torch.tensor([[0, 1, 1, 0]]))[0])
    # the figures are the model's, counted here by hand on strings made here
    bits = torch.randint(0, 2, (400, 12), generator=torch.Generator().manual_seed(1))
    right = (model(bits).argmax(-1) == bits.cumsum(1) % 2).float()
    at_12 = first["evaluation"]["lengths"][1]
    assert at_12["measured"] and abs(at_12["token"] - float(right.mean())) < 0.02
    assert abs(at_12["string"] - float(right.min(1).values.mean())) < 0.1
    assert 0.4 < at_12["majority"] < 0.6
    assert json.loads((tmp_path / "cell" / "seed-0" / "training.json").read_text()) == report.results[1]


def test_the_same_again_does_nothing_and_other_lengths_measure_anew(tmp_path):
    quick(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in sorted((tmp_path / "seed-0").iterdir())}
    assert quick(tmp_path).trained == []
    assert before == {p: p.stat().st_mtime_ns for p in sorted((tmp_path / "seed-0").iterdir())}
    again = quick(tmp_path, lengths=[10])
    assert [m["length"] for m in again.results[0]["evaluation"]["lengths"]] == [10]
    changed = [p.name for p, when in before.items() if p.stat().st_mtime_ns != when]
    assert changed == ["training.json"]
    assert quick(tmp_path, seeds=(0, 1), lengths=[10]).trained == [1]


def test_kill_9_in_the_middle_ends_at_the_same_weights(tmp_path, capsys):
    command = ["train", "gru", "parity", "--out", tmp_path / "torn", *OPTIONS, "--steps", 150, "--save-every", 0]
    state = tmp_path / "torn" / "seed-0" / "state.safetensors"
    with started(*command) as process:
        assert wait_until(state.exists, 60), process.stderr
        process.kill()
        process.wait()
    assert "training.json" not in names(state.parent)
    assert main([str(c) for c in command] + ["--save-every", "30"]) == 0
    assert "trained 1 seed" in capsys.readouterr().out
    quick(tmp_path / "whole", recipe=replace(QUICK, steps=150))
    assert weights(tmp_path / "torn") == weights(tmp_path / "whole")
    assert names(state.parent) == {"config.json", "model.safetensors", "training.json"}


def test_death_at_any_step_of_writing_leaves_what_can_be_gone_on_with(tmp_path):
    few = replace(QUICK, steps=4, evaluate_every=2)
    quick(tmp_path / "whole", recipe=few)
    torn = tmp_path / "torn"

    def prepare(moment: int) -> Callable[[], object]:
        if torn.exists():
            quick(torn, recipe=few)
            assert weights(torn) == weights(tmp_path / "whole"), moment
            shutil.rmtree(torn)
        return lambda: quick(torn, recipe=few, save_every_s=0)

    steps = [(Path, "replace"), (os, "fsync"), (Path, "open"), (Path, "unlink")]
    assert die_at_each_step(steps, prepare, stride=4) > 8


@pytest.mark.parametrize(
    ("recipe", "asked", "says"),
    [
        ({"lr": 0.02}, {}, "recipe.lr: there it is 0.01, asked was 0.02"),
        ({"curriculum": Curriculum(start=6, share=0.5)}, {}, "recipe.curriculum: there it is none"),
        ({}, {"options": SMALL | {"layers": 2}}, "model.layers: there it is 1, asked was 2"),
        ({}, {"architecture": "lstm"}, "model.architecture: there it is gru, asked was lstm"),
    ],
)
def test_another_cell_in_the_same_folder_is_refused_by_name(tmp_path, recipe, asked, says):
    quick(tmp_path, recipe=replace(QUICK, steps=2))
    with pytest.raises(SettingsDifferError, match=says):
        quick(tmp_path, recipe=replace(QUICK, steps=2, **recipe), **asked)


def test_a_folder_in_which_nothing_was_saved_can_be_another_cells(tmp_path):
    def never(*arguments):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(NewModel, "build", never)
        quick(tmp_path)
    other = replace(QUICK, steps=2, lr=0.5)
    with (
        exclusive_lock(tmp_path / ".seed-7.lock", ""),
        pytest.raises(SettingsDifferError, match=r"steps: there it is 40, asked was 2"),
    ):
        quick(tmp_path, recipe=other)
    assert quick(tmp_path, recipe=other).trained == [0]
    with pytest.raises(SettingsDifferError, match=r"steps: there it is 2, asked was 40"):
        quick(tmp_path)


def test_a_model_of_another_vocabulary_or_other_classes_is_refused():
    data = TaskData(parse_task("parity"))
    for sizes, says in (((3, 2), "vocab_size 3, .* has 2 symbols"), ((2, 5), "outputs 5, .* has 2 classes")):
        config = make_config("gru", vocab_size=sizes[0], outputs=sizes[1])
        with pytest.raises(RequestError, match=says):
            Cell(NewModel(config), data, QUICK)


def stopped_early(folder: Path) -> Path:
    """Leave a training after a few steps, and give the file of its state."""
    child = os.fork()
    if not child:
        die_now = [(os, "fsync")]
        from dying import _count_down

        _count_down(die_now, 9)
        quick(folder, save_every_s=0)
        os._exit(0)
    os.waitpid(child, 0)
    state = folder / "seed-0" / "state.safetensors"
    assert state.is_file()
    return state


def test_a_state_that_is_damaged_or_was_computed_otherwise_is_not_gone_on_with(tmp_path):
    state = stopped_early(tmp_path)
    with pytest.raises(SettingsDifferError, match="threads: there it is 1, asked was 2"):
        quick(tmp_path, threads=2)
    data = bytearray(state.read_bytes())
    data[-3] ^= 1
    state.write_bytes(data)
    with pytest.raises(JobError, match="was changed after it was written. Remove it"):
        quick(tmp_path)
    state.write_bytes(data[:100])
    with pytest.raises(JobError, match="cannot be read"):
        quick(tmp_path)
    state.unlink()
    quick(tmp_path)
    quick(tmp_path / "whole")
    assert weights(tmp_path) == weights(tmp_path / "whole")


def test_a_trained_model_that_is_gone_or_another_is_not_called_finished(tmp_path):
    for name in ("one", "other"):
        quick(tmp_path / name, recipe=replace(QUICK, steps=2), seeds=(0, 1))
    one = tmp_path / "one"
    for name in ("config.json", "model.safetensors"):
        (one / "seed-0" / name).write_bytes((one / "seed-1" / name).read_bytes())
    with pytest.raises(ModelError, match="is not the one that was trained there"):
        quick(one, recipe=replace(QUICK, steps=2))
    (tmp_path / "other" / "seed-0" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        quick(tmp_path / "other", recipe=replace(QUICK, steps=2))


def test_two_processes_do_not_train_one_seed(tmp_path):
    with (
        exclusive_lock(tmp_path / ".seed-0.lock", ""),
        pytest.raises(JobError, match=rf"seed-0 is being trained by another process \({os.getpid()}\)"),
    ):
        quick(tmp_path)


def test_a_loss_that_is_no_number_ends_its_seed_and_says_at_which_step(tmp_path, monkeypatch):
    build = NewModel.build

    def poisoned(self, seed):
        model = build(self, seed)
        if seed == 1:
            with torch.no_grad():
                model.head.weight.fill_(float("inf"))
        return model

    monkeypatch.setattr(NewModel, "build", poisoned)
    with pytest.raises(TrainingError, match=r"The loss is (nan|inf) at step 1 of seed 1.*in another folder") as caught:
        quick(tmp_path, seeds=(1, 0))
    assert "seed 0" not in str(caught.value)
    assert "training.json" in names(tmp_path / "seed-0")
    assert "training.json" not in names(tmp_path / "seed-1")


def test_weights_that_are_no_numbers_are_exit_code_1_and_the_last_good_state_is_kept(tmp_path, capsys):
    command = ["train", "gru", "parity", "--out", tmp_path, *OPTIONS, "--recipe", "clip=none", "--save-every", 0]
    command[command.index("--lr") + 1] = "1e30"
    assert main([str(c) for c in command]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("layerlake: ")
    assert "is no finite number any more at step 1 of seed 0" in err or "at step 2 of seed 0" in err
    assert "state.safetensors" in names(tmp_path / "seed-0")


def test_lengths_beyond_the_positions_are_no_number(tmp_path, capsys):
    arguments = ["train", "transformer", "parity", "--out", tmp_path, *OPTIONS, "--steps", 3]
    arguments += ["--set", "longest=10", "--set", "heads=2", "--set", "d_ff=16", "--recipe", "random_offset=true"]
    assert main([str(a) for a in arguments]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["seed", "parameters", "steps", "stopped", "8", "12"]
    assert table[2].split()[:5] == ["0", "1,954", "3", "all", "steps"] and table[2].endswith("no positions")
    assert main([str(a) for a in arguments] + ["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trained"] == [] and found["seeds"][0]["folder"] == str(tmp_path / "seed-0")
    beyond = found["seeds"][0]["evaluation"]["lengths"][1]
    assert not beyond["measured"] and not {"token", "last", "string"} & beyond.keys()


@pytest.mark.parametrize(
    ("options", "recipe", "measured"),
    [
        (("longest=16",), (), [True, False]),  # rows 8 to 15 of the table are as random as they were at the start
        (("longest=16",), ("random_offset=true",), [True, True]),
        (("positions=rotary",), (), [True, True]),
    ],
)
def test_positions_that_no_training_string_reached_are_not_measured(tmp_path, capsys, options, recipe, measured):
    arguments = ["train", "transformer", "parity", "--out", tmp_path, *OPTIONS, "--steps", 2, "--json"]
    for option in (*options, "heads=2", "d_ff=16"):
        arguments += ["--set", option]
    for field in recipe:
        arguments += ["--recipe", field]
    assert main([str(a) for a in arguments]) == 0
    found = json.loads(capsys.readouterr().out)["seeds"][0]["evaluation"]["lengths"]
    assert [at["measured"] for at in found] == measured


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"architecture": "lstmm"}, UnknownNameError, "Did you mean 'lstm'"),
        ({"options": {"d_sate": 4}}, UnknownNameError, "no option 'd_sate' of the architecture 'gru'"),
        ({"options": {"vocab_size": 4}}, RequestError, "vocab_size follows from the task"),
        ({"target": "depth"}, UnknownNameError, "no target 'depth' of the task 'parity'"),
        ({"recipe": replace(QUICK, length=1)}, RequestError, "few strings of that length"),
        ({"task": "dyck", "lengths": [8, 9]}, RequestError, "even length, not 9"),
        ({"seeds": ()}, RequestError, "at least one"),
        ({"seeds": (1, 1)}, RequestError, "different"),
        ({"strings": 0}, RequestError, "At least 1 string"),
        ({"lengths": [0]}, RequestError, "Lengths to test at"),
        ({"engine": "spark"}, UnknownNameError, "engine"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing(tmp_path, asked, error, says):
    with pytest.raises(error, match=says):
        quick(tmp_path / "cell", **asked)
    assert not (tmp_path / "cell").exists()


def test_an_option_of_the_command_is_a_field_of_the_recipe():
    made = recipe_of(
        "gru",
        "parity",
        {"steps": 9, "stop_at": "0.9", "curriculum": "start=5,grow=3,accuracy=0.9"},
        {"clip": "none", "betas": "0.8,0.95", "random_offset": False},
    )
    expected = Recipe(
        steps=9, stop_at=0.9, curriculum=Curriculum(start=5, grow=3, accuracy=0.9), clip=None, betas=(0.8, 0.95)
    )
    given = ("steps", "stop_at", "curriculum", "clip", "betas")
    assert made == replace(recipe_of("gru", "parity"), **{name: getattr(expected, name) for name in given})
    for wrong, says in (
        ([{"lr": 0.1}, {"lr": 0.2}], "lr is given twice"),
        ([{"warmpu": 1}], "Did you mean 'warmup'"),
        ([{"stop_at": "high"}], "stop_at is a number"),
        ([{"steps": "many"}], "steps cannot be 'many'"),
        ([{"curriculum": "fast"}], "no option of the curriculum"),
    ):
        with pytest.raises(RequestError, match=says):
            recipe_of("gru", "parity", *wrong)


def test_progress_is_a_line_now_and_then(tmp_path):
    out = io.StringIO()
    (tmp_path / PROGRESS_FILE).write_text(
        json.dumps({"step": 1200, "length": 20, "loss": 0.4321, "validation": 0.91, "rate": 20.0})
    )
    with TrainingWatch({0: tmp_path, 1: tmp_path / "not-begun"}, 3000, stream=out, line_every=0.05):
        assert wait_until(lambda: out.getvalue().count("\n") >= 2, 10)
    line = "seed 0: 1,200/3,000 steps, length 20, loss 0.432, validation 0.910, 20.0 steps/s, at most 1:30 left"
    assert set(out.getvalue().splitlines()) == {line}


@pytest.mark.slow
def test_seeds_on_ray_are_those_trained_here(tmp_path):
    seeds = (0, 1, 2)
    quick(tmp_path / "here", seeds=seeds)
    report = quick(tmp_path / "ray", seeds=seeds, engine="ray", workers=2)
    assert report.trained == list(seeds)
    for seed in seeds:
        files = [(tmp_path / where / f"seed-{seed}" / "model.safetensors").read_bytes() for where in ("here", "ray")]
        assert files[0] == files[1]


def test_the_session_of_the_documentation_is_what_is_seen(tmp_path, capsys, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "training.md"
    if not page.is_file():
        pytest.skip("the tests stand alone, without the documentation beside them")
    session = page.read_text().partition("```console\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for step in session.split("$ layerlake ")[1:]:
        command, _, shown = step.partition("\n")
        assert main(shlex.split(command)) == 0
        seen = capsys.readouterr().out
        number = re.compile(r"-?\d[\d,.]*")
        assert number.sub("N", seen).split() == number.sub("N", shown).split()
        for now, then in zip(number.findall(seen), number.findall(shown), strict=True):
            if re.fullmatch(r"\d\.\d{3,4}", then):  # another processor rounds otherwise
                assert abs(float(now) - float(then)) < 0.02, command
            elif "train" not in command:
                assert now == then, command
