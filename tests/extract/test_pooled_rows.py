"""Rows that are means over a sequence or a labelled span: the values, the tables, and every promise of other rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import toy_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layerlake.extract.driver import ExtractReport, extract
from layerlake.store.lake import Lake

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
        sel = lake.select(f"SELECT run, row, seq FROM {kind} WHERE run = '{name}' AND row IS NOT NULL ORDER BY row")
        assert sel.table["seq"].to_pylist() == [seq for seq, _ in wanted[kind]]
        for site, layer in reference[next(iter(ids))]:
            found = sel.array(layer, site, rows=kind)
            means = np.stack([reference[s][site, layer][at].astype(np.float64).mean(0) for s, at in wanted[kind]])
            np.testing.assert_allclose(found, means, rtol=0, atol=1e-5)
    if "spans" in kinds:
        query = f"SELECT seq, k, pos_start, pos_end, tokens FROM spans WHERE run = '{name}' ORDER BY row"
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
