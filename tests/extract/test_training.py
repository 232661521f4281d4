"""The training loop: what decides the weights, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layerlake.errors import RequestError, TrainingError, UnknownNameError
from layerlake.extract.models import ARCHITECTURES, SequenceModel, make_config
from layerlake.extract.tasks import Task, parse_task
from layerlake.extract.training import Curriculum, Recipe, TaskData, Trainer, evaluate
from layerlake.extract.training.optimizer import decaying
from layerlake.extract.training.saved_state import load_state, save_state


@dataclass(frozen=True, kw_only=True)
class OneClass(Task):
    """Bits whose parity is always said to be 0."""

    name = "one-class"
    symbols = ("0", "1")
    targets = ("parity",)

    def classes(self, target: str) -> tuple[int, ...]:
        return (0, 1)

    def label(self, strings: np.ndarray, target: str) -> np.ndarray:
        return np.zeros_like(strings)

    def draw(self, n: int, length: int, generator: np.random.Generator) -> np.ndarray:
        return generator.integers(0, 2, (n, length))


PARITY = parse_task("parity")


class Small(torch.nn.Module):
    """An embedding, positions, a GRU and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(2, 16)
        self.table = torch.nn.Embedding(12, 16)
        self.gru = torch.nn.GRU(16, 16, batch_first=True)
        self.head = torch.nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        at = torch.arange(ids.shape[1]) if positions is None else positions
        return self.head(self.gru(self.embed(ids) + self.table(at))[0])


QUICK = Recipe(steps=30, batch_size=16, length=6, warmup=5, lr=1e-2, stop_at=None, evaluate_every=10)


def without_time(trainer: Trainer) -> list[dict]:
    """What a trainer saw, but for the CPU time that it took."""
    return [{k: v for k, v in seen.items() if k != "cpu_seconds"} for seen in trainer.state.history]


def trained(recipe: Recipe, seed: int = 0, max_length: int | None = 12) -> Trainer:
    trainer = Trainer(Small(), TaskData(PARITY), recipe, seed=seed, max_length=max_length)
    trainer.run()
    return trainer


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_the_same_seed_is_the_same_weights_and_another_seed_others():
    one = trained(QUICK).tensors()
    torch.manual_seed(99)  # nothing global is read
    np.random.seed(99)
    assert same(one, trained(QUICK).tensors())
    assert not same(one, trained(QUICK, seed=1).tensors())


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"random_offset": True},
        {"curriculum": {"start": 4, "grow": 1, "accuracy": 0.4}},
        {"curriculum": {"start": 4, "grow": 1, "share": 0.6}, "clip": None},
    ],
)
def test_a_training_that_goes_on_elsewhere_ends_at_the_same_bits(recipe):
    recipe = Recipe.from_json(QUICK.to_json() | recipe)
    whole = trained(recipe)
    first = Trainer(Small(), TaskData(PARITY), recipe, seed=0, max_length=12)

    def leave() -> None:
        if first.state.step == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(leave)
    second = Trainer(Small(seed=5), TaskData(PARITY), recipe, seed=0, max_length=12)
    second.restore({k: v.clone() for k, v in first.tensors().items()}, first.state)
    second.run()
    assert same(whole.tensors(), second.tensors())
    assert without_time(whole) == without_time(second)


