"""Models that fail, or would give wrong values, in the middle of a run: what is said, and what is stored."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import toy_models
from layerlake.errors import JobError, ModelError
from layerlake.extract.driver import extract
from layerlake.extract.torch_model import TorchModel
from layerlake.store.lake import Lake
from processes import run_layerlake
from torch import nn

BAD = 49


def data_file(path, bad_document: int | None):
    """Documents of ids; one of them holds the id that the models here stumble over."""
    rng = np.random.default_rng(2)
    ids = [rng.integers(0, BAD, n).tolist() for n in (4, 6, 3, 5, 7, 2, 6, 4)]
    if bad_document is not None:
        ids[bad_document][1] = BAD
    path.write_text("".join(json.dumps({"input_ids": i}) + "\n" for i in ids))
    return path, ids


class Chain(nn.Module):
    """Five blocks over an embedding; `block` does something of its own at the bad id."""

    def __init__(self, block: type[nn.Module], at: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(BAD + 1, 4)
        with torch.no_grad():
            self.embed.weight[BAD] = 1000.0
        self.blocks = nn.ModuleList(block() if i == at else nn.Linear(4, 4) for i in range(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = block(x) + (x if i < 4 else 0)
        return x


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x.abs() > 500).any():
            raise toy_models.TwoPartError("the scan overflowed", 17)
        return self.inner(x)


class NotANumber(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.abs() > 500, torch.nan, x)


def chain(block: type[nn.Module]) -> TorchModel:
    return TorchModel(Chain(block, 3), blocks=tuple(f"blocks.{i}" for i in range(5)), padding=("right",))


def raises_in_block_3() -> TorchModel:
    return chain(Raises)


def nan_at_a_position() -> TorchModel:
    return chain(NotANumber)


def steered() -> TorchModel:
    model = chain(nn.Identity)
    model.module.get_submodule("blocks.2").register_forward_hook(lambda module, given, output: output + 1)
    return model


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    for function in (raises_in_block_3, nan_at_a_position, steered):
        monkeypatch.setattr(toy_models, function.__name__, function, raising=False)


def test_D04_an_error_inside_block_3_names_block_unit_and_sequence_and_keeps_its_text(tmp_path):
    data, _ = data_file(tmp_path / "d.jsonl", 4)
    with pytest.raises(JobError) as error:
        extract("toy_models:raises_in_block_3", data, tmp_path / "lake", run="r")
    said = str(error.value)
    for part in ("Unit 0", "sequence 4 (7 tokens)", "in block 3", "TwoPartError: the scan overflowed at 17"):
        assert part in said, part
    assert Lake.open(tmp_path / "lake").run("r").committed() == set()


def test_a_nan_at_one_position_is_stored_and_the_first_layer_that_has_it_is_named(tmp_path):
    data, ids = data_file(tmp_path / "d.jsonl", 2)
    report = extract("toy_models:nan_at_a_position", data, tmp_path / "lake", run="r")
    assert any("resid_post-3 is the first site with values that are NaN" in w for w in report.warnings)
    lake = Lake.open(tmp_path / "lake")
    sel = lake.select("SELECT run, row, seq, pos FROM tokens ORDER BY row")
    bad = [(s, p) == (2, 1) for s, p in zip(sel.table["seq"].to_pylist(), sel.table["pos"].to_pylist(), strict=True)]
    assert np.isnan(sel.array(3)).any(axis=1).tolist() == bad
    assert np.isfinite(sel.array(2)).all()
    counted = lake.sql("SELECT layer, nonfinite FROM stats WHERE site = 'resid_post' ORDER BY layer").to_pylist()
    expected = [int(np.isnan(sel.array(i)).sum()) for i in range(5)]
    assert [c["nonfinite"] for c in counted] == expected
    assert expected[:3] == [0, 0, 0]
    assert all(expected[3:])


def test_a_hook_left_by_someone_else_is_refused_by_module_and_a_looking_one_is_not(tmp_path, monkeypatch):
    data, _ = data_file(tmp_path / "d.jsonl", None)
    with pytest.raises(ModelError, match=r"hook of someone else.*'blocks\.2'.*changes what it computes"):
        extract("toy_models:steered", data, tmp_path / "lake", run="r")
    assert not (tmp_path / "lake").exists()
    seen = []

    def watched() -> TorchModel:
        model = chain(nn.Identity)
        model.module.get_submodule("blocks.2").register_forward_hook(lambda *_: seen.append(1))
        return model

    monkeypatch.setattr(toy_models, "watched", watched, raising=False)
    extract("toy_models:watched", data, tmp_path / "lake", run="r")
    assert seen


def test_doctor_says_what_does_not_hold_with_exit_code_1(tmp_path):
    (tmp_path / "noisy.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        torch.manual_seed(0)\n        self.embed = nn.Embedding(50, 4)\n"
        "        self.rnn = nn.GRU(4, 4, batch_first=True)\n\n    def forward(self, ids):\n"
        "        return self.rnn(nn.functional.dropout(self.embed(ids), training=True))[0]\n"
    )
    found = run_layerlake("doctor", "noisy:Model", cwd=tmp_path)
    assert found.returncode == 1, found.stderr
    assert any(line.startswith("repeats") and "FAILS" in line for line in found.stdout.splitlines())
    sound = run_layerlake("doctor", "toy_models:lstm", "--json")
    assert sound.returncode == 0
    checks = {c["name"]: c["passed"] for c in json.loads(sound.stdout)}
    assert checks["repeats"] is True
    assert checks["head"] is None
