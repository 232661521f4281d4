"""Compressed runs: the same bits as the raw ones or a sentence, and shards that any reader of Zarr understands."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import commit_unit, make_run
from layerlake.errors import CorruptLakeError, LayerlakeError, MissingExtraError, SettingsDifferError
from layerlake.store.catalog import publish_catalog
from layerlake.store.describe import describe_run
from layerlake.store.durable import canonical_json, read_json, sealed_json
from layerlake.store.lake import Lake
from layerlake.store.run import Run
from layerlake.store.unit_record import record_digest
from processes import environment

# Rows of 128 KiB: 8 to an inner chunk, 4 chunks to a shard.
WIDE: dict[str, Any] = {"trailing": (2, 1 << 14), "dtype": "float32", "layers": 0, "unit_rows": 32}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, np.ndarray, np.ndarray]:
    """A lake with one run raw and compressed, the bits of its one array, and its rows; never changed by a test."""
    root = tmp_path_factory.mktemp("archive") / "lake"
    make_run(root, name="raw", commit=True, **WIDE)
    run, tables, bits = make_run(root, name="packed", codec="archive", **WIDE)
    assert (run.layout(run.array("embed")).chunks, len(tables)) == (4, 3)
    return root, bits["embed"], np.concatenate([t["row"].to_numpy() for t in tables])


@pytest.fixture
def lake(written, tmp_path) -> Path:
    return Path(shutil.copytree(written[0], tmp_path / "lake"))


def first_shard(root: Path) -> Path:
    run = Run(root, "packed")
    return run.shard_path(run.array("embed"), 0)


def read(lake: Lake, run: str = "packed") -> np.ndarray:
    return lake.select(f"SELECT run, row FROM tokens WHERE run = '{run}' ORDER BY row").bits(site="embed")


def index_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data[-68:-4], "<u8").reshape(4, 2).copy()


def with_index(data: bytes, index: np.ndarray) -> bytes:
    """Give the shard another index, with a checksum that fits."""
    body = index.tobytes()
    return data[:-68] + body + google_crc32c.value(body).to_bytes(4, "little")


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_rows_in_any_order_are_those_of_the_raw_run(written, data):
    root, bits, rows = written
    chosen = rows[data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=60))]
    names = data.draw(st.lists(st.sampled_from(["raw", "packed"]), min_size=len(chosen), max_size=len(chosen)))
    lake = Lake.open(root)
    frame = pa.table({"run": pa.array(names, pa.string()), "row": chosen, "k": np.arange(len(chosen))})
    selection = lake.select("SELECT * FROM mine ORDER BY k", tables={"mine": frame})
    if not len(chosen):
        return
    assert np.array_equal(selection.bits(site="embed"), bits[chosen])
    assert np.array_equal(lake.rows("packed", chosen).bits(site="embed"), bits[chosen])
    checked = lake.select("SELECT * FROM mine ORDER BY k", tables={"mine": frame}, verify=True)
    assert np.array_equal(checked.bits(site="embed"), bits[chosen])


def test_a_compressed_shard_is_what_zarr_python_writes(tmp_path):
    """Real numbers in chunks of many Blosc blocks, made twice, once with Blosc told to use threads: the same bytes."""
    import zarr
    from numcodecs import blosc

    values = np.cumsum(np.random.default_rng(0).normal(size=(4096, 512)).astype(np.float32), axis=0)
    shape: dict[str, Any] = {"lengths": (4096,), "unit_rows": 4096, "width": 512, "dtype": "float32", "layers": 0}
    shards = []
    for name, threads in (("one", True), ("two", False)):
        run, tables, _ = make_run(tmp_path, name=name, codec="archive", commit=False, **shape)
        blosc.use_threads = threads
        try:
            record = commit_unit(run, 0, tables[0], {"embed": values.view(np.uint32)})
        finally:
            blosc.use_threads = False
        shards.append(run.shard_path(run.array("embed"), 0).read_bytes())
        assert record["arrays"]["embed"]["bytes"] == len(shards[-1]) < 0.95 * values.nbytes
    assert shards[0] == shards[1]
    group = zarr.open_group(run.folder / "activations.zarr", mode="r+")
    run.shard_path(run.array("embed"), 0).unlink()
    group["embed"][:] = values
    theirs = run.shard_path(run.array("embed"), 0).read_bytes()
    places = np.frombuffer(theirs[-132:-4], "<u8").reshape(-1, 2)
    ours = np.frombuffer(shards[0][-132:-4], "<u8").reshape(-1, 2)
    for (a, n), (b, m) in zip(places.tolist(), ours.tolist(), strict=True):  # Zarr may place them in another order
        assert theirs[a : a + n] == shards[0][b : b + m]


def test_checksums_and_statistics_do_not_depend_on_the_codec(written):
    raw, packed = (Run(written[0], name).unit_record(1)["arrays"]["embed"] for name in ("raw", "packed"))
    assert (raw["crc32c"], raw["statistics"]) == (packed["crc32c"], packed["statistics"])
    assert raw.keys() ^ packed.keys() == {"file_crc32c"}


DAMAGES = {
    "cut": lambda d: d[:-1],
    "half": lambda d: d[: len(d) // 2],
    "empty": lambda d: b"",
    "longer": lambda d: d + b"x",
    "zeros": lambda d: bytes(len(d)),
    "index": lambda d: d[:-30] + bytes([d[-30] ^ 1]) + d[-29:],
    "index checksum": lambda d: d[:-1] + bytes([d[-1] ^ 1]),
    "chunk header": lambda d: b"\xff" + d[1:],
    "a value": lambda d: d[:-5000] + bytes([d[-5000] ^ 1]) + d[-4999:],
    "chunks swapped": lambda d: with_index(d, index_of(d)[[1, 0, 2, 3]]),
    "missing chunk": lambda d: with_index(d, np.where(np.arange(4)[:, None] == 1, np.uint64(2**64 - 1), index_of(d))),
    "chunk outside": lambda d: with_index(d, index_of(d) + np.array([1 << 40, 0], np.uint64)),
}


@pytest.mark.parametrize("what", [*DAMAGES, "gone", "folder"])
def test_a_damaged_shard_is_named_and_read_again_once_it_is_mended(lake, written, what):
    _, bits, rows = written
    shard = first_shard(lake)
    whole = shard.read_bytes()
    before = Lake.open(lake)
    before.select("SELECT run, row FROM tokens WHERE run = 'packed' ORDER BY row LIMIT 1").bits(site="embed")
    shard.unlink()
    if what == "folder":
        shard.mkdir()
    elif what != "gone":
        shard.write_bytes(DAMAGES[what](whole))
    opened = Lake.open(lake)
    for _ in range(2):
        with pytest.raises(CorruptLakeError, match=r"packed/activations\.zarr/embed/c\.0\.0\.0.*verify"):
            read(opened)
    problems = {p.path for p in opened.verify()}
    assert problems == {str(shard.relative_to(lake))}
    assert np.array_equal(read(opened, "raw"), bits[rows])
    if what == "folder":
        shard.rmdir()
    shard.write_bytes(whole)
    for lake_object in (before, opened):
        assert np.array_equal(read(lake_object), bits[rows])
    assert opened.verify() == []


@pytest.mark.parametrize("what", ["gone", "cut"])
def test_a_shard_that_goes_while_the_lake_is_open_never_reads_as_nan(lake, written, what):
    _, bits, rows = written
    opened = Lake.open(lake)
    one = opened.select("SELECT run, row FROM tokens WHERE run = 'packed' ORDER BY row LIMIT 1")
    assert np.array_equal(one.bits(site="embed"), bits[rows[:1]])
    if what == "gone":
        first_shard(lake).unlink()
    else:
        os.truncate(first_shard(lake), 200_000)
    with pytest.raises(CorruptLakeError, match=r"c\.0\.0\.0"):
        read(opened)


@settings(max_examples=12, deadline=None)
@given(at=st.integers(0, 1 << 30), bit=st.integers(0, 7), near_end=st.booleans())
def test_a_flipped_bit_anywhere_is_found_by_verify_and_never_read_as_a_value(small, at, bit, near_end):
    root, shard, whole, expected = small
    at = len(whole) - 1 - at % 40 if near_end else at % len(whole)
    shard.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
    opened = Lake.open(root)
    assert [p.path for p in opened.verify()] == [str(shard.relative_to(root))]
    try:
        assert np.array_equal(read(opened), expected)
    except CorruptLakeError as error:
        assert str(shard) in str(error)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[tuple[Path, Path, bytes, np.ndarray]]:
    """A compressed run whose values are alike, so that there is something to compress."""
    root = tmp_path_factory.mktemp("small")
    run, tables, bits = make_run(root, name="packed", layers=0, width=40, codec="archive", commit=False)
    values = {"embed": (bits["embed"] & 0x0F) | 0x3F80}
    for unit, table in enumerate(tables):
        commit_unit(run, unit, table, values)
    publish_catalog(root)
    shard = run.shard_path(run.array("embed"), 1)
    whole = shard.read_bytes()
    yield root, shard, whole, read(Lake.open(root))
    shard.write_bytes(whole)


def test_other_bytes_that_decode_to_the_same_values_are_still_named(lake, written):
    """The first two chunks in each other's place, and an index that says so: no reader sees a difference."""
    shard = first_shard(lake)
    whole = shard.read_bytes()
    index = index_of(whole)
    first, second = int(index[0, 1]), int(index[1, 1])
    index[0, 0], index[1, 0] = second, 0
    shard.write_bytes(with_index(whole[first : first + second] + whole[:first] + whole[first + second :], index))
    assert np.array_equal(read(Lake.open(lake)), written[1][written[2]])
    problems = Lake.open(lake).verify()
    assert [p.path for p in problems] == [str(shard.relative_to(lake))]
    assert "other bytes than were written, though they decode to the same values" in problems[0].what


