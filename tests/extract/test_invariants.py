"""The three invariants of the design, for every family, against a plain forward of one unpadded sequence.

`reference` shares no code with the capture: it loads the weights itself, runs one sequence at a time and hooks
the blocks by hand.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_models
import transformers
from layerlake.extract.batch import Batch
from layerlake.extract.driver import extract
from layerlake.extract.loaded_model import ModelSource
from layerlake.extract.loading import load_model
from layerlake.store.lake import Lake
from toy_models import FAMILIES, REGISTERED, VOCABULARY, save_model

LENGTHS = (9, 3, 1, 17, 4, 4, 12, 30, 2, 9)
BLOCKS = {"bert": "encoder.layer", "bloom": "h", "gpt2": "h", "opt": "decoder.layers"}
"""Where a family's blocks are; the others have them in ``layers``."""
CASES = [(f, p) for f in FAMILIES for p in ("right", "left", "none")] + [
    *((f, p) for f in REGISTERED if f not in FAMILIES for p in ("right", "left")),
    ("lstm", "none"),
    ("lstm_right", "right"),
    ("lstm_time_first", "none"),
    ("lstm_bidirectional", "none"),
    ("tuples", "right"),
    ("tuples", "left"),
]


def sequences(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]


def write_ids(path: Path, ids: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": i}) + "\n" for i in ids))
    return path


def model_name(tmp_path: Path, family: str, dtype: torch.dtype = torch.float32) -> str:
    if family in REGISTERED:
        return str(save_model(tmp_path / f"{family}-{dtype}".replace("torch.", ""), family, dtype=dtype))
    return f"toy_models:{family}"


def reference(name: str, family: str, ids: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Run one sequence through a fresh plain model; returns embed and every block's output, and the last output."""
    seen: dict[str, torch.Tensor] = {}

    def keep(key: str):
        def hook(module, inputs, output):
            seen[key] = (output[0] if isinstance(output, tuple) else output)[0].clone()

        return hook

    x = torch.tensor([ids])
    with torch.no_grad():
        if family in REGISTERED:
            model = transformers.AutoModel.from_pretrained(name).eval()
            for i, block in enumerate(model.get_submodule(BLOCKS.get(family, "layers"))):
                block.register_forward_hook(keep(f"resid_post-{i}"))
            out = model(x).last_hidden_state[0]
            seen["embed"] = _embedding(model, family, x[0])
            return seen, out
        if family == "tuples":
            model = toy_models.Tuples().eval()
            for i, block in enumerate(model.blocks):
                block.register_forward_hook(keep(f"resid_post-{i}"))
            out = model(x)[0]
        else:
            model = getattr(toy_models, family)()
            if family == "lstm_right":
                model = toy_models.TorchLSTM()
            else:
                model = toy_models.TorchLSTM(
                    batch_first=family != "lstm_time_first", bidirectional=family == "lstm_bidirectional"
                )
            h = model.embed.weight[x[0]]
            for layer in range(3):
                h = _one_lstm_layer(model.rnn, layer, h)
                seen[f"resid_post-{layer}"] = h
            out = model.head(h)
        seen["embed"] = model.embed.weight[x[0]]
    return seen, out


def _embedding(model, family: str, ids: torch.Tensor) -> torch.Tensor:
    """What enters block 0, from the tables by hand."""
    rows = model.get_input_embeddings().weight[ids]
    if family == "gpt2":
        return rows + model.wpe.weight[: len(ids)]
    if family == "opt":  # its table begins with two rows that no position has
        return rows + model.decoder.embed_positions.weight[2 : 2 + len(ids)]
    if family == "bloom":
        return model.word_embeddings_layernorm(rows)
    if family.startswith("gemma"):
        return rows * rows.shape[1] ** 0.5
    if family == "bert":
        e = model.embeddings
        return e.LayerNorm(rows + e.position_embeddings.weight[: len(ids)] + e.token_type_embeddings.weight[0])
    return rows


def _one_lstm_layer(rnn: torch.nn.LSTM, layer: int, x: torch.Tensor) -> torch.Tensor:
    """The LSTM equations by hand, step by step (Hochreiter & Schmidhuber 1997, as nn.LSTM states them)."""
    sides = []
    for suffix in ("", "_reverse")[: 1 + rnn.bidirectional]:
        w_ih, w_hh, b_ih, b_hh = (
            getattr(rnn, f"{n}_l{layer}{suffix}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        h = c = torch.zeros(rnn.hidden_size)
        steps = range(len(x)) if not suffix else range(len(x) - 1, -1, -1)
        out = torch.zeros(len(x), rnn.hidden_size)
        for t in steps:
            i, f, g, o = (w_ih @ x[t] + b_ih + w_hh @ h + b_hh).chunk(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            out[t] = h
        sides.append(out)
    return torch.cat(sides, 1)


def stored(lake: Path, ids: list[list[int]], run: str) -> list[dict[str, np.ndarray]]:
    """Read every array of a run back, one dict a document, through SQL; checks the ids on the way."""
    opened = Lake.open(lake)
    arrays = opened.sql(f"SELECT site, layer FROM arrays WHERE run = '{run}'").to_pylist()
    found = []
    for n, expected in enumerate(ids):
        sel = opened.select(
            f"SELECT run, row, token_id FROM tokens JOIN sequences USING (run, seq) WHERE run = '{run}' "
            f"AND document LIKE '%:{n + 1}' ORDER BY pos"
        )
        assert sel.table["token_id"].to_pylist() == expected
        names = {(f"{a['site']}-{a['layer']}" if a["layer"] is not None else a["site"]): a for a in arrays}
        found.append({k: sel.array(a["layer"], a["site"]) for k, a in names.items()})
    return found


@pytest.mark.parametrize(("family", "padding"), CASES)
def test_E01_E04_each_site_equals_a_plain_forward_of_one_sequence(tmp_path, family, padding):
    ids = sequences()
    name = model_name(tmp_path, family)
    data = write_ids(tmp_path / "ids.jsonl", ids)
    report = extract(name, data, tmp_path / "lake", run="r", padding=padding)
    assert report.tokens == sum(LENGTHS)
    for n, found in enumerate(stored(tmp_path / "lake", ids, "r")):
        expected, last = reference(name, family, ids[n])
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value.detach().numpy(), atol=1e-5, rtol=0, err_msg=f"{key} of {n}")
        if family in REGISTERED and family != "bert":  # these end in a norm: the last layer is what stood before it
            top = max(k for k in expected if k.startswith("resid_post"))
            assert np.abs(found[top] - last.numpy()).max() > 0.1


@pytest.mark.parametrize("family", [*FAMILIES, "lstm", "tuples"])
def test_E24_values_do_not_depend_on_order_or_batch_size(tmp_path, family):
    name = model_name(tmp_path, family)
    ids = sequences()
    order = np.random.default_rng(1).permutation(len(ids))
    write_ids(tmp_path / "a.jsonl", ids)
    write_ids(tmp_path / "b.jsonl", [ids[i] for i in order])
    extract(name, tmp_path / "a.jsonl", tmp_path / "lake", run="a", batch_tokens=4096)
    extract(name, tmp_path / "b.jsonl", tmp_path / "lake", run="b", batch_tokens=20)
    first, second = (stored(tmp_path / "lake", i, r) for i, r in ((ids, "a"), ([ids[i] for i in order], "b")))
    for new, old in enumerate(order):
        for key, value in first[old].items():
            np.testing.assert_allclose(second[new][key], value, atol=1e-5, rtol=0, err_msg=key)
    settings = Lake.open(tmp_path / "lake").run("b").record.settings
    assert settings["batch_tokens"] == 20
    assert settings["model"]["dtype"] == "float32"


@pytest.mark.parametrize("family", [*FAMILIES, "lstm", "lstm_time_first", "lstm_bidirectional", "tuples"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_I01_stored_values_patched_back_change_nothing(tmp_path, family, dtype):
    """Exactly nothing: each sequence ran as a batch of its own, so a fresh forward has the same shape."""
    name = model_name(tmp_path, family, getattr(torch, dtype) if family in FAMILIES else torch.float32)
    ids = sequences()
    model = load_model(ModelSource(name))
    points = [p for p in model.points if p.editable]
    extract(
        name,
        write_ids(tmp_path / "i.jsonl", ids),
        tmp_path / "lake",
        run="r",
        dtype=dtype,
        batch_tokens=1,
        sites=list(dict.fromkeys(p.site for p in points)),
    )
    points = model.settled(points)
    lake = Lake.open(tmp_path / "lake")

    def output(n: int, edits=None) -> torch.Tensor:
        batch = Batch.of([np.array(ids[n])], "none")
        out = model.run(batch, points, edits)[1]
        return next((getattr(out, k) for k in ("logits", "last_hidden_state") if hasattr(out, k)), out)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(getattr(torch, dtype)).to(x.dtype)

    for n in range(len(ids)):
        sel = lake.select(
            f"SELECT run, row FROM tokens JOIN sequences USING (run, seq) WHERE document LIKE '%:{n + 1}' ORDER BY pos"
        )
        for point in points:
            kept = sel.tensor(point.layer, point.site)
            plain = output(n, {point.name: rounded})
            patched = output(n, {point.name: lambda x, k=kept: k.to(x.dtype)[None]})
            assert torch.equal(plain, patched), f"{point.name} of {n}"
            if dtype == "float32":
                assert torch.equal(output(n), patched)
            zeroed = output(n, {point.name: torch.zeros_like})
            assert not torch.equal(zeroed, plain), f"editing {point.name} changes nothing"


def test_S01_E_a_bfloat16_model_is_stored_bit_for_bit(tmp_path):
    name = model_name(tmp_path, "gpt2", torch.bfloat16)
    ids = sequences(lengths=(6, 6))
    extract(name, write_ids(tmp_path / "i.jsonl", ids), tmp_path / "lake", run="r", batch_tokens=1)
    assert {a.dtype for a in Lake.open(tmp_path / "lake").run("r").record.arrays} == {"bfloat16"}
    for n, found in enumerate(stored(tmp_path / "lake", ids, "r")):
        seen, _ = reference(name, "gpt2", ids[n])
        for i in range(3):
            assert seen[f"resid_post-{i}"].dtype == torch.bfloat16
            assert np.array_equal(found[f"resid_post-{i}"], seen[f"resid_post-{i}"].float().numpy())


def test_E09_a_square_batch_of_a_time_first_lstm_is_not_transposed(tmp_path):
    ids = sequences(lengths=(4, 4, 4, 4))
    extract("toy_models:lstm_time_first", write_ids(tmp_path / "i.jsonl", ids), tmp_path / "lake", run="r")
    values = [f["resid_post-2"] for f in stored(tmp_path / "lake", ids, "r")]
    for n, value in enumerate(values):
        expected = reference("", "lstm_time_first", ids[n])[0]["resid_post-2"].detach().numpy()
        np.testing.assert_allclose(value, expected, atol=1e-5)
    swapped = np.stack(values).transpose(1, 0, 2)
    assert (
        np.abs(swapped[0] - reference("", "lstm_time_first", ids[0])[0]["resid_post-2"].detach().numpy()).max() > 1e-3
    )


def test_E20_a_value_changed_in_place_later_is_stored_as_it_was(tmp_path):
    ids = sequences(lengths=(5, 5))
    extract("toy_models:in_place", write_ids(tmp_path / "i.jsonl", ids), tmp_path / "lake", run="r")
    model = toy_models.InPlace()
    for n, found in enumerate(stored(tmp_path / "lake", ids, "r")):
        a = model.a(model.embed(torch.tensor([ids[n]]))).detach()
        np.testing.assert_allclose(found["resid_post-0"], a[0].numpy(), atol=1e-6)
        np.testing.assert_allclose(found["resid_post-1"], model.b(a).detach()[0].numpy(), atol=1e-6)


def test_weights_that_a_checkpoint_lacks_are_refused(tmp_path):
    from layerlake.errors import ModelError
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path / "m", "gpt2")
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with (
        warnings.catch_warnings(),
        pytest.raises(ModelError, match=r"lacks weights .*h\.1\.mlp\.c_fc\.weight"),
    ):
        warnings.simplefilter("error")
        load_model(ModelSource(str(folder)))


@pytest.mark.parametrize("family", ["bert", "bloom", "gemma2", "gpt2", "gpt_neox", "jamba", "llama", "opt"])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_a_stored_attention_pattern_is_that_of_the_sequence_alone(tmp_path, family, padding):
    ids = sequences(lengths=(9, 3, 1, 17))
    name = model_name(tmp_path, family)
    extract(
        name,
        write_ids(tmp_path / "i.jsonl", ids),
        tmp_path / "lake",
        run="r",
        sites="pattern",
        attention="eager",
        padding=padding,
    )
    model = transformers.AutoModel.from_pretrained(name, attn_implementation="eager").eval()
    for n, found in enumerate(stored(tmp_path / "lake", ids, "r")):
        with torch.no_grad():
            expected = model(torch.tensor([ids[n]]), output_attentions=True).attentions
        layers = [int(k.rpartition("-")[2]) for k in found]
        assert len(layers) == len(expected)
        for layer, weights in zip(layers, expected, strict=True):
            value = found[f"pattern-{layer}"]
            assert value.shape == (len(ids[n]), 4, 17)
            np.testing.assert_allclose(
                value[..., : len(ids[n])], weights[0].transpose(0, 1).numpy(), atol=1e-5, rtol=0, err_msg=f"{layer}"
            )
            assert not value[..., len(ids[n]) :].any()


def test_a_pattern_that_is_not_computed_is_refused_with_what_to_do(tmp_path):
    from layerlake.errors import UnknownNameError

    name = model_name(tmp_path, "llama")
    with pytest.raises(UnknownNameError, match="--attention eager"):
        extract(name, write_ids(tmp_path / "i.jsonl", sequences()), tmp_path / "lake", sites="pattern")
