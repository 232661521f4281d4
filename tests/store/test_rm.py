"""A run is removed whole or not at all, and nothing else is touched."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lakes import make_run
from layerlake.__main__ import main
from layerlake.errors import (
    LayerlakeError,
    RequestError,
    RunLockedError,
    UnknownNameError,
    WorldError,
)
from layerlake.store.cli import app
from layerlake.store.durable import new_folder, sealed_json
from layerlake.store.lake import Lake
from layerlake.store.orphans import lake_orphans
from processes import environment, started, wait_until
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A lake of two runs, with a probe and results of each; never changed by a test."""
    root = tmp_path_factory.mktemp("whole") / "lake"
    for name, seed in (("toy", 0), ("twin", 1)):
        make_run(root, name=name, seed=seed)
        with new_folder(root / "artifacts" / f"probe-{name}") as folder:
            content = {"kind": "probe", "lineage": {"run": name}, "files": {}}
            (folder / "artifact.json").write_bytes(sealed_json(content))
        row = {"result": "p", "kind": "probe", "run": name, "metric": "accuracy", "value": 0.5, "artifact": "a"}
        pq.write_table(pa.Table.from_pylist([row]), root / "results" / f"probe-{name}.parquet")
    Lake.open(root).index()
    return root


@pytest.fixture
def lake(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "lake"))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def others(root: Path) -> dict[str, bytes]:
    """Everything of a lake but the run toy, the catalog and lock files."""
    return {
        n: b for n, b in tree(root).items() if not n.startswith(("runs/toy", "catalog")) and not n.endswith(".lock")
    }


