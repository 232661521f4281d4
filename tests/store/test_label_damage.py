"""Labels survive several annotators at once, one that is killed, and damage: never a value that is silently wrong."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from labelling import TOKENS, check_same_as_rebuilt, make_start, own, values
from lakes import commit_unit, make_run
from layerlake.errors import (
    CorruptLakeError,
    LakeWarning,
)
from layerlake.store.catalog import publish_catalog
from layerlake.store.durable import read_sealed, sealed_json
from layerlake.store.label_sets import verify_labels
from layerlake.store.lake import Lake
from processes import environment


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A lake of two runs, one with a label; never changed by a test."""
    return make_start(tmp_path_factory.mktemp("start") / "lake")


@pytest.fixture
def lake(start, tmp_path) -> Lake:
    return Lake.open(shutil.copytree(start, tmp_path / "lake"))


ANNOTATOR = """
    import sys
    import pyarrow as pa
    from layerlake.store.lake import Lake
    lake, who = Lake.open(sys.argv[1]), int(sys.argv[2])
    for i in range(2):
        lake.annotate("toy", pa.table({"row": [0, 1], "x": [who, i]}), "same")
    lake.annotate("toy", pa.table({"row": [0], f"mine{who}": [who]}), f"own{who}")
"""


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def finish(process: subprocess.Popen[str], seconds: float = 120) -> str:
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return out


def test_several_annotators_at_once_lose_nothing(lake):
    for process in [child(ANNOTATOR, lake.root, who) for who in range(3)]:
        finish(process)
    folder = lake.root / "runs/toy/labels"
    stored = [pq.read_table(folder / f"same-{v:04d}.parquet")["x"].to_pylist() for v in range(1, 7)]
    assert sorted(stored) == [[who, i] for who in range(3) for i in range(2)]
    assert all(stored.index([who, 0]) < stored.index([who, 1]) for who in range(3))
    assert [read_sealed(folder / f"same-{v:04d}.json")["previous"] for v in range(1, 7)] == [None, *range(1, 6)]
    assert lake.sql("SELECT count(*) AS n FROM labels")["n"].to_pylist() == [9]
    assert values(lake, "x")[:2] == stored[-1]
    check_same_as_rebuilt(lake.root)
    assert lake.verify() == []


KILLED = """
    import os, shutil, sys
    from pathlib import Path
    import pyarrow as pa
    from dying import die_at_each_step
    from layerlake.store import annotate
    from layerlake.store.lake import Lake

    steps = [(os, "fsync"), (os, "link"), (Path, "unlink"), (Path, "mkdir"), (annotate, "publish_catalog")]
    start = Path(sys.argv[1])
    annotate.publish_catalog = lambda root: None  # publishing has a test of its own

    def prepare(moment):
        lake = Lake.open(shutil.copytree(start, start.with_name(f"lake{moment}")))
        return lambda: lake.annotate("toy", pa.table({"row": [1, 2], "x": [20, 30]}), "s")

    print(die_at_each_step(steps, prepare, int(sys.argv[2])))
"""


EVERY = [pytest.param(first, 1, marks=pytest.mark.slow) for first in (False, True)]


@pytest.mark.parametrize("first, stride", [(False, 3), *EVERY])
def test_an_annotator_killed_anywhere_leaves_the_old_labels_or_the_new_ones(start, tmp_path, first, stride):
    root = shutil.copytree(start, tmp_path / "start")
    old: list[Any] = [None] * 3
    if not first:
        old = [1, 2, None]
        Lake.open(root).annotate("toy", pa.table({"row": [0, 1], "x": [1, 2]}), "s")
    moments = int(finish(child(KILLED, root, stride)))
    seen, remnants = [], 0
    for moment in range(moments):
        lake = Lake.open(tmp_path / f"lake{moment * stride}")
        lost = [what for _, what in verify_labels(lake.run("toy"))]
        assert all("is a remnant: it has no record" in w and "same file completes it" in w for w in lost)
        remnants += len(lost)
        publish_catalog(lake.root)
        there = "x" in lake.sql("FROM tokens LIMIT 0").column_names
        now = values(lake, "x")[:3] if there else [None] * 3
        assert now in (old, [None, 20, 30])
        seen.append(now != old)
        again = lake.annotate("toy", pa.table({"row": [1, 2], "x": [20, 30]}), "s")
        assert again.version == (1 if first else 2) + seen[-1]
        assert list(verify_labels(lake.run("toy"))) == []
    assert lake.verify() == []
    assert values(lake, "x")[:3] == [None, 20, 30]
    assert seen == sorted(seen) and set(seen) == {False, True}
    assert moments >= 10 // stride and remnants >= (2 if stride == 1 else 1)


