"""What holds of a run holds of its pooled rows: no other rows, the same bytes, damage found and made good, proofs."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors
import tensorstore
import toy_models
import zarr
from hypothesis import given
from hypothesis import strategies as st
from layerlake.__main__ import app
from layerlake.analyze.probe_job import probe_layers
from layerlake.errors import ReplayError, RequestError, SettingsDifferError, UnknownNameError
from layerlake.extract import worker
from layerlake.extract.driver import ExtractReport, extract
from layerlake.extract.packing import choose_pooled_rows, pack_kinds
from layerlake.extract.repair import repair
from layerlake.extract.verify_replay import verify_replay
from layerlake.store.lake import Lake
from layerlake.store.row_kinds import RowKinds
from processes import killed_at_work, run_layerlake
from typer.testing import CliRunner

ALL = "tokens,sequences,spans:k"
MEANS = "sequences,spans:k"


def write(path: Path, documents: int = 60, longest: int = 30) -> None:
    rng = np.random.default_rng(5)
    rows = []
    for n in rng.integers(1, longest, documents).tolist():
        labels = [None if v == 3 else int(v) for v in np.repeat(rng.integers(0, 4, n), 3)[:n]]
        rows.append({"input_ids": rng.integers(0, toy_models.VOCABULARY, n).tolist(), "k": labels, "d": n})
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def run(folder: Path, name: str = "r", model: str = "toy_models:tuples", **options: Any) -> ExtractReport:
    base: dict[str, Any] = {"label_columns": ["k", "d"], "run": name, "rows": ALL, "dtype": "bfloat16"}
    return extract(model, folder / "d.jsonl", folder / "lake", **(base | options))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Make a lake with runs of all kinds of rows, of means only, of tokens only, and of sequences only."""
    folder = tmp_path_factory.mktemp("made")
    write(folder / "d.jsonl")
    for name, rows in (("all", ALL), ("means", MEANS), ("tokens", "tokens"), ("seqs", "sequences")):
        run(folder, name, rows=rows)
    return folder


@pytest.fixture
def lake(made) -> Lake:
    return Lake.open(made / "lake")


@pytest.fixture
def spoiled(made, tmp_path) -> Path:
    """Give a lake that may be spoiled."""
    return Path(shutil.copytree(made / "lake", tmp_path / "lake"))