def test_a_dry_run_says_what_would_go_and_changes_nothing(lake):
    before = {p: (p.lstat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in lake.rglob("*")}
    found = Lake.open(lake).remove("toy", dry_run=True)
    files = [p for p in (lake / "runs" / "toy").rglob("*") if p.is_file()]
    assert (found.units, found.files, found.bytes) == (3, len(files), sum(p.stat().st_size for p in files))
    assert (found.stays, found.damaged, found.removed) == (
        ["artifacts/probe-toy", "results/probe-toy.parquet"],
        None,
        False,
    )
    printed = CliRunner().invoke(app, ["rm", "toy", "--lake", str(lake), "--dry-run"])
    assert printed.exit_code == 0
    assert printed.output.splitlines() == [
        f"Would remove run toy: 3 units, {found.files} files, {found.bytes:,} bytes.",
        "Made from it, and would stay in the lake:",
        "  artifacts/probe-toy",
        "  results/probe-toy.parquet",
    ]
    assert {p: (p.lstat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in lake.rglob("*")} == before


def test_a_removed_run_is_gone_and_all_else_is_as_it_was(lake):
    before = others(lake)
    opened = Lake.open(lake)
    assert opened.remove("toy").removed
    assert others(lake) == before
    assert opened.runs() == ["twin"]
    assert opened.sql("SELECT DISTINCT run FROM tokens")["run"].to_pylist() == ["twin"]
    assert opened.sql("SELECT run FROM results ORDER BY run")["run"].to_pylist() == ["toy", "twin"]
    assert opened.verify() == []
    assert sorted(p.name for p in (lake / "runs").iterdir()) == ["twin"]
    with pytest.raises(UnknownNameError, match="Known: twin"):
        opened.remove("toy")
    make_run(lake, name="toy", seed=5)  # the name is free again
    assert opened.verify() == []


def test_elsewhere_than_on_a_terminal_it_must_be_said_that_it_is_meant(lake, capsys):
    before = tree(lake)
    assert main(["rm", "toy", "--lake", str(lake)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "--yes" in err
    assert tree(lake) == before
    assert main(["rm", "toy", "--lake", str(lake), "--yes", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert {k: done[k] for k in ("run", "units", "removed")} == {
        "run": "toy", "units": 3, "removed": True,
    }  # fmt: skip
    assert Lake.open(lake).runs() == ["twin"]


@pytest.mark.parametrize("answer", ["n", "y"])
def test_on_a_terminal_it_asks(lake, answer, capsys, monkeypatch):
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    with os.fdopen(theirs) as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", terminal)
        code = main(["rm", "toy", "--lake", str(lake)])
    os.close(ours)
    out, err = capsys.readouterr()
    assert "Remove run toy?" in err
    assert (code, Lake.open(lake).runs()) == ((1, ["toy", "twin"]) if answer == "n" else (0, ["twin"]))
    assert out.startswith("Removed run toy: 3 units") == (answer == "y")


def test_a_run_with_a_living_driver_is_refused(lake, capsys):
    data = lake.parent / "d.jsonl"
    data.write_text("".join(json.dumps({"input_ids": [i % 50] * 20}) + "\n" for i in range(300)))
    arguments = ["extract", "toy_models:slow", data, "--lake", lake, "--run", "live", "--batch-tokens", 32]
    with started(*arguments, "--unit-rows", 256) as driver:
        assert wait_until(lambda: list((lake / "runs" / "live" / "units").glob("*")), 60)
        for dry in (True, False):
            with pytest.raises(RunLockedError, match=f"process {driver.pid}"):
                Lake.open(lake).remove("live", dry_run=dry)
        assert main(["rm", "live", "--lake", str(lake), "--yes"]) == 1
        assert f"process {driver.pid}" in capsys.readouterr().err
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        Lake.open(lake).remove("live")
    assert Lake.open(lake).runs() == ["toy", "twin"]
    assert Lake.open(lake).verify() == []


@pytest.mark.parametrize("how", ["flipped", "empty", "missing", "folder"])
def test_a_run_whose_record_is_damaged_can_be_removed_by_its_folders_name(lake, how):
    path = lake / "runs" / "toy" / "run.json"
    data = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes(b"" if how == "empty" else data.replace(b"toy", b"boy"))
    found = Lake.open(lake).remove("toy", dry_run=True)
    assert found.damaged and "run.json" in found.damaged
    assert Lake.open(lake).remove("toy").removed
    assert Lake.open(lake).verify() == []
    assert Lake.open(lake).sql("SELECT run FROM runs")["run"].to_pylist() == ["twin"]


def test_links_are_not_followed_and_no_name_leads_out_of_the_lake(lake):
    outside = lake.parent / "outside"
    make_run(outside, name="precious")
    (outside / "lock").write_text("keep me")
    before = tree(outside)
    run = lake / "runs" / "toy"
    (run / "elsewhere").symlink_to(outside)
    shutil.rmtree(run / "tokens")
    (run / "tokens").symlink_to(outside / "runs")
    (lake / "runs" / "linked").symlink_to(outside / "runs" / "precious")
    with pytest.raises(RequestError, match="is a link"):
        Lake.open(lake).remove("linked")
    for name in ("../../outside", "..", ".", "", "toy/../twin", "/", "a.tmp"):
        with pytest.raises(RequestError):
            Lake.open(lake).remove(name)
    Lake.open(lake).remove("toy")
    shutil.rmtree(lake / "runs" / "twin" / "tmp")
    (lake / "runs" / "twin" / "driver.lock").symlink_to(outside / "lock")
    with pytest.raises(WorldError, match="is not removed"):
        Lake.open(lake).remove("twin")
    assert tree(outside) == before
    assert Lake.open(lake).run("twin").committed() == {0, 1, 2}


KILLED = """
    import os, shutil, sys
    from pathlib import Path
    from dying import die_at_each_step
    from layerlake.store import orphans
    from layerlake.store.lake import Lake

    def prepare(moment):
        root = Path(shutil.copytree(sys.argv[1], Path(sys.argv[2]) / f"lake{moment}"))
        return lambda: Lake.open(root).remove("toy")

    steps = [(os, "rename"), (os, "fsync"), (os, "link"), (os, "unlink"), (os, "rmdir"), (os, "replace")]
    print(die_at_each_step(steps, prepare, int(sys.argv[3])))
"""


@pytest.mark.parametrize("stride", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_step_there_is_the_whole_run_or_none(whole, tmp_path, stride):
    code = [sys.executable, "-c", textwrap.dedent(KILLED), str(whole), str(tmp_path), str(stride)]
    done = subprocess.run(code, capture_output=True, text=True, env=environment(), timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    states = []
    for moment in range(int(done.stdout)):
        root = tmp_path / f"lake{stride * moment}"
        opened = Lake.open(root)
        assert others(root) == others(whole)
        if "toy" in opened.runs():
            states.append("whole")
            assert opened.verify() == []
            assert opened.remove("toy").removed
        else:
            states.append("left" if list((root / "runs").glob("*.tmp")) else "none")
            assert all(p.run == "toy" and "indexes 3 units" in p.what for p in opened.verify())
        orphans = list(lake_orphans(root))
        with_lock = [p for p in (root / "runs").glob("*.tmp") if (p / "driver.lock").exists()]
        assert set(with_lock) <= set(orphans)  # known to be dead at once; one without its lock after an hour
        opened.index()
        assert opened.verify() == []
    assert states[0] == "whole"
    assert states[-1] == "none"
    assert states == sorted(states, key=["whole", "left", "none"].index)
    assert states.count("left") > 1


def test_a_reader_in_the_middle_of_a_scan_keeps_what_it_has_mapped(lake):
    opened = Lake.open(lake)
    query = "SELECT run, row FROM tokens WHERE run = 'toy' ORDER BY row"
    expected = opened.select(query).bits(1)
    selection = opened.select(query)
    assert np.array_equal(selection.bits(1), expected)  # every shard of layer 1 is mapped now
    Lake.open(lake).remove("toy")
    assert np.array_equal(selection.bits(1), expected)
    with pytest.raises(WorldError, match="was removed meanwhile"):
        selection.bits(0)
    with pytest.raises(LayerlakeError):
        opened.reader("toy")
    assert len(opened.select(query)) == 0


def test_what_cannot_be_deleted_is_named_and_the_run_is_gone(lake, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted", str(lake / "runs" / "x"))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(WorldError, match=r"is removed, but `layerlake repair` .*Operation not permitted"):
            Lake.open(lake).remove("toy")
    assert Lake.open(lake).runs() == ["twin"]
