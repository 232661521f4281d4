"""Whatever happens to a file of a lake, `verify` names it, and no reader ends in anything but a sentence."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lakes import make_run
from layerlake.__main__ import app
from layerlake.errors import CorruptLakeError, LakeFormatError, LakeWarning, LayerlakeError
from layerlake.extract.repair import repair
from layerlake.store.artifacts import selection_name
from layerlake.store.catalog import publish_catalog
from layerlake.store.describe import describe_run
from layerlake.store.durable import canonical_json, file_sha256, read_json, sealed_json
from layerlake.store.lake import Lake
from layerlake.store.parquet import table_bytes
from layerlake.store.run import Run
from layerlake.store.tokens import table_hash
from layerlake.store.unit_record import record_digest
from safetensors.numpy import save_file
from typer.testing import CliRunner

TOKENS = 53
LABELS: dict[str, list[Any]] = {"x": [i / 3 for i in range(TOKENS)], "w": [f"w{i}" for i in range(TOKENS)]}
TRUE: dict[str, dict[str, np.ndarray]] = {}
"""The bits of every run's arrays, as they were written."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A lake of three runs, one of them compressed, and results; never changed by a test."""
    root = tmp_path_factory.mktemp("whole") / "lake"
    for name, seed in (("toy", 0), ("twin", 1)):
        TRUE[name] = make_run(root, name=name, seed=seed, labels=LABELS, layers=2 if name == "toy" else 0)[2]
    TRUE["packed"] = make_run(root, name="packed", layers=0, codec="archive")[2]
    row = {"result": "p", "kind": "probe", "run": "toy", "metric": "accuracy", "value": 0.5, "artifact": "a"}
    pq.write_table(pa.Table.from_pylist([row]), root / "results" / "p.parquet")
    for labels in ("added", "other"):
        table = pa.table({"row": [4, 3, 40], f"{labels}1": [0.5, None, 1.5], f"{labels}2": ["a", "b", None]})
        Lake.open(root).annotate("toy", table, labels)
    keep_artifacts(root)
    assert Lake.open(root).verify() == []
    return root


def keep_artifacts(root: Path) -> None:
    """Keep what a probe keeps: the rows that it was fitted on, its weights and its record."""
    rows = Lake.open(root).select("SELECT run, row, x AS label, seq AS grouping FROM tokens WHERE run = 'toy'").table
    kept = root / "artifacts" / f"{selection_name(table_hash([rows]))}.parquet"
    kept.write_bytes(table_bytes(rows))
    (root / "artifacts" / "probe-1").mkdir()
    weights = root / "artifacts" / "probe-1" / "probe.safetensors"
    save_file({"coef": np.arange(6.0)}, weights)
    record = {"kind": "probe", "lineage": {"run": "toy", "selection": kept.stem}}
    record |= {"files": {weights.name: file_sha256(weights)}}
    (root / "artifacts" / "probe-1" / "artifact.json").write_bytes(sealed_json(record))


@pytest.fixture
def lake(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "lake"))


def kinds(root: Path) -> dict[str, str]:
    """One file of each kind that a lake has, by what it is."""
    run = "runs/toy"
    return {
        "lake": "lake.json",
        "run": f"{run}/run.json",
        "plan sequences": f"{run}/plan/sequences.parquet",
        "plan tokens": f"{run}/plan/tokens-00000.parquet",
        "group metadata": f"{run}/activations.zarr/zarr.json",
        "array metadata": f"{run}/activations.zarr/resid_post-1/zarr.json",
        "first shard": f"{run}/activations.zarr/embed/c.0.0",
        "last shard": f"{run}/activations.zarr/resid_post-1/c.2.0",
        "archive shard": "runs/packed/activations.zarr/embed/c.0.0",
        "archive metadata": "runs/packed/activations.zarr/embed/zarr.json",
        "token table": f"{run}/tokens/00000001.parquet",
        "unit record": f"{run}/units/00000001.json",
        "label table": f"{run}/labels/added-0001.parquet",
        "label record": f"{run}/labels/added-0001.json",
        "result": "results/p.parquet",
        "kept rows": str(next((root / "artifacts").glob("selection-*")).relative_to(root)),
        "weights": "artifacts/probe-1/probe.safetensors",
        "artifact": "artifacts/probe-1/artifact.json",
        "pointer": "catalog.json",
        "generation": str(max((root / "catalog").glob("*.duckdb")).relative_to(root)),
    }