class TestNeverOtherRows:
    def test_of_several_kinds_the_reader_says_which(self, lake):
        sel = lake.select("SELECT run, span_row AS row FROM spans WHERE run = 'all'")
        for read in (sel.array, sel.bits, sel.tensor, sel.batches, sel.torch_dataset):
            with pytest.raises(RequestError, match="stores rows of tokens and sequences and spans: say which"):
                read(0)
        with pytest.raises(UnknownNameError, match="Did you mean 'spans'"):
            sel.array(0, rows="span")

    def test_of_one_kind_it_need_not_be_said(self, lake):
        sel = lake.select("SELECT run, sequence_row AS row FROM sequences WHERE run = 'seqs' ORDER BY row")
        assert np.array_equal(sel.bits(0), sel.bits(0, rows="sequences"))
        same = lake.select("SELECT run, sequence_row AS row FROM sequences WHERE run = 'all' ORDER BY row")
        assert np.array_equal(sel.bits([0, 1]), same.bits([0, 1], rows="sequences"))

    def test_a_kind_that_the_run_does_not_store_is_refused(self, lake):
        with pytest.raises(UnknownNameError, match="no kind of rows 'tokens' in run 'means'"):
            lake.rows("means", [0]).array(0, rows="tokens")
        with pytest.raises(UnknownNameError, match="no kind of rows 'spans' in run 'tokens'"):
            lake.select("SELECT run, row FROM tokens WHERE run = 'tokens'").array(0, rows="spans")

    @pytest.mark.parametrize("name", ["means", "seqs"])
    def test_tokens_of_a_run_of_means_have_no_rows(self, lake, name):
        with pytest.raises(RequestError, match="NULLs"):
            lake.select(f"SELECT run, row FROM tokens WHERE run = '{name}'")
        query = "SELECT * EXCLUDE (run, row) FROM tokens WHERE run = '{}' ORDER BY seq, pos"
        assert lake.sql(query.format(name)).equals(lake.sql(query.format("tokens")))
        facts = lake.sql(f"SELECT count(first_row) AS first, sum(rows) AS n FROM sequences WHERE run = '{name}'")
        assert facts.to_pylist() == [{"first": 0, "n": 0}]

    @pytest.mark.parametrize("kind", ["sequences", "spans"])
    def test_a_row_that_is_not_there_is_refused(self, lake, kind):
        record = lake.run("all").record
        used = set(
            lake.sql(f"SELECT {kind[:-1]}_row AS r FROM {kind} WHERE run = 'all' AND r IS NOT NULL")["r"].to_pylist()
        )
        everything = range(record.units * record.rows[kind])
        assert used < set(everything)
        for row in everything:
            sel = lake.rows("all", [row])
            if row in used:
                assert not np.isnan(sel.array(0, rows=kind)).any()
            else:
                with pytest.raises(RequestError, match=f"Row {row} of {kind} .* no {kind[:-1]} stands there"):
                    sel.array(0, rows=kind)
        with pytest.raises(RequestError, match="the run has no such row"):
            lake.rows("all", [len(everything)]).array(0, rows=kind)

    def test_rows_of_one_kind_in_one_run_and_another_in_another_are_refused(self, lake):
        tokens = "SELECT run, row FROM tokens WHERE run = 'tokens'"
        both = f"{tokens} UNION ALL SELECT run, sequence_row AS row FROM sequences WHERE run = 'seqs'"
        with pytest.raises(RequestError, match="rows of sequences and tokens"):
            lake.select(both).array(0)

    def test_a_mean_has_no_context(self, lake):
        with pytest.raises(RequestError, match="say which"):
            lake.select("SELECT run, span_row AS row FROM spans WHERE run = 'all'").context(0)
        with pytest.raises(RequestError, match="is a mean"):
            lake.select("SELECT run, sequence_row AS row FROM sequences WHERE run = 'seqs'").context(0)
        assert lake.select("SELECT run, row FROM tokens WHERE run = 'all'").context(0, rows="tokens").token

    def test_probes_need_tokens(self, lake):
        with pytest.raises(RequestError, match="stores no tokens, .* but rows of sequences and spans"):
            probe_layers(lake, "means", "k")

    def test_a_probe_of_a_run_with_means_too_is_fitted_on_its_tokens(self, spoiled):
        some = {"layers": [1], "sites": ["resid_post"], "seeds": (0,), "where": "k < 2"}
        found = [probe_layers(Lake.open(spoiled), name, "k", **some).rows() for name in ("all", "tokens")]
        assert found[0]
        assert [r["value"] for r in found[0]] == [r["value"] for r in found[1]]

    def test_a_damaged_chunk_is_not_given_out(self, spoiled):
        found = Lake.open(spoiled)
        sel = found.select("SELECT run, span_row AS row FROM spans WHERE run = 'all' ORDER BY row", verify=True)
        flip(spoiled / "runs/all/activations.zarr/resid_post-1.spans/c.0.0")
        sel.array(0, rows="spans")
        with pytest.raises(Exception, match="spans/c.0.0 holds other bytes"):
            sel.array(1, rows="spans")

    def test_every_way_of_reading_gives_the_same(self, lake, tmp_path):
        sel = lake.select("SELECT run, span_row AS row, k FROM spans WHERE run = 'all' ORDER BY k, row")
        whole = sel.array(1, rows="spans")
        assert whole.shape == (len(sel), 8)
        assert np.array_equal(copy.copy(sel).array(1, rows="spans"), whole)
        batches = [b.array for b in sel.batches(1, rows="spans", size=7)]
        assert np.array_equal(np.concatenate(batches), whole)
        data = [b["activations"].float().numpy() for b in sel.torch_dataset(1, rows="spans", size=7)]
        assert np.array_equal(np.concatenate(data), whole)
        assert np.array_equal(np.load(sel.to_npy(tmp_path / "a.npy", 1, rows="spans")), whole)
        with safetensors.safe_open(sel.to_safetensors(tmp_path / "a.safetensors", 1, rows="spans"), "np") as file:
            assert file.metadata()["kind"] == "spans"
        table = pa.parquet.read_table(sel.to_parquet(tmp_path / "a.parquet", 1, rows="spans"))
        assert np.array_equal(np.stack(table["activations"].to_numpy()), whole)


