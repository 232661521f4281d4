"""Broken units are redone by the same model to the same bytes, or nothing is moved and the report says why."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import toy_models
from dying import Step, die_at_each_step
from layerlake.__main__ import main
from layerlake.errors import RequestError
from layerlake.extract import run_models as room
from layerlake.extract import settings
from layerlake.extract.driver import extract
from layerlake.extract.loaded_model import ModelSource
from layerlake.extract.repair import RepairReport, repair
from layerlake.store.durable import file_sha256, sealed_json
from layerlake.store.lake import Lake
from layerlake.store.run import Run
from layerlake.store.unit import UnitWriter
from layerlake.store.unit_record import record_digest
from processes import run_layerlake
from safetensors.torch import load_file, save_file
from toy_models import save_model

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # Python 3.12 of every fork

CANNOT = "cannot be recreated"


def write_ids(path: Path, count: int = 90) -> Path:
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(0, 50, int(rng.integers(1, 31))).tolist(), "x": i} for i in range(count)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A lake of one run of six units; never changed by a test. The data are gone: a repair does not need them."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_ids(folder / "d.jsonl")
    extract("toy_models:tuples", data, folder / "lake", run="r", unit_rows=256, batch_tokens=64, label_columns=["x"])
    data.unlink()
    return folder / "lake"


@pytest.fixture
def lake(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "lake"))


def promised(root: Path, name: str = "r") -> dict[str, str]:
    """Everything that must be the same: all files of the run, of its records the part that does not vary."""
    folder = root / "runs" / name
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if not path.is_file() or inside.parts[0] in ("damaged", "driver.lock"):
            continue
        if inside.parts[0] == "units":
            record = json.loads(path.read_bytes())
            assert record["sha256"] == record_digest(record)
            found[str(inside)] = record["sha256"]
        else:
            found[str(inside)] = file_sha256(path)
    return found


def tree(root: Path) -> dict[str, str]:
    files = (p for p in sorted(root.rglob("*")) if not p.is_dir() and p.name not in ("driver.lock", "lock"))
    return {str(p.relative_to(root)): str(p.readlink()) if p.is_symlink() else file_sha256(p) for p in files}


def inodes(root: Path) -> dict[str, int]:
    return {str(p.relative_to(root)): p.stat().st_ino for p in (root / "runs").rglob("*") if p.is_file()}


def done(report: RepairReport) -> dict[str, str]:
    return {o.path: o.done for o in report.outcomes}


def shard(root: Path, unit: int, site: str = "resid_post", layer: int | None = 1) -> Path:
    run = Run(root, "r")
    return run.shard_path(run.array(site, layer), unit)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def replaced(path: Path, put: Callable[[Path], object]) -> None:
    path.unlink()
    put(path)


SPOIL: dict[str, Callable[[Path, Path], object]] = {
    "flipped": lambda root, path: flip(path),
    "truncated": lambda root, path: os.truncate(path, 50),
    "missing": lambda root, path: path.unlink(),
    "of another unit": lambda root, path: shutil.copy(shard(root, 0), path),
    "of another array": lambda root, path: shutil.copy(shard(root, 2, layer=0), path),
    "a folder": lambda root, path: replaced(path, lambda p: (p.mkdir(), (p / "x").write_text("x"))),
    "a link": lambda root, path: replaced(path, lambda p: p.symlink_to(shard(root, 0))),
}


@pytest.mark.parametrize("how", SPOIL)
def test_a_broken_shard_is_redone_to_the_same_bytes_and_nothing_else_is_touched(lake, whole, how):
    path = shard(lake, 2)
    name = str(path.relative_to(lake))
    SPOIL[how](lake, path)
    before, held = tree(lake), inodes(lake)
    would = repair(lake, dry_run=True)
    assert tree(lake) == before
    report = repair(lake)
    assert done(report) == done(would) == {name: "recreated"}
    assert report.whole and would.whole
    assert promised(lake) == promised(whole)
    assert Lake.open(lake).verify() == []
    now = inodes(lake)
    assert {n for n, i in held.items() if now.get(n) != i} - {name, f"{name}/x"} == set()
    if how == "missing":
        assert report.set_aside == []
    else:
        aside = lake / report.set_aside[0] / path.relative_to(lake / "runs" / "r")
        assert aside.is_symlink() if how == "a link" else aside.exists()


def test_whoever_has_the_lake_open_reads_the_redone_shard_from_the_next_selection_on(lake):
    opened = Lake.open(lake)
    query = "SELECT run, row FROM tokens ORDER BY row"
    right = opened.select(query).bits(1)
    path = shard(lake, 2)
    opened = Lake.open(lake)
    flip(path)
    assert (opened.select(query).bits(1) != right).sum() == 1
    assert repair(lake).whole
    assert (opened.select(query).bits(1) == right).all()


def lose_record(root: Path) -> None:
    Run(root, "r").unit_path(2).unlink()


def spoil_record(root: Path) -> None:
    flip(Run(root, "r").unit_path(2))


def another_record(root: Path) -> None:
    shutil.copy(Run(root, "r").unit_path(1), Run(root, "r").unit_path(2))


def lose_record_and_forget_it(root: Path) -> None:
    lose_record(root)
    Lake.open(root).index()


def lose_the_data(root: Path) -> None:
    run = Run(root, "r")
    for path in [run.tokens_path(2), *(run.shard_path(a, 2) for a in run.record.arrays)]:
        path.unlink()


def lose_everything_of_it(root: Path) -> None:
    lose_the_data(root)
    lose_record(root)


def spoil_all_but_one_shard(root: Path) -> None:
    spoil_record(root)
    flip(shard(root, 2, layer=0))
    os.truncate(shard(root, 2, "embed", None), 7)
    Run(root, "r").tokens_path(2).write_bytes(b"")


def lose_the_folders(root: Path) -> None:
    run = Run(root, "r")
    for name in ("units", "tokens", "tmp", "activations.zarr"):
        shutil.rmtree(run.folder / name)


@pytest.mark.parametrize(
    "spoil",
    [lose_record, spoil_record, another_record, lose_record_and_forget_it, lose_the_data, lose_everything_of_it,
     spoil_all_but_one_shard, lose_the_folders],
)  # fmt: skip
def test_a_broken_unit_is_redone_to_the_same_bytes(lake, whole, spoil):
    spoil(lake)
    before, kept = tree(lake), set(tree(lake / "runs").values())
    assert repair(lake, dry_run=True).whole
    assert tree(lake) == before
    report = repair(lake)
    assert report.whole, report
    assert set(done(report).values()) == {"recreated"}
    if spoil is spoil_all_but_one_shard:  # the record did not say so, but the model does
        files = [shard(lake, 2, layer=0), shard(lake, 2, "embed", None), Run(lake, "r").tokens_path(2)]
        assert set(done(report)) == {str(p.relative_to(lake)) for p in [*files, Run(lake, "r").unit_path(2)]}
    assert promised(lake) == promised(whole)
    assert Lake.open(lake).verify() == []
    assert kept <= set(tree(lake / "runs").values())  # what was damaged is set aside, not deleted
    for folder in report.set_aside:  # and what was intact has no second name there
        assert not set(tree(lake / folder).values()) & set(promised(whole).values())
    assert Lake.open(lake).sql("SELECT complete FROM runs")["complete"].to_pylist() == [True]
    clean = tree(lake)
    assert repair(lake).outcomes == []
    assert tree(lake) == clean


def test_what_a_killed_driver_left_is_swept_and_extracting_completes_the_run(tmp_path):
    data = write_ids(tmp_path / "d.jsonl", 60)
    driver = os.fork()
    if not driver:
        commit = UnitWriter.commit
        dying = {2: lambda *_: os.kill(os.getpid(), signal.SIGKILL)}
        UnitWriter.commit = lambda self, *facts: dying.get(self.unit, commit)(self, *facts)  # pyright: ignore
        extract("toy_models:tuples", data, tmp_path / "lake", run="r", unit_rows=256, batch_tokens=64)
        os._exit(0)
    assert os.waitpid(driver, 0)[1] == signal.SIGKILL
    run = Run(tmp_path / "lake", "r")
    assert run.committed() == {0, 1} and list(run.scratch.iterdir())
    unit = 2
    shutil.copy(run.shard_path(run.record.arrays[0], 0), run.shard_path(run.record.arrays[0], unit))
    Lake.open(tmp_path / "lake").index()
    report = repair(tmp_path / "lake")
    assert report.whole
    assert done(report)[str(run.shard_path(run.record.arrays[0], unit).relative_to(tmp_path / "lake"))] == "swept"
    assert set(done(report).values()) == {"swept"}
    assert list(run.scratch.iterdir()) == []
    assert len(run.committed()) < run.record.units  # a repair redoes what was there; the rest is for `extract`
    for place in ("other", "lake"):
        extract("toy_models:tuples", data, tmp_path / place, run="r", unit_rows=256, batch_tokens=64)
    ours, theirs = (promised(tmp_path / place) for place in ("lake", "other"))
    assert ours.pop("run.json") and theirs.pop("run.json")  # they say when they were made
    assert ours == theirs


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A lake whose model is a folder, `model`, beside it; never changed by a test."""
    folder = tmp_path_factory.mktemp("saved")
    model = save_model(folder / "model", "gpt2", layers=1)
    extract(str(model), write_ids(folder / "d.jsonl", 30), folder / "lake", run="r", unit_rows=256)
    return folder


