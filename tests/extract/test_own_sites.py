"""Sites of a user's own model: named by module paths in an adapter, and those inside of recurrent layers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import toy_models
from layerlake.errors import RequestError, UnknownNameError
from layerlake.extract.driver import extract
from layerlake.extract.hooks import SitePoint
from layerlake.extract.torch_model import TorchModel
from layerlake.store.lake import Lake
from torch import nn

LENGTHS = (5, 9, 1, 5)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.key(x).cumsum(1)))


class Block(nn.Module):
    def __init__(self, with_mlp: bool) -> None:
        super().__init__()
        self.attention = Mixer()
        self.mlp = nn.Linear(8, 8) if with_mlp else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x if self.mlp is None else x + torch.relu(self.mlp(x))


class Own(nn.Module):
    """A model whose last block has no MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(toy_models.VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block(i < 2) for i in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


SITES = {"mlp_out": "blocks.{}.mlp", "keys": "blocks.{}.attention.key", "mixed": "blocks.{}.attention.out:in"}


def own(**changes) -> TorchModel:
    asked = {"blocks": ("blocks.0", "blocks.1", "blocks.2"), "padding": ("right",), "embed": "tokens"}
    return TorchModel(Own(), **(asked | {"sites": SITES | {"final_norm": "norm"}} | changes))


def ids_file(path):
    rng = np.random.default_rng(5)
    ids = [rng.integers(0, toy_models.VOCABULARY, n).tolist() for n in LENGTHS]
    path.write_text("".join(json.dumps({"input_ids": i}) + "\n" for i in ids))
    return path, ids


def rows_of(lake: Lake, site: str, layer: int | None) -> list[np.ndarray]:
    sel = lake.select("SELECT run, row, seq FROM tokens ORDER BY row")
    values, seqs = sel.array(layer, site), sel.table["seq"].to_numpy()
    return [values[seqs == i] for i in range(len(LENGTHS))]


def test_an_adapter_names_sites_by_module_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(toy_models, "own", own, raising=False)
    data, ids = ids_file(tmp_path / "d.jsonl")
    sites = ("embed", "resid_post", "mlp_out", "keys", "mixed", "final_norm")
    report = extract("toy_models:own", data, tmp_path / "lake", run="r", sites=sites)
    assert [n for n in report.arrays if n.startswith("mlp_out")] == ["mlp_out-0", "mlp_out-1"]
    lake = Lake.open(tmp_path / "lake")
    plain = Own().eval()
    for n, one in enumerate(ids):
        x = plain.tokens(torch.tensor([one]))
        for layer, block in enumerate(plain.blocks):
            key = block.attention.key(x)
            mixed = torch.tanh(key.cumsum(1))
            expected = {"keys": key, "mixed": mixed}
            x = x + block.attention.out(mixed)
            if block.mlp is not None:
                expected["mlp_out"] = block.mlp(x)
                x = x + torch.relu(expected["mlp_out"])
            expected["resid_post"] = x
            for site, value in expected.items():
                np.testing.assert_allclose(
                    rows_of(lake, site, layer)[n], value[0].detach().numpy(), atol=1e-5, rtol=0, err_msg=site
                )
        np.testing.assert_allclose(
            rows_of(lake, "final_norm", None)[n], plain.norm(x)[0].detach().numpy(), atol=1e-5, rtol=0
        )


def test_sites_that_cannot_be_are_refused_by_name():
    with pytest.raises(UnknownNameError, match=r"blocks\.\{\}\.nothing.*for site 'keys'"):
        own(sites={"keys": "blocks.{}.nothing"}).points()
    with pytest.raises(RequestError, match="'resid_post', which `embed` and `blocks` say"):
        own(sites={"resid_post": "blocks.{}"}).points()
    assert SitePoint("mixed", 1, "blocks.1.attention.out", side="input") in own().points()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": False}])
def test_cells_and_gates_are_those_of_the_equations_of_one_cell(tmp_path, monkeypatch, kind, options):
    """Against torch's own LSTMCell and GRUCell, fed a token at a time; gates from the cell's weights by hand."""
    first = options.get("batch_first", True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.embed = nn.Embedding(toy_models.VOCABULARY, 5)
            self.rnn = kind(5, 6, 2, **({"batch_first": True} | options))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.rnn(self.embed(ids if first else ids.t()))[0]

    monkeypatch.setattr(toy_models, "own", lambda: TorchModel(Model(), padding=("right",)), raising=False)
    data, ids = ids_file(tmp_path / "d.jsonl")
    sites = ("resid_post", "hidden", "gates", "cell") if kind is nn.LSTM else ("resid_post", "hidden", "gates")
    extract("toy_models:own", data, tmp_path / "lake", run="r", sites=sites)
    lake = Lake.open(tmp_path / "lake")
    plain = Model()
    for n, one in enumerate(ids):
        x = plain.embed(torch.tensor(one))
        for layer in range(2):
            weights = {
                k.replace(f"_l{layer}", ""): v for k, v in plain.rnn.named_parameters() if k.endswith(f"l{layer}")
            }
            cell = (nn.LSTMCell if kind is nn.LSTM else nn.GRUCell)(x.shape[1], 6, bias=plain.rnn.bias)
            cell.load_state_dict(weights)
            h = c = torch.zeros(6)
            hidden, cells, gates = [], [], []
            for step in x:
                given = weights["weight_ih"] @ step + weights.get("bias_ih", 0)
                kept = weights["weight_hh"] @ h + weights.get("bias_hh", 0)
                if kind is nn.LSTM:
                    i, f, g, o = (given + kept).chunk(4)
                    gates.append(torch.stack([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()]))
                    h, c = (v[0] for v in cell(step[None], (h[None], c[None])))
                    cells.append(c)
                else:
                    (r, z, new), (rk, zk, nk) = given.chunk(3), kept.chunk(3)
                    r, z = (r + rk).sigmoid(), (z + zk).sigmoid()
                    gates.append(torch.stack([r, z, (new + r * nk).tanh()]))
                    h = cell(step[None], h[None])[0]
                hidden.append(h)
            x = torch.stack(hidden)
            expected = {"resid_post": x, "hidden": x, "gates": torch.stack(gates)}
            if cells:
                expected["cell"] = torch.stack(cells)
            for site, value in expected.items():
                np.testing.assert_allclose(
                    rows_of(lake, site, layer)[n], value.detach().numpy(), atol=1e-5, rtol=0, err_msg=f"{site}-{layer}"
                )


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba"])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_recurrent_states_are_those_that_transformers_keeps_for_the_next_token(tmp_path, family, padding):
    """Its cache holds the state after the last token, by code of its own; any token is the last of a prefix."""
    import transformers

    name = str(toy_models.save_model(tmp_path / "m", family))
    data, ids = ids_file(tmp_path / "d.jsonl")
    extract(name, data, tmp_path / "lake", run="r", sites=("ssm_state", "conv_out"), padding=padding)
    lake = Lake.open(tmp_path / "lake")
    layers = lake.sql("SELECT layer FROM arrays WHERE site = 'ssm_state' ORDER BY layer")["layer"].to_pylist()
    assert layers == ([0, 2] if family == "jamba" else [0, 1, 2])
    plain = transformers.AutoModel.from_pretrained(name).eval()
    for n, one in enumerate(ids):
        for end in {1, len(one) // 2 + 1, len(one)}:
            with torch.no_grad():
                cache = plain(torch.tensor([one[:end]]), use_cache=True).cache
            for layer in layers:
                kept = cache.get_recurrent_state(layer)
                kept = kept[0] if isinstance(kept, (list, tuple)) else kept
                found = rows_of(lake, "ssm_state", layer)[n][end - 1]
                np.testing.assert_allclose(
                    found, kept.reshape(found.shape).numpy(), atol=1e-5, rtol=0, err_msg=f"{layer} {end}"
                )