class TestRequests:
    @pytest.mark.parametrize(
        ("rows", "says"),
        [
            ("words", "'words' is no kind of rows"),
            ("spans", "'spans' is no kind of rows"),
            ("spans:", "no kind of rows"),
            ("tokens:k", "no kind of rows"),
            ("", "at least one kind"),
            ("spans:k,spans:d", "spans of one label"),
            ("spans:d", "one a document"),
            ("spans:x", "no label 'x'.*Known: k"),
        ],
    )
    def test_rows_that_cannot_be_are_refused_before_anything_is_written(self, made, tmp_path, rows, says):
        command = ["extract", "toy_models:tuples", str(made / "d.jsonl"), "--lake", str(tmp_path / "l"), "--rows", rows]
        done = CliRunner().invoke(app, [*command, "--label-column", "k", "--label-column", "d"])
        assert done.exit_code != 0
        with pytest.raises(RequestError, match=says):
            extract("toy_models:tuples", made / "d.jsonl", tmp_path / "l", rows=rows, label_columns=["k", "d"])
        assert not (tmp_path / "l").exists()

    def test_other_rows_into_the_same_run_are_refused_by_name_and_the_same_are_a_no_op(self, made):
        with pytest.raises(SettingsDifferError, match="rows: the run has tokens, sequences, spans:k, asked was None"):
            run(made, "all", rows="tokens")
        with pytest.raises(SettingsDifferError, match="rows: the run has None, asked was sequences"):
            run(made, "tokens", rows="sequences")
        assert run(made, "all", rows=["spans:k", "tokens", "sequences"]).units_done == 0

    def test_labels_without_a_value_have_no_spans(self, tmp_path):
        (tmp_path / "d.jsonl").write_text(json.dumps({"input_ids": [1, 2], "k": [None, None], "d": 1}) + "\n")
        with pytest.raises(RequestError, match="no row of spans: no token that is stored has a value of 'k'"):
            run(tmp_path)

    def test_ls_show_and_sql_say_the_kinds(self, made):
        def told(*command: str) -> str:
            done = CliRunner().invoke(app, [*command, "--lake", str(made / "lake")])
            assert done.exit_code == 0
            return done.output

        assert "tokens, sequences, spans:k" in told("ls")
        sizes = Lake.open(made / "lake").run("means").record.rows
        shown = told("show", "means")
        assert f"{sizes['sequences']} rows of sequences, {sizes['spans']} rows of spans each" in shown
        assert "sequences, spans:k" in shown
        assert json.loads(told("show", "means", "--json"))["rows"] == "sequences, spans:k"
        query = "SELECT rows, count(*) AS n FROM arrays WHERE run = 'all' GROUP BY rows ORDER BY rows"
        assert [r["n"] for r in Lake.open(made / "lake").sql(query).to_pylist()] == [3, 3, 3]

    def test_labels_of_a_run_of_means_are_matched_by_position(self, spoiled):
        found = Lake.open(spoiled)
        with pytest.raises(RequestError, match="Give seq and pos"):
            found.annotate("means", pa.table({"row": [0], "z": [1]}), "z")
        found.annotate("means", pa.table({"seq": [2, 0], "pos": [0, 0], "z": [5, 7]}), "z")
        query = "SELECT seq, pos, z FROM tokens WHERE run = 'means' AND z IS NOT NULL ORDER BY seq"
        assert [tuple(r.values()) for r in found.sql(query).to_pylist()] == [(0, 0, 7), (2, 0, 5)]
        assert (
            len(found.select("SELECT run, span_row AS row FROM spans WHERE run = 'means'")) > 20
        )  # the run was indexed anew

    def test_spans_of_other_labels_and_types_share_a_table(self, tmp_path):
        path = tmp_path / "d.jsonl"
        path.write_text(json.dumps({"input_ids": [1, 2, 3], "k": [1, 1, 2], "d": [True, None, False]}) + "\n")
        run(tmp_path, "numbers")
        run(tmp_path, "flags", rows="spans:d")
        path.write_text(json.dumps({"input_ids": [1, 2, 3], "k": ["x", "x", "y"], "d": [None] * 3}) + "\n")
        run(tmp_path, "texts")
        found = (
            Lake.open(tmp_path / "lake")
            .sql("SELECT run, k, d, tokens FROM spans ORDER BY run DESC, span_row")
            .to_pylist()
        )
        assert [tuple(r.values()) for r in found] == [
            ("texts", "x", None, 2),
            ("texts", "y", None, 1),
            ("numbers", "1", None, 2),
            ("numbers", "2", None, 1),
            ("flags", None, True, 1),
            ("flags", None, False, 1),
        ]

    def test_a_label_that_the_table_has_a_column_for_is_refused(self, tmp_path):
        (tmp_path / "d.jsonl").write_text(json.dumps({"input_ids": [1], "Span": [1]}) + "\n")
        with pytest.raises(RequestError, match="spans has a column 'Span' of its own"):
            run(tmp_path, rows="spans:Span", label_columns=["Span"])


