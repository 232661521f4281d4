"""Models, machines and requests that cannot be worked with: a sentence that names it, and nothing left behind."""

from __future__ import annotations

import importlib
import json
import resource
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from layerlake.__main__ import main
from layerlake.errors import (
    DataError,
    MissingExtraError,
    ModelError,
    RequestError,
    UnknownNameError,
    WorldError,
)
from layerlake.extract.driver import extract
from layerlake.extract.ray_engine import RayEngine
from layerlake.store.lake import Lake
from safetensors.torch import load_file
from some_tokenizers import byte_level_bpe
from toy_models import save_model


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"input_ids": list(range(n))} for n in (5, 9, 3, 12)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path / "d.jsonl"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("m") / "gpt2", "gpt2")


def change_config(folder: Path, **change: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def only_a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])


@pytest.mark.parametrize(
    ("spoil", "pattern"),
    [
        (lambda f: change_config(f, n_layer=2), r"no block for \(.*h\.2\..* and \d+ more\); they would be left out"),
        (lambda f: change_config(f, n_layer=4), r"lacks weights .*h\.3\..*random numbers"),
        (lambda f: change_config(f, n_inner=64), r"of other sizes than its config\.json says \(.*mlp"),
        (lambda f: (f / "config.json").write_text('{"model_type": "gpt2", '), "config"),
        (lambda f: (f / "config.json").write_text("[]"), "config"),
        (only_a_pickle, r"model\.safetensors"),
        (cut_short, "does not load"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer .* does not load"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path, gpt2, data, spoil, pattern):
    folder = tmp_path / "model"
    shutil.copytree(gpt2, folder)
    spoil(folder)
    with pytest.raises(ModelError, match=pattern):
        extract(str(folder), data, tmp_path / "lake")
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    ("options", "error", "pattern"),
    [
        ({"layers": [99]}, UnknownNameError, "layer '99' of site 'resid_post'.*Known: 0, 1"),
        ({"layers": [-1]}, UnknownNameError, "layer '-1'.*Known: 0, 1"),
        ({"sites": ["layer.3"]}, UnknownNameError, "site 'layer.3'.*Known: embed, resid_post"),
        ({"sites": ["model.layers.3"]}, UnknownNameError, "site 'model.layers.3'.*Known: embed, resid_post"),
        ({"model": "odd_models:names_a_module_wrongly"}, UnknownNameError, "module 'model.a'.*Known: .*embed, a, b"),
        ({"device": "tpu"}, RequestError, "'tpu' is not a device"),
        ({"device": "cuda:4096"}, WorldError, "sees no device cuda:4096"),
        ({"threads": 100_000}, RequestError, "at most 1024 threads"),
        ({"unit_rows": 2**40}, RequestError, "use at most 1048576"),
        ({"data": ""}, DataError, "empty name"),
        ({"model": ""}, RequestError, "'' names no model"),
        ({"model": "odd_models:of_float64"}, RequestError, "float64, which is not stored. Choose a --dtype"),
        ({"model": "odd_models:without_values"}, RequestError, "meta device"),
        ({"model": "odd_models:Base.nothing"}, RequestError, "package.module:function"),
        ({"labels": ["=code-depth"]}, RequestError, "'=code-depth' names no column"),
        ({"engine": "ray", "ray_address": "127.0.0.1:1"}, WorldError, "did not connect"),
    ],
)
def test_U01_a_wrong_request_names_what_is_wrong_and_leaves_no_lake(tmp_path, data, options, error, pattern):
    request = {"model": "odd_models:base", "data": data} | options
    with pytest.raises(error, match=pattern):
        extract(request.pop("model"), request.pop("data"), tmp_path / "lake", **request)
    assert not (tmp_path / "lake").exists()


def test_a_labeler_that_fails_is_named_with_the_document(tmp_path, gpt2, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(gpt2, folder)
    change_config(folder, vocab_size=400)
    (folder / "model.safetensors").unlink()
    import transformers

    transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    byte_level_bpe().save_pretrained(folder)
    (tmp_path / "t.txt").write_text("hello\n")
    with pytest.raises(DataError, match=r"labeler 'a' failed on t\.txt:1 with TypeError"):
        extract(str(folder), tmp_path / "t.txt", tmp_path / "lake", labels=["a=toy_models:raises"])
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(("package", "extra"), [("ray", "ray"), ("transformers", "hf"), ("tensorstore", "archive")])
def test_a_missing_extra_is_named_before_anything_is_made(tmp_path, gpt2, data, monkeypatch, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    engine = "ray" if package == "ray" else "inline"
    with pytest.raises(MissingExtraError, match=rf"layerlake\[{extra}\]"):
        extract(str(gpt2), data, tmp_path / "lake", engine=engine, codec="archive" if extra == "archive" else "none")
    assert not (tmp_path / "lake").exists()


def test_a_picture_without_matplotlib_is_refused_before_the_work(tmp_path, data, monkeypatch, capsys):
    extract("odd_models:base", data, tmp_path / "lake", run="r")
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n, *a: None if n == "matplotlib" else found(n, *a))
    picture = str(tmp_path / "p.png")
    assert main(["probe", "r", "--label", "pos", "--lake", str(tmp_path / "lake"), "--plot", picture]) == 1
    assert "layerlake[plot]" in capsys.readouterr().err
    assert not list((tmp_path / "lake" / "artifacts").iterdir())


def test_closed_streams_are_no_error(tmp_path, data, monkeypatch):
    extract("odd_models:base", data, tmp_path / "lake", run="r")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["ls", "--lake", str(tmp_path / "lake")]) == 0
    assert main(["ls", "--lake", str(tmp_path / "nothing")]) == 1
    sys.stdout.close()
    sys.stderr.close()


def test_Q05_the_metadata_cost_little(tmp_path):
    """500 texts of 100 tokens in 20 s, and ten times the tokens in at most fifteen times the time."""
    seconds = []
    for count in (50, 500):
        rng = np.random.default_rng(0)
        rows = [{"input_ids": rng.integers(0, 50, 100).tolist(), "topic": f"t{i}"} for i in range(count)]
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        start = time.perf_counter()
        extract("odd_models:base", path, tmp_path / f"lake{count}", run="r", label_columns=["topic"], layers=[0])
        seconds.append(time.perf_counter() - start)
    assert Lake.open(tmp_path / "lake500").sql("SELECT count(*) AS n FROM tokens")["n"][0].as_py() == 50_000
    assert seconds[1] < 20
    assert seconds[1] < 15 * max(seconds[0], 0.2)


def test_D06_activations_never_pass_through_the_object_store(tmp_path, monkeypatch):
    """Four times as many bytes as the object store holds: nothing is spilled and the driver stays small."""
    from layerlake.extract.ray_cluster import OBJECT_STORE_BYTES

    rows = [{"input_ids": [i % 50] * 70} for i in range(100)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    spilled: list[int] = []
    close = RayEngine.close

    def look_then_close(engine: RayEngine) -> None:
        if engine._cluster is not None:
            folder = engine._cluster._folder
            assert folder
            files = [p for p in folder.rglob("*") if "spilled" in str(p.relative_to(folder)) and p.is_file()]
            spilled.append(sum(p.stat().st_size for p in files))
        close(engine)

    monkeypatch.setattr(RayEngine, "close", look_then_close)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = extract("odd_models:wide", tmp_path / "d.jsonl", tmp_path / "lake", engine="ray", unit_rows=1024)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    written = sum(p.stat().st_size for p in (tmp_path / "lake").rglob("c.*"))
    assert report.units_done == report.units
    assert written >= 4 * OBJECT_STORE_BYTES
    assert grown < written / 2
    assert spilled == [0]