def test_a_damaged_description_of_the_array_is_named(lake):
    path = lake / "runs/packed/activations.zarr/embed/zarr.json"
    path.write_text(path.read_text().replace("bitshuffle", "shuffle"))
    with pytest.raises(CorruptLakeError, match=r"embed/zarr\.json holds other bytes"):
        read(Lake.open(lake))


@pytest.mark.parametrize("key", ["bytes", "file_crc32c"])
def test_a_unit_record_must_say_what_a_compressed_shard_is(lake, key):
    run = Run(lake, "packed")
    for bad in (None, -1, "1", 1.5):
        record = read_json(run.unit_path(0))
        record["arrays"]["embed"][key] = bad
        body = {k: v for k, v in record.items() if k not in ("seal", "sha256")}
        run.unit_path(0).write_bytes(sealed_json(body | {"sha256": record_digest(body)}))
        with pytest.raises(CorruptLakeError, match="compressed shard of embed"):
            read(Lake.open(lake))


def test_the_identity_of_a_raw_run_is_what_it_was_before_there_were_codecs(written):
    raw, packed = (Run(written[0], name).record for name in ("raw", "packed"))
    arrays = [{"site": "embed", "layer": None, "dtype": "float32", "shape": [2, 1 << 14]}]
    parts = {"settings": raw.settings, "arrays": arrays, "unit_rows": 32, "tokens_hash": raw.tokens_hash}
    assert raw.identity == hashlib.sha256(canonical_json(parts)).hexdigest() != packed.identity
    assert json.loads((written[0] / "runs/raw/run.json").read_bytes())["arrays"] == arrays
    with pytest.raises(SettingsDifferError, match=r"\(codec: the run has none, asked was archive\)"):
        raw.check_same(packed)
    with pytest.raises(ValueError, match="'zip' is no codec"):
        replace(raw.arrays[0], codec="zip").check()


