"""kill -9 at any moment, then the same command: the same bytes, and never a row of an uncommitted unit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from layerlake.store.lake import Lake
from layerlake.store.unit import record_digest
from processes import actors_of, run_layerlake, started, wait_until

UNITS = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "d.jsonl"
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in rng.integers(1, 31, 160)]
    path.write_text("".join(json.dumps({"input_ids": rng.integers(0, 50, n).tolist()}) + "\n" for n in lengths))
    return path


def arguments(data: Path, lake: Path) -> list[object]:
    return ["extract", "toy_models:slow", data, "--lake", lake, "--run", "r", "--unit-rows", 256, "--batch-tokens", 64]


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> dict[str, str]:
    lake = tmp_path_factory.mktemp("undisturbed") / "lake"
    result = run_layerlake(*arguments(data, lake))
    assert result.returncode == 0, result.stderr
    return promised_bytes(lake)


def promised_bytes(lake: Path) -> dict[str, bytes | str]:
    """Everything the design promises to be the same: shards, token tables, the deterministic part of records."""
    run = lake / "runs" / "r"
    found: dict[str, bytes | str] = {}
    for path in sorted([*(run / "activations.zarr").rglob("*"), *(run / "tokens").iterdir()]):
        if path.is_file():
            found[str(path.relative_to(run))] = path.read_bytes()
    for path in sorted((run / "units").iterdir()):
        record = json.loads(path.read_bytes())
        assert record["sha256"] == record_digest(record)
        found[path.name] = record["sha256"]
    return found


def at_work(lake: Path, pid: int) -> bool:
    """Say whether the process is the run's driver by now: the lock file names its holder."""
    lock = lake / "runs" / "r" / "driver.lock"
    return lock.exists() and lock.read_text() == str(pid)


def check_half_done(lake: Path, *, live: bool = False) -> int:
    """No query may see a row whose unit has no record; what is committed must be whole.

    With `live`, workers may still commit: the catalog may then lag behind the records, never run ahead of them.
    """
    if not (lake / "runs" / "r" / "run.json").is_file():
        return 0
    opened = Lake.open(lake)
    opened.index()
    seen = set(opened.sql("SELECT DISTINCT row // 256 AS unit FROM tokens")["unit"].to_pylist())
    units = set(opened.sql("SELECT unit FROM units")["unit"].to_pylist())
    committed = opened.run("r").committed()
    assert seen == units <= committed if live else seen == units == committed
    planned = opened.sql("SELECT DISTINCT unit FROM sequences")["unit"].to_pylist()
    assert set(planned) == units
    harmless = ("remnant", "are committed: `layerlake index`") if live else ("remnant",)
    damaged = [p for p in opened.verify() if not any(h in p.what for h in harmless)]
    assert not damaged, damaged
    if units:
        opened.select("SELECT run, row FROM tokens").array(1)
    return len(units)


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_S06_the_driver_killed_at_random_moments(data, undisturbed, tmp_path, seed):
    lake = tmp_path / "lake"
    moments = random.Random(seed)
    killed = 0
    for _ in range(30):
        with started(*arguments(data, lake)) as process:
            assert wait_until(lambda p=process: at_work(lake, p.pid) or p.poll() is not None, 30)
            longest = 2.0 if killed else 0.3  # on a fast machine the whole run may take less than two seconds
            if wait_until(lambda: process.poll() is not None, moments.uniform(0.0, longest)):
                assert process.returncode == 0, process.stderr.read()
                break
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
        check_half_done(lake)
    else:
        pytest.fail("thirty starts did not finish the run")
    assert killed >= 1
    assert promised_bytes(lake) == undisturbed
    assert Lake.open(lake).verify() == []
    assert not list((lake / "runs" / "r" / "tmp").iterdir())


def test_D01_actors_killed_at_random_moments(data, undisturbed, tmp_path):
    lake = tmp_path / "lake"
    moments = random.Random(5)
    with started(*arguments(data, lake), "--engine", "ray", "--workers", 2) as process:
        for _ in range(2):
            assert wait_until(lambda: len(actors_of(process.pid)) == 2 or process.poll() is not None, 60, 0.1)
            time.sleep(moments.uniform(0.1, 0.8))
            if actors := actors_of(process.pid):
                os.kill(moments.choice(actors), signal.SIGKILL)
            check_half_done(lake, live=True)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "died" in err  # the lost worker is named
    assert promised_bytes(lake) == undisturbed
    assert Lake.open(lake).verify() == []


def test_S05_S06_the_ray_driver_killed_and_started_again(data, undisturbed, tmp_path):
    lake = tmp_path / "lake"
    with started(*arguments(data, lake), "--engine", "ray", "--workers", 2) as process:
        assert wait_until(lambda: len(list((lake / "runs" / "r" / "units").glob("*"))) >= 2, 60, 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        done = check_half_done(lake, live=True)
        # at once: the dead driver's actors may still be at work
        result = run_layerlake(*arguments(data, lake), "--engine", "ray", "--workers", 2)
    assert result.returncode == 0, result.stderr
    assert done < len([k for k in undisturbed if k.endswith(".json") and "/" not in k])
    assert promised_bytes(lake) == undisturbed
    assert Lake.open(lake).verify() == []


def test_two_drivers_at_once(data, undisturbed, tmp_path):
    lake = tmp_path / "lake"
    with started(*arguments(data, lake)) as first:
        assert wait_until(lambda: (lake / "runs" / "r" / "units").is_dir(), 30)
        assert wait_until(lambda: list((lake / "runs" / "r" / "units").glob("*")), 30)
        first.send_signal(signal.SIGSTOP)
        second = run_layerlake(*arguments(data, lake))
        first.send_signal(signal.SIGCONT)
        assert second.returncode == 1
        assert f"process {first.pid}" in second.stderr
        assert "Traceback" not in second.stderr
        assert first.wait(60) == 0
    assert promised_bytes(lake) == undisturbed


def test_ctrl_c_stops_with_a_sentence_and_leaves_a_resumable_run(data, undisturbed, tmp_path):
    lake = tmp_path / "lake"
    with started(*arguments(data, lake)) as process:
        assert wait_until(lambda: list((lake / "runs" / "r" / "units").glob("*")), 30)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "same command goes on" in err
    assert "Traceback" not in err
    assert run_layerlake(*arguments(data, lake)).returncode == 0
    assert promised_bytes(lake) == undisturbed


def test_readers_are_never_blocked_or_wrong_while_a_run_is_writing(data, undisturbed, tmp_path):
    """Q03: queries during extraction work on the last published state; each row they see can be read."""
    lake = tmp_path / "lake"
    with started(*arguments(data, lake)) as process:
        assert wait_until(lambda: list((lake / "runs" / "r" / "units").glob("*")), 30)
        queries = 0
        while process.poll() is None:
            opened = Lake.open(lake)
            opened.index()
            sel = opened.select("SELECT run, row FROM tokens")
            if len(sel):
                sel.array(0)
            queries += 1
        assert process.returncode == 0
    assert queries > 3
    assert promised_bytes(lake) == undisturbed