def test_a_step_is_that_of_a_loop_written_by_hand():
    """torch's AdamW, its clipping and its cross entropy, on the same strings, with the rates of the recipe."""
    recipe = Recipe.from_json(QUICK.to_json() | {"steps": 12, "weight_decay": 0.1, "clip": 0.05, "floor": 0.1})
    model, data = Small(), TaskData(PARITY)
    decayed = [p for n, p in model.named_parameters() if "bias" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    for step in range(12):
        rate = 1e-2 * (step + 1) / 5 if step < 5 else 1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 5) / 6)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = data.train(0, step, 16, 6)
        loss = torch.nn.functional.cross_entropy(model(ids).transpose(1, 2), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    ours = trained(recipe).model.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_it_stops_early_at_the_accuracy_that_was_asked_for():
    recipe = Recipe.from_json(QUICK.to_json() | {"steps": 1500, "length": 5, "stop_at": 0.99, "batch_size": 64})
    trainer = trained(recipe)
    state = trainer.state
    assert state.stopped == "accuracy" and state.step < 1500
    assert state.history[-1]["token"] >= 0.99 > state.history[-2]["token"]
    results = evaluate(trainer.model, trainer.data, majority=0, max_length=12, lengths=(5, 12, 13), strings=100)
    assert results[0].accuracy and results[0].accuracy.token > 0.97
    assert results[1].accuracy is not None and results[2].accuracy is None
    assert all(0.4 < r.majority < 0.6 for r in results[1:])


def test_random_offsets_train_every_position():
    for offset, expected in ((False, [True] * 6 + [False] * 6), (True, [True] * 12)):
        recipe = Recipe.from_json(QUICK.to_json() | {"random_offset": offset, "weight_decay": 0})
        model = trained(recipe).model
        assert (model.table.weight != Small().table.weight).any(1).tolist() == expected


def test_a_loss_that_is_no_number_stops_and_says_where():
    trainer = Trainer(Small(), TaskData(PARITY), QUICK, seed=3)

    def spoil() -> None:
        if trainer.state.step == 11:
            trainer.model.head.weight.data[0, 0] = math.nan

    with pytest.raises(TrainingError, match=r"loss is nan at step 12 of seed 3"):
        trainer.run(spoil)
    assert trainer.state.step == 11


def test_a_gradient_that_is_no_number_changes_no_weight():
    trainer = Trainer(Small(), TaskData(PARITY), QUICK, seed=0)
    trainer.model.head.weight.register_hook(lambda g: g * math.inf)
    before = {k: v.clone() for k, v in trainer.tensors().items()}
    with pytest.raises(TrainingError, match=r"gradient's norm is (nan|inf) at step 1 "):
        trainer.run()
    assert same(before, trainer.tensors())


def test_what_cannot_be_trained_is_refused():
    data = TaskData(PARITY)
    with pytest.raises(RequestError, match="5 positions"):
        Trainer(Small(), data, QUICK, seed=0, max_length=5)
    with pytest.raises(RequestError, match="random_offset"):
        Trainer(Small(), data, Recipe(random_offset=True), seed=0)
    with pytest.raises(RequestError, match="nothing to learn.*'parity' is 0"):
        TaskData(OneClass()).majority(6)
    with pytest.raises(UnknownNameError, match="target 'depth'.*parity"):
        TaskData(PARITY, "depth")


def curricula() -> st.SearchStrategy[Curriculum | None]:
    share = st.floats(0, 1, exclude_min=True)
    one = st.fixed_dictionaries({"start": st.integers(1, 40), "grow": st.integers(1, 50)})
    by_steps = st.tuples(one, share).map(lambda f: Curriculum(**f[0], share=f[1]))
    by_accuracy = st.tuples(one, share).map(lambda f: Curriculum(**f[0], accuracy=f[1]))
    return st.none() | by_steps | by_accuracy


@given(curricula(), st.integers(1, 500), st.integers(0, 60), st.floats(0, 1))
def test_a_recipe_is_its_json_and_its_plan_grows_to_the_full_length(curriculum, steps, warmup, floor):
    recipe = Recipe(steps=steps, warmup=warmup, floor=floor, curriculum=curriculum)
    assert Recipe.from_json(recipe.to_json()) == recipe
    rates = [recipe.learning_rate(s) for s in range(steps)]
    assert all(0 <= r <= recipe.lr * (1 + 1e-12) for r in rates)
    if steps > warmup + 1:
        assert math.isclose(rates[-1], floor * recipe.lr, abs_tol=1e-12)
    lengths = [recipe.planned_length(s) for s in range(steps)]
    assert recipe.lengths[-1] == 40 and list(recipe.lengths) == sorted(set(recipe.lengths))
    if curriculum is None or curriculum.share is not None:
        assert lengths == sorted(lengths) and set(lengths) <= set(recipe.lengths)
        assert curriculum is None or curriculum.share * steps < 100 or lengths[0] == curriculum.start
    else:
        assert set(lengths) == {None}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"learning_rate": 1}, "no field 'learning_rate' of a recipe"),
        ({"curriculum": {"start": 5, "shares": 1}}, "Did you mean 'share'"),
        ({"curriculum": {"start": 5}}, "give one of the two"),
        ({"curriculum": {"start": 5, "share": 0.5, "accuracy": 0.9}}, "give one of the two"),
        ({"curriculum": {"start": 50, "share": 0.5}}, "starts at length 50"),
        ({"curriculum": "linear"}, "mapping"),
        ({"lr": 0}, "lr of a recipe"),
        ({"lr": math.nan}, "lr of a recipe"),
        ({"steps": 1.5}, "steps of a recipe"),
        ({"betas": [0.9]}, "betas of a recipe"),
        ({"betas": 3}, "wrong kind"),
        ({"stop_at": 1.5}, "stop_at of a recipe"),
        ({"clip": 0}, "clip of a recipe"),
        ({"random_offset": 1}, "random_offset of a recipe"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_by_name(fields, says):
    with pytest.raises(RequestError, match=says):
        Recipe.from_json(fields)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_goes_on_from_its_file_to_the_same_bits(architecture, tmp_path):
    config = make_config(architecture, vocab_size=2, outputs=2, layers=2, d_model=16)
    recipe = Recipe.from_json(QUICK.to_json() | {"steps": 12})

    def fresh(seed: int = 0) -> Trainer:
        model = SequenceModel(config, generator=torch.Generator().manual_seed(seed))
        return Trainer(model, TaskData(PARITY), recipe, seed=0)

    whole, resumed = fresh(), fresh(1)
    whole.run(lambda: save_state(tmp_path, whole, {}) if whole.state.step == 7 else None)
    assert load_state(tmp_path, resumed, {}) and resumed.state.step == 7
    resumed.run()
    assert same(whole.tensors(), resumed.tensors())
    every = {name for name, _ in whole.model.named_parameters()}
    kept = {n for n in every if "norm" in n or "bias" in n or n.endswith(("A_log", ".D"))}
    assert decaying(whole.model) == every - kept
    if "mamba" in architecture:
        assert sum(n.endswith(("A_log", ".D")) for n in kept) == 4
