"""One extraction after another: what is stored, what is refused, and that a refusal leaves nothing behind."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_models
from layerlake.__main__ import app
from layerlake.errors import (
    DataError,
    LakeFormatError,
    ModelError,
    RequestError,
    RunLockedError,
    SettingsDifferError,
    UnknownNameError,
)
from layerlake.extract.driver import extract
from layerlake.store.lake import Lake
from toy_models import VOCABULARY, save_model
from typer.testing import CliRunner


def ids_file(path: Path, lengths: tuple[int, ...] = (5, 9, 3, 12), seed: int = 0, **extra) -> Path:
    rng = np.random.default_rng(seed)
    rows = [{"input_ids": rng.integers(0, VOCABULARY, n).tolist()} for n in lengths]
    for name, values in extra.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_E15_a_model_without_tokenizer_works_from_ids(tmp_path):
    data = ids_file(tmp_path / "d.jsonl")
    report = extract("toy_models:lstm", data, tmp_path / "lake", run="r")
    assert (report.units_done, report.tokens, report.sequences) == (report.units, 29, 4)
    rows = Lake.open(tmp_path / "lake").sql(
        "SELECT seq, list(token_id ORDER BY pos) AS ids, bool_and(token IS NULL AND char_start IS NULL) AS bare "
        "FROM tokens GROUP BY seq ORDER BY seq"
    )
    assert rows["ids"].to_pylist() == [json.loads(line)["input_ids"] for line in data.read_text().splitlines()]
    assert rows["bare"].to_pylist() == [True] * 4


def test_U03_the_stored_ids_are_those_the_embedding_got(tmp_path, monkeypatch):
    seen: list[list[int]] = []

    def spy():
        model = toy_models.Tuples()
        model.embed.register_forward_hook(lambda m, i, o: seen.extend(i[0].tolist()))
        return toy_models.TorchModel(model, blocks=("blocks.0", "blocks.1"))

    monkeypatch.setattr(toy_models, "tuples", spy)
    extract("toy_models:tuples", ids_file(tmp_path / "d.jsonl"), tmp_path / "lake", run="r")
    stored = Lake.open(tmp_path / "lake").sql("SELECT list(token_id ORDER BY pos) AS ids FROM tokens GROUP BY seq")
    assert {tuple(i) for i in stored["ids"].to_pylist()} <= {tuple(i) for i in seen}  # it also saw the trials


def test_the_package_can_be_called_whatever_was_imported_before(tmp_path):
    import subprocess
    import sys

    from processes import environment

    data = ids_file(tmp_path / "d.jsonl")
    for before in ("", "from layerlake import Lake", "from layerlake.extract.torch_model import TorchModel"):
        code = (
            f"{before}\nfrom layerlake import extract\nimport layerlake\n"
            f"r = extract('toy_models:lstm', {str(data)!r}, {str(tmp_path / 'lake')!r}, run='r', sites='embed')\n"
            "print(r.tokens, layerlake.extract is extract, r.arrays)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
        )
        assert done.stdout == "29 True ['embed']\n", done.stderr


def test_a_compressed_run_has_the_bits_of_the_raw_one(tmp_path):
    data, lake = ids_file(tmp_path / "d.jsonl", (30, 40, 25, 31, 60)), tmp_path / "lake"
    for dtype in ("float32", "bfloat16", "float16"):
        for codec in ("none", "archive"):
            report = extract("toy_models:lstm", data, lake, run=f"{dtype}-{codec}", dtype=dtype, codec=codec)
        opened = Lake.open(lake)
        raw, packed = (
            opened.select(f"SELECT run, row FROM tokens WHERE run = '{dtype}-{codec}' ORDER BY row")
            for codec in ("none", "archive")
        )
        for name in report.arrays:
            site, _, layer = name.partition("-")
            at = (int(layer) if layer else None, site)
            assert np.array_equal(raw.bits(*at), packed.bits(*at)) and raw.bits(*at).any()
            assert torch.equal(raw.tensor(*at), packed.tensor(*at))
    assert opened.verify() == []
    before = tree(lake)
    command = ["extract", "toy_models:lstm", str(data), "--lake", str(lake), "--run", "float16-archive"]
    again = CliRunner().invoke(app, [*command, "--dtype", "float16", "--codec", "archive"])
    assert "is complete already" in again.output and tree(lake) == before, again.output
    made_with = [opened.run(f"float16-{c}").record.settings["compute"].get("numcodecs") for c in ("none", "archive")]
    assert made_with == [None, importlib.metadata.version("numcodecs")]  # its version moves the bytes of shards
    with pytest.raises(SettingsDifferError, match="codec: the run has archive, asked was none"):
        extract("toy_models:lstm", data, lake, run="float16-archive", dtype="float16")
    with pytest.raises(UnknownNameError, match="no codec 'achive'. Did you mean 'archive'"):
        extract("toy_models:lstm", data, lake, run="x", codec="achive")


def test_the_same_call_again_changes_no_file(tmp_path):
    data = ids_file(tmp_path / "d.jsonl")
    extract("toy_models:lstm", data, tmp_path / "lake", run="r")
    before = tree(tmp_path / "lake")
    report = extract("toy_models:lstm", data, tmp_path / "lake", run="r")
    assert report.units_done == 0
    assert tree(tmp_path / "lake") == before


def test_other_settings_into_the_same_run_are_refused_and_named(tmp_path):
    data = ids_file(tmp_path / "d.jsonl", label=[0, 1, 0, 1])
    base = {"model": "toy_models:tuples", "data": data, "lake": tmp_path / "lake", "run": "r"}
    extract(**base)
    before = tree(tmp_path / "lake")
    changes = {
        "dtype: the run has float32, asked was bfloat16": {"dtype": "bfloat16"},
        "batch_tokens": {"batch_tokens": 64},
        "padding": {"padding": "left"},
        "sites ": {"layers": [1]},
        "unit_rows": {"unit_rows": 1024},
        "compute.threads": {"threads": 2},
        "token table": {"label_columns": ["label"]},
        "data": {"data": ids_file(tmp_path / "e.jsonl", seed=9)},
        "model.code|weights: ": {"model": "toy_models:with_call"},
        "model.dtype": {"model_dtype": "bfloat16"},
    }
    for name, change in changes.items():
        if name.startswith("model.code"):
            change = {"model": "toy_models:big_values"}
        with pytest.raises(SettingsDifferError, match=rf"Run 'r' exists .*({name.strip()})"):
            extract(**(base | change))
    assert tree(tmp_path / "lake") == before


def test_wrong_requests_leave_no_lake(tmp_path):
    good = ids_file(tmp_path / "good.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    short = ids_file(tmp_path / "short.jsonl", (3, 4), tags=[[1, 2, 3], [1, 2, 3]])
    large = tmp_path / "large.jsonl"
    large.write_text(json.dumps({"input_ids": [1, VOCABULARY]}) + "\n")
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "hello"}) + "\n")
    (tmp_path / "not_a_model").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "t5"}')
    model = "toy_models:tuples"
    cases = [
        ((model, tmp_path / "missing.jsonl"), {}, DataError, "missing.jsonl"),
        ((model, tmp_path / "empty.jsonl"), {}, DataError, "empty"),
        ((model, tmp_path / "latin.txt"), {}, DataError, "UTF-8"),
        ((model, short), {"label_columns": ["tags"]}, DataError, r"short\.jsonl:2.*3.*4"),
        ((model, good), {"label_columns": ["lable"]}, UnknownNameError, "lable"),
        ((model, large), {}, DataError, f"{VOCABULARY}"),
        ((model, text), {}, RequestError, "tokenizer"),
        ((model, good), {"sites": ["resid_pots"]}, UnknownNameError, "Did you mean 'resid_post'"),
        ((model, good), {"layers": [99]}, UnknownNameError, "99.*Known: 0, 1"),
        ((model, good), {"layers": [-1]}, UnknownNameError, "-1.*Known: 0, 1"),
        ((model, good), {"dtype": "int8"}, UnknownNameError, "int8.*bfloat16"),
        ((model, good), {"unit_rows": 100}, RequestError, "power of two"),
        ((model, good), {"unit_rows": 16}, RequestError, "8 times"),
        ((model, good), {"run": "a/b"}, RequestError, "a/b"),
        ((model, good), {"padding": "middle"}, RequestError, "middle"),
        (("toy_models:lstm", good), {"padding": "left"}, RequestError, "left"),
        (("toy_models:lstm_bidirectional", good), {"padding": "right"}, RequestError, "right"),
        ((str(tmp_path / "not_a_model"), good), {}, RequestError, r"config\.json"),
        ((str(broken), good), {}, ModelError, "broken"),
        ((str(other), good), {}, ModelError, "encoder-decoder"),
        (("toy_models:nothing", good), {}, RequestError, "nothing"),
        (("no_such_module:f", good), {}, RequestError, "no_such_module"),
        (("toy_models.lstm", good), {}, RequestError, "write toy_models:lstm"),
        ((toy_models.lstm, good), {}, RequestError, "named by text"),
        (("toy_models:not_a_model", good), {}, ModelError, "returned str"),
        (("toy_models:raises", good), {}, ModelError, "no weights at 3"),
        (("toy_models:never_run", good), {}, ModelError, "'unused' was executed 0 times"),
        (("toy_models:with_call", ids_file(tmp_path / "long.jsonl", (21,))), {}, DataError, "21.*20"),
        ((model, good), {"engine": "dask"}, UnknownNameError, "dask"),
        ((model, good), {"device": "abacus"}, RequestError, "abacus"),
    ]
    for arguments, options, error, pattern in cases:
        with pytest.raises(error, match=pattern):
            extract(*arguments, tmp_path / "lake", **({"run": "r"} | options))
        assert not (tmp_path / "lake").exists(), (arguments, options)


def test_E18_a_module_that_never_runs_is_named(tmp_path):
    with pytest.raises(ModelError, match="resid_post-1: module 'unused' was executed 0 times"):
        extract("toy_models:never_run", ids_file(tmp_path / "d.jsonl"), tmp_path / "lake")


def test_a_lake_of_another_format_version_is_refused(tmp_path):
    extract("toy_models:lstm", ids_file(tmp_path / "d.jsonl"), tmp_path / "lake", run="r")
    (tmp_path / "lake" / "lake.json").write_text('{"format": "layerlake", "version": 99}')
    with pytest.raises(LakeFormatError, match="version 99"):
        extract("toy_models:lstm", ids_file(tmp_path / "d.jsonl"), tmp_path / "lake", run="s")
    with pytest.raises(LakeFormatError, match="version 99"):
        Lake.open(tmp_path / "lake")
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="holds other things"):
        extract("toy_models:lstm", ids_file(tmp_path / "d.jsonl"), other, run="s")
    assert [p.name for p in other.iterdir()] == ["notes.txt"]


def test_a_second_driver_is_refused(tmp_path):
    data = ids_file(tmp_path / "d.jsonl")
    extract("toy_models:lstm", data, tmp_path / "lake", run="r")
    with (
        Lake.open(tmp_path / "lake").run("r").driver_lock(),
        pytest.raises(RunLockedError, match="working on run 'r'"),
    ):
        extract("toy_models:lstm", data, tmp_path / "lake", run="r")
    assert extract("toy_models:lstm", data, tmp_path / "lake", run="r").units_done == 0


def test_a_function_that_gives_other_weights_each_time_is_refused(tmp_path):
    with pytest.raises(ModelError, match="other weights in the worker"):
        extract("toy_models:unseeded", ids_file(tmp_path / "d.jsonl"), tmp_path / "lake", run="r")
    assert not Lake.open(tmp_path / "lake").run("r").committed()


def test_D04_an_error_in_the_forward_keeps_its_text(tmp_path):
    from layerlake.errors import JobError

    data = ids_file(tmp_path / "d.jsonl", (3, 5, 30, 4, 6) * 12)
    with pytest.raises(JobError, match="the forward broke at 30"):
        extract("toy_models:failing", data, tmp_path / "lake", run="r")
    assert not list((tmp_path / "lake" / "runs" / "r" / "tmp").iterdir())


def test_float16_that_would_overflow_is_refused_with_site_and_value(tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"input_ids": [1, 3, 2]}) + "\n")
    with pytest.raises(RequestError, match=r"embed has the value 70000, which float16 cannot hold"):
        extract("toy_models:big_values", data, tmp_path / "lake", run="r", dtype="float16")
    assert not Lake.open(tmp_path / "lake").run("r").committed()
    with pytest.raises(RequestError, match=r"embed has the value 3\.4\d*e\+38, which bfloat16 cannot hold"):
        extract("toy_models:huge_values", data, tmp_path / "lake", run="h", dtype="bfloat16")
    extract("toy_models:big_values", data, tmp_path / "lake", run="b", dtype="float32")
    assert Lake.open(tmp_path / "lake").sql("SELECT max(max) AS m FROM stats WHERE run = 'b'")["m"][0].as_py() >= 7e4


def test_E22_nan_is_stored_counted_and_its_first_site_named(tmp_path):
    report = extract("toy_models:with_nan", ids_file(tmp_path / "d.jsonl"), tmp_path / "lake", run="r")
    assert any("resid_post-1 is the first site" in w and "29 of them" in w for w in report.warnings)
    lake = Lake.open(tmp_path / "lake")
    counted = lake.sql("SELECT site, layer, nonfinite FROM stats ORDER BY site, layer").to_pylist()
    assert [(r["layer"], r["nonfinite"]) for r in counted] == [(None, 0), (0, 0), (1, 29)]
    sel = lake.select("SELECT run, row FROM tokens")
    assert np.isnan(sel.array(1)).sum() == 29


def test_E22_no_pad_row_and_no_nan_from_masked_rows(tmp_path):
    for family in ("bert", "gpt2", "mamba"):
        name = str(save_model(tmp_path / family, family))
        data = ids_file(tmp_path / "d.jsonl", (1, 30, 1, 30))
        report = extract(name, data, tmp_path / "lake", run=family, padding="left")
        assert report.tokens == 62
        sel = Lake.open(tmp_path / "lake").select(f"SELECT run, row FROM tokens WHERE run = '{family}'")
        assert len(sel) == 62
        assert all(np.isfinite(sel.array(i)).all() for i in range(3))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_E22_llama_padded_on_the_left_has_no_nan_with_either_attention(tmp_path, attention, dtype):
    name = str(save_model(tmp_path / "m", "llama", dtype=getattr(torch, dtype)))
    data = ids_file(tmp_path / "d.jsonl", (1, 30, 1, 30))
    extract(name, data, tmp_path / "lake", run="r", padding="left", attention=attention)
    lake = Lake.open(tmp_path / "lake")
    assert lake.run("r").record.settings["model"]["attention"] == attention
    sel = lake.select("SELECT run, row FROM tokens")
    assert len(sel) == 62
    assert all(np.isfinite(sel.array(i)).all() for i in range(3))
    with pytest.raises(SettingsDifferError, match="attention"):
        other = {"sdpa": "eager", "eager": "sdpa"}[attention]
        extract(name, data, tmp_path / "lake", run="r", padding="left", attention=other)


@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_E03_blocks_that_return_tuples_or_tensors_give_the_same_rows_at_batch_size_1_and_2(tmp_path, family):
    name = str(save_model(tmp_path / "m", family))
    data = ids_file(tmp_path / "d.jsonl", (6, 6))
    for size in (1, 2):
        extract(name, data, tmp_path / "lake", run=f"r{size}", batch_tokens=6 * size)
    lake = Lake.open(tmp_path / "lake")
    one, two = (lake.select(f"SELECT run, row FROM tokens WHERE run = 'r{k}' ORDER BY row") for k in (1, 2))
    for layer in range(3):
        assert one.array(layer).shape == two.array(layer).shape == (12, 32)
        np.testing.assert_allclose(one.array(layer), two.array(layer), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["bloom", "llama", "jamba"])
def test_any_module_is_a_site_by_its_path_for_what_it_returns_and_what_enters_it(tmp_path, family):
    name = str(save_model(tmp_path / "m", family))
    norm = {"bloom": "h.1.input_layernorm", "llama": "layers.1.input_layernorm", "jamba": "layers.1.input_layernorm"}
    path = norm[family]
    data = ids_file(tmp_path / "d.jsonl", (6, 4))
    extract(
        name, data, tmp_path / "lake", run="r", sites=(path, f"{path}:in", "blocks.0.hook_resid_post", "resid_pre-1")
    )
    sel = Lake.open(tmp_path / "lake").select("SELECT run, row FROM tokens ORDER BY row")
    before = sel.array(site=f"{path}:in")
    assert np.array_equal(before, sel.array(1, "resid_pre"))
    assert np.array_equal(before, sel.array(0, "resid_post"))
    assert not np.array_equal(before, sel.array(site=path))


def test_stats_equal_numpy_over_the_selected_rows(tmp_path):
    data = ids_file(tmp_path / "d.jsonl", tuple(range(1, 40)))
    extract("toy_models:tuples", data, tmp_path / "lake", run="r", dtype="bfloat16")
    lake = Lake.open(tmp_path / "lake")
    sel = lake.select("SELECT run, row FROM tokens")
    assert lake.sql("SELECT count(*) AS n FROM units")["n"][0].as_py() > 1
    for row in lake.sql("SELECT * FROM stats").to_pylist():
        values = sel.array(row["layer"], row["site"]).astype(np.float64)
        assert row["count"] == values.size
        for key, expected in {
            "mean": values.mean(),
            "variance": values.var(),
            "min": values.min(),
            "max": values.max(),
            "norm": np.linalg.norm(values, axis=1).mean(),
        }.items():
            assert row[key] == pytest.approx(expected, rel=1e-12, abs=1e-12), key


def test_labels_and_splits_reach_the_token_table(tmp_path):
    data = ids_file(
        tmp_path / "d.jsonl",
        (3, 2, 4, 1),
        topic=["a", None, "c" * 300 + "雪🙂", "d"],
        tag=[[0, 1, 0], [1, None], [0, 0, 0, 1], [1]],
        side=["train", "test", "train", "test"],
    )
    extract(
        "toy_models:lstm",
        data,
        tmp_path / "lake",
        run="r",
        label_columns=["topic", "tag"],
        split_column="side",
    )
    lake = Lake.open(tmp_path / "lake")
    rows = lake.sql("SELECT topic, tag, split FROM tokens ORDER BY seq, pos").to_pylist()
    assert [r["tag"] for r in rows] == [0, 1, 0, 1, None, 0, 0, 0, 1, 1]
    assert [r["topic"] for r in rows] == ["a"] * 3 + [None] * 2 + ["c" * 300 + "雪🙂"] * 4 + ["d"]
    assert [r["split"] for r in rows] == ["train"] * 3 + ["test"] * 2 + ["train"] * 4 + ["test"]
    assert lake.sql("SELECT topic FROM sequences ORDER BY seq")["topic"].to_pylist()[0] == "a"


def test_torch_threads_are_as_before(tmp_path):
    torch.set_num_threads(2)
    try:
        extract("toy_models:lstm", ids_file(tmp_path / "d.jsonl"), tmp_path / "lake", run="r", threads=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_plan_hash_is_shared_by_runs_over_the_same_tokens(tmp_path):
    data = ids_file(tmp_path / "d.jsonl")
    extract("toy_models:lstm", data, tmp_path / "lake", run="a")
    extract("toy_models:tuples", data, tmp_path / "lake", run="b")
    extract("toy_models:tuples", ids_file(tmp_path / "e.jsonl", seed=3), tmp_path / "lake", run="c")
    hashes = Lake.open(tmp_path / "lake").sql("SELECT run, plan_hash FROM runs ORDER BY run")["plan_hash"].to_pylist()
    assert hashes[0] == hashes[1] != hashes[2]