def test_the_codec_is_shown(written):
    lake = Lake.open(written[0])
    shown = lake.sql("SELECT run, codec FROM arrays ORDER BY run").to_pylist()
    assert [tuple(row.values()) for row in shown] == [("packed", "archive"), ("raw", "none")]
    assert [a["codec"] for a in describe_run(lake, "packed")["arrays"]] == ["archive"]


def test_without_tensorstore_reading_is_a_sentence_and_verify_works(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    lake = Lake.open(written[0])
    with pytest.raises(MissingExtraError, match=r"run 'packed'.*pip install 'layerlake\[archive\]'"):
        read(lake)
    assert len(read(lake, "raw"))
    assert lake.verify() == []


def test_threads_share_an_open_lake_and_copies_of_it_open_for_themselves(written):
    _, bits, rows = written
    opened = Lake.open(written[0])
    selections = [opened.rows("packed", np.random.default_rng(i).permutation(rows)) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for selection, found in zip(selections, pool.map(lambda s: s.bits(site="embed"), selections), strict=True):
            assert np.array_equal(found, bits[selection.rows])
    copy = pickle.loads(pickle.dumps(selections[0]))  # noqa: S301
    assert np.array_equal(copy.bits(site="embed"), bits[copy.rows])


FORKED = """
    import os, sys
    from layerlake.errors import WorldError
    from layerlake.store.lake import Lake

    def read():
        return Lake.open(sys.argv[1]).rows("packed", [0, 1, 2]).bits(site="embed")

    for child_ends_with in (0, 7):  # before and after this process has read
        pid = os.fork()
        if not pid:
            try:
                read()
            except WorldError as error:
                assert "spawn" in str(error)
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == child_ends_with
        read()
"""


def test_a_forked_process_is_refused_instead_of_ended(written):
    code = [sys.executable, "-c", textwrap.dedent(FORKED), str(written[0])]
    done = subprocess.run(code, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_of_the_store_is_never_one_of_tensorstore(lake):
    """Whatever stands in the array's folder."""
    opened = Lake.open(lake)
    shutil.rmtree(lake / "runs/packed/activations.zarr/embed")
    with pytest.raises(LayerlakeError, match="embed"):
        read(opened)
