"""Stored bits come back unchanged through every reader, and holes are seen as holes."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch
from lakes import commit_unit, make_run
from layerlake.errors import CorruptLakeError, RequestError
from layerlake.store.catalog import publish_catalog
from layerlake.store.lake import Lake
from layerlake.store.unit import UnitWriter
from processes import environment

DTYPES = ["bfloat16", "float16", "float32"]
by_codec = pytest.mark.parametrize("codec", ["none", "archive"])


SHAPES: dict[str, Any] = {"unit_rows": 1024, "lengths": (300, 700, 900, 5)}


def used_rows(tables: list[pa.Table]) -> np.ndarray:
    return np.concatenate([t["row"].to_numpy() for t in tables])


@by_codec
@pytest.mark.parametrize("trailing", [(200,), (4, 50)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_S01_every_bit_pattern_survives_in_three_readers(tmp_path, dtype, trailing, codec):
    run, tables, bits = make_run(tmp_path, trailing=trailing, dtype=dtype, codec=codec, commit=False, **SHAPES)
    for array in bits.values():  # random bits come by many patterns; here come all there are of 16
        array.reshape(-1)[: 1 << 16] = np.arange(1 << 16) << (array.itemsize * 8 - 16)
    for unit, table in enumerate(tables):
        commit_unit(run, unit, table, bits)
    publish_catalog(tmp_path)
    rows = used_rows(tables)
    sel = Lake.open(tmp_path).select("SELECT run, row FROM tokens ORDER BY row")
    for layer, site in [(None, "embed"), (0, "resid_post"), (1, "resid_post")]:
        name = run.array(site, layer).name
        assert np.array_equal(sel.bits(layer, site), bits[name][rows])

        import zarr

        stored = zarr.open_group(run.folder / "activations.zarr", mode="r")[name][:]
        assert np.array_equal(np.asarray(stored)[rows].view(bits[name].dtype), bits[name][rows])

        import tensorstore

        path = str(run.folder / "activations.zarr" / name)
        plain = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result()
        assert plain.dtype.name == dtype
        assert np.array_equal(plain.read().result()[rows].view(bits[name].dtype), bits[name][rows])


@pytest.mark.parametrize("way", ["import", "entry point"])
def test_zarr_opens_bfloat16_once_the_type_is_registered(tmp_path, way):
    """zarr 3.1.6 collects the entry point and never loads it; a zarr that does needs no import of ours."""
    if way == "import":
        register = "import layerlake.store.zarr_bfloat16"
    else:
        register = "from zarr.dtype import data_type_registry; data_type_registry._lazy_load()"
        if not [e for e in importlib.metadata.entry_points(group="zarr.data_type") if e.name == "bfloat16"]:
            pytest.skip("layerlake is on the path here, not installed")
    run, tables, bits = make_run(tmp_path)
    code = (
        f"import sys, zarr, numpy as np\n{register}\n"
        f"a = zarr.open_group({str(run.folder / 'activations.zarr')!r}, mode='r')['embed']\n"
        "print(a.dtype.name, 'layerlake.store.lake' in sys.modules, np.asarray(a[:3]).view(np.uint16).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment()
    )
    assert done.stdout.strip() == f"bfloat16 False {bits['embed'][:3].tolist()}", done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
def test_array_gives_numbers_and_tensor_the_stored_dtype(tmp_path, dtype):
    run, tables, bits = make_run(tmp_path, dtype=dtype)
    numbers = np.array([1.5, -2.0, 0.15625, 3.0, 0.0, -0.0], np.float32)
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[dtype]
    known = {n: np.tile(numbers.astype(kind).view(b.dtype), (len(b), 1)) for n, b in bits.items()}
    other = make_run(tmp_path, name="known", dtype=dtype, commit=False)[0]
    for unit, table in enumerate(tables):
        commit_unit(other, unit, table, known)
    lake = Lake.open(tmp_path)
    lake.index()
    sel = lake.select("SELECT run, row FROM tokens WHERE run = 'known'")
    assert sel.array(0).dtype == np.float32
    assert np.array_equal(sel.array(0), np.tile(numbers, (len(sel), 1)))
    assert sel.tensor(0).dtype == getattr(torch, dtype)
    assert torch.equal(sel.tensor(0).float(), torch.from_numpy(sel.array(0)))


@by_codec
def test_tails_are_nan_for_other_readers(tmp_path, codec):
    run, tables, _ = make_run(tmp_path, codec=codec)
    import zarr

    stored = np.asarray(zarr.open_group(run.folder / "activations.zarr", mode="r")["embed"][:]).astype(np.float32)
    tail = np.ones(len(stored), bool)
    tail[used_rows(tables)] = False
    assert tail.sum() > 0
    assert np.isnan(stored[tail]).all()


@by_codec
def test_rows_keep_the_order_of_the_table_with_duplicates(tmp_path, codec):
    run, tables, bits = make_run(tmp_path, codec=codec)
    rng = np.random.default_rng(3)
    rows = rng.choice(used_rows(tables), 500)
    frame = pa.table({"run": ["toy"] * len(rows), "row": rows, "k": np.arange(len(rows))})
    sel = Lake.open(tmp_path).select("SELECT run, row, k FROM mine ORDER BY k", tables={"mine": frame})
    assert np.array_equal(sel.table["row"].to_numpy(), rows)
    assert np.array_equal(sel.bits(1), bits["resid_post-1"][rows])


def test_two_runs_in_one_selection(tmp_path):
    _, _, first = make_run(tmp_path, name="a", seed=1)
    _, _, second = make_run(tmp_path, name="b", seed=2, codec="archive")
    sel = Lake.open(tmp_path).select("SELECT run, row FROM tokens ORDER BY row DESC, run")
    expected = [
        {"a": first, "b": second}[run]["embed"][row]
        for run, row in zip(sel.table["run"].to_pylist(), sel.table["row"].to_pylist(), strict=True)
    ]
    assert np.array_equal(sel.bits(site="embed"), np.stack(expected))


def test_batches_cover_each_row_once_and_depend_on_the_seed_alone(tmp_path):
    make_run(tmp_path)
    lake = Lake.open(tmp_path)
    sel = lake.select("SELECT run, row FROM tokens ORDER BY row")
    seen = {}
    for seed in (0, 0, 1):
        batches = list(sel.batches(layer=0, size=7, shuffle=True, seed=seed))
        order = [r for b in batches for r in b.table["row"].to_pylist()]
        assert sorted(order) == sel.table["row"].to_pylist()
        for batch in batches:
            again = lake.select("SELECT run, row FROM t", tables={"t": batch.table})
            assert np.array_equal(again.array(0).view(np.uint32), batch.array.view(np.uint32))
        assert seen.setdefault(seed, order) == order
    assert seen[0] != seen[1]
    assert len(list(sel.batches(layer=0, size=7, drop_last=True))) == len(sel) // 7


def test_rows_without_a_token_are_refused(tmp_path):
    run, tables, _ = make_run(tmp_path)
    lake = Lake.open(tmp_path)
    hole = tables[0].num_rows
    for row, why in [(hole, "no token"), (-1, "no such row"), (10**9, "no such row")]:
        with pytest.raises(RequestError, match=f"Row {row} of run 'toy' cannot be read: .*{why}"):
            lake.select(f"SELECT 'toy' AS run, {row} AS row")
    with pytest.raises(RequestError, match="columns run and row"):
        lake.select("SELECT run FROM tokens")


def test_unknown_site_and_layer_list_what_there_is(tmp_path):
    make_run(tmp_path)
    sel = Lake.open(tmp_path).select("SELECT run, row FROM tokens")
    with pytest.raises(RequestError, match="no site 'resid_pots'.*Did you mean 'resid_post'"):
        sel.array(0, "resid_pots")
    for layer in (99, -1):
        with pytest.raises(RequestError, match=rf"no layer '{layer}' .*Known: 0, 1"):
            sel.array(layer)
    with pytest.raises(RequestError, match="Give a layer of site 'resid_post' in run 'toy': 0, 1"):
        sel.array()
    with pytest.raises(RequestError, match="'embed' in run 'toy' belongs to no layer"):
        sel.array(3, "embed")


def test_a_row_never_written_or_written_twice_is_an_error(tmp_path):
    run, tables, bits = make_run(tmp_path, commit=False)
    with UnitWriter(run, 0) as writer:
        for array in run.record.arrays:
            writer.write(array.name, 0, bits[array.name][:3])
            with pytest.raises(ValueError, match="written before"):
                writer.write(array.name, 2, bits[array.name][:3])
        with pytest.raises(ValueError, match="row 3 .* was never written"):
            writer.commit(tables[0], 1, {})
    assert not run.committed()
    assert not list(run.scratch.iterdir())


def test_S10_scattered_rows_are_not_slower_than_reading_everything(tmp_path):
    import time

    n = 40_000
    run, tables, bits = make_run(tmp_path, lengths=(2000,) * (n // 2000), width=64, unit_rows=16384, layers=1)
    rows = np.random.default_rng(0).choice(used_rows(tables), 2000)
    lake = Lake.open(tmp_path)
    some = lake.select("SELECT run, row FROM t", tables={"t": pa.table({"run": ["toy"] * 2000, "row": rows})})
    everything = lake.select("SELECT run, row FROM tokens ORDER BY row")
    assert np.array_equal(some.bits(0), bits["resid_post-0"][rows])

    def best(call) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(lambda: some.array(0)) <= 1.5 * best(lambda: everything.array(0))


def test_damaged_shards_are_named(tmp_path):
    run, _, _ = make_run(tmp_path)
    shard = run.shard_path(run.array("resid_post", 1), 0)
    whole = shard.read_bytes()
    query = "SELECT run, row FROM tokens"
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole + b"x", whole[:-6] + b"\1" + whole[-5:], b""):
        shard.write_bytes(damaged)
        with pytest.raises(CorruptLakeError, match=r"c\.0\.0"):
            Lake.open(tmp_path).select(query).array(1)
    shard.unlink()
    with pytest.raises(CorruptLakeError, match="missing"):
        Lake.open(tmp_path).select(query).array(1)
