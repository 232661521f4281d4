"""A unit is committed whole or not at all, whoever dies, returns from the dead or runs out of disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import commit_unit, make_run
from layerlake.errors import CorruptLakeError
from layerlake.store.catalog import publish_catalog
from layerlake.store.lake import Lake
from layerlake.store.run import Run
from layerlake.store.unit import UnitWriter
from processes import environment


@pytest.fixture(params=["none", "archive"])
def codec(request) -> str:
    return request.param


def promised(run: Run) -> dict[str, str]:
    """Hashes of what two makings of a run must share: shards, token tables, the digests of unit records."""
    files = [p for f in ("activations.zarr", "tokens") for p in (run.folder / f).rglob("*") if p.is_file()]
    found = {str(p.relative_to(run.folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    return found | {f"unit {u}": run.unit_record(u)["sha256"] for u in run.committed()}


def committed_files(run: Run, unit: int) -> dict[Path, bytes]:
    paths = [run.shard_path(a, unit) for a in run.record.arrays] + [run.tokens_path(unit), run.unit_path(unit)]
    return {p: p.read_bytes() for p in paths}


@contextlib.contextmanager
def filled(run: Run, unit: int, tokens: pa.Table, bits: dict[str, np.ndarray]) -> Iterator[UnitWriter]:
    """A writer with every row written and nothing committed."""
    base = unit * run.record.unit_rows
    with UnitWriter(run, unit) as writer:
        for array in run.record.arrays:
            writer.write(array.name, 0, bits[array.name][base : base + tokens.num_rows])
        yield writer


def test_a_zombie_with_the_same_bytes_changes_nothing(tmp_path, codec):
    run, tables, bits = make_run(tmp_path, commit=False, codec=codec)
    sequences = len(set(tables[0]["seq"].to_pylist()))
    with filled(run, 0, tables[0], bits) as zombie:
        record = commit_unit(run, 0, tables[0], bits)
        before = committed_files(run, 0)
        assert zombie.commit(tables[0], sequences, {"seconds": 99.0})["made"] == record["made"]
    assert committed_files(run, 0) == before
    assert list(run.scratch.iterdir()) == []


@pytest.mark.parametrize("what", ["shard", "tokens", "sequences"])
def test_a_zombie_with_other_bytes_is_refused_and_overwrites_nothing(tmp_path, what, codec):
    run, tables, bits = make_run(tmp_path, commit=False, codec=codec)
    other, tokens, sequences = bits, tables[0], len(set(tables[0]["seq"].to_pylist()))
    if what == "shard":
        other = {n: b.copy() for n, b in bits.items()}
        other["resid_post-1"][3, 2] ^= 1
    elif what == "tokens":
        changed = pa.array([f"z{i}" for i in range(tokens.num_rows)])
        tokens = tokens.set_column(tokens.column_names.index("token"), "token", changed)
    else:
        sequences += 1
    with filled(run, 0, tables[0], other) as zombie:
        commit_unit(run, 0, tables[0], bits)
        before = committed_files(run, 0)
        with pytest.raises(CorruptLakeError, match="is kept"):
            zombie.commit(tokens, sequences, {"seconds": 1.0})
    assert committed_files(run, 0) == before
    assert list(run.scratch.iterdir()) == []
    publish_catalog(tmp_path)
    assert Lake.open(tmp_path).verify() == []


@pytest.mark.parametrize("remnant", ["other bytes", "cut", "empty", "longer", "same"])
def test_a_remnant_of_an_uncommitted_unit_is_replaced(tmp_path, remnant, codec):
    expected = promised(make_run(tmp_path / "clean", codec=codec)[0])
    run, tables, bits = make_run(tmp_path / "lake", commit=False, codec=codec)
    commit_unit(run, 0, tables[0], bits)
    run.unit_path(0).unlink()
    paths = [run.shard_path(a, 0) for a in run.record.arrays] + [run.tokens_path(0)]
    for path in paths:
        data = path.read_bytes()
        contents = {"other bytes": bytes(b ^ 1 for b in data), "cut": data[:-3], "empty": b"", "longer": data + b"x"}
        path.write_bytes(contents.get(remnant, data))
    for unit, table in enumerate(tables):
        commit_unit(run, unit, table, bits)
    assert promised(run) == expected
    publish_catalog(tmp_path / "lake")
    assert Lake.open(tmp_path / "lake").verify() == []


KILLED = """
    import os, shutil, sys
    from pathlib import Path
    from dying import die_at_each_step
    from lakes import commit_unit, make_run
    from layerlake.store import unit
    from layerlake.store.run import Run

    steps = [(os, "fsync"), (os, "link"), (os, "open"), (Path, "unlink"), (Path, "replace"),
             (unit, "value_statistics"), (unit, "table_bytes")]
    start = Path(sys.argv[1])
    run, tables, bits = make_run(start, commit=False, codec=sys.argv[2])
    commit_unit(run, 0, tables[0], bits)

    def prepare(moment):
        root = shutil.copytree(start, start.with_name(f"lake{moment}"))
        return lambda: commit_unit(Run(root, "toy"), 1, tables[1], bits)

    print(die_at_each_step(steps, prepare, int(sys.argv[3])))
