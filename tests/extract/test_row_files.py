"""A .csv or .parquet file gives a document a row, as a .jsonl does: the same values, or the same kind of complaint."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layerlake.errors import DataError, UnknownNameError
from layerlake.extract.data import data_digest, read_documents
from layerlake.extract.document import Document


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_csv_row_is_a_document_with_labels_of_the_type_of_their_column(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.csv",
        "\ufefftext,n,code,x,ok,none,part\n"
        'plain,1,01,0.5,true,,train\n\n"two\r\nlines, ""quoted""",-2,02,,False,,test\n5,3,3,nan,TRUE,,7\n',
    )
    documents = read_documents(path, label_columns=["n", "code", "x", "ok", "none"], split_column="part")
    nan = documents[2].labels.pop("x")
    assert isinstance(nan, float) and math.isnan(nan)
    assert documents == [
        Document("d.csv:1", "plain", None, {"n": 1, "code": "01", "x": 0.5, "ok": True, "none": None}, "train"),
        Document(
            "d.csv:2",
            'two\r\nlines, "quoted"',
            None,
            {"n": -2, "code": "02", "x": None, "ok": False, "none": None},
            "test",
        ),
        Document("d.csv:3", "5", None, {"n": 3, "code": "3", "ok": True, "none": None}, "7"),
    ]
    kinds = [[type(v) for v in d.labels.values()] for d in documents]
    assert kinds[0] == [int, str, float, bool, type(None)]


TEXT = st.text(st.sampled_from(list('ab ,"\n\r\t;é漢😀\0')) | st.characters(codec="utf-8"), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(st.tuples(TEXT, TEXT | st.none()), min_size=1, max_size=6))
def test_any_text_that_csv_writes_is_read_as_it_was(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.mktemp("csv") / "d.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["text", "y"])
        writer.writerows([text, "#" + label if label is not None else ""] for text, label in rows)
    documents = read_documents(path, label_columns=["y"])
    assert [(d.text, d.labels["y"]) for d in documents] == [(t, None if y is None else "#" + y) for t, y in rows]
    assert [d.name for d in documents] == [f"d.csv:{k}" for k in range(1, len(rows) + 1)]


CSV = [
    ("text,y\na,1\nb\n", "row 2: 1 cells, where the header has 2"),
    ('text,y\n"a\nb",1\n\nc,2,3\n', "row 2: 3 cells, where the header has 2"),
    ("text,y\na,1\n,2\n", "row 2: no text in column 'text'"),
    ("text,y\na,1\n" + '"",2\n', "row 2: no text in column 'text'"),
    ('text,y\n"a,1\n', "a quotation mark is never closed"),
    ("text,y,y\na,1,2\n", "two columns 'y'"),
    ("text,y\na,9223372036854775808\n", "the integers of column 'y' do not fit into 64 bits"),
    ("text,y\na,9007199254740993\nb,0.5\n", "which would be rounded"),
    (b"text,y\na,1\nb\xff,2\n", "line 3: not UTF-8 at byte 12 (0xff)"),
    ("input_ids,y\n1 2 3,1\n", "row 1: 'input_ids' is a string, not a list"),
    ("messages,y\nhello,1\n", "row 1: 'messages' is a string, not a list of messages"),
    ("text,y\n", "is empty"),
    ("", "is empty"),
]


@pytest.mark.parametrize(("content", "says"), CSV, ids=[says for _, says in CSV])
def test_a_csv_that_cannot_be_read_is_refused_with_its_row(tmp_path: Path, content: str | bytes, says: str) -> None:
    path = write(tmp_path / "d.csv", content)
    with pytest.raises(DataError) as caught:
        read_documents(path, label_columns=["y"])
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


def test_a_parquet_row_is_a_document_whatever_way_its_columns_are_stored(tmp_path: Path) -> None:
    text = ["a", "b\r\nc\0", "😀"]
    table = pa.table(
        {
            "text": pa.array(text, pa.large_string()).dictionary_encode(),
            "y": pa.array([1, None, 3], pa.uint8()),
            "f": pa.array([math.nan, None, 0.5], pa.float32()),
            "s": pa.array(["x", None, "x"]).dictionary_encode(),
            "tags": pa.array([["N", None], None, []]),
            "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)),
            "d": pa.array([1, 2, 3], pa.decimal128(5, 0)),
            "part": ["train", "test", "train"],
            "when": pa.array([0, 1, 2], pa.timestamp("s")),
        }
    )
    path = parquet(tmp_path / "d.parquet", table, row_group_size=2)
    documents = read_documents(path, label_columns=["y", "f", "s", "tags", "fixed", "d"], split_column="part")
    assert [(d.name, d.text, d.split) for d in documents] == [
        ("d.parquet:1", text[0], "train"),
        ("d.parquet:2", text[1], "test"),
        ("d.parquet:3", text[2], "train"),
    ]
    labels = [d.labels for d in documents]
    assert [x["y"] for x in labels] == [1, None, 3]
    assert math.isnan(labels[0]["f"]) and labels[1]["f"] is None and labels[2]["f"] == 0.5
    assert [x["s"] for x in labels] == ["x", None, "x"]
    assert [x["tags"] for x in labels] == [["N", None], None, []]
    assert [x["fixed"] for x in labels] == [[1, 2], [3, 4], [5, 6]]
    assert [x["d"] for x in labels] == [1, 2, 3]


def test_ids_and_labels_a_token_come_from_parquet_as_from_jsonl(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 0, 2], "y": [True, None, False]}, {"input_ids": [7], "y": [None]}]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = read_documents(path, label_columns=["y"])
    other = read_documents(
        parquet(tmp_path / "d.parquet", {k: [row[k] for row in rows] for k in ("input_ids", "y")}), label_columns=["y"]
    )
    assert [(d.input_ids, d.labels) for d in one] == [(d.input_ids, d.labels) for d in other]
    assert [d.digest for d in one] == [d.digest for d in other]


