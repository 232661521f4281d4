"""Labels added later: they stand at the tokens that were meant, or nothing is stored."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from labelling import DEPTH, TOKENS, check_same_as_rebuilt, make_start, own, same, tree, values, write
from lakes import commit_unit, make_run
from layerlake.__main__ import main
from layerlake.errors import (
    CorruptLakeError,
    DataError,
    RequestError,
    UnknownNameError,
    WorldError,
)
from layerlake.store import annotate
from layerlake.store.catalog import publish_catalog
from layerlake.store.create import create_run
from layerlake.store.durable import read_sealed
from layerlake.store.lake import Lake
from layerlake.store.plan import read_sequences
from processes import run_layerlake


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A lake of two runs, one with a label; never changed by a test."""
    return make_start(tmp_path_factory.mktemp("start") / "lake")


@pytest.fixture
def lake(start, tmp_path) -> Lake:
    return Lake.open(shutil.copytree(start, tmp_path / "lake"))


FORMS = [("row", "parquet"), ("row", "csv"), ("row", "table"), ("seq, pos", "jsonl"), ("seq, pos", "reader")]
REST = [(k, f) for k in ("row", "seq, pos") for f in ("parquet", "csv", "jsonl", "table", "reader")]
REST = [pytest.param(*r, marks=pytest.mark.slow) for r in REST if r not in FORMS]


@pytest.mark.parametrize("key, kind", [*FORMS, *REST])
def test_labels_in_any_form_and_order_stand_at_their_tokens(lake, tmp_path, kind, key):
    rng = np.random.default_rng(0)
    chosen = rng.permutation(TOKENS)[:40]
    score, word = rng.normal(size=TOKENS), [f"w {i}" for i in range(TOKENS)]
    table = own(lake, key).append_column("score", pa.array(score)).append_column("word", pa.array(word)).take(chosen)
    source: Any = table if kind == "table" else table.to_reader() if kind == "reader" else None
    found = lake.annotate("toy", source or write(tmp_path / f"my labels.{kind}", table), "mine" if source else None)
    assert (found.name, found.version) == ("mine" if source else "my_labels", 1)
    assert (found.rows, found.labelled, found.key) == (40, 40, tuple(key.split(", ")))
    assert [(c.name, c.type, c.values) for c in found.columns] == [("score", "double", 40), ("word", "string", 40)]
    there = set(chosen.tolist())
    assert same(values(lake, "score"), [float(s) if i in there else None for i, s in enumerate(score)])
    assert values(lake, "word") == [w if i in there else None for i, w in enumerate(word)]
    assert values(lake, "depth") == DEPTH
    assert set(values(lake, "score", "other")) == {None}
    check_same_as_rebuilt(lake.root)
    assert lake.verify() == []


