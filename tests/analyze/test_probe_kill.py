"""kill -9 of a probe at any moment, then the same command: the same bytes, and no half-written artifact."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from layerlake.store.lake import Lake
from processes import run_layerlake, started, wait_until


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kill")
    rng = np.random.default_rng(0)
    rows = [{"input_ids": (i := rng.integers(0, 50, 30).tolist()), "mod": [t % 7 for t in i]} for _ in range(150)]
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = ["toy_models:tuples", folder / "d.jsonl", "--lake", folder / "lake", "--run", "toy", "--label-column", "mod"]
    assert run_layerlake("extract", *data).returncode == 0
    return folder / "lake"


def kept(lake: Path) -> dict[str, bytes]:
    return {str(p.relative_to(lake)): p.read_bytes() for p in sorted((lake / "artifacts").rglob("*")) if p.is_file()}


def test_a_probe_killed_at_random_moments(lake, tmp_path):
    command = ["probe", "toy", "--label", "mod", "--seeds", "2", "--json", "--lake"]
    clean, torn = (Path(shutil.copytree(lake, tmp_path / n)) for n in ("clean", "torn"))
    expected = run_layerlake(*command, clean)
    assert expected.returncode == 0, expected.stderr
    moments = random.Random(1)
    killed = 0
    for _ in range(4):
        with started(*command, torn) as process:
            if not wait_until(lambda p=process: p.poll() is not None, moments.uniform(1.0, 4.0)):
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
        assert [p for p in Lake.open(torn).verify() if p.path != "catalog.json"] == []
    assert killed >= 1
    again = run_layerlake(*command, torn)
    assert (again.returncode, again.stdout) == (0, expected.stdout)
    finished = {k: v for k, v in kept(torn).items() if ".tmp" not in k}
    assert finished == kept(clean)
    assert Lake.open(torn).sql("SELECT count(*) AS n FROM probes")["n"][0].as_py() == 3
