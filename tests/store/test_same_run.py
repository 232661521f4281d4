"""A selection gives the values of the run that it was made of, or says that the run is another one by now."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lakes import commit_unit, make_run
from layerlake.errors import WorldError
from layerlake.store import annotate
from layerlake.store.catalog import publish_catalog
from layerlake.store.lake import Lake

ROWS = "SELECT run, row, token FROM tokens ORDER BY row"
CODECS = ("none", "archive")


@pytest.mark.parametrize("codec", CODECS)
def test_a_selection_is_never_read_from_a_run_that_was_made_anew_under_its_name(tmp_path, codec):
    make_run(tmp_path, seed=1, codec=codec)
    lake = Lake.open(tmp_path)
    selection = lake.select(ROWS)
    lake.remove("toy")
    with pytest.raises(WorldError, match="removed meanwhile"):
        selection.bits(0)
    _, _, bits = make_run(tmp_path, seed=2, codec=codec)
    for _ in range(2):
        with pytest.raises(WorldError, match="made anew"):
            selection.bits(0)
    again = lake.select(ROWS)
    assert np.array_equal(again.bits(0), bits["resid_post-0"][again.rows])


def test_what_was_mapped_before_is_still_the_old_run_s(tmp_path):
    _, _, bits = make_run(tmp_path, seed=1)
    lake = Lake.open(tmp_path)
    selection = lake.select(ROWS)
    selection.bits(0)
    lake.remove("toy")
    make_run(tmp_path, seed=2)
    assert np.array_equal(selection.bits(0), bits["resid_post-0"][selection.rows])
    with pytest.raises(WorldError, match="made anew"):
        selection.bits(1)


def test_a_catalog_that_shows_the_run_before_is_not_mixed_with_the_values_of_the_one_after(tmp_path):
    root = tmp_path / "lake"
    make_run(root, seed=1, lengths=(7, 7))
    lake = Lake.open(root)
    lake.sql("FROM runs")
    shutil.rmtree(root / "runs" / "toy")  # as one who is killed between removing and publishing leaves it
    elsewhere, _, bits = make_run(tmp_path / "elsewhere", seed=2, lengths=(7, 7))
    shutil.copytree(elsewhere.folder, Path(root / "runs" / "toy"))
    with pytest.raises(WorldError, match="before it was made anew"):
        lake.select(ROWS)
    assert np.array_equal(lake.rows("toy", [3, 1]).bits(0), bits["resid_post-0"][[3, 1]])
    publish_catalog(root)
    assert np.array_equal(lake.select(ROWS).bits(0), bits["resid_post-0"][:14])


@pytest.mark.parametrize("moment", ["match_rows", "_publish_table"])
def test_annotating_a_run_that_goes_meanwhile_is_a_sentence(tmp_path, monkeypatch, moment):
    make_run(tmp_path)
    lake, step = Lake.open(tmp_path), getattr(annotate, moment)

    def removed_before(*arguments: object) -> object:
        lake.remove("toy")
        return step(*arguments)

    monkeypatch.setattr(annotate, moment, removed_before)
    with pytest.raises(WorldError, match="was removed meanwhile"):
        lake.annotate("toy", pa.table({"row": [1], "label": [2]}), "some")
    assert lake.verify() == [] and lake.runs() == []


def test_labels_that_a_disk_has_no_place_for_are_a_sentence_and_nothing_of_them_stays(tmp_path, monkeypatch):
    make_run(tmp_path)
    lake = Lake.open(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr(annotate, "publish", full)
    with pytest.raises(WorldError, match=r"could not be stored \(No space left on device: somewhere\)"):
        lake.annotate("toy", pa.table({"row": [1], "label": [2]}), "some")
    assert lake.verify() == [] and not list((tmp_path / "runs" / "toy" / "labels").iterdir())


@pytest.mark.parametrize("codec", CODECS)
def test_a_worker_presumed_dead_writes_nothing_into_a_run_made_anew(tmp_path, codec):
    old, tables, bits = make_run(tmp_path, seed=1, codec=codec)
    assert old.record
    lake = Lake.open(tmp_path)
    lake.remove("toy")
    new, _, _ = make_run(tmp_path, seed=2, codec=codec, commit=False)
    with pytest.raises(WorldError, match="made anew"):
        commit_unit(old, 0, tables[0], bits)
    assert new.committed() == set() and lake.verify() == []
    assert list(new.scratch.iterdir()) == []


def test_labels_that_are_being_added_are_no_remnant_to_verify(tmp_path, monkeypatch):
    make_run(tmp_path)
    lake, publish_table, seen = Lake.open(tmp_path), annotate._publish_table, []

    def look_after(*arguments: Any) -> int:
        version = publish_table(*arguments)
        seen.append((sorted(p.name for p in (tmp_path / "runs/toy/labels").glob("*.parquet")), lake.verify()))
        return version

    monkeypatch.setattr(annotate, "_publish_table", look_after)
    lake.annotate("toy", pa.table({"row": [1], "label": [2]}), "some")
    assert seen == [(["some-0001.parquet"], [])]
    (tmp_path / "runs/toy/labels/some-0001.json").unlink()
    assert any("is a remnant" in p.what for p in lake.verify())
