"""Labels have the values that were written, in whatever form they are brought."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from labelling import TOKENS, make_start, own, same, tree, values, write
from layerlake.errors import (
    RequestError,
)
from layerlake.store.lake import Lake


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A lake of two runs, one with a label; never changed by a test."""
    return make_start(tmp_path_factory.mktemp("start") / "lake")


@pytest.fixture
def lake(start, tmp_path) -> Lake:
    return Lake.open(shutil.copytree(start, tmp_path / "lake"))


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


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize(
    "name, content, pattern",
    [
        ("s.csv", b"", "cannot be read as .csv"),
        ("s.csv", b"row,x\n0,1,2\n", "row 1: 3 cells, where the header has 2"),
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
