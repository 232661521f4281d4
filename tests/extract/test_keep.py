"""A run that stores some of the tokens: the same values, the same promises, and nothing of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import toy_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layerlake.__main__ import app
from layerlake.analyze.probe_rows import rows_to_probe
from layerlake.errors import DataError, RequestError, SettingsDifferError, UnknownNameError
from layerlake.extract.batch import Batch
from layerlake.extract.document import Document
from layerlake.extract.driver import ExtractReport, extract
from layerlake.extract.packing import choose_unit_rows, pack
from layerlake.extract.plan import make_plan
from layerlake.extract.repair import repair
from layerlake.extract.unit_sequences import UnitSequences
from layerlake.extract.windows import Sequence
from layerlake.store.lake import Lake
from layerlake.store.parquet import table_bytes
from processes import killed_at_work, run_layerlake
from typer.testing import CliRunner

ARRAYS = ("embed", "resid_post-0", "resid_post-1")


def write(path: Path, masks: list[list[bool]], seed: int = 0, **columns: list[Any]) -> list[list[int]]:
    """Write ids with a label `k` a token that says which to keep; returns the ids."""
    rng = np.random.default_rng(seed)
    rows = [{"input_ids": rng.integers(0, toy_models.VOCABULARY, len(m)).tolist(), "k": m} for m in masks]
    for name, values in columns.items():
        rows = [r | {name: v} for r, v in zip(rows, values, strict=True)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return [r["input_ids"] for r in rows]


def run(folder: Path, name: str, **options: Any) -> ExtractReport:
    base: dict[str, Any] = {"label_columns": ["k"], "run": name}
    return extract("toy_models:tuples", folder / "d.jsonl", folder / "lake", **(base | options))


def plain(ids: list[int]) -> dict[str, np.ndarray]:
    """Run one sequence through a fresh model and hook it by hand."""
    model = toy_models.Tuples().eval()
    seen: dict[str, torch.Tensor] = {}
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda m, args, out, i=i: seen.__setitem__(f"resid_post-{i}", out[0][0]))
    with torch.no_grad():
        seen["embed"] = model.embed(torch.tensor([ids]))[0]
        model(torch.tensor([ids]))
    return {name: value.numpy() for name, value in seen.items()}


def stored(folder: Path, name: str) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """Read all that a run stores, by sequence and position."""
    sel = Lake.open(folder / "lake").select(f"SELECT run, row, seq, pos FROM tokens WHERE run = '{name}' ORDER BY row")
    values = {}
    for array in ARRAYS:
        site, _, layer = array.partition("-")
        values[array] = sel.array(layer=int(layer) if layer else None, site=site)
    keys = zip(sel.table["seq"].to_pylist(), sel.table["pos"].to_pylist(), strict=True)
    return {key: {a: values[a][i] for a in ARRAYS} for i, key in enumerate(keys)}


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=12).filter(
    lambda m: any(map(any, m))
)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=masks, padding=st.sampled_from(["right", "left", "none"]), codec=st.sampled_from(["none", "archive"]))
def test_the_kept_tokens_have_the_values_of_a_plain_forward(tmp_path_factory, kept, padding, codec):
    folder = tmp_path_factory.mktemp("keep")
    ids = write(folder / "d.jsonl", kept)
    report = run(folder, "some", keep="k", padding=padding, codec=codec, batch_tokens=100)
    expected = {(s, p) for s, m in enumerate(kept) for p, k in enumerate(m) if k}
    found = stored(folder, "some")
    assert found.keys() == expected
    for seq, one in enumerate(ids):
        reference = plain(one)
        for pos in range(len(one)):
            for name in ARRAYS:
                if (seq, pos) in expected:
                    np.testing.assert_allclose(found[seq, pos][name], reference[name][pos], rtol=0, atol=1e-5)
    read = [len(m) for m in kept if any(m)]
    assert (report.tokens, report.tokens_read) == (len(expected), sum(read))
    assert (report.sequences, report.left_out) == (len(read), len(kept) - len(read))
    lake = Lake.open(folder / "lake")
    assert lake.verify() == []
    table = lake.sql("SELECT seq, length, rows, first_row FROM sequences ORDER BY seq").to_pylist()
    assert [(t["seq"], t["length"], t["rows"]) for t in table] == [
        (s, len(m), sum(m)) for s, m in enumerate(kept) if any(m)
    ]
    firsts = lake.sql("SELECT seq, min(row) AS r FROM tokens GROUP BY seq ORDER BY seq")["r"].to_pylist()
    assert [t["first_row"] for t in table] == firsts


def test_where_batches_are_the_same_every_bit_is(tmp_path):
    rng = np.random.default_rng(1)
    kept = [[bool(k) for k in rng.random(n) < 0.3] for n in rng.integers(2, 40, 30)]
    for m in kept:
        m[int(rng.integers(len(m)))] = True
    write(tmp_path / "d.jsonl", kept)
    for name, keep in (("all", None), ("some", "k"), ("true", "true")):
        run(tmp_path, name, keep=keep, unit_rows=1024, dtype="bfloat16")  # one unit, so the same batches
    everything, some = stored(tmp_path, "all"), stored(tmp_path, "some")
    assert len(some) == sum(map(sum, kept)) < len(everything)
    for key, values in some.items():
        for name in ARRAYS:
            assert np.array_equal(values[name], everything[key][name])
    lake = Lake.open(tmp_path / "lake")
    hashes = {n: lake.run(n).record.plan_hash for n in ("all", "some", "true")}
    assert hashes["all"] == hashes["true"] != hashes["some"]


@pytest.mark.parametrize("padding", ["right", "left"])
def test_attention_patterns_of_kept_tokens_are_over_all_that_was_read(tmp_path, padding):
    write(tmp_path / "d.jsonl", [[True, False] * 6, [False, True], [False, False, True]])
    model = str(toy_models.save_model(tmp_path / "m", "gpt2"))
    for name, keep in (("all", None), ("some", "k")):
        options = {"label_columns": ["k"], "sites": "pattern", "attention": "eager", "padding": padding, "keep": keep}
        extract(model, tmp_path / "d.jsonl", tmp_path / "lake", run=name, unit_rows=128, **options)
    lake = Lake.open(tmp_path / "lake")
    everything, some = (
        lake.select(f"SELECT run, row FROM tokens WHERE run = '{n}' AND k ORDER BY row") for n in ("all", "some")
    )
    assert len(some) == 8
    for layer in range(3):
        assert np.array_equal(everything.bits(layer, "pattern"), some.bits(layer, "pattern"))
        np.testing.assert_allclose(some.array(layer, "pattern").sum(-1), 1, atol=1e-5)


def test_nothing_is_computed_for_sequences_that_keep_nothing(tmp_path, monkeypatch):
    kept = [[False] * 5, [True] + [False] * 8, [False] * 3, [False, True]]
    ids = write(tmp_path / "d.jsonl", kept)
    seen: list[list[int]] = []

    def spy():
        model = toy_models.Tuples()
        model.embed.register_forward_hook(lambda m, i, o: seen.extend(i[0].tolist()))
        return toy_models.TorchModel(model, blocks=("blocks.0", "blocks.1"))

    monkeypatch.setattr(toy_models, "tuples", spy)
    command = [
        "extract",
        "toy_models:tuples",
        str(tmp_path / "d.jsonl"),
        "--lake",
        str(tmp_path / "lake"),
        "--run",
        "r",
    ]
    done = CliRunner().invoke(app, [*command, "--label-column", "k", "--keep", "k"])
    assert done.exit_code == 0, done.output
    ran = {tuple(s) for s in seen}
    assert {tuple(ids[1]), tuple(ids[3])} <= ran
    assert not {tuple(ids[0]), tuple(ids[2])} & ran
    assert "2 of 11 tokens in 2 sequences of 4 documents" in done.output
    assert "Not run, as nothing of them is kept: 2 sequences." in done.output
    assert sorted(stored(tmp_path, "r")) == [(1, 0), (3, 1)]


def test_nothing_to_keep_is_an_error_before_the_model_runs(tmp_path, monkeypatch):
    write(tmp_path / "d.jsonl", [[False] * 5, [False]])
    calls = []
    monkeypatch.setattr("layerlake.extract.driver.check_batches", lambda *a: calls.append(a))
    with pytest.raises(RequestError, match="None of the 6 tokens would be stored: no token meets 'k'"):
        run(tmp_path, "r", keep="k")
    assert not calls and not (tmp_path / "lake").exists()


def test_a_wrong_condition_is_refused_before_the_model_is_loaded(tmp_path):
    write(tmp_path / "d.jsonl", [[True] * 5])
    for keep, error in (("kk", UnknownNameError), ("random() < 1", RequestError), ("k); COPY x TO 'y'", RequestError)):
        with pytest.raises(error):
            extract("toy_models:raises", tmp_path / "d.jsonl", tmp_path / "lake", keep=keep, label_columns=["k"])
    command = ["extract", "toy_models:raises", str(tmp_path / "d.jsonl"), "--lake", str(tmp_path / "lake")]
    assert CliRunner().invoke(app, [*command, "--keep", "kk"]).exception.exit_code == 2
    assert not (tmp_path / "lake").exists()


def test_the_same_command_goes_on_and_another_condition_is_refused_by_name(tmp_path):
    write(tmp_path / "d.jsonl", [[True] * 8] * 90)
    run(tmp_path, "r", keep="pos % 4 = 0 AND sample(0.9, 1)", unit_rows=64)
    lake = Lake.open(tmp_path / "lake")
    done = lake.run("r")
    assert done.record.settings["keep"] == "pos % 4 = 0 AND sample(0.9, 1)"
    assert done.record.units > 2
    before = {p.name: p.read_bytes() for p in done.folder.rglob("*") if p.is_file() and "units" not in p.parts}
    done.unit_path(1).unlink()
    done.shard_path(done.record.arrays[2], 1).unlink()
    assert run(tmp_path, "r", keep="pos % 4 = 0 AND sample(0.9, 1)", unit_rows=64).units_done == 1
    assert before == {p.name: p.read_bytes() for p in done.folder.rglob("*") if p.is_file() and "units" not in p.parts}
    for other in ("pos % 4 = 0", None):
        with pytest.raises(SettingsDifferError, match=f"keep: the run has pos % 4 = 0 AND .*, asked was {other}"):
            run(tmp_path, "r", keep=other, unit_rows=64)


def test_an_overlap_is_told_apart_and_stores_each_token_once(tmp_path):
    ids = write(tmp_path / "d.jsonl", [[True] * 50, [True] * 7])
    options = {"window": 12, "overlap": 4, "label_columns": ()}
    report = run(tmp_path, "r", **options)
    assert (report.tokens, report.tokens_read, report.left_out) == (57, 57 + 5 * 4, 0)
    with pytest.raises(SettingsDifferError, match="overlap: the run has 4, asked was 5"):
        run(tmp_path, "r", **(options | {"overlap": 5}))
    lake = Lake.open(tmp_path / "lake")
    assert "overlap" in lake.run("r").record.settings and lake.verify() == []
    query = "SELECT document, seq, pos, token_id, char_offset, length, rows FROM tokens JOIN sequences USING (run, seq)"
    table = lake.sql(f"{query} ORDER BY document, char_offset + pos").to_pylist()
    assert [t["token_id"] for t in table] == [i for one in ids for i in one]
    assert [t["char_offset"] + t["pos"] for t in table] == [*range(50), *range(7)]
    found = stored(tmp_path, "r")
    for t in table:
        document = ids[int(t["document"].rpartition(":")[2]) - 1]
        reference = plain(document[t["char_offset"] : t["char_offset"] + t["length"]])
        for name in ARRAYS:
            np.testing.assert_allclose(found[t["seq"], t["pos"]][name], reference[name][t["pos"]], rtol=0, atol=1e-5)
    run(tmp_path, "both", keep="pos >= 6", **options)
    assert sorted(stored(tmp_path, "both")) == [k for k in sorted(found) if k[1] >= 6]


def test_windows_that_overlap_are_never_on_both_sides_of_a_split(tmp_path):
    write(tmp_path / "d.jsonl", [[True, False] * 25, [True, False] * 7])
    for name, overlap, groups in (("apart", 0, 5 + 2), ("overlapping", 4, 2)):
        run(tmp_path, name, window=12, overlap=overlap)
        lake = Lake.open(tmp_path / "lake")
        _, rows = rows_to_probe(lake, lake.run(name), "k", None, "seq")
        assert (rows.num_rows, len(rows["grouping"].unique())) == (64, groups)


def test_the_text_around_a_kept_token_has_its_neighbours(tmp_path):
    ids = write(tmp_path / "d.jsonl", [[True] * 9, [False] * 9, [True] * 4])
    run(tmp_path, "r", keep="pos % 4 = 2 AND k")
    sel = Lake.open(tmp_path / "lake").select("SELECT run, row, seq, pos FROM tokens ORDER BY row")
    for row, seq, pos in zip(*(sel.table[c].to_pylist() for c in ("row", "seq", "pos")), strict=True):
        got = sel.context(row=row, n=2)
        shown = [str(i) for i in ids[seq]]
        assert (got.before, got.token, got.after) == (shown[pos - 2 : pos], shown[pos], shown[pos + 1 : pos + 3])


def test_labels_go_to_kept_tokens_only(tmp_path):
    write(tmp_path / "d.jsonl", [[False, True, False], [False] * 3, [True, True]])
    run(tmp_path, "r", keep="k")
    lake = Lake.open(tmp_path / "lake")
    labels = pa.Table.from_pylist([{"seq": 0, "pos": 1, "x": 5}, {"seq": 2, "pos": 0, "x": 6}])
    lake.annotate("r", labels, name="ok")
    assert lake.sql("SELECT seq, pos, x FROM tokens ORDER BY row")["x"].to_pylist() == [5, 6, None]
    for wrong in ({"seq": 0, "pos": 0}, {"seq": 1, "pos": 1}, {"row": 3}):
        with pytest.raises(DataError, match="does not have"):
            lake.annotate("r", pa.Table.from_pylist([wrong | {"y": 1}]), name="no")


def test_repair_redoes_what_follows_from_the_plan_and_says_what_does_not(tmp_path):
    write(tmp_path / "d.jsonl", [[i % 2 == 0 for i in range(12)]] * 30)
    run(tmp_path, "r", keep="k AND pos > 3", unit_rows=64)
    lake = tmp_path / "lake"
    found = Lake.open(lake).run("r")
    assert found.record.units == 2
    files = [found.tokens_path(0), found.shard_path(found.record.arrays[1], 0), found.unit_path(1)]
    before = {p: p.read_bytes() for p in files[:2]}
    for path in files[:2]:
        path.write_bytes(path.read_bytes()[:-9] + b"damaged!!")
    files[2].unlink()
    assert {p.path for p in Lake.open(lake).verify()} >= {str(p.relative_to(lake)) for p in files[:2]}
    report = repair(lake)
    assert report.whole, report.outcomes
    assert {p: p.read_bytes() for p in files[:2]} == before and Lake.open(lake).verify() == []
    plan = found.folder / "plan" / "tokens-00000.parquet"
    plan.write_bytes(plan.read_bytes()[:-9] + b"damaged!!")
    report = repair(lake)
    assert not report.whole
    assert [o.why for o in report.outcomes if o.path.endswith(plan.name)] == [
        "the plan has tokens that are read and not stored, which stand nowhere else: extract the data again, as a run "
        "of another name"
    ]


def test_every_damaged_file_of_a_run_of_kept_tokens_is_named(tmp_path):
    write(tmp_path / "d.jsonl", [[i % 2 == 0 for i in range(12)]] * 9)
    run(tmp_path, "r", keep="k AND pos > 3")
    lake = Lake.open(tmp_path / "lake")
    found = lake.run("r")
    whole = found.stored_tokens(0)
    assert whole["row"].to_pylist() == list(range(36)) and found.planned_tokens(0).num_rows == 108
    files = [p for p in found.folder.rglob("*") if p.is_file() and p.name != "driver.lock"]
    assert len(files) == 13
    for path in files:
        before = path.read_bytes()
        damaged = bytearray(before)
        damaged[len(damaged) // 3] ^= 1
        path.write_bytes(damaged)
        assert str(path.relative_to(lake.root)) in {p.path for p in lake.verify()}
        path.write_bytes(before)
    more = found.planned_tokens(0)
    found.tokens_path(0).write_bytes(table_bytes(more.set_column(0, "row", pa.array(range(108), pa.int64()))))
    assert str(found.tokens_path(0).relative_to(lake.root)) in {p.path for p in lake.verify()}


def test_a_value_of_a_token_that_is_not_stored_need_not_fit(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"input_ids": [1, 3, 2]}\n')
    options = {"dtype": "float16", "sites": ["embed"]}
    with pytest.raises(Exception, match="cannot hold"):
        extract("toy_models:big_values", tmp_path / "d.jsonl", tmp_path / "no", **options)
    report = extract("toy_models:big_values", tmp_path / "d.jsonl", tmp_path / "lake", keep="token_id <> 3", **options)
    assert report.tokens == 2


def test_where_everything_is_stored_nothing_is_copied():
    tokens = pa.table({"row": [0, 1, 2, 3, None], "seq": [0, 0, 1, 2, 2], "token_id": [5, 6, 7, 8, 9]})
    unit = UnitSequences(tokens)
    value = torch.arange(24.0).reshape(3, 2, 4)
    for members, whole in (([0, 1], True), ([2, 0], False)):
        batch = Batch.of([unit.ids[i] for i in members], "right")
        rows = unit.batch_rows(batch, members)
        selected = rows.select(value[: len(members)])
        assert (selected.data_ptr() == value.data_ptr()) == whole
        found = {first: part.tolist() for first, part in rows.runs(selected.numpy())}
        expected = (
            {0: value[0].tolist(), 2: value[1, :1].tolist()}
            if whole
            else {3: value[0, :1].tolist(), 0: value[1].tolist()}
        )
        assert found == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5000)), min_size=1, max_size=200))
def test_a_unit_reads_a_bearable_number_of_tokens(pairs):
    rows, lengths = [r for r, _ in pairs], [max(p) for p in pairs]
    size = choose_unit_rows(rows, None, lengths)
    assert size >= 8 * max(rows) and size & (size - 1) == 0
    read = np.bincount([u for u, _ in pack(rows, size)], weights=lengths).max()
    assert read <= 1 << 18 or size // 2 < 8 * max(rows)
    assert size <= choose_unit_rows(rows) and choose_unit_rows(rows, None, rows) == choose_unit_rows(rows)


def test_the_plan_has_what_is_read_and_rows_for_what_is_stored():
    def sequence(ids: list[int], kept: list[bool]) -> Sequence:
        n, blank = len(ids), np.full(len(ids), -1, np.int32)
        return Sequence(0, 0, n, np.array(ids, np.int32), np.zeros(n, bool), blank, blank, None, stored=np.array(kept))

    sequences = [
        sequence([5, 6, 7], [False, True, True]),
        sequence([8], [False]),
        sequence([9, 3], [True, False]),
        *(sequence([i], [True]) for i in range(14)),
    ]
    plan = make_plan([Document("d", None, (1,), {}, None)], sequences, unit_rows=16)
    assert plan.units[0]["row"].to_pylist() == [None, 0, 1, 2, None, *range(3, 16)]
    assert plan.units[1]["row"].to_pylist() == [16]
    assert plan.units[0]["seq"].to_pylist()[:6] == [0, 0, 0, 2, 2, 3]
    assert plan.sequences["rows"].to_pylist() == [2, 1, *[1] * 14]
    assert plan.sequences["first_row"].to_pylist() == [0, 2, *range(3, 17)]
    assert (plan.tokens, plan.read, plan.left_out) == (17, 19, 1)
    assert plan.waste == pytest.approx(1 - 17 / 32)


@pytest.mark.slow
def test_S06_killed_and_on_actors_a_run_of_kept_tokens_has_the_same_bytes(tmp_path):
    rng = np.random.default_rng(3)
    lengths = [int(n) for n in rng.integers(1, 60, 300)]
    write(tmp_path / "d.jsonl", [[True] * n for n in lengths])
    data = ["extract", "toy_models:slow", tmp_path / "d.jsonl", "--run", "r", "--window", 24, "--overlap", 9]
    command = [*data, "--keep", "sample(0.3, 5) OR pos = length - 1", "--unit-rows", 256, "--batch-tokens", 64]

    def promised(lake: Path) -> dict[str, bytes]:
        found = lake / "runs" / "r"
        files = [*(found / "activations.zarr").rglob("c.*"), *(found / "tokens").iterdir(), *(found / "plan").iterdir()]
        return {str(p.relative_to(found)): p.read_bytes() for p in files}

    assert run_layerlake(*command, "--lake", tmp_path / "whole").returncode == 0
    expected = promised(tmp_path / "whole")
    assert len(Lake.open(tmp_path / "whole").run("r").committed()) > 4
    assert killed_at_work(command, tmp_path / "killed", "r") > 1
    assert run_layerlake(*command, "--lake", tmp_path / "killed").returncode == 0
    assert promised(tmp_path / "killed") == expected
    done = run_layerlake(*command, "--lake", tmp_path / "ray", "--engine", "ray", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert promised(tmp_path / "ray") == expected
    assert Lake.open(tmp_path / "killed").verify() == Lake.open(tmp_path / "ray").verify() == []
