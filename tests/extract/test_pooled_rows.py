"""Rows that are means over a sequence or a labelled span: the values, the tables, and every promise of other rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_models
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layerlake.errors import RequestError
from layerlake.extract.driver import ExtractReport, extract
from layerlake.extract.pools import rounded_once
from layerlake.store.lake import Lake
from some_tokenizers import tokenizer

ALL = "tokens,sequences,spans:k"
LABELS = st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=12)


def write(path: Path, labels: list[list[Any]], seed: int = 0) -> list[list[int]]:
    """Write documents of ids with a label `k` a token; returns the ids."""
    rng = np.random.default_rng(seed)
    rows = [{"input_ids": rng.integers(0, toy_models.VOCABULARY, len(k)).tolist(), "k": k} for k in labels]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return [r["input_ids"] for r in rows]


def run(folder: Path, name: str, model: str = "toy_models:tuples", **options: Any) -> ExtractReport:
    base: dict[str, Any] = {"label_columns": ["k"], "run": name, "rows": ALL}
    return extract(model, folder / "d.jsonl", folder / "lake", **(base | options))


def spans_of(labels: list[Any]) -> list[tuple[Any, int, int]]:
    """Give (value, start, end) of each run of one value that is not None."""
    found, at = [], 0
    for value, group in itertools.groupby(labels):
        n = len(list(group))
        if value is not None:
            found.append((value, at, at + n))
        at += n
    return found


def plain_tuples(ids: list[int]) -> dict[tuple[str, int | None], np.ndarray]:
    model = toy_models.Tuples().eval()
    seen: dict[tuple[str, int | None], np.ndarray] = {}
    with torch.no_grad():
        x = model.embed(torch.tensor([ids]))
        seen["embed", None] = x[0].numpy()
        for i, block in enumerate(model.blocks):
            x = block(x)[0]
            seen["resid_post", i] = x[0].numpy()
    return seen


def plain_lstm(ids: list[int]) -> dict[tuple[str, int | None], np.ndarray]:
    model = toy_models.TorchLSTM().eval()
    seen: dict[tuple[str, int | None], np.ndarray] = {}
    with torch.no_grad():
        x = model.embed(torch.tensor([ids]))
        seen["embed", None] = x[0].numpy()
        for i in range(3):  # a layer of the stack, taken apart by hand
            one = torch.nn.LSTM(x.shape[-1], 16, batch_first=True)
            one.load_state_dict({n: getattr(model.rnn, n.replace("l0", f"l{i}")) for n, _ in one.named_parameters()})
            x = one(x)[0]
            seen["resid_post", i] = x[0].numpy()
    return seen


def check_means(
    lake: Lake,
    name: str,
    ids: dict[int, list[int]],
    labels: dict[int, list[Any]],
    plain: Callable[[list[int]], dict[tuple[str, int | None], np.ndarray]],
    kept: dict[int, list[bool]] | None = None,
) -> None:
    """Hold every pooled row of a run to NumPy's mean, over the `kept` tokens, of what a plain forward gives."""
    kept = kept or {s: [True] * len(one) for s, one in ids.items()}
    kinds = lake.run(name).record.row_kinds.kinds
    reference = {s: plain(one) for s, one in ids.items()}
    wanted: dict[str, list[tuple[int, list[int]]]] = {"sequences": [], "spans": []}
    facts = []
    for seq in ids:
        at = [p for p, k in enumerate(kept[seq]) if k]
        wanted["sequences"] += [(seq, at)] if at else []
        for value, start, end in spans_of(labels[seq]):
            if inside := [p for p in at if start <= p < end]:
                wanted["spans"].append((seq, inside))
                facts.append((seq, value, start, end, len(inside)))
    for kind in {"sequences", "spans"} & set(kinds):
        sel = lake.select(
            f"SELECT run, {kind[:-1]}_row AS row, seq FROM {kind} "
            f"WHERE run = '{name}' AND {kind[:-1]}_row IS NOT NULL ORDER BY row"
        )
        assert sel.table["seq"].to_pylist() == [seq for seq, _ in wanted[kind]]
        for site, layer in reference[next(iter(ids))]:
            found = sel.array(layer, site, rows=kind)
            means = np.stack([reference[s][site, layer][at].astype(np.float64).mean(0) for s, at in wanted[kind]])
            np.testing.assert_allclose(found, means, rtol=0, atol=1e-5)
    if "spans" in kinds:
        query = f"SELECT seq, k, pos_start, pos_end, tokens FROM spans WHERE run = '{name}' ORDER BY span_row"
        assert [tuple(r.values()) for r in lake.sql(query).to_pylist()] == facts


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    labels=st.lists(LABELS, min_size=1, max_size=9).filter(lambda d: any(v is not None for k in d for v in k)),
    padding=st.sampled_from(["right", "left", "none"]),
    codec=st.sampled_from(["none", "archive"]),
    rows=st.sampled_from([ALL, "sequences", "spans:k", "sequences,spans:k"]),
)
def test_pooled_rows_are_the_means_of_a_plain_forward(tmp_path_factory, labels, padding, codec, rows):
    folder = tmp_path_factory.mktemp("pooled")
    ids = dict(enumerate(write(folder / "d.jsonl", labels)))
    run(folder, "r", rows=rows, padding=padding, codec=codec, batch_tokens=30)
    lake = Lake.open(folder / "lake")
    check_means(lake, "r", ids, dict(enumerate(labels)), plain_tuples)
    assert lake.verify() == []
    assert lake.sql("SELECT count(*) AS n FROM units WHERE replayed > 0 AND replay_values < 1e-5")["n"][0].as_py() >= 1


