"""Labels added later: they stand at the tokens that were meant, exactly as written, or nothing is stored."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lakes import commit_unit, make_run
from layerlake.errors import CorruptLakeError, DataError, LakeWarning, LayerlakeError, RequestError, UnknownNameError
from layerlake.store.catalog import connect_catalog, publish_catalog
from layerlake.store.describe import describe_run
from layerlake.store.durable import read_sealed, sealed_json
from layerlake.store.lake import Lake
from processes import environment, run_layerlake

TOKENS = 53
DEPTH = [i % 4 for i in range(TOKENS)]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A lake of two runs, one with a label; never changed by a test."""
    root = tmp_path_factory.mktemp("start") / "lake"
    make_run(root, labels={"depth": DEPTH})
    make_run(root, name="other", seed=1, layers=0)
    return root


@pytest.fixture
def lake(start, tmp_path) -> Lake:
    return Lake.open(shutil.copytree(start, tmp_path / "lake"))


def own(lake: Lake, columns: str = "row", run: str = "toy") -> pa.Table:
    return lake.sql(f"SELECT {columns} FROM tokens WHERE run = '{run}' ORDER BY row")


def values(lake: Lake, column: str, run: str = "toy") -> list[Any]:
    return own(lake, f'"{column}" AS x', run)["x"].to_pylist()