def test_a_remnant_of_other_labels_is_left_alone_and_so_is_its_number(lake):
    lake.annotate("toy", pa.table({"row": [0], "x": [1]}), "s")
    folder = lake.root / "runs/toy/labels"
    shutil.copy(folder / "s-0001.parquet", folder / "s-0002.parquet")
    found = lake.annotate("toy", pa.table({"row": [0], "x": [3]}), "s")
    assert (found.version, found.previous, values(lake, "x")[0]) == (3, 1, 3)
    assert [(p.path, p.what) for p in lake.verify()] == [
        ("runs/toy/labels/s-0002.parquet", "is a remnant: it has no record s-0002.json (remove it)")
    ]


@pytest.fixture(scope="module")
def twice(start, tmp_path_factory) -> Path:
    """A lake with labels s in two versions, beside labels t, of one run; never changed by a test."""
    lake = Lake.open(shutil.copytree(start, tmp_path_factory.mktemp("twice") / "lake"))
    rows = own(lake)["row"]
    lake.annotate("toy", pa.table({"row": rows, "x": [1] * TOKENS}), "s")
    lake.annotate("toy", pa.table({"row": rows, "x": [2] * TOKENS}), "s")
    lake.annotate("toy", pa.table({"row": rows, "y": ["kept"] * TOKENS}), "t")
    return lake.root


@pytest.fixture
def labelled(twice, tmp_path) -> Lake:
    return Lake.open(shutil.copytree(twice, tmp_path / "labelled"))


DAMAGES = [("flip", "parquet"), ("another's", "json"), ("gone", "parquet")]
REST = [(d, k) for d in ("flip", "cut", "empty", "another's", "gone", "folder") for k in ("parquet", "json")]
REST = [pytest.param(*r, marks=pytest.mark.slow) for r in REST if r not in DAMAGES and r != ("gone", "json")]


