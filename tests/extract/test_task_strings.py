"""Strings of a task as DATA: what is drawn, which ids stand for it, and what of it the tables say."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from built_models import build
from hypothesis import given, settings
from hypothesis import strategies as st
from layerlake.__main__ import app
from layerlake.errors import DataError, ModelError, RequestError, SettingsDifferError, UnknownNameError
from layerlake.extract.cost import plan
from layerlake.extract.driver import extract
from layerlake.extract.models import load_checkpoint, save_checkpoint
from layerlake.extract.task_strings import TaskStrings
from layerlake.extract.tasks import TASKS
from layerlake.extract.tasks.sides import SIDES, side_of
from layerlake.store.lake import Lake
from layerlake.store.tokens import RESERVED_LABELS
from some_tokenizers import tokenizer
from toy_models import VOCABULARY, save_model
from typer.testing import CliRunner

DYCK = "task:dyck?k=2&length=8&n=40&seed=7"


def save(folder: Path, vocabulary, rows: int | None = None) -> Path:
    """Save a small LSTM that says what its ids stand for."""
    model = build("lstm", vocab_size=rows or len(vocabulary), layers=1)
    save_checkpoint(folder, model, {"vocabulary": vocabulary})
    return folder


def strings_of(lake: Path, columns: str) -> list[dict]:
    """The strings of the only run: of each its document and split, and lists of the columns by position."""
    lists = ", ".join(f"list({c} ORDER BY pos) AS {c}" for c in columns.split())
    return (
        Lake.open(lake)
        .sql(
            f"SELECT any_value(document) AS document, any_value(t.split) AS split, {lists} "
            "FROM tokens t JOIN sequences USING (run, seq) GROUP BY seq ORDER BY seq"
        )
        .to_pylist()
    )


def depth_and_top(symbols):
    stack = []
    for symbol in symbols:
        if symbol in "([":
            stack.append(symbol)
        else:
            assert stack.pop() + symbol in ("()", "[]")
        yield len(stack), stack[-1] if stack else "-"


@pytest.fixture(scope="module")
def dyck(tmp_path_factory) -> Path:
    """A lake with a run of Dyck words, of a model whose ids are in an order of its own."""
    folder = tmp_path_factory.mktemp("dyck")
    extract(str(save(folder / "lstm", ["]", "x", ")", "(", "["])), DYCK, folder / "lake")
    return folder


def test_labels_are_those_of_the_symbols_and_ids_those_of_the_models_vocabulary(dyck):
    found = strings_of(dyck / "lake", "token token_id depth top next special char_start")
    for one in found:
        assert list(zip(one["depth"], one["top"], strict=True)) == list(depth_and_top(one["token"]))
        assert [n[2:] for n in one["next"]] == [{"(": ")", "[": "]", "-": ""}[t] for t in one["top"]]
        assert one["token_id"] == ["]x)([".index(s) for s in one["token"]]
        assert one["special"] == [False] * 8 and one["char_start"] == [None] * 8
    assert len({tuple(one["token"]) for one in found}) > 20


def test_values_are_those_of_the_ids(dyck):
    selection = Lake.open(dyck / "lake").select("SELECT run, row, token_id FROM tokens ORDER BY row")
    model, _ = load_checkpoint(dyck / "lstm")
    table = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding)).weight.detach().numpy()
    assert (selection.array(site="embed") == table[selection.table["token_id"].to_numpy()]).all()
    assert selection.context(0, n=2).text.startswith(">>")


def test_the_split_is_the_side_that_the_task_gives_and_no_string_has_two(dyck):
    found = strings_of(dyck / "lake", "token")
    assert [one["split"] for one in found] == ["train"] * 32 + ["validation"] * 4 + ["test"] * 4
    assert [one["document"] for one in found][31:34] == ["dyck/train:32", "dyck/validation:1", "dyck/validation:2"]
    for one in found:
        string = np.array([["()[]".index(s) for s in one["token"]]])
        assert SIDES[side_of(string)[0]] == one["split"]


def test_the_run_says_what_was_drawn_and_the_same_again_is_nothing_to_do(dyck):
    lake, model = dyck / "lake", str(dyck / "lstm")
    title = "task:dyck?n=40&length=8&seed=7"  # k=2 is the default
    assert Lake.open(lake).sql("SELECT run, data FROM runs").to_pylist() == [
        {"run": "lstm-dyck-n-40-length-8-seed-7", "data": title}
    ]
    again = extract(model, title, lake)
    assert (again.units_done, again.documents) == (0, 40)
    with pytest.raises(SettingsDifferError, match="data"):
        extract(model, "task:dyck?n=40&length=8&seed=8", lake, run=again.run)


def test_another_seed_is_another_run_and_a_side_alone_has_the_strings_that_it_has_among_all(dyck, tmp_path):
    model = str(dyck / "lstm")
    alone = extract(model, "task:dyck?length=8&n=4&seed=7&split=test", tmp_path / "a")
    other = extract(model, "task:dyck?length=8&n=4&seed=8&split=test", tmp_path / "b")
    assert (alone.run, other.run) == tuple(f"lstm-dyck-n-4-length-8-seed-{s}-split-test" for s in (7, 8))
    all_sides = strings_of(dyck / "lake", "token")
    assert strings_of(tmp_path / "a", "token") == [one for one in all_sides if one["split"] == "test"]
    assert strings_of(tmp_path / "b", "token") != strings_of(tmp_path / "a", "token")


def test_other_ids_for_the_same_symbols_are_another_run(tmp_path):
    model = save(tmp_path / "m", list("()[]"))
    extract(str(model), DYCK, tmp_path / "lake", run="r")
    save(tmp_path / "m", list("[]()"))
    with pytest.raises(SettingsDifferError, match="token table"):
        extract(str(model), DYCK, tmp_path / "lake", run="r")


def test_a_tokenizers_single_tokens_stand_for_symbols_and_nothing_is_added(tmp_path):
    tokens = tokenizer("bytes, bos")
    folder = save_model(tmp_path / "gpt2", "gpt2", layers=1, vocab_size=len(tokens))
    tokens.save_pretrained(folder)
    extract(str(folder), "task:flip-flop?length=6&n=10", tmp_path / "lake")
    found = strings_of(tmp_path / "lake", "token token_id stored special")
    for one in found:
        assert [tokens.decode([i]).strip() for i in one["token_id"]] == one["token"]
        assert not any(one["special"]) and len(one["token"]) == 6
        written = [b for i, b in zip(one["token"][::2], one["token"][1::2], strict=True) if i == "w"]
        assert one["stored"][-1] == written[-1]
    with pytest.raises(RequestError, match="'213' is no single token"):
        extract(str(folder), "task:s3?generators=minimal", tmp_path / "lake")


def test_a_model_with_neither_has_the_numbers_of_the_symbols(tmp_path):
    extract("toy_models:lstm", "task:modular-addition?modulus=50&n=3&length=5", tmp_path / "lake", run="r")
    for one in strings_of(tmp_path / "lake", "token token_id sum"):
        assert one["token_id"] == [int(t) for t in one["token"]]
        assert one["sum"] == (np.cumsum(one["token_id"]) % 50).tolist()
    with pytest.raises(
        RequestError, match=f"'50' has the id 50, and the embedding table of toy_models:lstm has {VOCABULARY}"
    ):
        extract("toy_models:lstm", "task:modular-addition?modulus=51&n=3&length=5", tmp_path / "lake")


def test_the_labels_of_another_task_and_some_targets_only(tmp_path):
    spec = "task:s3?length=6&n=5&labels=dyck?k=1;max_depth=2"
    extract("toy_models:lstm", spec, tmp_path / "lake", run="r", label_columns="depth", keep="depth = 1")
    lake = Lake.open(tmp_path / "lake")
    assert (
        lake.sql("SELECT data FROM runs")["data"][0].as_py()
        == "task:s3?labels=dyck?k=1;max_depth=2&n=5&length=6&seed=0"
    )
    columns = lake.sql("SELECT * FROM tokens WHERE row IS NOT NULL LIMIT 1").column_names
    assert "depth" in columns and "top" not in columns
    assert set(lake.sql("SELECT depth FROM tokens WHERE row IS NOT NULL")["depth"].to_pylist()) == {1}


def test_plan_and_the_command_take_a_task(tmp_path):
    model = save(tmp_path / "m", list("01"))
    arguments = [str(model), "task:parity?n=20&length=10", "--lake", str(tmp_path / "lake")]
    cost = CliRunner().invoke(app, ["plan", *arguments, "--no-timing", "--json"])
    assert cost.exit_code == 0
    assert {k: json.loads(cost.output)[k] for k in ("documents", "tokens", "run")} == {
        "documents": 20, "tokens": 200, "run": "m-parity-n-20-length-10-seed-0"
    }  # fmt: skip
    assert not (tmp_path / "lake").exists()
    done = CliRunner().invoke(app, ["extract", *arguments, "--rows", "tokens,spans:parity"])
    assert done.output.startswith("Run m-parity-n-20-length-10-seed-0 is complete: 200 tokens in 20 sequences")
    spans = Lake.open(tmp_path / "lake").sql("SELECT parity, tokens FROM spans ORDER BY span_row").to_pylist()
    assert sum(s["tokens"] for s in spans) == 200 and {s["parity"] for s in spans} == {0, 1}


@pytest.mark.parametrize(
    ("data", "options", "error", "says"),
    [
        ("task:dick", {}, UnknownNameError, "no task 'dick'. Did you mean 'dyck'"),
        ("task:", {}, UnknownNameError, "no task ''"),
        ("task:dyck?lenght=8", {}, UnknownNameError, "no option 'lenght' .* Did you mean 'length'.*seed, split"),
        ("task:parity?k=2", {}, UnknownNameError, "no option 'k' of the task 'parity'"),
        ("task:dyck?length=7", {}, RequestError, "even length, not 7"),
        ("task:dyck?n=0", {}, RequestError, "0 strings of length 40 are no data"),
        ("task:dyck?n=-3", {}, RequestError, "-3 strings"),
        ("task:dyck?length=0", {}, RequestError, "1000 strings of length 0"),
        ("task:dyck?n=many", {}, RequestError, "n of the task 'dyck' is 'many', which is no int"),
        ("task:dyck?n=3&n=4", {}, RequestError, "n of the task 'dyck' is given twice"),
        ("task:dyck?seed=-1", {}, RequestError, "from 0 on, not -1"),
        ("task:dyck?split=dev", {}, UnknownNameError, "no side 'dev'. Known: train, validation, test"),
        ("task:dyck?length=2&k=1&n=20", {}, RequestError, "There are few strings of that length|few strings"),
        ("task:dyck", {"label_columns": ["height"]}, UnknownNameError, "no target 'height'.*Known: depth, top, next"),
        ("task:dyck", {"split_column": "part"}, RequestError, "its strings have no columns.*split=test"),
        ("task:dyck", {"data_splits": ["test"]}, RequestError, "split=test"),
        ("task:dyck", {"labels": ["code-depth"]}, RequestError, "'depth' is a label of the data and a labeler"),
        ("task:parity", {"labels": ["code-depth"]}, DataError, "is token ids, and the labeler 'depth' reads text"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_leaves_no_lake(tmp_path, data, options, error, says):
    with pytest.raises(error, match=says):
        extract("toy_models:tuples", data, tmp_path / "lake", **options)
    assert not (tmp_path / "lake").exists()


def test_a_vocabulary_that_does_not_fit_is_refused_by_the_symbol(tmp_path):
    model = save(tmp_path / "m", ["0", "1"])
    for run in (extract, plan):
        with pytest.raises(RequestError, match=r"'\(' is not in the vocabulary of .*/m, which is '0', '1'"):
            run(str(model), DYCK, tmp_path / "lake")
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize("vocabulary", [["a", "a"], ["a", 1], "ab", ["a", "b", "c", "d"]])
def test_a_checkpoint_whose_vocabulary_is_none_is_refused(tmp_path, vocabulary):
    with pytest.raises(ModelError, match="no list of at most 3 different symbols"):
        extract(str(save(tmp_path / "m", vocabulary, rows=3)), "task:parity", tmp_path / "lake")


@settings(max_examples=40, deadline=None)
@given(
    task=st.sampled_from(["parity", "dyck?k=3", "flip-flop?ignore=0.25", "s3?labels=dyck?k=1;max_depth=2"]),
    n=st.integers(1, 60),
    length=st.integers(5, 9).map(lambda half: 2 * half),
    seed=st.integers(0, 2**64),
    split=st.sampled_from([None, *SIDES]),
)  # fmt: skip
def test_a_title_says_all_that_decides_the_strings(task, n, length, seed, split):
    asked = {"n": n, "length": length, "seed": seed} | ({"split": split} if split else {})
    options = "&".join(f"{k}={v}" for k, v in asked.items())
    strings = TaskStrings.parse(f"task:{task}{'&' if '?' in task else '?'}{options}")
    again = TaskStrings.parse(strings.title)
    assert again == strings and again.title == strings.title
    documents = strings.documents()
    assert documents == again.documents() and len(documents) == n
    assert len({d.name for d in documents}) == n
    assert {d.split for d in documents} == {s for s, k in strings.counts.items() if k}


@pytest.mark.parametrize("name", TASKS)
def test_no_option_of_a_task_is_one_of_the_data_and_no_target_is_a_column(name):
    task = TASKS[name]
    assert not {f.name for f in fields(task)} & {f.name for f in fields(TaskStrings)}
    assert not set(task().targets) & RESERVED_LABELS