KINDS = ["lake", "run", "plan sequences", "plan tokens", "group metadata", "array metadata", "first shard"]
KINDS += ["last shard", "archive shard", "archive metadata", "token table", "unit record", "label table"]
KINDS += ["label record", "result", "kept rows", "weights", "artifact", "pointer", "generation"]
OTHERS = {
    "run": "runs/twin/run.json",
    "plan sequences": "runs/toy/plan/tokens-00000.parquet",
    "plan tokens": "runs/toy/plan/sequences.parquet",
    "group metadata": "runs/toy/activations.zarr/embed/zarr.json",
    "array metadata": "runs/toy/activations.zarr/zarr.json",
    "first shard": "runs/toy/activations.zarr/embed/c.1.0",
    "last shard": "runs/toy/activations.zarr/resid_post-0/c.2.0",
    "archive shard": "runs/packed/activations.zarr/embed/c.1.0",
    "archive metadata": "runs/toy/activations.zarr/embed/zarr.json",
    "token table": "runs/toy/tokens/00000000.parquet",
    "unit record": "runs/twin/units/00000001.json",
    "label table": "runs/toy/labels/other-0001.parquet",
    "label record": "runs/toy/labels/other-0001.json",
    "pointer": "lake.json",
}
"""A file of the same kind that belongs to something else, to put in a file's place."""


def flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def corruptions(kind: str, root: Path, rng: random.Random, times: int = 1) -> Iterator[tuple[str, bytes | None]]:
    """Many ways in which the content of a file can be wrong; None stands for a file that is gone."""
    data = (root / kinds(root)[kind]).read_bytes()
    for _ in range(2 * times):
        yield "flip", flip(data, rng)
    for _ in range(times):
        yield "truncate", data[: rng.randrange(1, len(data))]
    yield "cut by one", data[:-1]
    yield "append", data + rng.randbytes(rng.randrange(1, 50))
    if kind != "lake":  # a lake.json that an editor ended with a line is still one
        yield "append space", data + b" \n"
    yield "empty", b""
    yield "zeros", bytes(len(data))
    yield "noise", rng.randbytes(len(data))
    if kind in OTHERS:
        yield "another's", (root / OTHERS[kind]).read_bytes()
    if not (kind == "pointer" or (kind == "generation")):  # a catalog may be deleted: it is built again
        yield "deleted", None


def read_everything(root: Path) -> list[str]:
    """Go through every reader there is; anything but a `LayerlakeError` ends the test. Returns the sentences."""
    said = []

    def attempt(call: Callable[[], object]) -> object:
        try:
            return call()
        except (LayerlakeError, LakeWarning) as error:  # warnings are errors in these tests
            said.append(str(error))
            return None

    opened = attempt(lambda: Lake.open(root))
    if not isinstance(opened, Lake):
        return said
    attempt(opened.runs)
    attempt(lambda: opened.sql("SELECT * FROM runs JOIN arrays USING (run)"))
    attempt(lambda: opened.sql("SELECT count(DISTINCT COLUMNS(*)) FROM tokens JOIN sequences USING (run, seq)"))
    attempt(lambda: opened.sql("FROM stats, probes, results"))
    for layer, site in ((None, "embed"), (0, "resid_post"), (1, "resid_post")):
        query = "SELECT run, row FROM tokens WHERE run = 'toy'"
        attempt(lambda q=query, la=layer, s=site: opened.select(q).array(la, s))
    attempt(lambda: opened.select("SELECT run, row FROM tokens WHERE run = 'packed'").array(site="embed"))
    for run in ("toy", "twin", "packed"):
        attempt(lambda r=run: read_in_every_way(opened, r, root.parent))
    attempt(opened.verify)
    attempt(lambda: describe_run(opened, "toy"))
    attempt(lambda: opened.remove("toy", dry_run=True))
    for dry_run in (True, False):
        attempt(lambda d=dry_run: repair(root, dry_run=d))
    for run in ("toy", "packed"):
        attempt(lambda r=run: opened.annotate(r, pa.table({"seq": [1], "pos": [2], "later": ["x"]}), "later"))
    attempt(opened.index)
    for arguments in (["ls"], ["show", "toy"], ["verify"], ["sql", "FROM labels"], ["rm", "toy", "--yes"]):
        result = CliRunner().invoke(app, [*arguments, "--lake", str(root)])
        assert isinstance(result.exception, (LayerlakeError, LakeWarning, SystemExit, type(None))), result.exception
    return said