@pytest.mark.parametrize("damage, kind", [*DAMAGES, *REST])
def test_damaged_labels_are_named_and_left_out_and_no_older_version_stands_in(labelled, damage, kind):
    path = labelled.root / f"runs/toy/labels/s-0002.{kind}"
    data = path.read_bytes()
    path.unlink()
    middle = len(data) // 2
    if damage == "folder":
        path.mkdir()
    elif damage != "gone":
        wrong = {"flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], "cut": data[:-9], "empty": b""}
        path.write_bytes(wrong[damage] if damage in wrong else path.with_name(f"t-0001.{kind}").read_bytes())
    assert [p.path for p in labelled.verify()] == [str(path.relative_to(labelled.root))]
    publish_catalog(labelled.root, rebuild=True)
    publish_catalog(labelled.root)
    with pytest.warns(LakeWarning, match=rf"Labels 's' of run 'toy' are damaged and left out: .*s-0002\.{kind}"):
        seen = labelled.sql("FROM tokens WHERE run = 'toy'")
    assert seen["y"].to_pylist() == ["kept"] * TOKENS and "x" not in seen.column_names
    with pytest.warns(LakeWarning):
        assert labelled.sql("SELECT run, labels FROM problems").to_pylist() == [{"run": "toy", "labels": "s"}]
    path.rmdir() if damage == "folder" else path.unlink(missing_ok=True)
    path.write_bytes(data)
    publish_catalog(labelled.root)  # mended, it is back without a rebuild
    assert values(labelled, "x") == [2] * TOKENS
    check_same_as_rebuilt(labelled.root)
    assert labelled.verify() == []


def test_a_record_that_is_lost_makes_its_table_a_remnant_and_annotating_again_brings_it_back(labelled):
    (labelled.root / "runs/toy/labels/s-0002.json").unlink()
    assert [(p.path, p.what) for p in labelled.verify()] == [
        (
            "runs/toy/labels/s-0002.parquet",
            "is a remnant: it has no record s-0002.json (annotating again with the same file completes it)",
        ),
        ("runs/toy/labels/s-0002.json", "is missing, although the catalog has its labels"),
    ]
    publish_catalog(labelled.root)
    assert values(labelled, "x") == [1] * TOKENS
    labelled.annotate("toy", pa.table({"row": own(labelled)["row"], "x": [2] * TOKENS}), "s")
    assert values(labelled, "x") == [2] * TOKENS
    assert labelled.verify() == []


def test_a_table_that_was_damaged_after_it_was_indexed_gives_no_labels_to_new_units(tmp_path):
    run, tables, bits = make_run(tmp_path, commit=False)
    lake = Lake.open(tmp_path)
    rows = np.concatenate([t["row"].to_numpy() for t in tables])
    commit_unit(run, 0, tables[0], bits)
    lake.annotate("toy", pa.table({"row": rows, "x": rows}), "s")
    assert values(lake, "x") == tables[0]["row"].to_pylist()
    (run.folder / "labels/s-0001.parquet").write_bytes(b"other")
    commit_unit(run, 1, tables[1], bits)
    publish_catalog(tmp_path)
    with pytest.warns(LakeWarning, match=r"Labels 's' .*s-0001\.parquet holds other bytes"):
        seen = lake.sql("FROM tokens")
    assert seen.num_rows == tables[0].num_rows + tables[1].num_rows and "x" not in seen.column_names


def test_a_damaged_set_can_be_written_anew_and_keeps_others_from_guessing_its_columns(labelled):
    folder = labelled.root / "runs/toy/labels"
    (folder / "s-0002.json").write_bytes(b"{}")
    with pytest.raises(CorruptLakeError, match="Labels 's' of run 'toy' are damaged"):
        labelled.annotate("toy", pa.table({"row": [0], "new": [1]}), "u")
    assert labelled.annotate("toy", pa.table({"row": [0], "x": [9]}), "s").version == 3
    (folder / "s-0002.json").unlink(), (folder / "s-0002.parquet").unlink()
    publish_catalog(labelled.root)
    assert values(labelled, "x")[:2] == [9, None]


def test_files_of_another_run_or_of_nobody_are_named(labelled):
    folder = labelled.root / "runs/toy/labels"
    other = labelled.root / "runs/other/labels"
    shutil.copytree(folder, other)
    for name in ("x.parquet", "s-1.json", "s-0000.json", "note.txt"):
        (folder / name).write_bytes(b"x")
    (folder / "s.1.abc.tmp").write_bytes(b"being written")
    found = {p.path: p.what for p in labelled.verify()}
    strangers = {p: w for p, w in found.items() if w == "does not belong to this run"}
    assert set(strangers) == {f"runs/toy/labels/{n}" for n in ("x.parquet", "s-1.json", "s-0000.json", "note.txt")}
    foreign = {p for p, w in found.items() if "belongs to labels of another run" in w}
    assert foreign == {f"runs/other/labels/{n}.json" for n in ("s-0001", "s-0002", "t-0001")}
    for path in other.glob("t-*"):
        path.unlink()
    publish_catalog(labelled.root)
    with pytest.warns(LakeWarning, match="Labels 's' of run 'other'"):
        assert set(values(labelled, "x", "other")) == {None}


def test_labels_that_are_gone_but_indexed_or_there_and_not_indexed_are_named(labelled):
    folder, kept = labelled.root / "runs/toy/labels", labelled.root / "kept"
    kept.mkdir()
    for name in ("t-0001.json", "t-0001.parquet"):
        (folder / name).rename(kept / name)
    assert [(p.path, p.what) for p in labelled.verify()] == [
        ("runs/toy/labels/t-0001.json", "is missing, although the catalog has its labels")
    ]
    publish_catalog(labelled.root)
    for path in kept.iterdir():
        path.rename(folder / path.name)
    assert [(p.path, p.what) for p in labelled.verify("toy")] == [
        ("catalog.json", "does not show labels t-0001 of run toy: `layerlake index`")
    ]
    assert labelled.verify("other") == []
    publish_catalog(labelled.root)
    assert labelled.verify() == []


@pytest.mark.parametrize("rest", [{"row": [0, 0]}, {"row": [1, 0]}, {"row": [0, None]}, {"row": [0.0, 1.0]}, {}])
def test_a_table_with_right_hashes_that_is_none_multiplies_no_token(labelled, rest):
    folder = labelled.root / "runs/toy/labels"
    pq.write_table(pa.table(rest | {"x": [1, 2]}), folder / "s-0002.parquet")
    record = read_sealed(folder / "s-0002.json")
    digest = hashlib.sha256((folder / "s-0002.parquet").read_bytes()).hexdigest()
    (folder / "s-0002.json").write_bytes(sealed_json(record | {"rows": 2, "sha256": digest}))
    publish_catalog(labelled.root)
    with pytest.warns(LakeWarning, match="Labels 's'"):
        assert labelled.sql("FROM tokens").num_rows == 2 * TOKENS


ABSURD: list[object] = [None, True, -1, 10**30, 1.5, "", "../../x", "\0", [], [[]], {}, [{"name": "x", "type": "date"}]]


def test_absurd_records_with_right_hashes_are_sentences(labelled):
    path = labelled.root / "runs/toy/labels/s-0002.json"
    original = read_sealed(path)
    for key in original:
        for absurd in ABSURD:
            path.write_bytes(sealed_json(original | {key: absurd}))
            assert all(len(what) > 20 for _, what in verify_labels(labelled.run("toy")))
    hostile = [
        {"columns": [{"name": "ROW", "type": "int64", "values": 1}]},
        {"columns": [{"name": "depth", "type": "int64", "values": 1}]},
        {"columns": [{"name": "y", "type": "int64", "values": 1}]},
        {"version": 7},
        {"columns": None},
    ]
    for absurd in hostile:
        path.write_bytes(sealed_json(original | absurd))
        assert "runs/toy/labels/s-0002" in [p.path.rpartition(".")[0] for p in labelled.verify("toy")]
        publish_catalog(labelled.root)
        with pytest.warns(LakeWarning, match="Labels 's'"):
            assert values(labelled, "y") == ["kept"] * TOKENS