def write(path: Path, table: pa.Table) -> Path:
    """Write a table as the file that the name asks for, with the writers of Python and pyarrow."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in table.to_pylist()))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.column_names)
            for row in table.to_pylist():
                writer.writerow(["" if v is None else repr(v) if isinstance(v, float) else v for v in row.values()])
    return path


def tree(root: Path) -> dict[str, str]:
    files = (p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def contents(root: Path) -> dict[str, tuple[list[str], list[str]]]:
    with connect_catalog(root) as connection:
        found = {}
        for (name,) in connection.execute(
            "SELECT table_name FROM duckdb_tables() WHERE database_name = 'lake' UNION "
            "SELECT view_name FROM duckdb_views() WHERE database_name = 'lake' AND NOT internal"
        ).fetchall():
            columns = [f"{c[0]} {c[1]}" for c in connection.execute(f"DESCRIBE {name}").fetchall()]
            found[name] = (columns, sorted(map(repr, connection.execute(f"FROM {name}").fetchall())))
    return found


def check_same_as_rebuilt(root: Path) -> None:
    publish_catalog(root)
    grown = contents(root)
    assert "labels" in grown
    publish_catalog(root, rebuild=True)
    assert grown == contents(root)


def same(seen: list[Any], expected: list[Any]) -> bool:
    """Equal in type and value, where NaN is NaN, -0.0 is not 0.0 and None is neither."""
    return list(map(repr, seen)) == list(map(repr, expected))


# What is stored


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl", "table", "reader"])
@pytest.mark.parametrize("key", ["row", "seq, pos"])
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
        ("other", "depth", [0.5, 7]),  # beside the integers of toy
        ("other", "Score", [1, 2]),
        ("toy", "score", ["a", "b"]),  # in front of other's, and text
        ("toy", "alpha", [True, None]),
        ("other", "empty", [None, None]),
        ("toy", "empty", [1, 2]),
    ]
    for run, column, labels in steps:
        lake.annotate(run, pa.table({"row": own(lake, run=run)["row"][:2], column: labels}), f"set.{column}")
        check_same_as_rebuilt(lake.root)
    assert values(lake, "depth") == [float(d) for d in DEPTH]
    assert values(lake, "depth", "other")[:3] == [0.5, 7.0, None]
    assert (values(lake, "score")[:2], values(lake, "score", "other")[:2]) == (["a", "b"], ["1", "2"])
    assert values(lake, "alpha")[:3] == [True, None, None]
    assert lake.verify() == []


def test_removing_a_run_and_making_it_again_leaves_no_labels_behind(lake):
    lake.annotate("toy", pa.table({"row": own(lake)["row"], "x": [1] * TOKENS}), "s")
    shutil.rmtree(lake.root / "runs/toy")
    make_run(lake.root, seed=3)
    assert "x" not in lake.sql("FROM tokens LIMIT 0").column_names
    assert lake.sql("FROM labels").num_rows == 0
    check_same_as_rebuilt(lake.root)


# Values


def test_Q07_nan_stays_nan_infinities_stay_and_missing_is_null(lake, tmp_path):
    nan, inf = math.nan, math.inf
    expected = [nan, None, inf, -inf, 0.5, -0.0]
    rows = own(lake)["row"].to_pylist()[:6]
    table = pa.table({"row": rows, "x": pa.array(expected, from_pandas=False)})
    for kind in ("parquet", "csv", "jsonl"):
        lake.annotate("toy", write(tmp_path / f"s.{kind}", table), "s")
        assert same(values(lake, "x")[:6], expected), kind
        counted = lake.sql(
            "SELECT count(*) FILTER (x IS NULL) AS missing, count(*) FILTER (isnan(x)) AS nan FROM tokens"
        )
        assert counted.to_pylist() == [{"missing": 2 * TOKENS - 5, "nan": 1}]


def test_S08_long_and_foreign_texts_are_stored_whole(lake, tmp_path):
    texts = ["x" * 3_000_000, "漢字" * 150, "🙂" * 300, 'quo"te, and\nnew line\r\n', " spaces ", "\ttab", "NULL", "007"]
    table = pa.table({"row": own(lake)["row"][: len(texts)], "x": texts})
    for kind in ("parquet", "csv", "jsonl"):
        lake.annotate("toy", write(tmp_path / f"s.{kind}", table), "s")
        assert values(lake, "x")[: len(texts)] == texts, kind


@pytest.mark.parametrize(
    "cells, expected",
    [
        (["9007199254740993", "", "-9223372036854775808"], [2**53 + 1, None, -(2**63)]),
        (["1", "0.5", "nan"], [1.0, 0.5, math.nan]),
        (["true", "FALSE", ""], [True, False, None]),
        (["true", "1", ""], ["true", "1", None]),
        (["2024-01-01", "2024-01-01 00:00:00", ""], ["2024-01-01", "2024-01-01 00:00:00", None]),
        (["007", "12", "+5"], ["007", "12", "+5"]),
        (["NA", "null", '""'], ["NA", "null", None]),
        (["1e3", ".5", "5."], [1000.0, 0.5, 5.0]),
        (["", "", ""], [None, None, None]),
        (["0x10", "1_000", "1"], ["0x10", "1_000", "1"]),
        (['"1"', '""', '"3"'], [1, None, 3]),
    ],
)
def test_a_csv_is_read_by_all_of_its_cells_and_keeps_them(lake, tmp_path, cells, expected):
    rows = own(lake)["row"].to_pylist()
    lines = [f"{r},{c}" for r, c in zip(rows, cells, strict=False)]
    (tmp_path / "s.csv").write_bytes("\r\n".join(["\ufeffrow,x", *lines, ""]).encode())
    lake.annotate("toy", tmp_path / "s.csv")
    assert same(values(lake, "x")[:3], expected)


@pytest.mark.parametrize(
    "labels, expected",
    [
        (["9007199254740993", "null"], [2**53 + 1, None]),
        (['"2024-01-01 00:00:00"', '"x"'], ["2024-01-01 00:00:00", "x"]),
        (["1", "0.5"], [1.0, 0.5]),
        (["NaN", "-Infinity"], [math.nan, -math.inf]),
        (['"1"', '""'], ["1", ""]),
        (["true", "null"], [True, None]),
    ],
)
def test_a_jsonl_keeps_what_it_says(lake, tmp_path, labels, expected):
    rows = own(lake)["row"].to_pylist()
    lines = [f'{{"x": {x}, "row": {r}}}' for r, x in zip(rows, labels, strict=False)]
    lines += ["", f'{{"row": {rows[2]}}}']
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    assert lake.annotate("toy", tmp_path / "s.jsonl").rows == 3
    assert same(values(lake, "x")[:3], [*expected, None])


def test_narrow_wide_and_coded_columns_of_arrow_become_the_types_of_labels(lake):
    rows = own(lake)["row"][:2]
    columns = {
        "a": pa.array([1, 2], pa.uint8()),
        "b": pa.array([0.5, None], pa.float16()),
        "c": pa.array(["x", "x"]).dictionary_encode(),
        "d": pa.array(["y", None], pa.large_string()),
        "e": pa.array([12, 2**60], pa.decimal128(38, 0)),  # what SQL makes of a sum
        "f": pa.array([15, None], pa.decimal128(4, 1)),
    }
    found = lake.annotate("toy", pa.table({"row": rows.cast(pa.uint64()), **columns}), "s")
    assert [c.type for c in found.columns] == ["int64", "double", "string", "string", "int64", "double"]
    (first,) = lake.sql(f"SELECT a, b, c, d, e, f FROM tokens WHERE run = 'toy' AND row = {rows[0]}").to_pylist()
    assert first == {"a": 1, "b": 0.5, "c": "x", "d": "y", "e": 12, "f": 15.0}


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8).map(lambda s: "t" + s)
_COLUMN = st.sampled_from([st.integers(-(2**63), 2**63 - 1), st.floats(width=64), _TEXT, st.booleans()])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["parquet", "csv", "jsonl"]))
def test_whatever_rows_and_values_are_given_sql_shows_these(lake, tmp_path, data, kind):
    rows = own(lake)["row"].to_pylist()
    chosen = data.draw(st.lists(st.sampled_from(rows), unique=True, min_size=1, max_size=8))
    cells = data.draw(st.lists(data.draw(_COLUMN) | st.none(), min_size=len(chosen), max_size=len(chosen)))
    one = next((c for c in cells if c is not None), None)
    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    column = pa.array(cells, kinds.get(type(one), pa.null()), from_pandas=False)
    path = write(tmp_path / f"s.{kind}", pa.table({"row": chosen, "x": column}))
    found = lake.annotate("toy", path)
    expected = dict(zip(chosen, cells, strict=True))
    seen = values(lake, "x")
    assert same([type(v)(v) if v is not None else None for v in seen], [expected.get(r) for r in rows])
    assert found.labelled == sum(c is not None for c in cells)


# What is refused


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
    from layerlake.store.create import create_run
    from layerlake.store.plan import read_sequences
    from layerlake.store.record import RunRecord

    record = RunRecord(**(run.record.__dict__ | {"name": "odd", "files": {}}))
    create_run(root, record, read_sequences(run.folder / "plan"), tables)
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


@pytest.mark.parametrize(
    "name, content, pattern",
    [
        ("s.csv", b"", "cannot be read as .csv"),
        ("s.csv", b"row,x\n0,1,2\n", "Expected 2 columns, got 3"),
        ("s.csv", b'row,x\n0,"abc\n', "quotation mark is never closed"),
        ("s.csv", b"row,x\n0,\xff\n", "UTF8"),
        ("s.csv", b"row,row\n0,1\n", "two columns 'row'"),
        ("s.csv", b"row,x\n0,99999999999999999999\n", "'x' do not fit into 64 bits"),
        ("s.csv", b"row,x\n0,9007199254740993\n1,0.5\n", "'x' mixes real numbers with integers beyond"),
        ("s.jsonl", b'{"row": 0, "x": 9007199254740993}\n{"row": 1, "x": 0.5}\n', "'x' mixes real numbers"),
        ("s.jsonl", b'{"row": 0, "x": 99999999999999999999}\n', "'x' does not fit into 64 bits"),
        ("s.jsonl", b'{"row": 0, "x": 1}\n{"row": 1, "x": "a"}\n', "'x' mixes int, str"),
        ("s.jsonl", b'{"row": 0, "x": true}\n{"row": 1, "x": 1}\n', "'x' mixes bool, int"),
        ("s.jsonl", b'{"row": 0, "x": [1]}\n', "'x' is nested"),
        ("s.jsonl", b'{"row": 0, "x": {}}\n', "'x' is nested"),
        ("s.jsonl", b'{"row": 0, "x": 1, "x": 2}\n', "line 1: the key 'x' is given twice"),
        ("s.jsonl", b'\n{"row": 0, "x"\n', "line 2: not valid JSON"),
        ("s.jsonl", b"[1]\n", "line 1: not an object"),
        ("s.jsonl", b'{"row": 0, "x": "\\ud800"}\n', "half a character"),
        ("s.jsonl", b'{"row": 0, "x": "\xff"}\n', "not UTF-8"),
        ("s.jsonl", b'{"row": 0, "x": %s}\n' % (b"[" * 100_000), "line 1: not valid JSON"),
        ("s.jsonl", b"", "no label"),
        ("s.parquet", b"row,x\n0,1\n", "cannot be read as .parquet"),
        ("s.tsv", b"row\tx\n", r"none of \.parquet, \.csv, \.jsonl"),
        ("标签.csv", b"row,x\n0,1\n", "--name"),
        ("no/such.csv", None, "cannot be read"),
    ],
)
def test_files_that_are_none_are_sentences(lake, tmp_path, name, content, pattern):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = tree(lake.root)
    with pytest.raises(RequestError, match=pattern):
        lake.annotate("toy", tmp_path / name)
    assert tree(lake.root) == before


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


# Many at once, killed, damaged

ANNOTATOR = """
    import sys
    import pyarrow as pa
    from layerlake.store.lake import Lake
    lake, who = Lake.open(sys.argv[1]), int(sys.argv[2])
    for i in range(3):
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
    stored = [pq.read_table(folder / f"same-{v:04d}.parquet")["x"].to_pylist() for v in range(1, 10)]
    assert sorted(stored) == [[who, i] for who in range(3) for i in range(3)]
    assert all(stored.index([who, i]) < stored.index([who, i + 1]) for who in range(3) for i in range(2))
    assert [read_sealed(folder / f"same-{v:04d}.json")["previous"] for v in range(1, 10)] == [None, *range(1, 9)]
    assert lake.sql("SELECT count(*) AS n FROM labels")["n"].to_pylist() == [12]
    assert values(lake, "x")[:2] == stored[-1]
    check_same_as_rebuilt(lake.root)
    assert lake.verify() == []