def read_in_every_way(lake: Lake, run: str, folder: Path) -> None:
    """Read an array of a run in all ways, checked; what is given out must be what was written."""
    true = TRUE[run]["embed"]
    for verify in (True, False):
        selection = lake.select(f"SELECT run, row FROM tokens WHERE run = '{run}' ORDER BY row", verify=verify)
        if len(selection):  # a damaged run is left out
            bits = selection.bits(site="embed")
            assert not verify or np.array_equal(bits, true[selection.rows])
    selection = lake.rows(run, [40, 3, 3], verify=True)
    assert np.array_equal(selection.bits(site="embed"), true[[40, 3, 3]])
    for batch in selection.batches(site="embed", size=2, shuffle=True):
        assert len(batch.array) == batch.table.num_rows
    for batch in selection.torch_dataset(site="embed", size=2):
        assert np.array_equal(batch["activations"].view(torch.uint16).numpy(), true[[40, 3, 3]][batch["index"].numpy()])
    assert selection.context(40).token == "t25"
    for write in (selection.to_npy, selection.to_safetensors, selection.to_parquet):
        write(folder / "export", site="embed", overwrite=True)


@pytest.mark.parametrize("times, most", [(1, 6), pytest.param(20, 100, marks=pytest.mark.slow)])  # 1,200 in all
@pytest.mark.parametrize("kind", KINDS)
def test_verify_names_the_file_whatever_happened_to_it(lake, kind, times, most):
    name = kinds(lake)[kind]
    run = name.split("/")[1] if name.startswith("runs/") else None
    path, original = lake / name, (lake / name).read_bytes()
    rng = random.Random(kind)
    ways = list(corruptions(kind, lake, rng, times))
    for what, content in rng.sample(ways, min(most, len(ways))):
        assert content != original
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        if kind == "lake":
            with pytest.raises(LakeFormatError, match="lake"):
                Lake.open(lake)
                pytest.fail(f"{what} opened: {content}")
        else:
            named = {p.path for p in Lake.open(lake).verify(run if path.exists() else None)}
            allowed = {name} | ({"catalog.json"} if kind in ("run", "unit record") else set())
            if kind in ("run", "unit record") and content is None:  # what it vouched for is no longer accounted for
                allowed |= {n for n in named if n.startswith("runs/toy/")}
            if kind == "label record" and content is None:
                allowed.add(kinds(lake)["label table"])
            assert name in named and named <= allowed, (what, named)
        path.unlink(missing_ok=True)
        path.write_bytes(original)
    assert Lake.open(lake).verify() == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 21))])
def test_no_reader_ends_in_anything_but_a_sentence(whole, tmp_path, seed):
    rng = random.Random(seed)
    every = kinds(whole)
    for kind in KINDS[1::6] if seed == 0 else KINDS:
        name, chosen = every[kind], rng.sample(list(corruptions(kind, whole, rng, 3)), 1)
        for what, content in chosen:
            root = Path(shutil.copytree(whole, tmp_path / "lake"))
            (root / name).unlink()
            if content is not None:
                (root / name).write_bytes(content)
            for sentence in read_everything(root):
                assert len(sentence) > 20, (kind, what)
            shutil.rmtree(root)