class TestStored:
    def test_other_readers_open_pooled_arrays(self, made, lake):
        import layerlake.store.zarr_bfloat16

        assert layerlake.store.zarr_bfloat16
        group = zarr.open_group(made / "lake/runs/all/activations.zarr", mode="r")
        for kind in ("sequences", "spans"):
            sel = lake.select(
                f"SELECT run, {kind[:-1]}_row AS row FROM {kind} "
                f"WHERE run = 'all' AND {kind[:-1]}_row IS NOT NULL ORDER BY row"
            )
            mine = sel.array(1, rows=kind)
            name = f"resid_post-1.{kind}"
            array = np.asarray(group[name][:]).astype(np.float32)
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": str(made / f"lake/runs/all/activations.zarr/{name}")},
            }
            other = tensorstore.open(spec, open=True, read=True).result().read().result().astype(np.float32)
            for whole in (array, other):
                assert np.array_equal(whole[sel.rows], mine)
                rest = np.setdiff1d(np.arange(len(whole)), sel.rows)
                assert len(rest)
                assert np.isnan(whole[rest]).all()

    def test_statistics_are_of_the_means_and_leave_tails_out(self, lake):
        for kind in ("sequences", "spans"):
            sel = lake.select(
                f"SELECT run, {kind[:-1]}_row AS row FROM {kind} WHERE run = 'all' AND {kind[:-1]}_row IS NOT NULL"
            )
            values = sel.array(0, rows=kind).astype(np.float64)
            query = f"SELECT * FROM stats WHERE run = 'all' AND site = 'resid_post' AND layer = 0 AND rows = '{kind}'"
            (stats,) = lake.sql(query).to_pylist()
            assert (stats["count"], stats["nonfinite"]) == (values.size, 0)
            np.testing.assert_allclose(
                [stats["mean"], stats["variance"], stats["norm"]],
                [values.mean(), values.var(), np.linalg.norm(values, axis=1).mean()],
            )

    def test_a_unit_without_any_span_is_a_unit(self, tmp_path):
        rows = [{"input_ids": [1, 2, 3], "k": [0 if i == 0 else None] * 3, "d": 1} for i in range(30)]
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        for name, codec in (("r", "none"), ("a", "archive")):
            run(tmp_path, name, unit_rows=32, codec=codec)
            found = Lake.open(tmp_path / "lake")
            query = f"SELECT count(*) FILTER (WHERE span_rows = 0) AS n, count(*) AS of FROM units WHERE run = '{name}'"
            (counts,) = found.sql(query).to_pylist()
            assert counts["n"] == counts["of"] - 1 > 1
        assert found.verify() == []

    def test_token_rows_are_the_same_with_and_without_means(self, lake):
        one, other = lake.run("all").record, lake.run("tokens").record
        assert one.plan_hash == other.plan_hash
        a, b = (lake.select(f"SELECT run, row FROM tokens WHERE run = '{n}' ORDER BY row") for n in ("all", "tokens"))
        assert np.array_equal(a.bits(1, rows="tokens"), b.bits(1))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)