KILLED = """
    import os, shutil, sys
    from pathlib import Path
    import pyarrow as pa
    from dying import die_at_each_step
    from layerlake.store import annotate, durable
    from layerlake.store.lake import Lake

    steps = [(os, "fsync"), (os, "link"), (os, "open"), (Path, "unlink"), (Path, "mkdir"), (annotate, "sealed_json"),
             (annotate, "publish_catalog")]
    start = Path(sys.argv[1])

    def prepare(moment):
        lake = Lake.open(shutil.copytree(start, start.with_name(f"lake{moment}")))
        return lambda: lake.annotate("toy", pa.table({"row": [1, 2], "x": [20, 30]}), "s")

    print(die_at_each_step(steps, prepare))
"""


@pytest.mark.parametrize("first", [True, False])
def test_an_annotator_killed_anywhere_leaves_the_old_labels_or_the_new_ones(start, tmp_path, first):
    root = shutil.copytree(start, tmp_path / "start")
    old: list[Any] = [None] * 3
    if not first:
        old = [1, 2, None]
        Lake.open(root).annotate("toy", pa.table({"row": [0, 1], "x": [1, 2]}), "s")
    moments = int(finish(child(KILLED, root)))
    seen, remnants = [], 0
    for moment in range(moments):
        lake = Lake.open(tmp_path / f"lake{moment}")
        lost = [p.what for p in lake.verify() if "indexes" not in p.what]
        assert all("is a remnant: it has no record" in w and "same file completes it" in w for w in lost)
        remnants += len(lost)
        publish_catalog(lake.root)
        there = "x" in lake.sql("FROM tokens LIMIT 0").column_names
        now = values(lake, "x")[:3] if there else [None] * 3
        assert now in (old, [None, 20, 30])
        seen.append(now != old)
        again = lake.annotate("toy", pa.table({"row": [1, 2], "x": [20, 30]}), "s")
        assert again.version == (1 if first else 2) + seen[-1]
        assert values(lake, "x")[:3] == [None, 20, 30]
        assert lake.verify() == []
    assert seen == sorted(seen) and set(seen) == {False, True}
    assert moments > 12 and remnants >= 2


