"""Probes over the layers of a run: planted labels are found where they are, rows and results are kept."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from layerlake.analyze.probe import Probe
from layerlake.analyze.probe_job import probe_layers
from layerlake.errors import CorruptLakeError, RequestError, UnknownNameError
from layerlake.extract.driver import extract
from layerlake.store.lake import Lake
from processes import run_layerlake
from safetensors.numpy import load_file
from toy_models import VOCABULARY, Tuples


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Lake:
    """A run with labels a probe must find (a coordinate's sign) and must not (drawn at random a sequence)."""
    folder = tmp_path_factory.mktemp("probe")
    rng = np.random.default_rng(0)
    side = (Tuples().embed.weight[:, 0] > 0).tolist()
    rows = []
    for i in range(120):
        ids = rng.integers(0, VOCABULARY, 12).tolist()
        rows.append(
            {
                "input_ids": ids,
                "small": [side[t] for t in ids],
                "third": [None if t % 3 == 0 else "abc"[t % 3] for t in ids],
                "luck": int(rng.integers(0, 2)),
                "one": 1,
                "part": i // 2,
            }
        )
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    columns = ["small", "third", "luck", "one", "part"]
    extract("toy_models:tuples", folder / "d.jsonl", folder / "lake", run="toy", label_columns=columns)
    return Lake.open(folder / "lake")


def test_a_label_of_the_token_is_read_everywhere_and_luck_nowhere(lake):
    found = probe_layers(lake, "toy", "small")
    assert [e.place for e in found.entries] == ["embed", "0", "1"]
    for entry in found.entries:
        assert entry.summary["accuracy"] > 0.95
        assert entry.summary["majority"] < 0.7
        assert entry.summary["random_label"] < 0.7
        assert entry.summary["n_rows"] == 120 * 12
        assert len(entry.per_seed) == 3
    luck = probe_layers(lake, "toy", "luck")
    for entry in luck.entries:
        assert 0.3 < entry.summary["accuracy"] < 0.65


def test_a_stored_probe_equals_one_fitted_by_hand_on_the_stored_rows(lake):
    """Q02: the exact rows are kept, and a refit on them gives the same coefficients."""
    probe_layers(lake, "toy", "small", where="pos > 3")
    facts = lake.sql("SELECT * FROM results WHERE kind = 'probe' AND metric = 'n_rows' AND seed IS NULL").to_pylist()
    artifact = next(f["artifact"] for f in facts if f["layer"] == 1 and f["value"] == 120 * 8)
    folder = lake.root / "artifacts" / artifact
    content = json.loads((folder / "artifact.json").read_bytes())
    rows = pq.read_table(lake.root / "artifacts" / f"{content['lineage']['selection']}.parquet")
    assert rows.num_rows == 120 * 8
    assert content["lineage"]["identity"] == lake.run("toy").record.identity
    sel = lake.select("SELECT * FROM kept", tables={"kept": rows})
    again = Probe().fit(sel.array(1), np.array(rows["label"].to_pylist()), rows["grouping"].to_pylist())
    kept = load_file(folder / "probe.safetensors")
    assert np.array_equal(kept["coef"], again.coef_)
    assert np.array_equal(kept["intercept"], again.intercept_)
    assert content["summary"]["accuracy"] == again.accuracy_


def test_missing_labels_are_dropped_and_counted(lake):
    entry = probe_layers(lake, "toy", "third", layers=[0], sites=["resid_post"]).entries[0]
    missing = lake.sql("SELECT count(*) AS n FROM tokens WHERE third IS NULL")["n"][0].as_py()
    assert entry.summary["n_dropped"] == missing > 0
    assert entry.summary["n_rows"] == 120 * 12 - missing
    assert entry.summary["classes"] == ["b", "c"]


def test_the_same_request_again_fits_nothing_and_shows_the_same(lake, monkeypatch):
    first = probe_layers(lake, "toy", "small")
    before = {p: p.stat().st_mtime_ns for p in lake.root.rglob("*") if p.is_file() and "catalog" not in str(p)}
    monkeypatch.setattr(Probe, "fit", lambda *a, **k: pytest.fail("fitted again"))
    assert probe_layers(lake, "toy", "small").rows() == first.rows()
    after = {p: p.stat().st_mtime_ns for p in lake.root.rglob("*") if p.is_file() and "catalog" not in str(p)}
    assert after == before


def test_results_and_probes_can_be_asked_for_in_sql(lake):
    profile = probe_layers(lake, "toy", "small")
    rows = lake.sql(
        "SELECT site, layer, accuracy, majority FROM probes WHERE label = 'small' AND n_rows = 1440 ORDER BY layer"
    )
    stored = {(r["site"], r["layer"]): r["accuracy"] for r in rows.to_pylist()}
    assert stored == {(e.site, e.layer): e.summary["accuracy"] for e in profile.entries}
    seeds = lake.sql("SELECT DISTINCT seed FROM results WHERE seed IS NOT NULL ORDER BY seed")["seed"].to_pylist()
    assert seeds == [0, 1, 2]


def test_splits_are_by_document_or_sequence(lake):
    by_document = probe_layers(lake, "toy", "small", sites=["embed"]).entries[0]
    by_sequence = probe_layers(lake, "toy", "small", sites=["embed"], by="seq").entries[0]
    assert by_document.summary["n_groups"] == by_sequence.summary["n_groups"] == 120
    with pytest.raises(UnknownNameError, match="'token'.*document, seq"):
        probe_layers(lake, "toy", "small", by="token")


def test_units_committed_after_the_last_publication_are_probed_too(lake, tmp_path):
    """As after a driver was killed between a commit and its next publication."""
    import shutil

    copy = tmp_path / "lake"
    shutil.copytree(lake.root, copy)
    record = max((copy / "runs" / "toy" / "units").iterdir())
    content = record.read_bytes()
    record.unlink()
    Lake.open(copy).index()
    record.write_bytes(content)
    entry = probe_layers(Lake.open(copy), "toy", "small", sites=["embed"]).entries[0]
    assert entry.summary["n_rows"] == 120 * 12


def test_a_probe_is_counted_once_however_often_it_is_asked_for(lake):
    probe_layers(lake, "toy", "small", seeds=(4,))
    probe_layers(lake, "toy", "small", seeds=(4,), layers=[0, 0], sites=["resid_post", "resid_post"])
    counted = lake.sql("SELECT count(*) AS n, count(DISTINCT artifact) AS d FROM probes").to_pylist()[0]
    assert counted["n"] == counted["d"]


def test_P06_one_class_is_named_before_anything_is_fitted(lake):
    with pytest.raises(RequestError, match=r"'one'.*1"):
        probe_layers(lake, "toy", "one")


def test_wrong_requests_are_named(lake):
    for arguments, pattern in [
        ({"label": "smal"}, "Did you mean 'small'"),
        ({"label": "small", "layers": [7]}, "layer '7'"),
        ({"label": "small", "sites": ["logits"]}, "site 'logits'"),
        ({"label": "small", "where": "pos > 99"}, "No rows"),
        ({"label": "small", "where": "no such thing"}, "syntax error"),
        ({"label": "small", "where": "nowhere > 1"}, "nowhere"),
        ({"label": "small", "seeds": ()}, "seeds"),
        ({"label": "small", "C": float("nan")}, "finite"),
        ({"label": "small", "test_share": float("nan")}, "test_share"),
        ({"label": "document"}, "no label 'document'"),
    ]:
        label = arguments.pop("label")
        with pytest.raises(RequestError, match=pattern):
            probe_layers(lake, "toy", label, **arguments)


def test_a_condition_cannot_reach_beyond_its_run(lake):
    entry = probe_layers(lake, "toy", "small", sites=["embed"], where="true) OR (true").entries[0]
    assert entry.summary["n_rows"] == 120 * 12


def test_ray_and_inline_give_the_same_bytes(lake, tmp_path):
    """The same job on both engines, in the program: same artifacts, byte for byte."""
    import shutil

    folders = []
    for engine in (["--engine", "inline"], ["--engine", "ray", "--workers", "2"]):
        copy = tmp_path / engine[1]
        shutil.copytree(lake.root, copy)
        for old in (copy / "artifacts").iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        for old in (copy / "results").iterdir():
            old.unlink()
        picture = tmp_path / f"{engine[1]}.png"
        result = run_layerlake("probe", "toy", "--label", "small", "--lake", copy, *engine, "--plot", picture)
        assert result.returncode == 0, result.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")
        folders.append(copy / "artifacts")
    files = [{str(p.relative_to(f)): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in folders]
    assert len(files[0]) == 3 * 2 + 1
    assert files[0] == files[1]


def test_a_probe_job_interrupted_is_completed(lake, tmp_path):
    """A probe that is stored is not fitted again; one that is missing is, to the same bytes."""
    import shutil

    profile = probe_layers(lake, "toy", "small")
    copy = tmp_path / "lake"
    shutil.copytree(lake.root, copy)
    victim = copy / "artifacts" / str(profile.entries[2].artifact)
    kept = {p.name: p.read_bytes() for p in victim.iterdir()}
    shutil.rmtree(victim)
    again = probe_layers(Lake.open(copy), "toy", "small")
    assert again.rows() == profile.rows()
    assert {p.name: p.read_bytes() for p in victim.iterdir()} == kept


def _write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def _ids(rng, n=12):
    return rng.integers(0, VOCABULARY, n).tolist()


def test_P12_a_label_keeps_its_own_type_beside_a_run_with_another(tmp_path):
    """One column of SQL holds the labels of all runs: text in one run must not turn NaN of another into a class."""
    rng = np.random.default_rng(1)
    rows = [{"input_ids": (i := _ids(rng)), "x": [float("nan") if t % 3 == 0 else t % 3 for t in i]} for _ in range(40)]
    extract("toy_models:tuples", _write(tmp_path / "a.jsonl", rows), tmp_path / "lake", run="a", label_columns=["x"])
    lake = Lake.open(tmp_path / "lake")
    request = {"sites": ["embed"], "seeds": (0,), "where": "x > 0 OR isnan(x)"}
    before = probe_layers(lake, "a", "x", **request)
    rows = [{"input_ids": _ids(rng), "x": "text", "only": 1} for _ in range(3)]
    data = _write(tmp_path / "b.jsonl", rows)
    extract("toy_models:tuples", data, tmp_path / "lake", run="b", label_columns=["x", "only"])
    assert lake.sql("SELECT typeof(x) AS t FROM tokens LIMIT 1")["t"].to_pylist() == ["VARCHAR"]
    after = probe_layers(lake, "a", "x", **request)
    assert after.entries[0].summary["classes"] == [1, 2]
    assert after.entries[0].summary["n_dropped"] > 0
    assert after.rows() == before.rows()
    with pytest.raises(UnknownNameError, match="label 'only' in run 'a'"):
        probe_layers(lake, "a", "only")


def test_P01_copies_of_a_document_are_never_on_both_sides(tmp_path):
    rng = np.random.default_rng(2)
    rows = [r for i in range(10) for r in [{"input_ids": _ids(rng), "luck": i % 2}] * 6]
    data = _write(tmp_path / "d.jsonl", rows)
    extract("toy_models:tuples", data, tmp_path / "lake", run="r", label_columns=["luck"])
    for by in ("document", "seq"):
        found = probe_layers(Lake.open(tmp_path / "lake"), "r", "luck", sites=["embed"], by=by, seeds=(0,))
        assert (found.entries[0].summary["n_groups"], found.entries[0].summary["n_rows"]) == (10, 720)


def test_a_condition_is_one_condition(lake):
    count = 120 * 8
    request = {"sites": ["embed"], "seeds": (0,)}
    for where in ("pos > 3 -- the rest", "(pos > 3)\n", "pos > 3 /* ; */"):
        assert probe_layers(lake, "toy", "small", where=where, **request).entries[0].summary["n_rows"] == count
    again = "true) UNION ALL SELECT run, row, small, 'z' FROM tokens WHERE (true"
    for where in ("pos > 3) --", again, "pos > 3; SELECT 1", "pos > 3) LIMIT (5"):
        with pytest.raises(RequestError):
            probe_layers(lake, "toy", "small", where=where, **request)


@pytest.mark.parametrize("name", ["my label", "end", "group", 'a"b', "x'y", "雪 🙂", "label", "grouping", "where;--"])
def test_a_label_may_have_any_name(tmp_path, name):
    rng = np.random.default_rng(3)
    rows = [{"input_ids": (i := _ids(rng)), name: [t % 2 for t in i], "empty": None} for _ in range(8)]
    data = _write(tmp_path / "d.jsonl", rows)
    extract("toy_models:tuples", data, tmp_path / "lake", run="r", label_columns=[name, "empty"])
    lake = Lake.open(tmp_path / "lake")
    found = probe_layers(lake, "r", name, sites=["embed"], seeds=(0,)).entries[0]
    assert (found.summary["classes"], found.summary["n_rows"]) == ([0, 1], 96)
    with pytest.raises(RequestError, match="'empty' has no value in any of its 96 rows"):
        probe_layers(lake, "r", "empty", sites=["embed"])


def test_a_probe_of_an_incomplete_run_says_so(lake, tmp_path):
    import shutil

    copy = tmp_path / "lake"
    shutil.copytree(lake.root, copy)
    (copy / "runs" / "toy" / "units" / "00000001.json").unlink()
    assert run_layerlake("index", "--lake", copy).returncode == 0
    result = run_layerlake("probe", "toy", "--label", "small", "--site", "embed", "--lake", copy, "--seeds", "1")
    assert result.returncode == 0, result.stderr
    units = lake.run("toy").record.units
    assert f"Run toy is incomplete: the probes rest on {units - 1} of its {units} units." in result.stderr
    assert probe_layers(lake, "toy", "small").warnings == ()


def test_a_label_added_later_is_probed_like_one_that_was_extracted(lake, tmp_path):
    import shutil

    copy = Lake.open(shutil.copytree(lake.root, tmp_path / "lake"))
    labels = copy.sql("SELECT seq, pos, token_id, small AS later, NULL AS never FROM tokens WHERE pos < 10")
    copy.annotate("toy", labels, "mine")
    request = {"sites": ["embed"], "seeds": (0,)}
    later = probe_layers(copy, "toy", "later", **request).entries[0].summary
    same = probe_layers(copy, "toy", "small", where="pos < 10", **request).entries[0].summary
    assert (later["accuracy"], later["n_rows"], later["n_dropped"]) == (same["accuracy"], 1200, 240)
    with pytest.raises(RequestError, match="'never' has no value"):
        probe_layers(copy, "toy", "never", **request)
    copy.annotate("toy", labels.drop_columns(["later"]).append_column("later", labels["never"]), "mine")
    with pytest.raises(RequestError, match="'later' has no value"):
        probe_layers(copy, "toy", "later", **request)
    (copy.root / "runs/toy/labels/mine-0002.json").write_bytes(b"")
    with pytest.raises(CorruptLakeError, match="'later' may be one of those that are damaged"):
        probe_layers(copy, "toy", "later", **request)