def test_an_lstm_has_its_means(tmp_path):
    labels = [[0, 0, None, 1, 1], [1], [2, 2, 0], [None, None]]
    ids = dict(enumerate(write(tmp_path / "d.jsonl", labels)))
    run(tmp_path, "r", "toy_models:lstm_right", rows="sequences,spans:k")
    check_means(Lake.open(tmp_path / "lake"), "r", ids, dict(enumerate(labels)), plain_lstm)


def test_context_is_in_no_mean_and_a_span_ends_with_its_window(tmp_path):
    whole = [[0] * 9 + [1] * 5 + [None] * 3, [2] * 7]
    documents = write(tmp_path / "d.jsonl", whole)
    run(tmp_path, "r", "toy_models:lstm_right", rows="sequences,spans:k", window=6, overlap=2)
    ids, labels, kept = {}, {}, {}
    for one, values in zip(documents, whole, strict=True):
        for at in range(0, max(1, len(one) - 2), 4):
            seq = len(ids)
            ids[seq] = one[at : at + 6]
            kept[seq] = [not at or p >= 2 for p in range(len(ids[seq]))]
            labels[seq] = [v if k else None for v, k in zip(values[at : at + 6], kept[seq], strict=True)]
    check_means(Lake.open(tmp_path / "lake"), "r", ids, labels, plain_lstm, kept)