def test_a_row_without_text_falls_back_to_its_ids_in_parquet_too(tmp_path: Path) -> None:
    columns = {"text": ["a", None, "c"], "input_ids": [[1], [2, 3], None]}
    documents = read_documents(parquet(tmp_path / "d.parquet", columns))
    assert [(d.text, d.input_ids) for d in documents] == [("a", None), (None, (2, 3)), ("c", None)]
    asked = parquet(tmp_path / "e.parquet", {"text": ["a", "b"], "input_ids": [[1], [2]]})
    assert [d.input_ids for d in read_documents(asked, text_column="input_ids")] == [(1,), (2,)]


PARQUET: list[tuple[dict[str, Any], str]] = [
    ({"text": ["a", ""], "y": [1, 2]}, ", row 2: 'text' is empty"),
    ({"text": ["a", None], "y": [1, 2]}, ", row 2: no text in column 'text'"),
    ({"text": [1, 2], "y": [1, 2]}, ": the column 'text' is of type int64, not a string"),
    ({"text": [b"a", b"b"], "y": [1, 2]}, ": the column 'text' is of type binary, not a string"),
    ({"text": ["a"], "y": pa.array([0], pa.timestamp("us"))}, ": the column 'y' is of type timestamp[us]"),
    ({"text": ["a"], "y": [{"b": 1}]}, ": the column 'y' is of type struct"),
    ({"text": ["a"], "y": [[[1]]]}, ": the column 'y' is of type list"),
    ({"text": ["a"], "y": pa.array([2**63], pa.uint64())}, ": the column 'y', uint64, does not fit into int64"),
    ({"input_ids": [[1], [2, -1]], "y": [1, 2]}, ", row 2: 'input_ids' holds -1 at position 1"),
    ({"input_ids": [[1.0]], "y": [1]}, ", row 1: 'input_ids' holds 1.0 at position 0"),
    ({"text": pa.array([], pa.string()), "y": pa.array([], pa.int64())}, " is empty"),
]


@pytest.mark.parametrize(("columns", "says"), PARQUET, ids=[says for _, says in PARQUET])
def test_a_parquet_that_cannot_be_read_is_refused_with_its_row_or_column(
    tmp_path: Path, columns: dict[str, Any], says: str
) -> None:
    path = parquet(tmp_path / "d.parquet", columns)
    with pytest.raises(DataError) as caught:
        read_documents(path, label_columns=["y"])
    assert str(caught.value).startswith(f"{path}{says}")


def test_a_parquet_with_bytes_that_are_not_utf8_names_the_row(tmp_path: Path) -> None:
    binary = pa.array([b"good", b"caf\xe9"], pa.binary())
    path = parquet(tmp_path / "d.parquet", {"text": pa.Array.from_buffers(pa.string(), 2, binary.buffers())})
    with pytest.raises(DataError, match=r"row 2: 'text' is not UTF-8 at byte 3"):
        read_documents(path)


def test_a_file_that_is_no_parquet_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.parquet cannot be read as \.parquet"):
        read_documents(write(tmp_path / "d.parquet", "text\na\n"))


