"""What a run's identity tells apart, and what it must not: each is changed on its own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layerlake.errors import SettingsDifferError
from layerlake.extract.driver import extract
from layerlake.extract.fingerprint import source_hash
from layerlake.extract.loaded_model import ModelSource
from layerlake.extract.loading import load_model
from layerlake.store.lake import Lake
from processes import run_layerlake
from safetensors.torch import load_file, save_file
from some_tokenizers import byte_level_bpe
from toy_models import save_model

MODEL = """
import torch
from torch import nn
from layerlake.extract.torch_model import TorchModel
import {package}.parts
from {package} import widths as w

def model():
    from {package}.late import VALUE
    torch.manual_seed(0)
    return TorchModel(nn.Sequential(nn.Embedding(50, w.WIDTH), nn.Linear(w.WIDTH, w.WIDTH)), embed="0", blocks=("1",))

def other():
    return model()
"""


def write_package(folder: Path, package: str) -> Path:
    (folder / package).mkdir(parents=True)
    for name, content in {
        "__init__": "",
        "model": MODEL.format(package=package),
        "parts": "from . import deep",
        "deep": "import torch, json",
        "late": "VALUE = 1",
        "widths": "WIDTH = 8",
        "unused": "",
    }.items():
        (folder / package / f"{name}.py").write_text(content)
    return folder / package


def write_data(path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(0, 50, n).tolist(), "x": n} for n in (5, 9, 3, 12)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_code_is_hashed_with_what_it_imports_and_not_where_it_lies(tmp_path, monkeypatch):
    package = write_package(tmp_path / "one", "pack_hashed")
    monkeypatch.syspath_prepend(tmp_path / "one")
    before = source_hash("pack_hashed.model")
    for name in ("model", "parts", "deep", "late", "widths", "__init__"):
        path = package / f"{name}.py"
        kept = path.read_text()
        path.write_text(kept + "\n# changed")
        assert source_hash("pack_hashed.model") != before, name
        path.write_text(kept)
    (package / "unused.py").write_text("changed = 1")
    os.utime(package / "model.py", (1, 1))
    assert source_hash("pack_hashed.model") == before
    assert source_hash("no_such_module_at_all") is None


def test_the_code_of_an_imported_module_changed_is_another_run(tmp_path):
    """In processes of their own, as a user edits a file between two commands; moving the folder changes nothing."""
    package = write_package(tmp_path / "here", "pack_edited")
    data = write_data(tmp_path / "d.jsonl")
    command = ["extract", "pack_edited.model:model", data, "--lake", tmp_path / "lake", "--run", "r"]
    first = run_layerlake(*command, cwd=tmp_path / "here")
    assert first.returncode == 0, first.stderr
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = run_layerlake(*command, cwd=tmp_path / "there")
    assert "complete already" in moved.stdout, moved.stderr
    (tmp_path / "there" / package.name / "deep.py").write_text("import torch")
    edited = run_layerlake(*command, cwd=tmp_path / "there")
    assert edited.returncode == 2
    assert "model.code" in edited.stderr


def test_two_functions_of_one_module_are_two_models(tmp_path):
    data = write_data(tmp_path / "d.jsonl")
    extract("odd_models:base", data, tmp_path / "lake", run="r")
    with pytest.raises(SettingsDifferError, match=r"model\.function"):
        extract("odd_models:called_otherwise", data, tmp_path / "lake", run="r")


def test_a_buffer_that_no_checkpoint_holds_is_part_of_the_weights(tmp_path, monkeypatch):
    data = write_data(tmp_path / "d.jsonl")
    extract("odd_models:base", data, tmp_path / "lake", run="r")
    monkeypatch.setenv("ODD_SCALE", "2")
    with pytest.raises(SettingsDifferError, match=r"weights: scale has other values"):
        extract("odd_models:base", data, tmp_path / "lake", run="r")


def test_one_last_bit_of_one_weight_is_another_run(tmp_path):
    folder, data = save_model(tmp_path / "m", "gpt2"), write_data(tmp_path / "d.jsonl")
    extract(str(folder), data, tmp_path / "lake", run="r")
    weights = load_file(folder / "model.safetensors")
    one = weights["transformer.h.1.mlp.c_fc.weight"].view(-1)
    one[5] = torch.nextafter(one[5], torch.tensor(9.0))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        SettingsDifferError, match=r"\(weights: transformer\.h\.1\.mlp\.c_fc\.weight has other values \(1 of"
    ):
        extract(str(folder), data, tmp_path / "lake", run="r")


def test_a_rule_of_the_tokenizer_and_a_value_of_the_config_are_told_apart(tmp_path):
    folder = save_model(tmp_path / "m", "gpt2")
    byte_level_bpe(eos_token="</s>").save_pretrained(folder)
    base = load_model(ModelSource(str(folder))).identity

    def changed(file: str, change: dict[str, Any]) -> set[str]:
        path = folder / file
        kept = path.read_text()
        path.write_text(json.dumps(json.loads(kept) | change))
        found = load_model(ModelSource(str(folder))).identity
        path.write_text(kept)
        return {k for k in base if base[k] != found[k]}

    rules = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]
    assert changed("tokenizer.json", {"pre_tokenizer": rules | {"add_prefix_space": True}}) == {"tokenizer"}
    assert changed("config.json", {"layer_norm_epsilon": 1e-3}) == {"config"}
    assert load_model(ModelSource(str(folder), dtype="bfloat16")).identity["dtype"] != base["dtype"]


def test_a_label_value_is_told_apart(tmp_path):
    data = write_data(tmp_path / "d.jsonl")
    extract("odd_models:base", data, tmp_path / "lake", run="r", label_columns=["x"])
    data.write_text(data.read_text().replace('"x": 9', '"x": 8'))
    with pytest.raises(SettingsDifferError, match="token table"):
        extract("odd_models:base", data, tmp_path / "lake", run="r", label_columns=["x"])


def test_where_files_lie_and_how_old_they_are_changes_nothing(tmp_path, monkeypatch):
    folder, data = save_model(tmp_path / "m", "bert"), write_data(tmp_path / "d.jsonl")
    extract(str(folder), data, tmp_path / "lake", run="r")
    record = Lake.open(tmp_path / "lake").run("r").record
    (tmp_path / "away").mkdir()
    for path in (folder, data):
        shutil.move(path, tmp_path / "away" / path.name)
    for path in (tmp_path / "away").rglob("*"):
        os.utime(path, (1, 1))
    monkeypatch.chdir(tmp_path / "away")
    assert extract("m", "d.jsonl", "../lake", run="r").units_done == 0
    assert extract(str(tmp_path / "away" / "m"), Path("d.jsonl"), tmp_path / "lake", run="r").units_done == 0
    assert extract("m", "d.jsonl", "../lake", run="s").units_done > 0
    assert Lake.open(tmp_path / "lake").run("s").record.identity == record.identity
