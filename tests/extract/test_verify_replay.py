"""`verify --replay`: stored activations are held to the reloaded model, long after they were made."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from layerlake.errors import ModelError, RequestError
from layerlake.extract.driver import extract
from layerlake.extract.verify_replay import verify_replay
from layerlake.store.lake import Lake
from processes import run_layerlake
from toy_models import VOCABULARY, make_model


@pytest.fixture
def made(tmp_path):
    model = tmp_path / "model"
    make_model("llama").save_pretrained(model)
    rng = np.random.default_rng(3)
    data = tmp_path / "i.jsonl"
    lengths = rng.integers(2, 13, 120)
    data.write_text("".join(json.dumps({"input_ids": rng.integers(0, VOCABULARY, n).tolist()}) + "\n" for n in lengths))
    extract(str(model), data, tmp_path / "lake", run="r", unit_rows=256, dtype="bfloat16")
    return model, tmp_path / "lake"


def test_a_sound_lake_is_replayed_and_the_distance_is_said(made):
    _, lake = made
    report = verify_replay(lake, share=0.5)
    assert report.problems == []
    assert report.units == len(Lake.open(lake).run("r").committed()) == 4
    assert report.sequences > 10
    assert report.values is not None
    assert report.values < 0.005
    result = run_layerlake("verify", "--lake", lake, "--replay")
    assert result.returncode == 0, result.stderr
    assert "everything is as it was written" in result.stdout
    assert "Replayed" in result.stdout
    found = json.loads(run_layerlake("verify", "--lake", lake, "--replay", "--json").stdout)
    assert found["replay"]["sequences"] >= 1


def test_values_of_a_wrong_place_with_sound_checksums_are_found(made):
    """Two layers of a unit change places, and its record is written anew: only the model can tell."""
    from layerlake.store.durable import sealed_json
    from layerlake.store.unit_record import record_digest

    _, lake = made
    run = Lake.open(lake).run("r")
    first, second = (run.array("resid_post", i) for i in (0, 1))
    a, b = (run.shard_path(array, 2) for array in (first, second))
    contents = a.read_bytes(), b.read_bytes()
    a.write_bytes(contents[1])
    b.write_bytes(contents[0])
    record = json.loads(run.unit_path(2).read_bytes())
    arrays = record["arrays"]
    arrays[first.name], arrays[second.name] = arrays[second.name], arrays[first.name]
    record.pop("seal")
    record["sha256"] = record_digest(record)
    run.unit_path(2).write_bytes(sealed_json(record))
    Lake.open(lake).index()
    assert Lake.open(lake).verify() == []
    report = verify_replay(lake, share=0.5)
    assert [p.path for p in report.problems] == ["runs/r/units/00000002.json"]
    assert "resid_post-0" in report.problems[0].what
    result = run_layerlake("verify", "--lake", lake, "--replay", "--share", 0.5)
    assert result.returncode == 1
    assert "unit 2, sequence" in result.stdout


def test_a_model_that_moved_is_named_and_one_with_other_weights_is_refused(made, tmp_path):
    model, lake = made
    moved = model.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match="--model"):
        verify_replay(lake, run="r")
    assert verify_replay(lake, run="r", model=str(moved)).problems == []
    other = make_model("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[0, 0] += 1e-3
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="weights"):
        verify_replay(lake, run="r", model=str(tmp_path / "other"))
    assert "weights" in verify_replay(lake, model=str(tmp_path / "other")).problems[0].what


def test_a_share_of_one_replays_every_sequence(made):
    report = verify_replay(made[1], share=1)
    assert (report.sequences, report.problems) == (120, [])


def test_a_share_without_a_replay_is_a_wrong_request(made):
    for option in (("--share", 0.5), ("--model", "elsewhere")):
        result = run_layerlake("verify", "--lake", made[1], *option)
        assert result.returncode == 2
        assert "--replay" in result.stderr


def test_a_share_out_of_range_is_refused(made):
    with pytest.raises(RequestError, match="share"):
        verify_replay(made[1], share=0)


def test_a_run_that_stores_some_of_its_tokens_is_replayed_too(made):
    model, lake = made
    extract(str(model), lake.parent / "i.jsonl", lake, run="some", window=6, overlap=2, keep="pos % 2 = 1")
    report = verify_replay(lake, run="some", share=1.0)
    assert (report.problems, report.units) == ([], len(Lake.open(lake).run("some").committed()))
    assert report.sequences > 20
    assert report.values is not None and report.values < 1e-5
