"""A data set of the `datasets` library, in a local folder: its rows are documents, its splits the split."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from layerlake.errors import DataError, MissingExtraError, RequestError, UnknownNameError, WorldError
from layerlake.extract.data import data_digest, read_documents
from layerlake.extract.driver import extract
from layerlake.extract.settings import data_title
from layerlake.store.lake import Lake

datasets = pytest.importorskip("datasets")

ROWS = {
    "train": {
        "text": [f"text {k}\r\nline" for k in range(5)],
        "y": [0, 1, None, 1, 0],
        "x": [0.5, math.nan, None, 1, 2],
    },
    "test": {"text": ["test 0", "test 1"], "y": [1, 0], "x": [3.0, 4.0]},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def parquet_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split, columns in ROWS.items():
        pq.write_table(pa.table(columns), folder / f"{split}.parquet")
    return folder


@pytest.fixture
def jsonl_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "lines"
    folder.mkdir()
    for split in ("train", "validation"):
        rows = [{"input_ids": [k, k + 1], "tags": ["N", None]} for k in range(3)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    data = datasets.DatasetDict({split: datasets.Dataset.from_dict(columns) for split, columns in ROWS.items()})
    data.save_to_disk(str(tmp_path / "saved"), num_proc=None)
    return tmp_path / "saved"


def check_rows(documents: list[Any], name: str) -> None:
    assert [d.name for d in documents] == [f"{name}/train:{k}" for k in range(1, 6)] + [
        f"{name}/test:{k}" for k in (1, 2)
    ]
    assert [d.text for d in documents] == ROWS["train"]["text"] + ROWS["test"]["text"]
    assert [d.labels["y"] for d in documents] == [0, 1, None, 1, 0, 1, 0]
    assert [d.split for d in documents] == ["train"] * 5 + ["test"] * 2
    assert math.isnan(documents[1].labels["x"]) and documents[2].labels["x"] is None


def test_a_folder_of_parquet_files_and_a_saved_one_give_the_same_documents(parquet_folder: Path, saved: Path) -> None:
    one = read_documents(f"hf:{parquet_folder}", label_columns=["y", "x"])
    check_rows(one, "corpus")
    other = read_documents(f"hf:{saved}", label_columns=["y", "x"])
    check_rows(other, "saved")
    assert [d.digest for d in one] == [d.digest for d in other]


def test_ids_and_labels_a_token_come_from_jsonl_files_in_a_folder(jsonl_folder: Path) -> None:
    documents = read_documents(f"hf:{jsonl_folder}", label_columns=["tags"])
    assert [(d.name, d.input_ids, d.labels["tags"], d.split) for d in documents] == [
        (f"lines/{split}:{k + 1}", (k, k + 1), ["N", None], split)
        for split in ("train", "validation")
        for k in range(3)
    ]


def test_rows_of_a_split_keep_the_names_that_they_have_in_the_whole(parquet_folder: Path, saved: Path) -> None:
    for folder, name in ((parquet_folder, "corpus"), (saved, "saved")):
        whole = {d.name: d for d in read_documents(f"hf:{folder}")}
        documents = read_documents(f"hf:{folder}", splits=["train[1:3]"])
        assert [d.name for d in documents] == [f"{name}/train:2", f"{name}/train:3"]
        assert [d.text for d in documents] == [whole[d.name].text for d in documents]
        assert [d.split for d in documents] == [None, None]  # of one split, a fifth is test as elsewhere
        both = read_documents(f"hf:{folder}", splits=["test", "train[:1]"])
        assert [(d.name, d.split) for d in both] == [
            *[(f"{name}/test:1", "test"), (f"{name}/test:2", "test"), (f"{name}/train:1", "train")]
        ]
        assert len(read_documents(f"hf:{folder}", splits=["train[:99]"])) == 5
        with pytest.raises(DataError, match="holds no text"):
            read_documents(f"hf:{folder}", splits=["train[5:9]"])
        with pytest.raises(RequestError, match="Row 2 of the split 'train' is asked for twice"):
            read_documents(f"hf:{folder}", splits=["train[:3]", "test", "train[2:]"])
        assert len(read_documents(f"hf:{folder}", splits=["train[:3]", "train[3:]"])) == 5


def test_a_shuffled_subset_that_was_saved_is_read_in_its_order(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"text": [f"t{k}" for k in range(50)]}).select([7, 3, 40])
    data.save_to_disk(str(tmp_path / "few"))
    documents = read_documents(f"hf:{tmp_path / 'few'}")
    assert [(d.name, d.text, d.split) for d in documents] == [
        ("few:1", "t7", None),
        ("few:2", "t3", None),
        ("few:3", "t40", None),
    ]
    with pytest.raises(UnknownNameError, match="no split 'train'"):
        read_documents(f"hf:{tmp_path / 'few'}", splits=["train"])


def test_a_column_of_the_data_can_be_the_split_and_a_class_label_is_its_number(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "part": datasets.Value("string"),
            "y": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "part": ["dev", "held"], "y": ["yes", "no"]}, features)
    data.save_to_disk(str(tmp_path / "d"))
    documents = read_documents(f"hf:{tmp_path / 'd'}", label_columns=["y"], split_column="part")
    assert [(d.split, d.labels["y"]) for d in documents] == [("dev", 1), ("held", 0)]


def test_a_bad_row_and_an_absent_column_are_named(tmp_path: Path, parquet_folder: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"no label column 'z' in hf:.*Known: text, y, x"):
        read_documents(f"hf:{parquet_folder}", label_columns=["z"])
    datasets.Dataset.from_dict({"text": ["a", ""]}).save_to_disk(str(tmp_path / "bad"))
    with pytest.raises(DataError, match=r"hf:bad, row 2: 'text' is empty"):
        read_documents(f"hf:{tmp_path / 'bad'}")


def test_configurations_and_splits_that_are_not_there_are_refused(tmp_path: Path, parquet_folder: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"no split 'dev' in hf:.*Known: train, test"):
        read_documents(f"hf:{parquet_folder}", splits=["dev"])
    with pytest.raises(RequestError, match=r"'train\[:10%\]' names no split. Write it as train, train\[:1000\]"):
        read_documents(f"hf:{parquet_folder}", splits=["train[:10%]"])
    with pytest.raises(DataError, match=r"cannot be loaded as a data set: .*'other'"):
        read_documents(f"hf:{parquet_folder}", config="other")
    front = "configs:\n- config_name: a\n  data_files: train.parquet\n- config_name: b\n  data_files: test.parquet\n"
    (parquet_folder / "README.md").write_text(f"---\n{front}---\n")
    with pytest.raises(DataError, match=r"\['a', 'b'\].*Name one with --data-config"):
        read_documents(f"hf:{parquet_folder}")
    assert len(read_documents(f"hf:{parquet_folder}", config="b")) == 2


def test_names_that_are_no_data_set_are_refused(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"text": "a"}\n')
    for name, says in (
        ("", "names no data set"),
        ("./nothing", "there is no folder ./nothing"),
        ("owner/name@", "names no data set"),
        ("a/b/c", "names no data set"),
        (str(tmp_path / "f.jsonl"), "is a file and no data set. Give a file without hf:"),
    ):
        with pytest.raises(DataError, match=says):
            read_documents(f"hf:{name}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be loaded as a data set"):
        read_documents(f"hf:{tmp_path / 'empty'}")
    with pytest.raises(RequestError, match="saved by save_to_disk and has no configurations"):
        read_documents(f"hf:{saved}", config="a")
    with pytest.raises(RequestError, match="is no hf: data set"):
        read_documents(tmp_path / "f.jsonl", splits=["train"])


def test_code_and_pickles_in_a_folder_are_not_run(tmp_path: Path) -> None:
    import pickle

    class Mark:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "train.pkl").write_bytes(pickle.dumps(Mark()))
    for folder in ("code", "pickled"):
        with pytest.raises(DataError, match="cannot be loaded as a data set"):
            read_documents(f"hf:{tmp_path / folder}")
    assert not (tmp_path / "ran").exists()


def test_a_hub_without_a_network_is_a_sentence_and_leaves_no_lake(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"hf:owner/name@v1 cannot be fetched: .*Is there a network\?"):
        extract("toy_models:lstm", "hf:owner/name@v1", tmp_path / "lake")
    assert not (tmp_path / "lake").exists()


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        MissingExtraError, match=r"hf:owner/name needs an optional extra: pip install 'layerlake\[data\]'"
    ):
        read_documents("hf:owner/name")


def test_a_run_is_made_of_a_data_set_and_its_place_is_no_part_of_it(tmp_path: Path, jsonl_folder: Path) -> None:
    report = extract("toy_models:lstm", f"hf:{jsonl_folder}", tmp_path / "lake", run="r", label_columns="tags")
    assert (report.documents, report.tokens) == (6, 12)
    lake = Lake.open(tmp_path / "lake")
    rows = lake.sql("SELECT document, split FROM sequences ORDER BY seq")
    assert rows["document"].to_pylist()[:4] == ["lines/train:1", "lines/train:2", "lines/train:3", "lines/validation:1"]
    assert rows["split"].to_pylist() == ["train"] * 3 + ["validation"] * 3
    digest = data_digest(read_documents(f"hf:{jsonl_folder}", label_columns=["tags"]))
    assert lake.run("r").record.settings["data"] == digest
    (tmp_path / "away").mkdir()
    shutil.move(jsonl_folder, tmp_path / "away")
    again = extract("toy_models:lstm", f"hf:{tmp_path}/away/lines", tmp_path / "lake", run="r", label_columns="tags")
    assert again.units_done == 0
    assert data_title(f"hf:{tmp_path}/away/lines") == "hf:away/lines"
    assert data_title("hf:owner/name@v1") == "hf:owner/name@v1"