def test_a_column_with_a_dot_and_a_nested_one_are_told_apart(tmp_path: Path) -> None:
    path = parquet(tmp_path / "d.parquet", {"a.b": ["dotted"], "a": [{"b": "nested"}]})
    (document,) = read_documents(path, text_column="a.b")
    assert document.text == "dotted"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_absent_column_lists_what_there_is(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"d.{suffix}"
    if suffix == "csv":
        write(path, "body,label\na,1\n")
    else:
        parquet(path, {"body": ["a"], "label": [1]})
    with pytest.raises(UnknownNameError, match=r"no text column 'text' in .*'messages' or 'input_ids'.*body, label"):
        read_documents(path)
    with pytest.raises(UnknownNameError, match=r"no label column 'labels' .*Did you mean 'label'.*body, label"):
        read_documents(path, text_column="body", label_columns=["labels"])
    with pytest.raises(UnknownNameError, match=r"no split column 'split'.*body, label"):
        read_documents(path, text_column="body", split_column="split")


def test_a_glob_of_mixed_files_gives_a_document_a_row(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "text,y\na,1\n")
    write(tmp_path / "b.jsonl", '{"text": "b", "y": 2}\n\n{"text": "c"}\n')
    parquet(tmp_path / "c.parquet", {"text": ["d", "e"], "y": [4, 5]})
    write(tmp_path / "empty.csv", "")
    documents = read_documents(f"{tmp_path}/*", label_columns=["y"])
    assert [(d.name, d.text, d.labels["y"]) for d in documents] == [
        *[("a.csv:1", "a", 1), ("b.jsonl:1", "b", 2), ("b.jsonl:3", "c", None)],
        *[("c.parquet:1", "d", 4), ("c.parquet:2", "e", 5)],
    ]
    write(tmp_path / "z.csv", "text,y\nf,word\n")
    with pytest.raises(DataError, match=r"'y' is a number in .*a\.csv, row 1 and a string in .*z\.csv, row 1"):
        read_documents(f"{tmp_path}/*", label_columns=["y"])


def test_the_digest_is_that_of_the_values_and_not_of_how_parquet_stores_them(tmp_path: Path) -> None:
    table = pa.table({"text": [f"t{k % 3}" for k in range(300)], "y": list(range(300))})
    digests = set()
    for row_group_size, dictionary in ((7, True), (300, False)):
        folder = tmp_path / str(row_group_size)
        folder.mkdir()
        path = parquet(folder / "d.parquet", table, row_group_size=row_group_size, use_dictionary=dictionary)
        documents = read_documents(path, label_columns=["y"])
        assert [d.labels["y"] for d in documents] == list(range(300))
        digests.add(data_digest(documents))
    assert len(digests) == 1


def test_U06_odd_texts_are_stored_as_given_in_every_format(tmp_path: Path) -> None:
    texts = ["a\0b", "\ta\x07\t", "x" * 1_000_000, "\U0001f600\u2028é"]
    parquet(tmp_path / "d.parquet", {"text": texts})
    with (tmp_path / "d.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["text"], *([text] for text in texts)])
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for suffix in ("parquet", "csv", "jsonl"):
        assert [d.text for d in read_documents(tmp_path / f"d.{suffix}")] == texts


def test_only_row_groups_are_read_and_only_the_columns_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(
        tmp_path / "d.parquet", {"text": ["a"] * 10, "y": [1] * 10, "big": ["x" * 1000] * 10}, row_group_size=5
    )
    read: list[Any] = []
    real = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *a, **k: pytest.fail("the whole file is read"))
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, i, columns: read.append((i, columns)) or real(self, i, columns)
    )
    assert len(read_documents(path, label_columns=["y"])) == 10
    assert read == [(0, ["text", "y"]), (1, ["text", "y"])]


def test_a_large_csv_keeps_every_line_break_of_its_texts(tmp_path: Path) -> None:
    """Where a reader cuts a file into blocks, a quoted line break on the edge of one must not lose its second half."""
    text = "\r\n" * 500_000
    with (tmp_path / "d.csv").open("w", newline="") as file:
        file.write("text\r\n")
        for _ in range(70):
            file.write(f'"{text}"\r\n')
    raw = (tmp_path / "d.csv").read_bytes()
    assert raw[(64 << 20) - 1 : (64 << 20) + 1] == b"\r\n"
    assert {d.text for d in read_documents(tmp_path / "d.csv")} == {text}
