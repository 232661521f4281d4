"""Exports are whole or not there, read by other libraries, exact, and they know what they are of."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dying import die_at_each_step
from lakes import make_run
from layerlake import __version__
from layerlake.errors import CorruptLakeError, RequestError, WorldError
from layerlake.store import durable, export
from layerlake.store.lake import Lake
from layerlake.store.tokens import table_hash
from safetensors import safe_open

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # Python 3.12 of every fork

FORMATS = ["npy", "safetensors", "parquet"]


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Lake:
    root = tmp_path_factory.mktemp("lake")
    for name, dtype, seed, trailing in (
        ("bf", "bfloat16", 1, (6,)),
        ("bf2", "bfloat16", 2, (6,)),
        ("half", "float16", 3, (3, 2)),
        ("full", "float32", 4, (5,)),
    ):
        make_run(root, name=name, dtype=dtype, seed=seed, trailing=trailing)
    return Lake.open(root)


def query(run: str) -> str:
    where = "run LIKE 'bf%'" if run == "both" else f"run = '{run}'"
    return f"SELECT run, row, token, pos FROM tokens WHERE {where} ORDER BY hash(row), run"


def write(sel, kind: str, path: Path, layer: int | None = 1, site: str = "resid_post", **options) -> Path:
    return getattr(sel, f"to_{kind}")(path, layer, site, **options)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(export, "_BLOCK_BYTES", 1000)  # some ten rows


RUNS = ["bf", "half", "full", "both"]


@pytest.mark.parametrize("run", RUNS)
def test_npy_is_float32_and_can_be_mapped(lake, tmp_path, run):
    sel = lake.select(query(run))
    path = write(sel, "npy", tmp_path / "x.npy")
    expected = sel.array(1)
    assert path == tmp_path / "x.npy"
    for mode in (None, "r"):
        found = np.load(path, mmap_mode=mode)
        assert found.dtype == np.float32
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("run", RUNS)
def test_safetensors_has_the_stored_bits_and_says_what_they_are(lake, tmp_path, run):
    sel = lake.select(query(run))
    path = write(sel, "safetensors", tmp_path / "x.safetensors")
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"activations", "row"} | ({"run"} if run == "both" else set())
        found = file.get_tensor("activations")
        said = file.metadata()
        assert file.get_tensor("row").tolist() == sel.table["row"].to_pylist()
        runs = json.loads(said["runs"])
        codes = file.get_tensor("run").tolist() if run == "both" else [0] * len(sel)
        assert [runs[c]["run"] for c in codes] == sel.table["run"].to_pylist()
    assert found.dtype == sel.tensor(1).dtype
    assert np.array_equal(found.view(torch.uint8).numpy(), sel.tensor(1).view(torch.uint8).numpy())
    check_metadata(said, lake, sel)


def check_metadata(said: dict[str, str], lake: Lake, sel) -> None:
    runs = json.loads(said["runs"])
    for entry in runs:
        record = lake.run(entry["run"]).record
        assert entry["identity"] == record.identity
        assert entry["weights"] == record.settings["model"]["fingerprint"]
    names = sel.table["run"].unique().to_pylist()
    assert [entry["run"] for entry in runs] == names
    array = lake.run(names[0]).array("resid_post", 1)
    assert (said["site"], json.loads(said["layer"]), said["dtype"]) == ("resid_post", 1, array.dtype)
    assert tuple(json.loads(said["shape"])) == array.shape
    assert (said["query"], said["layerlake"], said["rows"]) == (sel.query, __version__, str(len(sel)))
    assert said["rows_sha256"] == table_hash([sel.table.select(["run", "row"])])


@pytest.mark.parametrize("run", RUNS)
def test_parquet_has_the_table_and_the_activations(lake, tmp_path, run):
    sel = lake.select(query(run))
    path = write(sel, "parquet", tmp_path / "x.parquet")
    found = pq.read_table(path)
    assert found.select(sel.table.column_names).equals(sel.table)
    field = found.schema.field("activations")
    assert pa.types.is_fixed_size_list(field.type)
    assert field.type.value_type == pa.float32()
    shape = json.loads(field.metadata[b"shape"])
    values = found["activations"].combine_chunks().flatten().to_numpy().reshape(len(sel), *shape)
    assert np.array_equal(values.view(np.uint32), sel.array(1).view(np.uint32))
    check_metadata({k.decode(): v.decode() for k, v in found.schema.metadata.items()}, lake, sel)
    import duckdb

    ((first,),) = duckdb.sql(f"SELECT activations FROM '{path}' LIMIT 1").fetchall()
    assert np.array_equal(np.array(first, np.float32), values[0].reshape(-1), equal_nan=True)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("run", ["bf", "half", "both"])
def test_blocks_leave_no_trace_in_the_values(lake, tmp_path, kind, run, monkeypatch):
    sel = lake.select(f"SELECT * FROM ({query(run)}) ORDER BY run, row")
    whole = write(sel, kind, tmp_path / "whole")
    monkeypatch.setattr(export, "_BLOCK_BYTES", 1000)
    parts = write(sel, kind, tmp_path / "parts")
    if kind != "parquet":
        assert parts.read_bytes() == whole.read_bytes()
        return
    assert pq.ParquetFile(parts).num_row_groups > 3
    one, other = pq.read_table(parts), pq.read_table(whole)
    assert one.schema.equals(other.schema, check_metadata=True)
    assert table_bits(one) == table_bits(other)


def table_bits(table: pa.Table) -> list[object]:
    """The columns of a table, activations as bits, as NaN is not NaN."""
    values = table["activations"].combine_chunks().flatten().to_numpy()
    return [*table.drop_columns(["activations"]).to_pydict().items(), values.view(np.uint32).tolist()]


def test_a_site_without_a_layer(lake, tmp_path):
    sel = lake.select(query("bf"))
    with safe_open(sel.to_safetensors(tmp_path / "e", site="embed"), "np") as file:
        assert json.loads(file.metadata()["layer"]) is None
        assert file.metadata()["site"] == "embed"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_exists_is_kept_unless_overwrite(lake, tmp_path, kind):
    sel = lake.select(query("bf"))
    path = tmp_path / "x"
    path.write_text("mine")
    with pytest.raises(RequestError, match="x exists and is kept. Choose another name, or give overwrite=True"):
        write(sel, kind, path)
    assert path.read_text() == "mine"
    write(sel, kind, path, overwrite=True)
    assert path.read_bytes() == write(sel, kind, tmp_path / "y").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "y"]


def test_a_file_that_appears_while_it_is_written_is_kept(lake, tmp_path, monkeypatch):
    path = tmp_path / "x.npy"
    real = export.write_npy
    sel = lake.select(query("bf"))
    monkeypatch.setattr("layerlake.store.selection.write_npy", lambda e, f: (real(e, f), path.write_text("theirs")))
    with pytest.raises(RequestError, match="exists and is kept"):
        sel.to_npy(path, 1)
    assert path.read_text() == "theirs"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kind", FORMATS)
def test_asked_wrongly_is_a_sentence_and_leaves_nothing(lake, tmp_path, kind):
    sel = lake.select(query("bf"))
    before = sorted(lake.root.rglob("*"))
    for path, message in [
        (tmp_path / "no" / "x", "the folder .*no is not there"),
        (tmp_path, "is a folder"),
        (lake.root / "x", "lies in the lake"),
        (lake.run("bf").shard_path(lake.run("bf").array("embed"), 0), "lies in the lake"),
    ]:
        with pytest.raises(RequestError, match=message):
            write(sel, kind, path, overwrite=True)
    with pytest.raises(RequestError, match="Did you mean 'resid_post'"):
        write(sel, kind, tmp_path / "x", site="resid_pots")
    with pytest.raises(RequestError, match="The selection is empty"):
        write(lake.select("SELECT run, row FROM tokens WHERE false"), kind, tmp_path / "x")
    with pytest.raises(RequestError, match="The runs of this selection differ"):
        write(lake.select("SELECT run, row FROM tokens"), kind, tmp_path / "x")
    assert not list(tmp_path.iterdir())
    assert sorted(lake.root.rglob("*")) == before


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("1 AS activations", "column 'activations' of its own"),
        ("1 AS x, 2 AS x", "two columns 'x'"),
        ("INTERVAL 1 DAY AS x", "cannot be written as Parquet"),
    ],
)
def test_a_table_that_parquet_cannot_hold_is_refused(lake, tmp_path, columns, message):
    with pytest.raises(RequestError, match=message):
        lake.select(f"SELECT run, row, {columns} FROM tokens WHERE run = 'bf'").to_parquet(tmp_path / "x", 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_failed_write_leaves_nothing(tmp_path, kind, small_blocks):
    run, _, _ = make_run(tmp_path / "lake", lengths=(30, 30, 30))
    sel = Lake.open(tmp_path / "lake").select("SELECT run, row FROM tokens ORDER BY row")
    out = tmp_path / "out"
    out.mkdir()
    shard = run.shard_path(run.array("resid_post", 1), 2)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])  # the last blocks cannot be read
    for _ in range(2):
        with pytest.raises(CorruptLakeError, match=r"c\.2\.0"):
            write(sel, kind, out / "x")
        assert not list(out.iterdir())
        (out / "x").write_text("mine")
        with pytest.raises(CorruptLakeError, match=r"c\.2\.0"):
            write(sel, kind, out / "x", overwrite=True)
        assert (out / "x").read_text() == "mine"
        (out / "x").unlink()
    shard.write_bytes(whole)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, limits[1]))  # as a full disk: a write fails in the middle
        with pytest.raises(WorldError, match="x could not be written .*Nothing is left of it"):
            write(sel, kind, out / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(out.iterdir())
    write(sel, kind, out / "x")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_any_step_the_name_holds_all_or_what_it_held(lake, tmp_path, kind, overwrite):
    sel = lake.select(query("bf"))
    whole = write(sel, kind, tmp_path / "whole").read_bytes()
    folders: list[Path] = []

    def prepare(moment: int):
        folder = tmp_path / f"m{moment}"
        folder.mkdir()
        folders.append(folder)
        if overwrite:
            (folder / "x").write_bytes(b"before")
        return lambda: write(sel, kind, folder / "x", overwrite=overwrite)

    steps = [(export.os, "fsync"), (durable.os, "link"), (Path, "replace"), (Path, "unlink"), (Path, "open")]
    children = die_at_each_step(steps, prepare)
    assert children >= 5
    for folder in folders:
        held = (folder / "x").read_bytes() if (folder / "x").exists() else None
        assert held in ({b"before", whole} if overwrite else {None, whole})
    assert (folders[-1] / "x").read_bytes() == whole
    assert [p.name for p in folders[-1].iterdir()] == ["x"]


def anonymous_memory() -> int:
    """Bytes of memory of this process that are not pages of files."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("kind", FORMATS)
def test_memory_does_not_grow_with_the_selection(tmp_path, kind, monkeypatch):
    n, width = 40_000, 512
    make_run(tmp_path / "lake", lengths=(1000,) * 4, width=width, unit_rows=2048, layers=1)
    lake = Lake.open(tmp_path / "lake")
    sel = lake.rows("toy", np.random.default_rng(0).integers(0, 2000, n))
    monkeypatch.setattr(export, "_BLOCK_BYTES", 1 << 20)
    seen = []
    real = export.Export.blocks

    def watched(self):
        for block in real(self):
            seen.append(anonymous_memory())
            yield block

    monkeypatch.setattr(export.Export, "blocks", watched)
    write(sel, kind, tmp_path / "warm", 0)
    pa.default_memory_pool().release_unused()
    before = anonymous_memory()
    seen.clear()
    path = write(sel, kind, tmp_path / "x", 0)
    assert len(seen) > 75
    assert (4 if kind == "npy" else 2) * n * width <= 1.5 * path.stat().st_size
    assert max(seen) - before < n * width  # a quarter of the values as float32; a block is a fortieth of that