def promised(folder: Path) -> dict[str, bytes]:
    files = [*(folder / "activations.zarr").rglob("c.*"), *(folder / "tokens").iterdir(), *(folder / "plan").iterdir()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


class TestKept:
    @pytest.mark.parametrize("name", ["all", "means"])
    @pytest.mark.parametrize("shard", ["resid_post-1.sequences/c.0.0", "embed.spans/c.0.0"])
    def test_a_flipped_byte_is_found_and_redone(self, spoiled, name, shard):
        folder = spoiled / "runs" / name
        before = promised(folder)
        flip(folder / "activations.zarr" / shard)
        (problem,) = Lake.open(spoiled).verify()
        assert problem.path.endswith(shard)
        assert "holds other values" in problem.what
        assert repair(spoiled).whole
        assert promised(folder) == before
        assert Lake.open(spoiled).verify() == []

    def test_a_flipped_byte_of_the_table_of_spans_is_found_and_made_again(self, spoiled):
        path = spoiled / "runs/all/plan/spans.parquet"
        before = path.read_bytes()
        flip(path)
        (problem,) = Lake.open(spoiled).verify()
        assert problem.path.endswith("plan/spans.parquet")
        assert repair(spoiled).whole
        assert path.read_bytes() == before

    def test_replay_holds_means_to_the_model(self, spoiled):
        report = verify_replay(spoiled, run="means", share=1.0)
        assert report.problems == []
        assert report.sequences > 20
        assert report.values is not None
        assert report.values < 0.01

    def test_replay_finds_means_of_a_wrong_place_where_every_checksum_is_right(self, tmp_path, monkeypatch):
        write(tmp_path / "d.jsonl", 20)
        real = worker.BatchPools.means
        with monkeypatch.context() as patched:
            patched.setattr(worker.BatchPools, "means", lambda *a: (real(*a)[0], np.roll(real(*a)[1], 1, axis=0)))
            patched.setattr(worker.ReplayCheck, "check", lambda *a: None)
            run(tmp_path, rows="sequences")
        assert Lake.open(tmp_path / "lake").verify() == []
        (problem,) = verify_replay(tmp_path / "lake").problems
        assert "its mean that was to be stored at site embed is not that of" in problem.what

    @pytest.mark.parametrize(
        "fault",
        [
            lambda means, places: means[::-1],
            lambda means, places: means * 1.1,
            lambda means, places: means * 0,
        ],
        ids=["swapped", "counted wrongly", "zeros"],
    )
    @pytest.mark.parametrize("rows", ["sequences", "spans:k"])
    def test_a_wrong_mean_is_not_committed(self, tmp_path, monkeypatch, fault, rows):
        write(tmp_path / "d.jsonl", 20)
        real = worker.BatchPools.means

        def wrong(self: Any, *arguments: Any) -> Any:
            places, means = real(self, *arguments)
            return places, np.ascontiguousarray(fault(means, places))

        monkeypatch.setattr(worker.BatchPools, "means", wrong)
        with pytest.raises(ReplayError, match="its mean .*is not that of what the model gives"):
            run(tmp_path, rows=rows, dtype="float32")
        assert Lake.open(tmp_path / "lake").run("r").committed() == set()

    @pytest.mark.slow
    def test_S06_killed_and_on_actors_pooled_rows_have_the_same_bytes(self, tmp_path):
        write(tmp_path / "d.jsonl", 300, 60)
        data = ["extract", "toy_models:slow", tmp_path / "d.jsonl", "--run", "r", "--label-column", "k"]
        command = [*data, "--rows", ALL, "--unit-rows", 512, "--batch-tokens", 64]
        assert run_layerlake(*command, "--lake", tmp_path / "whole").returncode == 0
        expected = promised(tmp_path / "whole/runs/r")
        assert killed_at_work(command, tmp_path / "killed", "r") > 1
        assert run_layerlake(*command, "--lake", tmp_path / "killed").returncode == 0
        assert promised(tmp_path / "killed/runs/r") == expected
        done = run_layerlake(*command, "--lake", tmp_path / "ray", "--engine", "ray", "--workers", 2)
        assert done.returncode == 0, done.stderr
        assert promised(tmp_path / "ray/runs/r") == expected
        assert Lake.open(tmp_path / "killed").verify() == Lake.open(tmp_path / "ray").verify() == []


needs = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1), st.integers(0, 20)), min_size=1, max_size=80)


@given(rows=needs, kinds=st.sampled_from([ALL, MEANS, "sequences", "spans:k", "tokens,spans:k"]))
def test_units_hold_sequences_in_order_until_any_kind_would_overflow(rows, kinds):
    each = dict(zip(("tokens", "sequences", "spans"), map(list, zip(*rows, strict=True)), strict=True))
    asked = RowKinds.parse(kinds)
    each = {k: v for k, v in each.items() if k == "tokens" or k in asked.kinds}
    sizes = {"tokens": 512} | choose_pooled_rows(each, 512, asked)
    assert all(n & (n - 1) == 0 for n in sizes.values())
    units, first = pack_kinds(each, sizes)
    taken: dict[str, set[int]] = {kind: set() for kind in sizes}
    used = {kind: 0 for kind in sizes}
    for i, unit in enumerate(units):
        if i and unit > units[i - 1]:
            assert unit == units[i - 1] + 1
            assert any(used[kind] + each[kind][i] > sizes[kind] for kind in sizes)  # it did not fit any more
            used = dict.fromkeys(sizes, 0)
        for kind, size in sizes.items():
            mine = range(first[kind][i], first[kind][i] + each[kind][i])
            assert first[kind][i] == unit * size + used[kind]
            assert all(r // size == unit for r in mine)
            assert taken[kind].isdisjoint(mine)
            taken[kind].update(mine)
            used[kind] += each[kind][i]
    assert units[0] == 0