def test_a_remnant_of_other_labels_is_left_alone_and_so_is_its_number(lake):
    lake.annotate("toy", pa.table({"row": [0], "x": [1]}), "s")
    folder = lake.root / "runs/toy/labels"
    shutil.copy(folder / "s-0001.parquet", folder / "s-0002.parquet")
    found = lake.annotate("toy", pa.table({"row": [0], "x": [3]}), "s")
    assert (found.version, found.previous, values(lake, "x")[0]) == (3, 1, 3)
    assert [(p.path, p.what) for p in lake.verify()] == [
        ("runs/toy/labels/s-0002.parquet", "is a remnant: it has no record s-0002.json (remove it)")
    ]


def labelled_twice(lake: Lake) -> Path:
    """Labels s in two versions, beside labels t, of one run."""
    rows = own(lake)["row"]
    lake.annotate("toy", pa.table({"row": rows, "x": [1] * TOKENS}), "s")
    lake.annotate("toy", pa.table({"row": rows, "x": [2] * TOKENS}), "s")
    lake.annotate("toy", pa.table({"row": rows, "y": ["kept"] * TOKENS}), "t")
    return lake.root / "runs/toy/labels"


@pytest.mark.parametrize("kind", ["parquet", "json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "another's", "gone", "folder"])
def test_damaged_labels_are_named_and_left_out_and_no_older_version_stands_in(lake, kind, damage):
    folder = labelled_twice(lake)
    path = folder / f"s-0002.{kind}"
    data = path.read_bytes()
    path.unlink()
    middle = len(data) // 2
    if damage == "folder":
        path.mkdir()
    elif damage != "gone":
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        contents_ = {"flip": flipped, "cut": data[:-9], "empty": b""}
        path.write_bytes(
            contents_.get(damage) or ((folder / f"t-0001.{kind}").read_bytes() if damage != "empty" else b"")
        )
    assert str(path.relative_to(lake.root)) in {p.path for p in lake.verify()}
    assert {p.path for p in lake.verify()} <= {f"runs/toy/labels/s-0002.{k}" for k in ("json", "parquet")}
    publish_catalog(lake.root, rebuild=True)
    if (damage, kind) == ("gone", "json"):  # a table without a record is what a killed annotator leaves
        assert values(lake, "x") == [1] * TOKENS
        return
    for rebuild in (True, False):
        publish_catalog(lake.root, rebuild=rebuild)
        with pytest.warns(LakeWarning, match=rf"Labels 's' of run 'toy' are damaged and left out: .*s-0002\.{kind}"):
            assert values(lake, "y") == ["kept"] * TOKENS
        with pytest.warns(LakeWarning):
            assert "x" not in lake.sql("FROM tokens LIMIT 0").column_names
        with pytest.warns(LakeWarning):
            assert lake.sql("SELECT run, labels FROM problems").to_pylist() == [{"run": "toy", "labels": "s"}]
    path.rmdir() if damage == "folder" else path.unlink(missing_ok=True)
    path.write_bytes(data)
    publish_catalog(lake.root)  # mended, it is back without a rebuild
    assert values(lake, "x") == [2] * TOKENS
    check_same_as_rebuilt(lake.root)
    assert lake.verify() == []


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


def test_a_damaged_set_can_be_written_anew_and_keeps_others_from_guessing_its_columns(lake):
    folder = labelled_twice(lake)
    (folder / "s-0002.json").write_bytes(b"{}")
    with pytest.raises(CorruptLakeError, match="Labels 's' of run 'toy' are damaged"):
        lake.annotate("toy", pa.table({"row": [0], "new": [1]}), "u")
    assert lake.annotate("toy", pa.table({"row": [0], "x": [9]}), "s").version == 3
    (folder / "s-0002.json").unlink(), (folder / "s-0002.parquet").unlink()
    publish_catalog(lake.root)
    assert values(lake, "x")[:2] == [9, None]


def test_files_of_another_run_or_of_nobody_are_named(lake):
    folder = labelled_twice(lake)
    other = lake.root / "runs/other/labels"
    shutil.copytree(folder, other)
    for name in ("x.parquet", "s-1.json", "s-0000.json", "note.txt"):
        (folder / name).write_bytes(b"x")
    (folder / "s.1.abc.tmp").write_bytes(b"being written")
    found = {p.path: p.what for p in lake.verify()}
    strangers = {p: w for p, w in found.items() if w == "does not belong to this run"}
    assert set(strangers) == {f"runs/toy/labels/{n}" for n in ("x.parquet", "s-1.json", "s-0000.json", "note.txt")}
    foreign = {p for p, w in found.items() if "belongs to labels of another run" in w}
    assert foreign == {f"runs/other/labels/{n}.json" for n in ("s-0001", "s-0002", "t-0001")}
    publish_catalog(lake.root)
    with pytest.warns(LakeWarning, match="Labels 's' of run 'other'"):
        assert set(values(lake, "x", "other")) == {None}


def test_labels_that_are_gone_but_indexed_are_named(lake):
    folder = labelled_twice(lake)
    (folder / "t-0001.json").unlink(), (folder / "t-0001.parquet").unlink()
    assert [(p.path, p.what) for p in lake.verify()] == [
        ("runs/toy/labels/t-0001.json", "is missing, although the catalog has its labels")
    ]


@pytest.mark.parametrize("rest", [{"row": [0, 0]}, {"row": [1, 0]}, {"row": [0, None]}, {"row": [0.0, 1.0]}, {}])
def test_a_table_with_right_hashes_that_is_none_multiplies_no_token(lake, rest):
    folder = labelled_twice(lake)
    pq.write_table(pa.table(rest | {"x": [1, 2]}), folder / "s-0002.parquet")
    record = read_sealed(folder / "s-0002.json")
    digest = hashlib.sha256((folder / "s-0002.parquet").read_bytes()).hexdigest()
    (folder / "s-0002.json").write_bytes(sealed_json(record | {"rows": 2, "sha256": digest}))
    publish_catalog(lake.root)
    with pytest.warns(LakeWarning, match="Labels 's'"):
        assert lake.sql("FROM tokens").num_rows == 2 * TOKENS


ABSURD: list[object] = [
    None,
    True,
    -1,
    10**30,
    1.5,
    "",
    "../../x",
    "\0",
    [],
    [[]],
    {},
    [{"name": "row", "type": "int64"}],
]


def test_absurd_records_with_right_hashes_are_sentences(lake):
    folder = labelled_twice(lake)
    original = read_sealed(folder / "s-0002.json")
    for key in original:
        for absurd in ABSURD:
            if key in ("created", "created_by", "previous") or original[key] == absurd:
                continue
            (folder / "s-0002.json").write_bytes(sealed_json(original | {key: absurd}))
            try:
                list(lake.verify("toy"))
                describe_run.__wrapped__ if False else None
            except LayerlakeError:
                pass
    for absurd in ({"columns": [{"name": "ROW", "type": "int64", "values": 1}]}, {"version": 7}, {"columns": None}):
        (folder / "s-0002.json").write_bytes(sealed_json(original | absurd))
        assert [p.path for p in lake.verify("toy")] == ["runs/toy/labels/s-0002.json"]
        publish_catalog(lake.root)
        with pytest.warns(LakeWarning, match="Labels 's'"):
            assert values(lake, "y") == ["kept"] * TOKENS


# The command


def test_the_command_says_what_was_labelled_and_show_and_sql_list_it(lake, tmp_path):
    path = write(
        tmp_path / "mood.csv", pa.table({"row": [0, 1, 2], "mood": ["good", None, "bad"], "n": [1, None, None]})
    )
    done = run_layerlake("annotate", "toy", path, "--lake", lake.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Labels mood version 1 of run toy: 2 of 53 tokens got one: mood (string, 2), n (int64, 1).\n"
    again = run_layerlake("annotate", "toy", path, "--lake", lake.root, "--json")
    assert json.loads(again.stdout)["version"] == 2 and json.loads(again.stdout)["tokens"] == TOKENS
    shown = run_layerlake("show", "toy", "--lake", lake.root).stdout.splitlines()
    assert "mood, n: version 2, 2 tokens, from mood.csv" in next(s for s in shown if s.startswith("labels mood"))
    wrong = run_layerlake("annotate", "toy", path, "--lake", lake.root, "--name", "other")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("layerlake: 'mood' is a label of set 'mood' of run 'toy'")
    (lake.root / "runs/toy/labels/mood-0002.parquet").write_bytes(b"")
    bad = run_layerlake("verify", "--lake", lake.root)
    assert bad.returncode == 1 and "runs/toy/labels/mood-0002.parquet: " in bad.stdout
    indexed = run_layerlake("index", "--lake", lake.root)
    assert indexed.returncode == 1
    assert "layerlake: warning: Labels 'mood' of run 'toy' are damaged and left out: " in indexed.stderr


def test_labels_that_are_stored_but_cannot_be_indexed_say_so(lake, monkeypatch):
    from layerlake.errors import WorldError
    from layerlake.store import annotate

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
    assert os.path.getsize(tmp_path / "s.parquet") > 0
