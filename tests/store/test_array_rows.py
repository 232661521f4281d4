"""Rows come out of the maps of many shards as they went in, and only what is asked for is read."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import commit_unit, make_run
from layerlake.errors import CorruptLakeError, RequestError, WorldError
from layerlake.store import array_rows, shard_region
from layerlake.store.lake import Lake
from layerlake.store.run import Run
from layerlake.store.shard_region import ShardRegion
from processes import environment

UNITS, UNIT_ROWS = 12, 64


def used(tables: list[Any]) -> np.ndarray:
    return np.concatenate([t["row"].to_numpy() for t in tables])


@pytest.fixture(scope="module", params=["together", "alone"])
def many(request, tmp_path_factory):
    """A run of a dozen units whose shards can lie side by side in memory (64 x 32 x 2 bytes), or cannot."""
    width = {"together": 32, "alone": 6}[request.param]
    root = tmp_path_factory.mktemp(request.param)
    run, tables, bits = make_run(root, lengths=(60,) * UNITS, width=width, unit_rows=UNIT_ROWS)
    assert ShardRegion.fit_together(run.layout(run.record.arrays[0])) == (request.param == "together")
    return root, used(tables), bits


@settings(max_examples=25, deadline=None)
@given(data=st.data(), shards=st.sampled_from([1, 2, 5, 4096]), most=st.sampled_from([1, 3, 4096]))
def test_any_rows_in_any_order_with_few_maps_or_many(many, data, shards, most):
    root, rows, bits = many
    position = st.integers(0, len(rows) - 1)
    run_of_rows = st.tuples(position, st.integers(1, 70)).map(lambda r: list(range(r[0], min(sum(r), len(rows)))))
    pieces = data.draw(st.lists(st.one_of(st.lists(position, max_size=80), run_of_rows), max_size=6))
    wanted = rows[[p for piece in pieces for p in piece]] if any(pieces) else rows[:0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_rows, "REGION_SHARDS", shards)
        patch.setattr(array_rows, "MOST_MAPS", most)
        lake = Lake.open(root)
        if not len(wanted):
            wanted = rows[:1]
        for layer in (0, 1, 0):
            assert np.array_equal(lake.rows("toy", wanted).bits(layer), bits[f"resid_post-{layer}"][wanted])
        held = [r for a in lake._maps._arrays for r in a.regions.values()]
        least = max((int(r.mapped.sum()) for r in held), default=0)  # what is in use is never dropped
        assert sum(int(r.mapped.sum()) for r in held) <= max(most, least)


def test_several_layers_in_one_call_are_those_of_several_calls(many):
    root, rows, bits = many
    sel = Lake.open(root).rows("toy", rows[::7])
    both = sel.bits([1, 0])
    assert np.array_equal(both, np.stack([bits["resid_post-1"][rows[::7]], bits["resid_post-0"][rows[::7]]]))
    assert np.array_equal(sel.array(range(2)), np.stack([sel.array(0), sel.array(1)]), equal_nan=True)
    assert sel.tensor([1]).shape == (1, len(sel), both.shape[-1])
    batches = list(sel.batches([0, 1], size=9))
    assert np.array_equal(np.concatenate([b.array for b in batches], axis=1), sel.array([0, 1]), equal_nan=True)
    with pytest.raises(RequestError, match="no layer '7'"):
        sel.bits([0, 7])
    with pytest.raises(RequestError, match="list of layers is empty"):
        sel.bits([])


def test_units_committed_later_are_read_by_the_lake_that_was_open(tmp_path):
    run, tables, bits = make_run(tmp_path, lengths=(60,) * 4, width=32, unit_rows=UNIT_ROWS, commit=False)
    lake = Lake.open(tmp_path)
    for unit in (2, 0, 3, 1):
        rows = used([tables[unit]])
        with pytest.raises(RequestError, match=f"Row {rows[0]} of run 'toy' cannot be read: its unit is not committed"):
            lake.rows("toy", rows)
        commit_unit(run, unit, tables[unit], bits)
        assert np.array_equal(lake.rows("toy", rows).bits(1), bits["resid_post-1"][rows])


def test_a_run_made_anew_under_its_name_is_read_anew(tmp_path):
    import shutil

    make_run(tmp_path, lengths=(60,) * 3, width=32, unit_rows=UNIT_ROWS)
    lake = Lake.open(tmp_path)
    old = lake.rows("toy", [3, 70]).bits(0)
    shutil.rmtree(tmp_path / "runs" / "toy")
    _, _, bits = make_run(tmp_path, lengths=(60,) * 3, width=32, unit_rows=UNIT_ROWS, seed=5)
    assert np.array_equal(lake.rows("toy", [3, 70]).bits(0), bits["resid_post-0"][[3, 70]])
    assert not np.array_equal(lake.rows("toy", [3, 70]).bits(0), old)


def test_views_outlive_what_was_dropped(monkeypatch, tmp_path):
    _, tables, bits = make_run(tmp_path, lengths=(60,) * 4, width=32, unit_rows=UNIT_ROWS)
    monkeypatch.setattr(array_rows, "REGION_SHARDS", 1)
    monkeypatch.setattr(array_rows, "MOST_MAPS", 1)
    lake = Lake.open(tmp_path)
    lake.rows("toy", [0]).bits(0)
    (region,) = next(iter(lake._maps._arrays)).regions.values()
    view = region._rows[:60]
    del region
    for unit in (1, 2, 3):
        lake.rows("toy", used([tables[unit]])).bits(0)
    del lake
    gc.collect()
    assert np.array_equal(view, bits["resid_post-0"][:60])


def test_threads_share_the_maps_of_a_lake(many):
    root, rows, bits = many
    lake, wrong = Lake.open(root), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_rows, "REGION_SHARDS", 3)
        patch.setattr(array_rows, "MOST_MAPS", 4)

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(25):
                layer, wanted = int(rng.integers(2)), rng.choice(rows, 40)
                if not np.array_equal(lake.rows("toy", wanted).bits(layer), bits[f"resid_post-{layer}"][wanted]):
                    wrong.append(wanted)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert not wrong


UNMAPPED = """
    import os, sys
    from pathlib import Path
    import numpy as np
    from layerlake.store.run import Run
    from layerlake.store.shard_region import ShardRegion
    run = Run(Path(sys.argv[1]), "toy")
    array = run.record.arrays[0]
    region = ShardRegion(run.layout(array), 3)
    region.map([1], [run.shard_path(array, 1)], run.check_same)
    out = np.empty((1, 32), np.uint16)
    region.gather(np.array([64]), out)
    print("read", flush=True)
    for row in (0, 63, 128):
        child = os.fork()
        if not child:
            region.gather(np.array([row]), out)
            os._exit(0)
        print(row, -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_rows_of_shards_that_are_not_mapped_cannot_come_out_as_zeros(tmp_path):
    make_run(tmp_path, lengths=(60,) * 3, width=32, unit_rows=UNIT_ROWS)
    code = [sys.executable, "-c", textwrap.dedent(UNMAPPED), str(tmp_path)]
    done = subprocess.run(code, capture_output=True, text=True, env=environment(), check=False)
    ended = [f"{row} {int(signal.SIGSEGV)}" for row in (0, 63, 128)]
    assert (done.returncode, done.stdout.split("\n")) == (0, ["read", *ended, ""]), done.stderr


@pytest.mark.parametrize("damage", ["missing", "cut", "longer", "index", "folder", "loop"])
@pytest.mark.parametrize("several", [True, False])
def test_a_damaged_shard_is_named_and_the_others_are_read(tmp_path, damage, several):
    run, tables, bits = make_run(tmp_path, lengths=(60,) * 4, width=32, unit_rows=UNIT_ROWS)
    path = run.shard_path(run.array("resid_post", 0), 2)
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "loop":
        path.symlink_to(path)
    elif damage != "missing":
        path.write_bytes({"cut": data[:-1], "longer": data + b"x", "index": data[:-9] + b"x" + data[-8:]}[damage])
    lake = Lake.open(tmp_path)
    files = open_files()
    with pytest.raises(CorruptLakeError, match=str(path)):
        lake.rows("toy", used(tables) if several else used(tables[2:3])).bits(0)
    assert open_files() == files
    rest = used([tables[0], tables[1], tables[3]])
    assert np.array_equal(lake.rows("toy", rest).bits(0), bits["resid_post-0"][rest])
    path.rmdir() if damage == "folder" else path.unlink(missing_ok=True)
    path.write_bytes(data)
    assert np.array_equal(lake.rows("toy", used(tables)).bits(0), bits["resid_post-0"][used(tables)])


def test_a_process_that_may_not_map_more_is_told(monkeypatch, tmp_path):
    make_run(tmp_path, lengths=(60,) * 3, width=32, unit_rows=UNIT_ROWS)
    monkeypatch.setattr(shard_region._libc, "mmap", lambda *arguments: 2**64 - 1)
    with pytest.raises(WorldError, match=r"cannot be mapped into memory .* vm.max_map_count"):
        Lake.open(tmp_path).rows("toy", [0]).bits(0)


NO_ADDRESSES = """
    import resource, sys
    from layerlake.errors import WorldError
    from layerlake.store.lake import Lake
    lake = Lake.open(sys.argv[1])
    sel = lake.rows("toy", [0])
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20),) * 2)
    try:
        sel.bits(0)
    except WorldError as error:
        print(error)
"""


def test_a_process_without_addresses_is_told_which_limit_to_raise(large):
    code = [sys.executable, "-c", textwrap.dedent(NO_ADDRESSES), str(large[0])]
    done = subprocess.run(code, capture_output=True, text=True, env=environment(), check=False)
    assert "not given addresses for 16,777,216 bytes" in done.stdout, done.stderr
    assert "ulimit -v" in done.stdout


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Four units of 4,096 rows of 1 KiB: what a disk and its cache can be told by."""
    root = tmp_path_factory.mktemp("large")
    run, tables, bits = make_run(root, lengths=(4096,) * 4, width=256, dtype="float32", unit_rows=4096, layers=1)
    return root, run, used(tables), bits["resid_post-0"]


def dropped(run: Run) -> int:
    """Have the kernel forget the shards, and say how many bytes the disk has given so far."""
    gc.collect()
    for unit in range(run.record.units):
        fd = os.open(run.shard_path(run.array("resid_post", 0), unit), os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return read_bytes()


def open_files() -> set[str]:
    """Name the files this process holds open, the listing itself left out."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(entry.readlink()))
    return {name for name in found if "resid_post" in name}


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_scattered_rows_from_a_cold_disk_are_right_and_do_not_read_the_whole_file(large):
    root, run, rows, bits = large
    wanted = np.random.default_rng(0).choice(rows, 600, replace=False)
    before = dropped(run)
    got = Lake.open(root).rows("toy", wanted).bits(0)
    taken = read_bytes() - before
    assert np.array_equal(got, bits[wanted])
    if taken == 0:
        pytest.skip("the temporary folder lies in memory")
    assert taken < 600 * 8192 + (1 << 20)  # a page a row, two where it crosses a border; a seventh of the file


@pytest.mark.parametrize("what", ["scan", "sequences"])
def test_runs_of_rows_from_a_cold_disk_are_right(large, what):
    root, run, rows, bits = large
    starts = np.random.default_rng(0).integers(0, len(rows) - 300, 40)
    wanted = rows if what == "scan" else rows[(starts[:, None] + np.arange(300)).ravel()]
    dropped(run)
    assert np.array_equal(Lake.open(root).rows("toy", wanted).bits(0), bits[wanted])


def test_maps_hold_no_file_and_memory_grows_with_the_result_alone(large):
    root, run, rows, _ = large
    lake = Lake.open(root)
    before = open_files()
    lake.rows("toy", rows).bits(0)
    assert open_files() == before
    mapped = Path("/proc/self/maps").read_text().count(str(root))
    assert mapped == run.record.units


def test_zarr_python_and_tensorstore_and_the_maps_give_equal_bytes(many):
    import tensorstore

    root, rows, bits = many
    path = root / "runs" / "toy" / "activations.zarr" / "resid_post-1"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    theirs: Any = tensorstore.open(spec, open=True, read=True).result()
    ours = Lake.open(root).rows("toy", rows).bits(1)
    assert np.array_equal(np.asarray(theirs[rows].read().result()).view(np.uint16), ours)
    array: Any = zarr.open_array(path, mode="r")
    assert np.array_equal(np.asarray(array.oindex[rows]).view(np.uint16), ours)
