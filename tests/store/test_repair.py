"""What a repair makes again without a model is what was there, byte for byte; all else is left as it is, and named."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lakes import commit_unit, make_run
from layerlake.__main__ import main
from layerlake.extract.repair import RepairReport, repair
from layerlake.store.catalog import named_generation, publish_catalog
from layerlake.store.durable import exclusive_lock, file_sha256, new_folder, read_json, sealed_json
from layerlake.store.lake import Lake
from layerlake.store.orphans import remove
from layerlake.store.run import Run
from layerlake.store.unit_record import record_digest

LABELS = {"x": [i / 3 for i in range(53)], "w": [f"w{i}" for i in range(53)], "none": [None] * 53}
RUN = "runs/toy"
RECREATED = {
    "plan tokens": f"{RUN}/plan/tokens-00000.parquet",
    "group metadata": f"{RUN}/activations.zarr/zarr.json",
    "array metadata": f"{RUN}/activations.zarr/resid_post-1/zarr.json",
    "token table": f"{RUN}/tokens/00000001.parquet",
}
LEFT = {
    "run": f"{RUN}/run.json",
    "plan sequences": f"{RUN}/plan/sequences.parquet",
    "shard": f"{RUN}/activations.zarr/resid_post-1/c.2.0",
    "unit record": f"{RUN}/units/00000001.json",
    "result": "results/p.parquet",
    "artifact": "artifacts/probe-p/artifact.json",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A lake of two runs, a result and an artifact; never changed by a test."""
    root = tmp_path_factory.mktemp("whole") / "lake"
    for name, seed in (("toy", 0), ("twin", 1)):
        make_run(root, name=name, seed=seed, labels=LABELS, layers=2 if name == "toy" else 0)
    row = {"result": "p", "kind": "probe", "run": "toy", "metric": "accuracy", "value": 0.5, "artifact": "a"}
    pq.write_table(pa.Table.from_pylist([row]), root / "results" / "p.parquet")
    with new_folder(root / "artifacts" / "probe-p") as folder:
        (folder / "artifact.json").write_bytes(sealed_json({"kind": "probe", "files": {}}))
    publish_catalog(root)
    for name in ("toy", "twin"):
        with Run(root, name).driver_lock():
            pass
    assert Lake.open(root).verify() == []
    return root


@pytest.fixture
def lake(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "lake"))