def test_a_version_is_a_sorted_table_and_a_sealed_record_with_its_lineage(lake, tmp_path):
    before = tree(lake.root / "runs")
    rows = own(lake)["row"]
    path = write(tmp_path / "s.parquet", pa.table({"row": rows.take(pa.array([9, 4, 30])), "x": [1, None, 3]}))
    lake.annotate("toy", path)
    after = tree(lake.root / "runs")
    assert before.items() <= after.items()  # run.json and everything else is as it was
    assert set(after) - set(before) == {"toy/labels/s-0001.json", "toy/labels/s-0001.parquet", "toy/labels.lock"}
    stored = lake.root / "runs/toy/labels/s-0001.parquet"
    expected = pa.table({"row": rows.take(pa.array([4, 9, 30])), "x": pa.array([None, 1, 3], pa.int64())})
    assert pq.read_table(stored).equals(expected)
    record = read_sealed(stored.with_suffix(".json"))
    run = lake.run("toy").record
    created = record.pop("created")
    assert created.startswith("20") and record == {
        "name": "s", "version": 1, "run": "toy", "identity": run.identity, "plan_hash": run.plan_hash, "key": ["row"],
        "source": {"file": "s.parquet", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "created_by": "0.1.0", "rows": 3, "labelled": 2, "columns": [{"name": "x", "type": "int64", "values": 2}],
        "sha256": hashlib.sha256(stored.read_bytes()).hexdigest(), "previous": None,
    }  # fmt: skip
    (row,) = lake.sql("FROM labels").to_pylist()
    assert row == {
        "run": "toy", "name": "s", "version": 1, "columns": ["x"], "rows": 3, "created": created,
        "source": "s.parquet", "path": "runs/toy/labels/s-0001.parquet", "newest": True,
    }  # fmt: skip


def test_the_same_name_again_is_the_next_version_whatever_its_columns_and_sql_shows_it_alone(lake):
    rows = own(lake)["row"]
    lake.annotate("toy", pa.table({"row": rows, "x": [1] * TOKENS, "y": ["a"] * TOKENS}), "s")
    first = tree(lake.root / "runs/toy/labels")
    found = lake.annotate("toy", pa.table({"row": rows[:2], "x": ["one", "two"], "z": [True, None]}), "s")
    assert (found.version, found.previous) == (2, 1)
    assert first.items() <= tree(lake.root / "runs/toy/labels").items()
    assert values(lake, "x")[:3] == ["one", "two", None]
    assert "y" not in lake.sql("FROM tokens LIMIT 0").column_names
    listed = lake.sql("SELECT name, version, columns, newest FROM labels ORDER BY version").to_pylist()
    assert [tuple(r.values()) for r in listed] == [("s", 1, ["x", "y"], False), ("s", 2, ["x", "z"], True)]
    check_same_as_rebuilt(lake.root)
    lake.annotate("toy", pa.table({"row": rows[:1], "Y": [0.5]}), "t")  # y is free again
    assert values(lake, "y")[:2] == [0.5, None]
    check_same_as_rebuilt(lake.root)


def test_a_run_can_be_annotated_before_it_is_extracted_and_units_committed_later_have_the_labels(tmp_path):
    lengths = (7,) * 140  # more units than one file of the plan holds
    run, tables, bits = make_run(tmp_path, lengths=lengths, unit_rows=8, width=2, layers=0, commit=False)
    assert len(list((run.folder / "plan").glob("tokens-*"))) == 3
    lake = Lake.open(tmp_path)
    rows = np.concatenate([t["row"].to_numpy() for t in tables])
    chosen = np.random.default_rng(0).permutation(rows)[:500]
    found = lake.annotate("toy", pa.table({"row": chosen, "x": chosen * 3}), "s")
    assert (found.labelled, lake.sql("FROM tokens").num_rows) == (500, 0)
    for unit in (139, 0, 70):
        commit_unit(run, unit, tables[unit], bits)
        publish_catalog(tmp_path)
    check_same_as_rebuilt(tmp_path)
    expected = [3 * r if r in chosen else None for u in (0, 70, 139) for r in tables[u]["row"].to_pylist()]
    assert values(lake, "x") == expected and None in expected
    by_pos = pa.table({"seq": [139, 0], "pos": [6, 0], "y": ["last", "first"]})
    lake.annotate("toy", by_pos, "t")
    assert lake.sql("SELECT seq, pos, y FROM tokens WHERE y IS NOT NULL ORDER BY seq").to_pylist() == [
        {"seq": 0, "pos": 0, "y": "first"},
        {"seq": 139, "pos": 6, "y": "last"},
    ]
    check_same_as_rebuilt(tmp_path)


def test_labels_of_several_runs_share_a_column_by_the_rule_of_extracted_ones(lake):
    steps: list[tuple[str, str, list[Any]]] = [
        ("toy", "alpha", [True, None]),
        ("other", "Beta", [1, 2]),  # in front of alpha and depth, as runs come by name
        ("other", "depth", [0.5, 7]),  # beside the integers of toy
        ("toy", "beta", ["a", "b"]),  # text beside integers
        ("other", "alpha", [None, None]),
    ]
    for step, (run, column, labels) in enumerate(steps):
        lake.annotate(run, pa.table({"row": own(lake, run=run)["row"][:2], column: labels}), f"set.{column}")
        if step in (1, 4):
            check_same_as_rebuilt(lake.root)
    assert lake.sql("FROM tokens LIMIT 0").column_names[10:] == ["Beta", "alpha", "depth"]
    assert values(lake, "depth") == [float(d) for d in DEPTH]
    assert values(lake, "depth", "other")[:3] == [0.5, 7.0, None]
    assert (values(lake, "beta")[:2], values(lake, "beta", "other")[:2]) == (["a", "b"], ["1", "2"])
    assert values(lake, "alpha")[:3] == [True, None, None]
    assert lake.verify() == []


def test_removing_a_run_and_making_it_again_leaves_no_labels_behind(lake):
    lake.annotate("toy", pa.table({"row": own(lake)["row"], "x": [1] * TOKENS}), "s")
    shutil.rmtree(lake.root / "runs/toy")
    make_run(lake.root, seed=3)
    assert "x" not in lake.sql("FROM tokens LIMIT 0").column_names
    assert lake.sql("FROM labels").num_rows == 0
    check_same_as_rebuilt(lake.root)


def test_columns_of_the_tokens_are_compared_and_not_stored(lake, tmp_path):
    table = own(lake, "run, row, seq, pos, token_id, token, char_start, char_end, special, split")
    table = table.append_column("x", pa.array(range(TOKENS)))
    for kind in ("parquet", "csv", "jsonl"):
        found = lake.annotate("toy", write(tmp_path / f"s.{kind}", table), "s")
        assert [c.name for c in found.columns] == ["x"] and values(lake, "x") == list(range(TOKENS))
    before = tree(lake.root)
    lied: dict[str, Any] = {"run": "other", "seq": 5, "pos": 9, "token_id": -1, "token": "lie", "char_start": 7}
    for name, lie in (lied | {"char_end": 0, "special": None, "split": ""}).items():
        changed = table[name].to_pylist()
        changed[3], stored = lie, changed[3]
        wrong = table.set_column(table.column_names.index(name), name, pa.array(changed, table[name].type))
        for kind in ("csv", "parquet"):
            said = {None: "nothing", "": "nothing" if kind == "csv" else "''"}.get(lie, repr(lie))
            row = table["row"][3].as_py()
            pattern = (
                rf"row {row} has {name} {said}, the run has {stored!r}" if name != "run" else "'other' in data row 4"
            )
            with pytest.raises(DataError, match=pattern):
                lake.annotate("toy", write(tmp_path / f"s.{kind}", wrong), "s")
    assert tree(lake.root) == before


def test_a_token_that_looks_like_a_number_or_is_empty_is_compared_as_text(tmp_path):
    root = tmp_path / "lake"
    run, tables, bits = make_run(root, name="plain", lengths=(4,), unit_rows=4, commit=False)
    odd = pa.array(["007", "", "nan", "true"])
    tables[0] = tables[0].set_column(4, "token", odd)
    create_run(root, replace(run.record, name="odd", files={}), read_sequences(run.folder / "plan"), tables)
    table = tables[0].select(["row", "token"]).append_column("x", pa.array([1, 2, 3, 4]))
    for kind in ("csv", "jsonl", "parquet"):
        assert Lake.open(root).annotate("odd", write(tmp_path / f"t.{kind}", table)).labelled == 4
    wrong = table.set_column(1, "token", pa.array(["7", "", "nan", "true"]))
    with pytest.raises(DataError, match="row 0 has token '7', the run has '007'"):
        Lake.open(root).annotate("odd", write(tmp_path / "t.csv", wrong))


ROWS = [0, 1, 2, 3]
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"row": [0, 99, 3, 64, -1, 2**62], "x": [0] * 6},
        r"does not have \(3\): row 99, row -1, row 4611686018427387904\.",
    ),
    ({"row": [30, 31, 63, 95], "x": [0] * 4}, r"does not have \(4\): row 30.*, row 31, row 63 and 1 more"),
    ({"seq": [0, 0, 7, -1], "pos": [0, 5, 0, 2], "x": ROWS}, r"\(3\): seq 0, pos 5, seq 7, pos 0, seq -1, pos 2"),
    ({"seq": [0], "pos": [2**40], "x": [1]}, r"\(1\): seq 0, pos 1099511627776"),
    ({"row": [1, 2, 1, 2, 1], "x": [0] * 5}, r"already \(3\): row 1 again in data row 3, row 2 again in data row 4"),
    ({"seq": [1, 1], "pos": [0, 0], "x": [0, 0]}, r"already \(1\): seq 1, pos 0 again in data row 2"),
    ({"row": [1, None, 2, None], "x": ROWS}, r"Labels without row \(2\): data row 2, data row 4\."),
    ({"row": [1.0, math.nan], "x": [1, 2]}, r"Labels without row \(1\): data row 2"),
    ({"seq": [1, None], "pos": [1, 1], "x": [1, 2]}, r"Labels without seq \(1\): data row 2"),
    ({"row": [0.0, 1.5, 2.25], "x": [1, 2, 3]}, r"no integer \(2\): 1\.5 in data row 2, 2\.25 in data row 3"),
    ({"row": [0.0, math.inf], "x": [1, 2]}, r"no integer \(1\): inf in data row 2"),
    ({"row": ["a", "1"], "x": [1, 2]}, r"no integer \(2\): 'a' in data row 1"),
    ({"row": [True], "x": [1]}, r"no integer \(1\): True in data row 1"),
    ({"row": [2.0**60], "x": [1]}, r"no integer"),
    ({"seq": [1], "x": [1]}, "need the column row, or seq and pos"),
    ({"x": [1]}, "need the column row, or seq and pos"),
    ({"row": ROWS}, "There is no label"),
    ({"row": [1], "token_id": [0], "run": ["toy"]}, "There is no label"),
    ({"row": [], "x": []}, "There are no rows"),
    ({"row": [0], "document": ["d"]}, "'document' cannot name a label"),
    ({"row": [0], "rowid": [1]}, "'rowid' cannot name a label"),
    ({"row": [0], "TOKEN": ["d"]}, "'TOKEN' cannot name a label.*Did you mean 'token'"),
    ({"Row": [0], "x": [1]}, "'Row' cannot name a label.*Did you mean 'row'"),
    ({"row": [0], "Depth": [1]}, "'Depth' is a label that run 'toy' was extracted with"),
    ({"row": [0], "x": [1], "X": [1]}, "two columns 'x'"),
    ({"row": [0], "": [1]}, "without a name"),
    ({"row": [0], "x": [[1]]}, "'x' is nested"),
    ({"row": [0], "x": [{"a": 1}]}, "'x' is nested"),
    ({"row": [0], "x": pa.array([0], pa.date32())}, "'x' is of type date32"),
    ({"row": [0], "x": [b"b"]}, "'x' is of type binary"),
    ({"row": [0], "x": pa.array([2**63], pa.uint64())}, "'x', uint64, does not fit into int64"),
    ({"row": [0], "token_id": ["word"], "x": [1]}, "Column token_id is string and cannot be the run's token_id"),
    ({"row": [0], "x": [1], "__index_level_0__": [3]}, "index of a pandas frame"),
    ({"row": [0, 1], "run": ["toy", None], "x": [1, 2]}, "None in data row 2"),
]