def test_two_shards_swapped_are_both_named(lake):
    run = Run(lake, "toy")
    one, two = run.shard_path(run.array("resid_post", 0), 0), run.shard_path(run.array("resid_post", 1), 0)
    spare = lake / "spare"
    one.rename(spare), two.rename(one), spare.rename(two)
    assert [p.path for p in Lake.open(lake).verify()] == [str(p.relative_to(lake)) for p in (one, two)]


def test_two_units_swapped_whole_are_named(lake):
    run = Run(lake, "toy")
    pairs = [(run.shard_path(a, 0), run.shard_path(a, 1)) for a in run.record.arrays]
    pairs += [(run.tokens_path(0), run.tokens_path(1)), (run.unit_path(0), run.unit_path(1))]
    for one, two in pairs:
        kept = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(kept)
    assert {p.path for p in Lake.open(lake).verify()} == {f"runs/toy/units/0000000{i}.json" for i in (0, 1)}
    with pytest.raises(CorruptLakeError, match="belongs to another run or unit"):
        Lake.open(lake).select("SELECT run, row FROM tokens WHERE run = 'toy'")


def test_files_that_belong_to_nothing_are_named(lake):
    names = ["activations.zarr/embed/c.3.0", "activations.zarr/embed/c.00.0", "activations.zarr/embed/x",
             "activations.zarr/stray", "tokens/00000009.parquet", "tokens/1.parquet", "units/7.json",
             "units/00000009.json.bak"]  # fmt: skip
    for name in names:
        (lake / "runs/toy" / name).write_bytes(b"x")
    (lake / "runs/toy/activations.zarr/resid_post-9").mkdir()
    found = {p.path: p.what for p in Lake.open(lake).verify()}
    assert found == {f"runs/toy/{n}": "does not belong to this run" for n in [*names, "activations.zarr/resid_post-9"]}


def test_a_unit_beyond_the_run_is_named(lake):
    run = Run(lake, "toy")
    record = read_json(run.unit_path(2)) | {"unit": 3, "first_row": 96}
    write_unit(run, 3, record)
    problems = Lake.open(lake).verify()
    assert "runs/toy/units/00000003.json" in {p.path for p in problems}
    assert any("is beyond the run's 3 units" in p.what for p in problems)


def test_remnants_are_said_to_be_some(lake):
    run = Run(lake, "toy")
    run.unit_path(1).unlink()
    publish_catalog(lake)
    problems = Lake.open(lake).verify()
    files = [run.shard_path(a, 1) for a in run.record.arrays] + [run.tokens_path(1)]
    assert [p.path for p in problems] == sorted(str(f.relative_to(lake)) for f in files)
    assert all("is a remnant: unit 1 is not committed" in p.what for p in problems)


def test_a_stale_catalog_is_named(lake):
    run = Run(lake, "toy")
    stale = (lake / "catalog.json").read_bytes(), max((lake / "catalog").glob("*.duckdb"))
    record = run.unit_path(2).read_bytes()
    run.unit_path(2).unlink()
    publish_catalog(lake)
    run.unit_path(2).write_bytes(record)
    what = [p.what for p in Lake.open(lake).verify()]
    assert what == ["indexes 2 units of run toy, 3 are committed: `layerlake index`"]
    (lake / "catalog.json").write_bytes(stale[0])
    assert Lake.open(lake).verify() == []


def test_a_plan_replaced_with_its_hashes_is_still_not_the_plan_that_was_asked_for(lake):
    run = Run(lake, "toy")
    other, tables, _ = make_run(lake.parent / "other", name="toy", lengths=(6, 8, 3, 16, 7, 12, 1), commit=False)
    shutil.rmtree(run.folder / "plan")
    shutil.copytree(other.folder / "plan", run.folder / "plan")
    value = run.record.to_json() | {"files": run.record.files | other.record.files}
    (run.folder / "run.json").write_bytes(sealed_json(value))
    problems = Lake.open(lake).verify("toy")
    assert [p.path for p in problems] == ["runs/toy/plan"]
    assert "does not give the tokens that the run was made of" in problems[0].what