def state(root: Path) -> dict[str, str]:
    """Everything of a lake, links and empty folders too, but for who held a lock last."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_dir():
            found[name] = "folder"
        elif path.name not in ("lock", "driver.lock"):
            found[name] = file_sha256(path)
    return found


def runs_of(root: Path) -> dict[str, str]:
    """The files of a lake without the catalog and without what was set aside."""
    kept = {n: s for n, s in state(root).items() if not n.startswith("catalog") and "/damaged" not in n}
    return {n: s for n, s in kept.items() if s != "folder"}


def done(report: RepairReport) -> dict[str, str]:
    return {o.path: o.done for o in report.outcomes}


def put_folder(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("a folder of somebody's")


DAMAGE: dict[str, Callable[[Path, bytes], object]] = {
    "flipped": lambda path, data: path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]),
    "folder": lambda path, data: put_folder(path),
    "gone": lambda path, data: None,
    "cut": lambda path, data: path.write_bytes(data[:-7]),
    "link to nothing": lambda path, data: path.symlink_to(path.parent / "nowhere"),
    "empty": lambda path, data: path.write_bytes(b""),
    "loop": lambda path, data: path.symlink_to(path),
    "longer": lambda path, data: path.write_bytes(data + b"x"),
}


WAYS = [1, pytest.param(len(DAMAGE), marks=pytest.mark.slow)]


def damage(path: Path, kind: str, ways: int) -> Iterator[str]:
    """Spoil a file in some ways, one after the other; what is left of the last one is taken away."""
    data = path.read_bytes()
    for how in random.Random(kind).sample(list(DAMAGE), ways):
        remove(path)
        DAMAGE[how](path, data)
        yield how
    remove(path)
    path.write_bytes(data)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("kind", RECREATED)
def test_what_follows_from_other_files_is_recreated_with_the_same_bytes(lake, whole, kind, ways):
    path = lake / RECREATED[kind]
    for how in damage(path, kind, ways):
        spoilt = state(lake)
        would = repair(lake, dry_run=True)
        assert state(lake) == spoilt
        report = repair(lake)
        assert done(report) == done(would) == {RECREATED[kind]: "recreated"}, how
        assert report.whole and would.whole
        assert runs_of(lake) == runs_of(whole)
        assert Lake.open(lake).verify() == []
        kept = [lake / folder / path.relative_to(lake / RUN) for folder in report.set_aside]
        assert len(kept) == (how != "gone")
        for aside in kept:
            assert state(lake)[str(aside.relative_to(lake))] == spoilt[RECREATED[kind]]
        shutil.rmtree(lake / RUN / "damaged", ignore_errors=True)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("kind", LEFT)
def test_what_cannot_be_recreated_is_left_untouched_and_named(lake, whole, kind, ways, capsys):
    for how in damage(lake / LEFT[kind], kind, ways):
        spoilt = state(lake)
        assert not repair(lake, dry_run=True).whole
        report = repair(lake)
        named = LEFT[kind]
        assert done(report)[named] == "cannot be recreated", how
        assert not report.whole
        if kind == "run":  # what is no run any more is none in the catalog
            assert {n: s for n, s in state(lake).items() if not n.startswith("catalog")} == {
                n: s for n, s in spoilt.items() if not n.startswith("catalog")
            }
        else:
            assert state(lake) == spoilt, how
        assert main(["repair", "--lake", str(lake)]) == 1
        assert f"{named}: " in capsys.readouterr().out
    assert repair(lake).whole
    assert runs_of(lake) == runs_of(whole)


@pytest.mark.parametrize("kind", ["pointer", "generation"])
def test_a_damaged_catalog_is_built_anew(lake, whole, kind):
    generation = named_generation(lake)
    assert generation
    path = lake / "catalog.json" if kind == "pointer" else generation.path
    for how in ("flipped", "empty"):
        data = path.read_bytes()
        DAMAGE[how](path, data)
        assert repair(lake, dry_run=True).whole
        report = repair(lake)
        assert report.whole
        assert set(done(report).values()) == {"recreated"}
        generation = named_generation(lake)
        assert generation
        path = lake / "catalog.json" if kind == "pointer" else generation.path
    counted = Lake.open(lake).sql("SELECT run, units FROM runs ORDER BY run").to_pylist()
    assert [(r["run"], r["units"]) for r in counted] == [("toy", 3), ("twin", 3)]
    assert runs_of(lake) == runs_of(whole)


def test_a_catalog_older_than_the_lake_is_brought_up_to_date(lake):
    old = (lake / "catalog.json").read_bytes(), max((lake / "catalog").glob("*.duckdb"))
    make_run(lake, name="later")
    (lake / "catalog.json").write_bytes(old[0])
    assert [p.path for p in Lake.open(lake).verify()] == ["catalog.json"]
    before = state(lake)
    assert done(repair(lake, dry_run=True)) == {"catalog.json": "recreated"}
    assert state(lake) == before
    assert repair(lake).whole
    assert Lake.open(lake).sql("SELECT run FROM runs ORDER BY run")["run"].to_pylist() == ["later", "toy", "twin"]


def test_a_lake_that_is_whole_is_left_as_it_is(lake):
    before = state(lake)
    report = repair(lake)
    assert (report.outcomes, report.problems, report.whole) == ([], [], True)
    assert state(lake) == before


def test_a_catalog_that_alone_knows_what_is_missing_is_kept(lake):
    """Building it anew would forget that a unit was there, or what a result held, and all would look well."""
    unit = Run(lake, "toy").unit_path(2)
    record = unit.read_bytes()
    for path in [unit, Run(lake, "toy").tokens_path(2)]:
        path.unlink()
    result = lake / "results" / "p.parquet"
    table = pq.read_table(result)
    pq.write_table(table.set_column(4, "value", pa.array([0.75])), result)
    for _ in range(2):
        report = repair(lake)
        assert not report.whole
        assert done(report) == {
            f"{RUN}/units/00000002.json": "cannot be recreated",
            "results/p.parquet": "cannot be recreated",
            "catalog.json": "cannot be recreated",
        }
    unit.write_bytes(record)
    report = repair(lake)
    assert done(report)[f"{RUN}/tokens/00000002.parquet"] == "recreated"
    assert not report.whole  # the result
    pq.write_table(table, result)
    assert repair(lake).whole


def test_a_token_table_that_would_have_other_bytes_is_not_put_in_place(lake):
    """As where another pyarrow wrote the run: the record names bytes that this one does not write."""
    run = Run(lake, "toy")
    table = pq.read_table(run.tokens_path(1))
    pq.write_table(table, run.tokens_path(1), compression="snappy")
    value = {k: v for k, v in read_json(run.unit_path(1)).items() if k not in ("seal", "sha256")}
    value["tokens"]["sha256"] = file_sha256(run.tokens_path(1))
    run.unit_path(1).write_bytes(sealed_json(value | {"sha256": record_digest(value)}))
    assert repair(lake).whole
    os.truncate(run.tokens_path(1), 50)
    before = state(lake)
    report = repair(lake)
    assert done(report) == {f"{RUN}/tokens/00000001.parquet": "cannot be recreated"}
    assert "other bytes" in report.outcomes[0].why
    assert state(lake) == before


def test_a_plan_and_a_token_table_that_are_both_gone_cannot_be_recreated(lake):
    for kind in ("plan tokens", "token table"):
        os.truncate(lake / RECREATED[kind], 20)
    before = state(lake)
    report = repair(lake)
    assert {done(report)[RECREATED[k]] for k in ("plan tokens", "token table")} == {"cannot be recreated"}
    assert (state(lake), report.whole) == (before, False)


def test_remnants_are_swept_and_a_whole_unit_without_its_record_is_not(lake, tmp_path):
    run, tables, bits = make_run(lake, name="part", commit=False)
    for unit in (0, 1):
        commit_unit(run, unit, tables[unit], bits)
    for unit in (0, 1):
        run.unit_path(unit).unlink()
    run.tokens_path(0).unlink()  # its writer was killed before; unit 1 has all its files and lost its record
    publish_catalog(lake)
    before = state(lake)
    shards = [str(run.shard_path(a, 0).relative_to(lake)) for a in run.record.arrays]
    lost = "runs/part/units/00000001.json"
    assert done(repair(lake, dry_run=True)) == dict.fromkeys(shards, "swept") | {lost: "cannot be recreated"}
    assert state(lake) == before
    report = repair(lake)
    assert done(report) == dict.fromkeys(shards, "swept") | {lost: "cannot be recreated"}
    assert not report.whole
    assert runs_of(lake) == {n: s for n, s in before.items() if n in runs_of(lake)}
    assert not [s for s in shards if s in state(lake)]
    for unit in (0, 1):
        commit_unit(run, unit, tables[unit], bits)
    assert repair(lake).whole


def test_what_belongs_to_nothing_is_set_aside_and_never_followed(lake):
    outside = lake.parent / "outside"
    outside.mkdir()
    (outside / "mine").write_text("keep me")
    arrays = lake / RUN / "activations.zarr"
    (arrays / "embed" / "c.9.0").write_bytes(b"foreign")
    (arrays / "stray").symlink_to(outside)
    (arrays / "resid_post-7").mkdir()
    (arrays / "resid_post-7" / "c.0.0").write_bytes(b"more")
    (lake / RUN / "units" / "00000009.json").write_bytes(b"{}")
    names = ["activations.zarr/embed/c.9.0", "activations.zarr/resid_post-7", "activations.zarr/stray"]
    names = [f"{RUN}/{n}" for n in [*names, "units/00000009.json"]]
    assert done(repair(lake, dry_run=True)).items() >= dict.fromkeys(names, "set aside").items()
    report = repair(lake)
    assert done(report) == dict.fromkeys(names, "set aside")
    assert report.whole
    aside = lake / report.set_aside[0] / "activations.zarr"
    assert (aside / "resid_post-7" / "c.0.0").read_bytes() == b"more"
    assert (aside / "stray").readlink() == outside
    shutil.rmtree(lake / RUN / "damaged")
    assert (outside / "mine").read_text() == "keep me"
    assert Lake.open(lake).verify() == []


def test_orphans_of_the_dead_are_swept_and_those_of_the_living_left(lake):
    long_ago = time.time() - 4000
    outside = lake.parent / "outside"
    outside.mkdir()
    (outside / "mine").write_text("keep me")
    old, young = [], []
    for folder in (".", "runs", "artifacts", "results"):
        for age, names in (("old", old), ("young", young)):
            path = lake / folder / f"{age}.1.abc.tmp"
            path.mkdir()
            (path / "half").write_text("x")
            names.append(str(path.relative_to(lake)))
            for p in (path / "half", path):
                os.utime(p, (long_ago, long_ago) if age == "old" else None)
    for name in ("x.tmp", "x.tmp.wal"):
        (lake / "catalog" / name).write_text("x")
        old.append(f"catalog/{name}")
    (lake / "results" / "link.tmp").symlink_to(outside)
    os.utime(lake / "results" / "link.tmp", (long_ago, long_ago), follow_symlinks=False)
    old.append("results/link.tmp")
    removed = lake / "runs" / "gone.1.abc.tmp"  # of a `rm` that was killed: nobody holds its lock
    removed.mkdir()
    (removed / "driver.lock").write_text("1")
    old.append("runs/gone.1.abc.tmp")
    (lake / RUN / "tmp" / "shard.tmp").write_text("x")
    (lake / RUN / "tmp" / "folder").mkdir()
    scratch = [f"{RUN}/tmp/folder", f"{RUN}/tmp/shard.tmp"]
    before = state(lake)
    assert done(repair(lake, dry_run=True)) == dict.fromkeys([*old, *scratch], "swept")
    assert state(lake) == before
    with exclusive_lock(removed / "driver.lock", ""), Run(lake, "toy").driver_lock():
        report = repair(lake)
        swept = set(old) - {"runs/gone.1.abc.tmp"}
        assert done(report) == dict.fromkeys(swept, "swept") | {RUN: "left"}
        assert not report.whole
        assert str(os.getpid()) in report.outcomes[0].why
    report = repair(lake)
    assert done(report) == dict.fromkeys([*scratch, "runs/gone.1.abc.tmp"], "swept")
    assert report.whole
    assert {str(p.relative_to(lake)) for p in lake.rglob("*.tmp")} == set(young)
    assert (outside / "mine").read_text() == "keep me"


def test_folders_that_are_no_runs_are_named_with_what_to_do(lake):
    (lake / "runs" / "empty").mkdir()
    (lake / "runs" / "odd name").mkdir()
    report = repair(lake)
    whys = {o.path: o.why for o in report.outcomes}
    assert "`layerlake rm empty`" in whys["runs/empty/run.json"]
    assert "by hand" in whys["runs/odd name/run.json"]
    Lake.open(lake).remove("empty")
    (lake / "runs" / "odd name").rmdir()
    assert repair(lake).whole


def test_only_the_run_that_is_named_is_repaired(lake):
    for name in ("toy", "twin"):
        os.truncate(lake / "runs" / name / "tokens" / "00000000.parquet", 9)
    report = repair(lake, run="twin")
    assert done(report) == {"runs/twin/tokens/00000000.parquet": "recreated"}
    assert report.whole
    assert [p.path for p in Lake.open(lake).verify()] == [f"{RUN}/tokens/00000000.parquet"]


def test_the_command_says_what_it_did_and_json_says_the_same(lake, capsys):
    os.truncate(lake / RECREATED["token table"], 9)
    assert main(["repair", "--lake", str(lake), "--dry-run"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [
        f"{RECREATED['token table']}: holds other bytes than were written -> would be recreated",
        "Then everything would be as it was written.",
    ]
    assert main(["repair", "--lake", str(lake), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["outcomes"] == [
        {"run": "toy", "path": RECREATED["token table"], "what": "holds other bytes than were written",
         "done": "recreated", "why": ""}
    ]  # fmt: skip
    assert (value["problems"], value["whole"], value["dry_run"], len(value["set_aside"])) == ([], True, False, 1)
    assert main(["repair", "--lake", str(lake)]) == 0
    assert capsys.readouterr().out == "Everything is as it was written.\n"


PLACES = [*RECREATED.values(), *LEFT.values(), f"{RUN}/tokens/00000000.parquet", "catalog.json"]
PLACES += [f"{RUN}/activations.zarr/embed/c.0.0", f"{RUN}/units/00000000.json", "runs/twin/units/00000002.json"]
SPOIL: dict[str, Callable[[bytes], bytes | None]] = {
    "flip": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut": lambda data: data[: len(data) // 2],
    "gone": lambda data: None,
}


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrinking takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.dictionaries(st.sampled_from(PLACES), st.sampled_from(list(SPOIL)), min_size=1, max_size=5))
def test_any_damage_is_repaired_to_the_same_bytes_or_left_as_it_is(whole, tmp_path, spoilt):
    root = tmp_path / str(time.monotonic_ns())
    shutil.copytree(whole, root)
    for name, how in spoilt.items():
        content = SPOIL[how]((root / name).read_bytes())
        (root / name).unlink() if content is None else (root / name).write_bytes(content)
    before, original = runs_of(root), runs_of(whole)
    report = repair(root)
    after, everything = runs_of(root), state(root)
    assert report.whole == (Lake.open(root).verify() == [])
    assert set(before.values()) <= set(everything.values())  # nothing is lost, wherever it lies now
    for name in original:
        assert after.get(name) in (before.get(name), original[name], None)
    if "catalog.json" not in spoilt:  # else a unit that lost its record is one that never was committed
        assert report.whole == (after == original)
    assert repair(root).whole == report.whole
    assert runs_of(root) == after
    if report.whole:
        assert state(root) == everything