def test_what_does_not_fit_is_refused_by_the_first_rows_and_nothing_is_stored(lake):
    before = tree(lake.root)
    for columns, pattern in WRONG:
        with pytest.raises(RequestError, match=pattern):
            lake.annotate("toy", pa.table(columns), "s")
    assert tree(lake.root) == before


def test_a_set_cannot_take_another_sets_column_but_its_own(lake):
    row = own(lake)["row"][:1]
    lake.annotate("toy", pa.table({"row": row, "Score": [1]}), "a")
    before = tree(lake.root)
    with pytest.raises(RequestError, match="'score' is a label of set 'a' of run 'toy'"):
        lake.annotate("toy", pa.table({"row": row, "score": [1]}), "b")
    assert tree(lake.root) == before
    lake.annotate("other", pa.table({"row": row, "score": [1]}), "b")
    assert lake.annotate("toy", pa.table({"row": row, "score": [2]}), "a").version == 2


def test_names_are_names(lake):
    table = pa.table({"row": [0], "x": [1]})
    for name in ("", "../x", "a/b", ".x", "x.tmp", "a b", "x" * 101):
        with pytest.raises(RequestError, match="cannot name labels"):
            lake.annotate("toy", table, name)
    with pytest.raises(RequestError, match="Give the labels a name"):
        lake.annotate("toy", table)
    with pytest.raises(UnknownNameError, match="toy"):
        lake.annotate("toi", table, "s")
    with pytest.raises(RequestError, match="not as int"):
        lake.annotate("toy", 3, "s")
    assert lake.annotate("toy", table, "s-0001").title == "s-0001-0001"
    assert lake.annotate("toy", pa.table({"row": [0], 'a"b; --': [1]}), "S").version == 1
    assert values(lake, 'a""b; --')[0] == 1
    assert lake.verify() == []