def test_the_hash_of_a_table_tells_missing_from_zero_and_not_how_rows_are_cut():
    values = [[0, None, 2], [0, 0, 2], [None, 0, 2], [0, None, None]]
    tables = [pa.table({"a": pa.array(v, kind)}) for v in values for kind in (pa.int64(), pa.float64(), pa.int32())]
    tables += [pa.table({"a": pa.array(v, pa.string())}) for v in (["", None], [None, ""], ["a", "b"], ["ab", ""])]
    tables += [pa.table({"b": [0, 0, 2]}), pa.table({"a": [True, None]}), pa.table({"a": [True, False]})]
    assert len({table_hash([t]) for t in tables}) == len(tables)
    for table in tables:
        assert table_hash(table.slice(i, 1) for i in range(table.num_rows)) == table_hash([table])


def write_unit(run: Run, unit: int, record: dict[str, Any]) -> None:
    """Write a unit record with right hashes, whatever it says."""
    body = {k: v for k, v in record.items() if k not in ("seal", "sha256")}
    run.unit_path(unit).write_bytes(sealed_json(body | {"sha256": record_digest(body)}))


ABSURD: list[object] = [None, True, -1, 10**30, 1.5, "", "x", "../../x", [], [[]], {}, {"a": {}}, "\0", 2**63, -(2**63)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def with_one_replaced(value: Any, path: tuple[Any, ...], new: object) -> Any:
    if not path:
        return new
    copy = json.loads(json.dumps(value))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return copy


def reseal(path: Path, value: Any, kind: str) -> None:
    """Write absurd content as whoever wrote it on purpose would: with right hashes."""
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if k != "seal"}
        if kind == "run":
            with contextlib.suppress(Exception):
                from layerlake.store.record import ArraySpec, RunRecord

                fields = {k: v for k, v in value.items() if k != "identity"}
                arrays = tuple(ArraySpec(**(a | {"shape": tuple(a["shape"])})) for a in fields.pop("arrays"))
                value["identity"] = RunRecord(arrays=arrays, **fields).identity
        if kind == "unit record":
            value["sha256"] = record_digest(value)
        path.write_bytes(sealed_json(value))
    else:
        path.write_bytes(canonical_json(value))


@pytest.mark.parametrize("times", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["run", "unit record", "label record", "pointer", "lake"])
def test_absurd_content_with_right_hashes_is_a_sentence(whole, tmp_path, kind, times):
    name = kinds(whole)[kind]
    original = read_json(whole / name)
    rng = random.Random(kind)
    cases = [(p, v) for p in places(original) for v in ABSURD]
    root = Path(shutil.copytree(whole, tmp_path / "lake"))
    pristine = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    for path, new in rng.sample(cases, min(times, len(cases))):
        reseal(root / name, with_one_replaced(original, path, new), kind)
        with contextlib.suppress(LayerlakeError, LakeWarning):
            opened = Lake.open(root)
            for call in (
                opened.runs,
                opened.verify,
                opened.index,
                lambda o=opened: describe_run(o, "toy"),
                lambda o=opened: o.sql("FROM runs"),
                lambda o=opened: o.select("SELECT run, row FROM tokens").array(1),
            ):
                with contextlib.suppress(LayerlakeError, LakeWarning):
                    call()
        for file in root.rglob("*"):
            if file.is_file() and file not in pristine:
                file.unlink()
        for file, data in pristine.items():
            if not file.is_file() or file.read_bytes() != data:
                file.write_bytes(data)