"""


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_S06_killed_between_any_two_steps_of_a_commit(tmp_path, codec, stride):
    expected = promised(make_run(tmp_path / "clean", codec=codec)[0])
    code = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "start"), codec, str(stride)]
    done = subprocess.run(code, capture_output=True, text=True, env=environment(), timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    moments = int(done.stdout)
    tables, bits = make_run(tmp_path / "again", commit=False, codec=codec)[1:]
    seen, remnants = [], 0
    for moment in range(moments):
        root = tmp_path / f"lake{moment * stride}"
        run = Run(root, "toy")
        published = publish_catalog(root)
        rows = set(Lake.open(root).sql("SELECT row FROM tokens")["row"].to_pylist())
        committed = 1 in run.committed()
        wanted = {r for u in range(1 + committed) for r in tables[u]["row"].to_pylist()}
        assert rows == wanted  # no row before the record, all after it
        seen.append(committed)
        remnants += run.shard_path(run.record.arrays[0], 1).exists() and not committed
        for unit, table in enumerate(tables):
            commit_unit(run, unit, table, bits)
        assert promised(run) == expected
        assert publish_catalog(root) != published
    assert seen == sorted(seen) and seen[0] is False and seen[-1] is True
    assert moments > 20 // stride and remnants > 5 // stride


def test_leaving_without_a_commit_leaves_nothing(tmp_path, codec):
    run, tables, bits = make_run(tmp_path, commit=False, codec=codec)
    before = sorted(p for p in run.folder.rglob("*"))
    with pytest.raises(KeyboardInterrupt), filled(run, 0, tables[0], bits):
        raise KeyboardInterrupt
    with filled(run, 0, tables[0], bits):
        pass
    assert sorted(p for p in run.folder.rglob("*")) == before


@pytest.fixture
def small_disk():
    """Mount file systems of a few hundred KiB; a call gives the folder of one of so many bytes."""
    mounted = []

    def mount(size: int) -> Path:
        # not below tmp_path: another session of pytest may tidy that up, and cannot remove a mounted folder
        folder = Path(tempfile.mkdtemp(prefix="layerlake-disk-"))
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mounting a small file system is not permitted: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount command")
def test_a_full_disk_is_an_error_that_leaves_nothing(small_disk, tmp_path, codec):
    page = 4096
    failed = whole = 0
    sequences = 1
    full = small_disk(1 << 20)
    shape: dict[str, Any] = {"unit_rows": 1024, "lengths": (1000,), "width": 16, "layers": 2}
    run, tables, bits = make_run(full, commit=False, codec=codec, **shape)
    clean = sorted(p for p in full.rglob("*"))
    for free in range(0, 48):
        ballast = full / "ballast"
        room = os.statvfs(full)
        ballast.write_bytes(b"x" * max(0, (room.f_bavail - free) * page))
        before = sorted(p for p in run.folder.rglob("*"))
        try:
            with filled(run, 0, tables[0], bits) as writer:
                writer.commit(tables[0], sequences, {"seconds": 0.1})
            whole += 1
        except OSError as error:
            assert error.errno == errno.ENOSPC
            failed += 1
            assert list(run.scratch.iterdir()) == [], free
            assert run.committed() == set()
            published = {run.shard_path(a, 0) for a in run.record.arrays} | {run.tokens_path(0)}
            assert set(run.folder.rglob("*")) <= set(before) | published
        ballast.unlink()
        if whole:
            break
    assert failed > 10 and whole == 1
    assert run.committed() == {0}
    assert set(clean) <= set(full.rglob("*"))
    publish_and_check(run, tmp_path)


def publish_and_check(run: Run, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.root, tmp_path / "copy"))
    publish_catalog(copy)
    assert Lake.open(copy).verify() == []


@st.composite
def writings(draw: st.DrawFn) -> list[tuple[int, int]]:
    """A partition of a unit's 24 rows into pieces, in any order."""
    cuts = sorted(draw(st.sets(st.integers(1, 23), max_size=10)))
    pieces = list(zip([0, *cuts], [*cuts, 24], strict=True))
    return draw(st.permutations(pieces))