def test_keep_names_the_tokens_of_a_mean(tmp_path):
    labels = [[0, 0, 0, 1, None, 1], [2, None], [1, 1], [0]]
    ids = dict(enumerate(write(tmp_path / "d.jsonl", labels)))
    for name, rows in (("with", ALL), ("without", "sequences,spans:k")):
        run(tmp_path, name, rows=rows, keep="pos % 2 = 0 AND seq <> 2")
        kept = {s: [p % 2 == 0 and s != 2 for p in range(len(one))] for s, one in ids.items()}
        some = {s: one for s, one in ids.items() if s != 2}
        check_means(Lake.open(tmp_path / "lake"), name, some, dict(enumerate(labels)), plain_tuples, kept)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_special_tokens_are_in_no_mean(tmp_path, padding):
    tokens = tokenizer("bytes, roberta")  # <s> before and </s> behind every text
    toy_models.save_model(tmp_path / "m", "gpt2", layers=2, vocab_size=len(tokens))
    tokens.save_pretrained(tmp_path / "m")
    texts = ["hello world the cat", "sat", "def value(self, other)"]
    ids = {s: tokens(text)["input_ids"] for s, text in enumerate(texts)}
    labels = {s: [None, *(["a", "a", None, "b"] * 9)[: len(one) - 2], None] for s, one in ids.items()}
    lines = [{"text": t, "k": labels[s][1:-1]} for s, t in enumerate(texts)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def plain(one: list[int]) -> dict[tuple[str, int | None], np.ndarray]:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
        seen: dict[tuple[str, int | None], np.ndarray] = {}
        blocks = model.transformer.h
        blocks[0].register_forward_pre_hook(lambda m, args: seen.update({("embed", None): args[0][0].numpy()}))
        for i, block in enumerate(blocks):
            block.register_forward_hook(
                lambda m, a, out, i=i: seen.update(
                    {("resid_post", i): (out if torch.is_tensor(out) else out[0])[0].numpy()}
                )
            )
        with torch.no_grad():
            model(torch.tensor([one]))
        return seen

    kept = {s: [0 < p < len(one) - 1 for p in range(len(one))] for s, one in ids.items()}
    model = str(tmp_path / "m")
    run(tmp_path, "r", model, padding=padding)
    lake = Lake.open(tmp_path / "lake")
    check_means(lake, "r", ids, labels, plain, kept)
    # Of a sequence of which special tokens alone are stored there is no mean, and the table says so.
    run(tmp_path, "s", model, padding=padding, keep="special OR seq = 0")
    table = lake.sql("SELECT seq, sequence_row AS row, rows FROM sequences WHERE run = 's' ORDER BY seq").to_pylist()
    assert [(t["row"], t["rows"]) for t in table] == [(0, len(ids[0])), (None, 2), (None, 2)]
    check_means(lake, "s", ids, labels, plain, {s: k if s == 0 else [False] * len(k) for s, k in kept.items()})
    with pytest.raises(RequestError, match="2 NULLs"):
        lake.select("SELECT run, sequence_row AS row FROM sequences WHERE run = 's'")
    with pytest.raises(RequestError, match="no row of sequences: all are special"):
        run(tmp_path, "t", model, rows="sequences", keep="special")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_mean_is_of_the_values_before_they_are_rounded_and_is_rounded_once(tmp_path, dtype):
    labels = [[0] * 12, [1] * 12, [0] * 6 + [1] * 6]
    write(tmp_path / "d.jsonl", labels)
    run(tmp_path, "full", dtype="float32")
    run(tmp_path, "r", dtype=dtype)
    lake = Lake.open(tmp_path / "lake")
    values = lake.select("SELECT run, row, seq, pos FROM tokens WHERE run = 'full' ORDER BY row")
    whole = values.array(1, rows="tokens").reshape(3, 12, -1)
    found = lake.select("SELECT run, span_row AS row, seq, pos_start, pos_end FROM spans WHERE run = 'r' ORDER BY row")
    bits = found.tensor(1, rows="spans")
    for mean, place in zip(bits, found.table.to_pylist(), strict=True):
        part = whole[place["seq"], place["pos_start"] : place["pos_end"]]
        for k in range(part.shape[1]):
            exact = sum(Fraction(float(v)) for v in part[:, k]) / len(part)
            assert nearest(exact, dtype) == mean[k].item()


def nearest(exact: Fraction, dtype: str) -> float:
    """Round a fraction to the nearest number of a dtype, ties to even, in whole numbers."""
    digits, least = {"float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}[dtype]
    if not exact:
        return 0.0
    power = 0
    while abs(exact) >= Fraction(2) ** (power + 1):
        power += 1
    while abs(exact) < Fraction(2) ** power:
        power -= 1
    step = Fraction(2) ** max(power - digits + 1, least)
    return float(round(exact / step) * step)  # Python rounds fractions to even


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-6e4, max_value=6e4), st.data())
def test_float64_is_rounded_once_to_any_dtype(value, data):
    near = torch.tensor(value).to(torch.bfloat16).double().item()
    offset = data.draw(st.sampled_from([0.0, 2.0**-9, -(2.0**-9), 2.0**-9 + 2.0**-40, 2.0**-9 - 2.0**-40]))
    for one in (value, near * (1 + 2 * offset), near * (1 + offset)):
        for dtype in ("float32", "float16", "bfloat16"):
            rounded = rounded_once(np.array([one]), dtype).to(getattr(torch, dtype)).item()
            assert rounded == nearest(Fraction(one), dtype)


def test_a_site_of_any_shape_has_means(tmp_path):
    toy_models.save_model(tmp_path / "m", "gpt2", layers=1)
    labels = [[0] * 5, [1, 1, 2]]
    write(tmp_path / "d.jsonl", labels)
    run(tmp_path, "r", str(tmp_path / "m"), sites=("pattern", "z"), attention="eager")
    lake = Lake.open(tmp_path / "lake")
    for site in ("pattern", "z"):
        tokens = lake.select("SELECT run, row, seq FROM tokens ORDER BY row")
        values, seqs = tokens.array(0, site, rows="tokens"), tokens.table["seq"].to_numpy()
        means = lake.select("SELECT run, sequence_row AS row FROM sequences ORDER BY row").array(
            0, site, rows="sequences"
        )
        expected = np.stack([values[seqs == s].astype(np.float64).mean(0) for s in (0, 1)])
        np.testing.assert_allclose(means, expected, rtol=0, atol=1e-7)
