"""`layerlake plan` tells what an extraction would take, and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from layerlake.errors import WorldError
from layerlake.extract.cost import plan
from layerlake.extract.driver import extract
from layerlake.store.lake import Lake
from processes import run_layerlake
from toy_models import VOCABULARY, save_model


@pytest.fixture
def data(tmp_path) -> Path:
    rng = np.random.default_rng(3)
    path = tmp_path / "i.jsonl"
    ids = [rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(1, 60, 80)]
    path.write_text("".join(json.dumps({"input_ids": i, "topic": "a"}) + "\n" for i in ids))
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "sites": ("resid_post", "z", "logits"), "layers": "0,2"},
        {"keep": "pos = length - 1", "unit_rows": 64},
        {"window": 20, "overlap": 5},
        {"rows": "tokens,sequences"},
        {"rows": "sequences", "window": 20},
    ],
)
def test_what_is_told_is_what_the_extraction_takes(tmp_path, data, options):
    model = str(save_model(tmp_path / "m", "llama"))
    told = plan(model, data, tmp_path / "lake", run="r", timed=False, **options)
    assert not (tmp_path / "lake").exists()
    report = extract(model, data, tmp_path / "lake", run="r", **options)
    run = Lake.open(tmp_path / "lake").run("r")
    assert (told.tokens, told.tokens_read, told.sequences) == (report.tokens, report.tokens_read, report.sequences)
    assert (told.units, told.unit_rows) == (report.units, run.record.unit_rows)
    assert told.waste == pytest.approx(1 - report.tokens / (report.units * run.record.unit_rows))
    assert told.unit_sizes == {kind: run.record.unit_size(kind) for kind in run.record.row_kinds.kinds}
    for array in told.arrays:
        shards = (run.folder / "activations.zarr" / array.name).glob("c.*")
        assert sum(p.stat().st_size for p in shards) == array.bytes
    assert sum(a.bytes for a in told.arrays) == told.bytes
    assert told.seconds is None
    assert told.memory is None


def test_batches_are_timed_and_recomputing_is_weighed_against_storing(tmp_path, data):
    told = plan("toy_models:lstm", data, tmp_path / "lake", sites=("embed", "resid_post", "gates"), threads=1)
    assert told.tokens_per_second is not None
    assert told.tokens_per_second > 100
    assert told.seconds is not None
    assert told.seconds < 60
    assert told.memory is not None
    assert 50e6 < told.memory < 5e9
    assert told.disk_bytes_per_second is not None
    computing = told.tokens_read / told.tokens_per_second
    assert told.recomputing_is_cheaper == (computing < 2 * told.bytes / told.disk_bytes_per_second)
    assert list(tmp_path.iterdir()) == [data]  # neither a lake nor the file that the disk was timed with


def test_a_run_that_the_disk_cannot_hold_is_refused_before_anything_is_written(data, small_disk):
    disk = small_disk(400_000)
    lake = disk / "lake"
    options = {"run": "r", "sites": ("embed", "resid_post")}
    with pytest.raises(WorldError, match=r"The run takes .*kB and the disk of .* has .*kB free.*--ignore-free-space"):
        plan("toy_models:lstm", data, lake, **options)
    with pytest.raises(WorldError, match="The run takes"):
        extract("toy_models:lstm", data, lake, **options)
    assert list(disk.iterdir()) == []
    told = plan("toy_models:lstm", data, lake, ignore_free_space=True, timed=False, **options)
    assert not told.fits
    with pytest.raises(Exception, match="No space left"):
        extract("toy_models:lstm", data, lake, ignore_free_space=True, **options)


def test_the_command_takes_the_arguments_of_extract(tmp_path, data):
    arguments = ["toy_models:lstm", data, "--lake", tmp_path / "lake", "--site", "resid_post", "--layers", "0-1"]
    result = run_layerlake("plan", *arguments, "--dtype", "bfloat16", "--label-column", "topic")
    assert result.returncode == 0, result.stderr
    for part in (
        "Units: ",
        "Disk: ",
        "in 2 arrays (2 of 16 bfloat16",
        "Memory: about",
        "Time: about",
        "Storing|Computing",
    ):
        assert any(p in result.stdout for p in part.split("|")), part
    assert not (tmp_path / "lake").exists()
    found = json.loads(run_layerlake("plan", *arguments, "--no-timing", "--json").stdout)
    assert [a["name"] for a in found["arrays"]] == ["resid_post-0", "resid_post-1"]
    assert found["tokens_per_second"] is None
    wrong = run_layerlake("plan", *arguments, "--label-column", "nothing")
    assert wrong.returncode == 2
    assert "nothing" in wrong.stderr