@pytest.fixture(scope="module", params=["none", "archive"])
def reference(request, tmp_path_factory) -> Any:
    root = tmp_path_factory.mktemp("reference")
    asked = {"lengths": (10, 14), "dtype": "float16", "layers": 1, "codec": request.param}
    run, tables, bits = make_run(root, **asked)
    return root, promised(run), tables, bits, asked


@settings(max_examples=12, deadline=None)
@given(pieces=st.lists(writings(), min_size=2, max_size=2))
def test_any_partition_of_the_rows_in_any_order_gives_the_same_bytes(reference, tmp_path_factory, pieces):
    root, expected, tables, bits, asked = reference
    run, _, _ = make_run(tmp_path_factory.mktemp("pieces"), commit=False, **asked)
    assert [a.name for a in run.record.arrays] == ["embed", "resid_post-0"]
    with UnitWriter(run, 0) as writer:
        for array, parts in zip(run.record.arrays, pieces, strict=True):
            for first, last in parts:
                writer.write(array.name, first, bits[array.name][first:last])
        writer.commit(tables[0], 2, {"seconds": 0.1})
    assert promised(run) == expected
    shutil.rmtree(run.root)


@settings(max_examples=20, deadline=None)
@given(pieces=writings(), data=st.data())
def test_a_row_left_out_or_written_twice_is_never_committed(reference, tmp_path_factory, pieces, data):
    root, _, tables, bits, _ = reference
    run = Run(root, "toy")
    left_out = data.draw(st.integers(0, len(pieces) - 1))
    before = promised(run)
    with UnitWriter(run, 0) as writer:
        for array in run.record.arrays:
            for i, (first, last) in enumerate(pieces):
                if i != left_out:
                    writer.write(array.name, first, bits[array.name][first:last])
                    with pytest.raises(ValueError, match="written before"):
                        writer.write(array.name, last - 1, bits[array.name][last - 1 : last])
        with pytest.raises(ValueError, match=f"row {pieces[left_out][0]} .* was never written"):
            writer.commit(tables[0], 2, {})
    assert promised(run) == before
    assert list(run.scratch.iterdir()) == []


@pytest.mark.parametrize(
    "row, shape, kind, why",
    [
        (30, (3, 6), np.uint16, "outside a shard"),
        (-1, (2, 6), np.uint16, "outside a shard"),
        (0, (2, 5), np.uint16, "do not fit"),
        (0, (6,), np.uint16, "do not fit"),
        (0, (2, 6), np.float16, "do not fit"),
        (0, (2, 6), np.uint32, "do not fit"),
    ],
)
def test_rows_of_another_shape_place_or_type_are_refused(tmp_path, row, shape, kind, why):
    run, _, _ = make_run(tmp_path, commit=False)
    with UnitWriter(run, 0) as writer, pytest.raises(ValueError, match=why):
        writer.write("embed", row, np.zeros(shape, kind))


def test_rows_behind_the_unit_s_end_are_refused(tmp_path):
    run, tables, bits = make_run(tmp_path, commit=False)
    used = tables[0].num_rows
    with filled(run, 0, tables[0], bits) as writer:
        writer.write("embed", used, bits["embed"][:1])
        with pytest.raises(ValueError, match=f"rows after the {used} of the unit were written"):
            writer.commit(tables[0], 1, {})