@pytest.mark.parametrize("text", ["1e999", "NaN", "9" * 5000, '"\\ud800"', "[" * 50_000, '{"a":1,"a":2}', "\ufeff{}"])
def test_json_that_python_reads_and_others_do_not_is_a_sentence(whole, tmp_path, text):
    root = Path(shutil.copytree(whole, tmp_path / "lake"))
    for kind in ("run", "unit record", "lake"):
        path = root / kinds(root)[kind]
        original = path.read_bytes()
        for content in (text.encode(), b'{"settings":' + text.encode() + b"}"):
            path.write_bytes(content)
            with pytest.raises(LayerlakeError):
                Run(Lake.open(root).root, "toy").unit_record(1)
        path.write_bytes(original)


PUTS: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path),
    "nowhere": lambda path: path.symlink_to(path.parent / "nowhere"),
    "folder elsewhere": lambda path: path.symlink_to("/"),
    "file elsewhere": lambda path: path.symlink_to("/dev/null"),
}
EACH = [(kind, list(PUTS)[i % len(PUTS)]) for i, kind in enumerate(KINDS[::3])]
REST = [(k, p) for k in KINDS for p in PUTS if (k, p) not in EACH]


@pytest.mark.parametrize("kind, put", [*EACH, *(pytest.param(*r, marks=pytest.mark.slow) for r in REST)])
def test_folders_links_and_loops_in_the_place_of_files(lake, kind, put):
    path = lake / kinds(lake)[kind]
    path.unlink()
    PUTS[put](path)
    if kind not in ("lake", "pointer", "generation", "result"):
        assert Lake.open(lake).verify()
    read_everything(lake)


def test_odd_folders_among_the_runs_are_no_runs(lake):
    (lake / "runs" / "empty").mkdir()
    (lake / "runs" / "a file").write_text("x")
    (lake / "runs" / "loop").symlink_to(lake / "runs" / "loop")
    (lake / "runs" / "odd name").mkdir()
    (lake / "runs" / "odd name" / "run.json").write_text("{}")
    (lake / "runs" / "half.0123.tmp").mkdir()  # one that is being made
    opened = Lake.open(lake)
    assert opened.runs() == ["packed", "toy", "twin"]
    publish_catalog(lake, rebuild=True)
    assert {p.path for p in opened.verify()} == {f"runs/{n}/run.json" for n in ("empty", "a file", "loop", "odd name")}


def test_flipped_values_are_for_verify_and_reading_shows_them(lake):
    """The reading path checks sizes and indexes, not checksums; this states it."""
    run = Run(lake, "toy")
    shard = run.shard_path(run.array("embed"), 0)
    opened = Lake.open(lake)
    before = opened.select("SELECT run, row FROM tokens WHERE run = 'toy' ORDER BY row").bits(site="embed")
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    after = Lake.open(lake).select("SELECT run, row FROM tokens WHERE run = 'toy' ORDER BY row").bits(site="embed")
    assert np.argwhere(before != after).tolist() == [[0, 0]]
    assert [(p.path, p.what) for p in opened.verify()] == [
        (str(shard.relative_to(lake)), "holds other values than were written, from row 0 on (1 chunk)")
    ]


def test_verify_only_reads(lake):
    shutil.rmtree(lake / "catalog")
    (lake / "catalog.json").unlink()
    before = {p: p.stat().st_mtime_ns for p in lake.rglob("*")}
    assert Lake.open(lake).verify() == []
    assert {p: p.stat().st_mtime_ns for p in lake.rglob("*")} == before


def test_the_command_counts_names_and_ends_with_one(lake):
    good = CliRunner().invoke(app, ["verify", "--lake", str(lake)])
    assert (good.exit_code, good.output) == (0, "Checked 3 runs, 9 units: everything is as it was written.\n")
    shard = lake / "runs/toy/activations.zarr/embed/c.0.0"
    os.truncate(shard, 10)
    bad = CliRunner().invoke(app, ["verify", "--lake", str(lake), "--run", "toy"])
    assert bad.exit_code == 1
    assert "runs/toy/activations.zarr/embed/c.0.0: " in bad.output and "1 problem." in bad.output
    other = CliRunner().invoke(app, ["verify", "--lake", str(lake), "--run", "twin"])
    assert other.exit_code == 0