def with_model_at(saved: Path, root: Path, model: Path) -> None:
    """Copy the saved lake, whose record then names `model`: where it lies is not part of the identity."""
    shutil.copytree(saved / "lake", root)
    path = root / "runs" / "r" / "run.json"
    value = {k: v for k, v in json.loads(path.read_bytes()).items() if k != "seal"}
    value["source"]["load"]["name"] = str(model)
    path.write_bytes(sealed_json(value))


def test_other_weights_are_refused_before_anything_moves_and_the_right_ones_can_be_named(saved, tmp_path, capsys):
    root, model = tmp_path / "lake", tmp_path / "model"
    with_model_at(saved, root, model)
    flip(shard(root, 1, layer=0))
    spoilt = str(shard(root, 1, layer=0).relative_to(root))
    before = tree(root)
    moved = repair(root)
    assert done(moved) == {spoilt: CANNOT}
    assert "--model" in moved.outcomes[0].why
    shutil.copytree(saved / "model", model)
    weights = load_file(model / "model.safetensors")
    weights["transformer.wte.weight"][3, 4] += 1e-3
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    for arguments in ({}, {"model": str(model)}, {"model": "toy_models:lstm"}, {"model": str(tmp_path / "none")}):
        for dry_run in (True, False):
            report = repair(root, dry_run=dry_run, **arguments)
            assert done(report) == {spoilt: CANNOT}
            assert not report.whole
            assert tree(root) == before
    assert "other weights than the model" in repair(root, model=str(model)).outcomes[0].why
    assert main(["repair", "--lake", str(root)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 problem left."
    assert main(["repair", "--lake", str(root), "--model", str(saved / "model")]) == 0
    assert promised(root).items() >= {n: h for n, h in promised(saved / "lake").items() if n != "run.json"}.items()
    assert Lake.open(root).verify() == []


def test_a_machine_that_would_give_other_bytes_is_refused_before_anything_moves(lake, monkeypatch):
    flip(shard(lake, 2))
    before = tree(lake)
    here = settings.compute_settings
    monkeypatch.setattr(settings, "compute_settings", lambda *a: here(*a) | {"torch": "1.0", "cpu": "ABACUS"})
    for dry_run in (True, False):
        report = repair(lake, dry_run=dry_run)
        assert done(report) == {str(shard(lake, 2).relative_to(lake)): CANNOT}
        assert "torch 1.0, not " in report.outcomes[0].why and "cpu ABACUS" in report.outcomes[0].why
        assert tree(lake) == before


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("spoil", [flip, Path.unlink])
def test_a_model_that_is_the_same_by_all_names_and_gives_other_values_changes_nothing(lake, monkeypatch, spoil, layer):
    """The checksums that the record holds tell; the unit stays as it was, the broken shard too."""
    spoil(shard(lake, 2, layer=layer))
    before = tree(lake)
    forward = toy_models.TupleBlock.forward
    monkeypatch.setattr(toy_models.TupleBlock, "forward", lambda self, x: (forward(self, x)[0] * 1.001, None))
    report = repair(lake)
    assert list(done(report).values()) == [CANNOT]
    assert "than this attempt computed" in report.outcomes[0].why
    assert not report.whole
    assert tree(lake) == before
    monkeypatch.undo()
    assert repair(lake).whole


def test_a_shard_that_came_out_right_beside_others_that_did_not_is_kept_and_that_is_said(lake, monkeypatch):
    shard(lake, 2, "embed", None).unlink()
    forward = toy_models.TupleBlock.forward
    monkeypatch.setattr(toy_models.TupleBlock, "forward", lambda self, x: (forward(self, x)[0] * 1.001, None))
    report = repair(lake)
    assert list(done(report).values()) == ["recreated"]
    assert "other content than this attempt computed" in report.outcomes[0].why
    assert Lake.open(lake).verify() == []


def test_some_units_fail_and_the_others_are_redone(lake, whole, monkeypatch):
    """The forward breaks on sequences of one unit only: that one is as it was, with what went wrong."""
    run = Run(lake, "r")
    lengths = [np.bincount(run.planned_tokens(u)["seq"].to_numpy()).max() for u in range(6)]
    worst = int(np.argmax(lengths))
    others = [u for u in range(6) if lengths[u] < max(lengths)][:2]
    for unit in (worst, *others):
        flip(shard(lake, unit))
    spoil_name = str(shard(lake, worst).relative_to(lake))
    forward = toy_models.Tuples.forward

    def broken(self, ids):
        if ids.shape[1] == max(lengths):
            raise toy_models.TwoPartError("the forward broke", ids.shape[1])
        return forward(self, ids)

    monkeypatch.setattr(toy_models.Tuples, "forward", broken)
    before = tree(lake)
    report = repair(lake)
    assert done(report) == {str(shard(lake, u).relative_to(lake)): "recreated" for u in others} | {spoil_name: CANNOT}
    assert "the forward broke" in {o.path: o.why for o in report.outcomes}[spoil_name]
    assert not report.whole
    assert tree(lake)[spoil_name] == before[spoil_name]
    assert [p.path for p in Lake.open(lake).verify()] == [spoil_name]
    monkeypatch.undo()
    assert repair(lake).whole
    assert promised(lake) == promised(whole)


def test_a_plan_that_is_gone_with_a_unit_stops_that_and_a_plan_alone_is_made_first(lake, whole):
    flip(shard(lake, 2))
    plan = lake / "runs" / "r" / "plan" / "tokens-00000.parquet"
    plan.unlink()
    assert repair(lake, dry_run=True).whole
    report = repair(lake)
    assert report.whole
    assert promised(lake) == promised(whole)
    flip(shard(lake, 2))
    flip(plan)
    Run(lake, "r").tokens_path(3).unlink()
    before = tree(lake)
    report = repair(lake)
    assert set(done(report).values()) == {CANNOT}
    assert tree(lake) == before


def test_code_that_comes_with_a_model_runs_only_when_asked_for_now(lake, monkeypatch):
    """What a lake says must not be enough, as lakes are passed on."""
    path = lake / "runs" / "r" / "run.json"
    value = {k: v for k, v in json.loads(path.read_bytes()).items() if k != "seal"}
    value["source"]["load"]["trust_remote_code"] = True
    path.write_bytes(sealed_json(value))
    flip(shard(lake, 2))
    asked: list[ModelSource] = []
    load = room.load_model
    monkeypatch.setattr(room, "load_model", lambda source, **options: asked.append(source) or load(source, **options))
    assert repair(lake).whole
    assert [s.trust_remote_code for s in asked] == [False]


def test_a_run_that_does_not_say_how_it_was_made_is_left_as_it_is(lake):
    path = lake / "runs" / "r" / "run.json"
    value = {k: v for k, v in json.loads(path.read_bytes()).items() if k != "seal"}
    flip(shard(lake, 2))
    for load in ({}, {"name": 3}, {"name": "toy_models:tuples", "more": 1}, [], "x", None):
        value["source"]["load"] = load
        path.write_bytes(sealed_json(value))
        before = tree(lake)
        report = repair(lake)
        assert list(done(report).values()) == [CANNOT], load
        assert tree(lake) == before


def test_a_living_driver_is_not_disturbed(lake):
    flip(shard(lake, 2))
    before = tree(lake)
    with Run(lake, "r").driver_lock():
        for dry_run in (True, False):
            report = repair(lake, dry_run=dry_run)
            assert done(report) == {"runs/r": "left"}
            assert f"process {os.getpid()}" in report.outcomes[0].why
            assert not report.whole
    assert tree(lake) == before
    assert repair(lake).whole


def test_what_is_asked_wrongly_is_refused(lake):
    flip(shard(lake, 2))
    before = tree(lake)
    for options in ({"engine": "dask"}, {"workers": 2}, {"run": "q"}, {"run": "../r"}):
        with pytest.raises(RequestError):
            repair(lake, **options)
    assert tree(lake) == before


STEPS: list[Step] = [(os, name) for name in ("rename", "replace", "fsync", "link", "unlink", "mkdir", "rmdir")]


@pytest.mark.parametrize("stride", [90, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_any_step_verify_says_what_is_wrong_and_the_next_repair_completes_it(lake, whole, tmp_path, stride):
    flip(shard(lake, 1))
    lose_record(lake)
    spoil_all_but_one_shard_of(lake, 3)
    (lake / "runs" / "r" / "activations.zarr" / "zarr.json").unlink()
    flip(Run(lake, "r").tokens_path(5))
    spoilt = {p.path for p in Lake.open(lake).verify()}
    kept = set(tree(lake / "runs").values())

    def prepare(moment: int) -> Callable[[], object]:
        root = Path(shutil.copytree(lake, tmp_path / f"lake{moment}"))
        return lambda: repair(root).whole or os._exit(3)

    moments = die_at_each_step(STEPS, prepare, stride)
    assert moments > 2
    run = Run(whole, "r")
    of_unit = {str(run.unit_path(u).relative_to(whole)) for u in (1, 2, 3)}
    of_unit |= {str(run.shard_path(a, u).relative_to(whole)) for u in (1, 2, 3) for a in run.record.arrays}
    of_unit |= {str(run.tokens_path(u).relative_to(whole)) for u in (1, 2, 3)}
    for moment in range(moments):
        root = tmp_path / f"lake{moment * stride}"
        found = {p.path for p in Lake.open(root).verify()}
        if moment == moments - 1:
            assert found == set()
        assert found <= spoilt | of_unit, moment
        assert kept - set(tree(root / "runs").values()) == set(), moment  # nothing is lost on the way
        if moment % 2:
            Lake.open(root).index()  # the catalog forgets what has no record now
        assert repair(root).whole, moment
        assert promised(root) == promised(whole), moment
        assert Lake.open(root).verify() == []


def spoil_all_but_one_shard_of(root: Path, unit: int) -> None:
    flip(Run(root, "r").unit_path(unit))
    flip(shard(root, unit, layer=0))
    shard(root, unit, "embed", None).unlink()


@pytest.mark.slow
def test_ray_actors_redo_units_as_well(lake, whole):
    for unit in range(6):
        flip(shard(lake, unit))
    result = run_layerlake("repair", "--lake", lake, "--engine", "ray", "--workers", 2)
    assert result.returncode == 0, result.stderr
    assert promised(lake) == promised(whole)
