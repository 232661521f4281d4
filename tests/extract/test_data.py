"""Documents are read as they stand in the files, or refused with the file, the line and what to do."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from layerlake.errors import DataError, UnknownNameError
from layerlake.extract.data import data_digest, default_split, read_documents
from layerlake.extract.document import Document


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(path: Path, *rows: Any) -> Path:
    return write(path, "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def test_txt_gives_a_document_a_line_and_keeps_line_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "notes.txt", "one\n\n  \t\n\ttwo \r\nthree")
    assert [(d.name, d.text) for d in read_documents(path)] == [
        ("notes.txt:1", "one"),
        ("notes.txt:4", "\ttwo "),
        ("notes.txt:5", "three"),
    ]


def test_jsonl_gives_texts_labels_and_splits(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "d.jsonl",
        {"body": "a b", "y": 1, "tags": ["N", None], "part": "train"},
        "",
        {"body": "c", "part": "test"},
    )
    documents = read_documents(path, text_column="body", label_columns=["y", "tags"], split_column="part")
    assert documents == [
        Document("d.jsonl:1", "a b", None, {"y": 1, "tags": ["N", None]}, "train"),
        Document("d.jsonl:3", "c", None, {"y": None, "tags": None}, "test"),
    ]


def test_E15_jsonl_gives_ids_where_there_is_no_text(tmp_path: Path) -> None:
    rows = [{"input_ids": [0, 5, 2]}, {"text": "both", "input_ids": [1]}, {"text": None, "input_ids": [7]}]
    path = jsonl(tmp_path / "d.jsonl", *rows)
    assert [(d.text, d.input_ids) for d in read_documents(path)] == [
        (None, (0, 5, 2)),
        ("both", None),
        (None, (7,)),
    ]
    asked = read_documents(path, text_column="input_ids")
    assert [(d.text, d.input_ids) for d in asked] == [(None, (0, 5, 2)), (None, (1,)), (None, (7,))]


def test_folder_gives_every_source_file_sorted_by_relative_path(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    for name in ("b.py", "a/z.py", "a/y.md", "a.c"):
        write(folder / name, f"text of {name}\r\n")
    write(folder / "a/empty/__init__.py", "")
    for name in ("x.bin", "rows.jsonl", ".hidden.py", ".git/h.py", "a/__pycache__/c.py"):
        write(folder / name, b"\xff")
    assert [(d.name, d.text) for d in read_documents(folder)] == [
        ("a.c", "text of a.c\r\n"),
        ("a/y.md", "text of a/y.md\r\n"),
        ("a/z.py", "text of a/z.py\r\n"),
        ("b.py", "text of b.py\r\n"),
    ]


def test_folder_order_does_not_depend_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("c.py", "a.py", "b/d.py"):
        write(tmp_path / name, name)
    walk = os.walk

    def backwards(*args: Any, **kwargs: Any) -> Any:
        for here, folders, files in walk(*args, **kwargs):
            folders.sort(reverse=True)
            yield here, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert [d.name for d in read_documents(tmp_path)] == ["a.py", "b/d.py", "c.py"]


def test_glob_crosses_folders_and_takes_every_ending(tmp_path: Path) -> None:
    for name in ("src/b.py", "src/a/z.py", "src/a/z.odd", "src/.h/n.py", "src/__pycache__/m.py"):
        write(tmp_path / name, name)
    assert [d.name for d in read_documents(f"{tmp_path}/src/**/*.py")] == ["a/z.py", "b.py"]
    assert [d.text for d in read_documents(f"{tmp_path}/src/a/*.odd")] == ["src/a/z.odd"]


def test_glob_reads_jsonl_line_by_line(tmp_path: Path) -> None:
    jsonl(tmp_path / "two.jsonl", {"text": "c", "y": 2})
    jsonl(tmp_path / "one.jsonl", {"text": "a"}, {"text": "b"})
    documents = read_documents(f"{tmp_path}/*.jsonl", label_columns=["y"])
    assert [(d.name, d.text, d.labels["y"]) for d in documents] == [
        ("one.jsonl:1", "a", None),
        ("one.jsonl:2", "b", None),
        ("two.jsonl:1", "c", 2),
    ]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a[1].py", "x = 1\n")
    write(tmp_path / "a1.py", "other")
    assert [(d.name, d.text) for d in read_documents(path)] == [("a[1].py", "x = 1\n")]


def test_byte_order_mark_is_dropped_and_crlf_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.py", b"\xef\xbb\xbfx = 1\r\ny\r")
    assert [d.text for d in read_documents(path)] == ["x = 1\r\ny\r"]


def test_U06_odd_characters_are_stored_as_given(tmp_path: Path) -> None:
    texts = ["a\0b", "\ta\x07", "x" * 1_000_000, "\U0001f600\u2028é"]
    path = jsonl(tmp_path / "d.jsonl", *({"text": text} for text in texts))
    assert [d.text for d in read_documents(path)] == texts


def test_S08_long_labels_are_kept_whole(tmp_path: Path) -> None:
    labels = ["a" * 300, "漢" * 300, "😀" * 300]
    path = jsonl(tmp_path / "d.jsonl", *({"text": "t", "y": y} for y in labels))
    assert [d.labels["y"] for d in read_documents(path, label_columns=["y"])] == labels


def test_Q07_nan_stays_nan_and_null_is_missing(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "d.jsonl",
        '{"text": "a", "y": NaN}',
        '{"text": "b", "y": null}',
        '{"text": "c", "y": -Infinity}',
    )
    nan, null, infinite = [d.labels["y"] for d in read_documents(path, label_columns=["y"])]
    assert isinstance(nan, float) and math.isnan(nan)
    assert null is None
    assert infinite == -math.inf


LINE = [
    ("{'text': 1}", "not valid JSON"),
    ('{"text": "a"', "not valid JSON"),
    ("[" * 100_000, "recursion"),
    ('["a"]', "a list, not an object"),
    ('{"text": 3}', "'text' is an integer, not a string"),
    ('{"text": ["a"]}', "'text' is a list, not a string"),
    ('{"text": ""}', "empty"),
    ('{"y": 1}', "no text in column 'text' and no 'messages' or 'input_ids'"),
    ('{"text": "a", "text": "b"}', "'text' is given twice"),
    ('{"text": "a\\ud83d!"}', "lone surrogate (\\ud83d) at character 1"),
    ('{"text": "a", "y": {"b": 1}}', "the label 'y' holds an object"),
    ('{"text": "a", "y": [[1]]}', "the label 'y' holds a list"),
    ('{"text": "a", "y": "\\udc00"}', "'y' holds a lone surrogate"),
    ('{"text": "a", "y": 9223372036854775808}', "does not fit into 64 bits"),
    ('{"input_ids": "1 2"}', "'input_ids' is a string, not a list"),
    ('{"input_ids": []}', "'input_ids' is empty"),
    ('{"input_ids": [1, true]}', "holds True at position 1"),
    ('{"input_ids": [1.0]}', "holds 1.0 at position 0"),
    ('{"input_ids": [0, 4, -1]}', "holds -1 at position 2"),
    ('{"input_ids": [2147483648]}', "holds 2147483648 at position 0"),
]


@pytest.mark.parametrize(("line", "says"), LINE, ids=[says for _, says in LINE])
def test_U06_a_bad_line_is_refused_with_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"text": "good", "y": 1}, "", line)
    with pytest.raises(DataError) as caught:
        read_documents(path, label_columns=["y"])
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("split", [None, 1, "", ["train"]])
def test_a_row_without_a_named_split_is_refused(tmp_path: Path, split: object) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"text": "a", "part": "train"}, {"text": "b", "part": split})
    with pytest.raises(DataError, match="line 2: the split 'part'"):
        read_documents(path, split_column="part")


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (1, "1", "a number in .* line 1 and a string in .* line 2"),
        (True, 1, "a boolean in .* line 1 and a number in .* line 2"),
        ([1], 1, "a list with a label a token in .* line 1 and one label in .* line 2"),
        ([None, "a"], [2], "a string in .* line 1 and a number in .* line 2"),
    ],
)
def test_a_label_column_of_two_kinds_is_refused(tmp_path: Path, first: Any, second: Any, says: str) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"text": "a", "y": first}, {"text": "b", "y": second})
    with pytest.raises(DataError, match=says):
        read_documents(path, label_columns=["y"])


def test_integers_and_floats_are_one_kind(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"text": "a", "y": 1}, {"text": "b", "y": 0.5})
    assert [d.labels["y"] for d in read_documents(path, label_columns=["y"])] == [1, 0.5]


def test_a_column_in_no_row_is_an_unknown_name_with_near_ones(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"text": "a", "label": 1})
    with pytest.raises(UnknownNameError, match=r"no label column 'labels' .*Did you mean 'label'"):
        read_documents(path, label_columns=["labels"])
    with pytest.raises(UnknownNameError, match="no split column 'split'"):
        read_documents(path, split_column="split")
    with pytest.raises(UnknownNameError, match=r"no text column 'txt' .*Did you mean 'text'"):
        read_documents(path, text_column="txt")


def test_text_files_have_no_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "n.txt", "a\n")
    with pytest.raises(
        UnknownNameError, match=r"no label column 'y' .*only rows of \.jsonl, \.csv, \.parquet or hf: data"
    ):
        read_documents(path, label_columns=["y"])


@pytest.mark.parametrize(
    ("name", "content"), [("e.txt", ""), ("e.txt", "\n \n"), ("e.jsonl", "\n"), ("e.py", "\ufeff\n")]
)
def test_an_empty_file_is_refused(tmp_path: Path, name: str, content: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=rf"{name} is empty"):
        read_documents(path)


def test_places_without_data_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "folder/rows.jsonl", "{}")
    write(tmp_path / "blank/a.py", "\n")
    write(tmp_path / "t.tsv", "a\tb")
    with pytest.raises(DataError, match=r"no file or folder .*missing.txt"):
        read_documents(tmp_path / "missing.txt")
    with pytest.raises(DataError, match=r"folder holds no source or text file.*\*\*/\*\.jsonl"):
        read_documents(tmp_path / "folder")
    with pytest.raises(DataError, match="blank holds no text"):
        read_documents(tmp_path / "blank")
    with pytest.raises(DataError, match="No file matches"):
        read_documents(f"{tmp_path}/**/*.nothing")
    with pytest.raises(DataError, match=r"ends in '\.tsv' is not read"):
        read_documents(tmp_path / "t.tsv")


def test_bytes_that_are_not_utf8_are_refused_with_line_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "l.txt", b"\xef\xbb\xbfab\ncaf\xe9 \n")
    with pytest.raises(DataError) as caught:
        read_documents(path)
    assert str(caught.value).startswith(f"{path}, line 2: not UTF-8 at byte 9 (0xe9)")


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write(tmp_path / os.fsdecode(b"caf\xe9.py"), "x = 1\n")
    with pytest.raises(DataError, match=r"name of the file .* is not UTF-8"):
        read_documents(tmp_path)


def test_the_digest_is_that_of_the_content_alone() -> None:
    a = Document("a", "café", None, {}, None)
    assert a.digest == hashlib.sha256("café".encode()).hexdigest()
    assert a.digest == Document("b", "café", None, {"y": 1}, "test").digest
    ids = Document("a", None, (1, 2), {}, None)
    assert len({a.digest, ids.digest, Document("a", None, (1, 3), {}, None).digest}) == 3
    assert ids.digest == Document("b", None, (1, 2), {}, None).digest


def test_the_data_digest_sees_every_field_and_the_order() -> None:
    base = Document("a", "t", None, {"y": 1}, "train")
    other = Document("b", "u", None, {"y": [1, None]}, "test")
    variants = [
        [base, other],
        [other, base],
        [base],
        [base, Document("c", "u", None, {"y": [1, None]}, "test")],
        [base, Document("b", "v", None, {"y": [1, None]}, "test")],
        [base, Document("b", "u", None, {"y": [1, 2]}, "test")],
        [base, Document("b", "u", None, {"y": ["1", None]}, "test")],
        [base, Document("b", "u", None, {"y": [1.0, None]}, "test")],
        [base, Document("b", "u", None, {"y": [True, None]}, "test")],
        [base, Document("b", "u", None, {"z": [1, None]}, "test")],
        [base, Document("b", "u", None, {"y": [1, None]}, None)],
    ]
    assert len({data_digest(documents) for documents in variants}) == len(variants)
    assert data_digest(variants[0]) == data_digest(list(variants[0]))
    both = [Document("a", "t", None, labels, None) for labels in ({"x": 1, "y": 2}, {"y": 2, "x": 1})]
    assert data_digest(both[:1]) == data_digest(both[1:])
    nan = [Document("a", "t", None, {"y": math.nan}, None)]
    assert data_digest(nan) != data_digest([Document("a", "t", None, {"y": None}, None)])


def test_the_default_split_is_a_fifth_and_stays_as_it_is() -> None:
    digests = [hashlib.sha256(str(k).encode()).hexdigest() for k in range(5000)]
    sides = [default_split(digest) for digest in digests]
    assert set(sides) == {"train", "test"}
    assert 0.18 < sides.count("test") / len(sides) < 0.22
    # A fifth of the numbers that start a digest: whoever changes this moves documents between sides.
    assert default_split("0" * 64) == default_split("3333" + "0" * 60) == "test"
    assert default_split("3334" + "0" * 60) == default_split("f" * 64) == "train"