def test_labels_are_checked_against_the_plan_that_was_written(lake):
    (lake.root / "runs/toy/plan/tokens-00000.parquet").write_bytes(b"other")
    with pytest.raises(CorruptLakeError, match=r"tokens-00000\.parquet holds other bytes"):
        lake.annotate("toy", pa.table({"row": [0], "x": [1]}), "s")


def test_the_command_says_what_was_labelled_and_show_and_sql_list_it(lake, tmp_path, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([*map(str, arguments), "--lake", str(lake.root)])
        return code, *capsys.readouterr()

    moods = pa.table({"row": [0, 1, 2], "mood": ["good", None, "bad"], "n": [1, None, None]})
    path = write(tmp_path / "mood.csv", moods)
    said = "Labels mood version 1 of run toy: 2 of 53 tokens got one: mood (string, 2), n (int64, 1).\n"
    assert run("annotate", "toy", path) == (0, said, "")
    again = json.loads(run("annotate", "toy", path, "--json")[1])
    assert (again["version"], again["tokens"]) == (2, TOKENS)
    shown = run("show", "toy")[1].splitlines()
    assert "mood, n: version 2, 2 tokens, from mood.csv" in next(s for s in shown if s.startswith("labels mood"))
    code, out, err = run("annotate", "toy", path, "--name", "other")
    assert (code, out) == (2, "")
    assert err.startswith("layerlake: 'mood' is a label of set 'mood' of run 'toy'")
    (lake.root / "runs/toy/labels/mood-0002.parquet").write_bytes(b"")
    code, out, _ = run("verify")
    assert code == 1 and "runs/toy/labels/mood-0002.parquet: " in out
    indexed = run_layerlake("index", "--lake", lake.root)
    assert indexed.returncode == 1
    assert "layerlake: warning: Labels 'mood' of run 'toy' are damaged and left out: " in indexed.stderr


def test_labels_that_are_stored_but_cannot_be_indexed_say_so(lake, monkeypatch):

    def full(root: Path) -> Path:
        raise WorldError("The disk is full.")

    monkeypatch.setattr(annotate, "publish_catalog", full)
    with pytest.raises(WorldError, match="Labels s version 1 of run 'toy' are stored, but SQL does not show them yet"):
        lake.annotate("toy", pa.table({"row": [0], "x": [1]}), "s")
    publish_catalog(lake.root)
    assert values(lake, "x")[0] == 1


@pytest.mark.slow
def test_a_million_labels_take_seconds(tmp_path):
    make_run(tmp_path / "lake", lengths=(256,) * 4096, unit_rows=16384, width=2, layers=0)
    lake = Lake.open(tmp_path / "lake")
    rows = np.random.default_rng(0).permutation(4096 * 256)[:1_000_000]
    pq.write_table(pa.table({"row": rows, "x": rows / 7, "w": [f"w{r % 999}" for r in rows]}), tmp_path / "s.parquet")
    begun = time.perf_counter()
    assert lake.annotate("toy", tmp_path / "s.parquet").labelled == 1_000_000
    assert time.perf_counter() - begun < 10
    assert lake.sql("SELECT count(*) AS n FROM tokens WHERE x = row / 7")["n"].to_pylist() == [1_000_000]
