"""How fast rows come out of a lake, against a raw memmap of the same bytes and against zarr-python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from layerlake.store.lake import Lake
from layerlake.store.run import Run
from layerlake.store.zarr_bfloat16 import BFloat16
from making import make_lake, raw_copy
from timing import Row, bytes_read, drop_cached, interleaved, row

SEQUENCES, LENGTH = 100, 256


CALLS = {"scan": 1, "1 % scattered": 4, "0.1 % scattered": 20, "100 sequences": 1}
"""Calls a timing: short ones are timed together, each with rows of its own."""


def requests(n: int) -> dict[str, list[np.ndarray]]:
    """The rows that are asked for: all, scattered ones in no order, and sequences."""
    rng = np.random.default_rng(1)
    starts = rng.integers(0, n - LENGTH, SEQUENCES)
    return {
        "scan": [np.arange(n)],
        "1 % scattered": [rng.choice(n, n // 100, replace=False) for _ in range(CALLS["1 % scattered"])],
        "0.1 % scattered": [rng.choice(n, n // 1000, replace=False) for _ in range(CALLS["0.1 % scattered"])],
        "100 sequences": [(starts[:, None] + np.arange(LENGTH)).ravel()],
    }


def read_raw(raw: np.ndarray, what: str) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """How a person would read rows from one raw file: each sensible way, the fastest counts."""
    plain = np.asarray(raw)
    if what == "scan":
        return {"memmap copy": lambda rows: np.array(plain)}
    if what != "100 sequences":
        return {"memmap[rows]": lambda rows: raw[rows]}

    def slices(rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *raw.shape[1:]), raw.dtype)
        for i, start in enumerate(rows[::LENGTH].tolist()):
            out[i * LENGTH : (i + 1) * LENGTH] = plain[start : start + LENGTH]
        return out

    return {"memmap[rows]": lambda rows: raw[rows], "memmap slices": slices}


def measure(folder: Path, rows: int, units: int, width: int, dtype: str, repeats: int) -> Iterator[Row]:
    """Measure one lake, warm and cold."""
    on = f"{rows:,} x {width} {dtype}, {units} shards"
    root = folder / f"read-{rows}-{units}-{width}-{dtype}"
    run = make_lake(root, rows, units, width, dtype)
    raw_path = folder / f"raw-{rows}-{units}-{width}-{dtype}.bin"
    raw = raw_copy(run, 0, raw_path)
    group = zarr.open_group(run.folder / "activations.zarr", mode="r")
    zarr_array: Any = group["resid_post-0"]
    assert BFloat16  # registered
    lake = Lake.open(root)
    for what, wanted in requests(rows).items():
        yield from measure_warm(lake, what, wanted, raw, zarr_array, on, repeats)
    yield from measure_batches(lake, raw, on, dtype, max(3, repeats // 3))
    shards = [run.shard_path(run.array("resid_post", 0), u) for u in range(units)]
    del raw, lake
    yield from measure_cold(root, run, raw_path, shards, rows, on, max(3, repeats // 3))


def measure_warm(
    lake: Lake, what: str, wanted: list[np.ndarray], raw: np.ndarray, zarr_array: Any, on: str, repeats: int
) -> Iterator[Row]:
    """Measure one kind of request with everything in the page cache."""
    selections = [lake.rows("bench", w) for w in wanted]
    for sel, rows in zip(selections, wanted, strict=True):
        assert np.array_equal(sel.bits(0), raw[rows])

    def each(read: Callable[[np.ndarray], object]) -> Callable[[], object]:
        return lambda: [read(rows) for rows in wanted]

    ways = {name: each(read) for name, read in read_raw(raw, what).items()}
    ours = {
        "layerlake": lambda: [sel.bits(0) for sel in selections],
        "and selecting": each(lambda rows: lake.rows("bench", rows).bits(0)),
    }
    slow = {"zarr-python": each(lambda rows: zarr_array[:] if what == "scan" else zarr_array.oindex[rows])}
    times = interleaved(ours | ways | slow, repeats, once=["zarr-python"])
    times = {name: [t / len(wanted) for t in found] for name, found in times.items()}
    yield row(f"{what}, warm", on, times, "layerlake", ways, 0.8)
    yield row(f"{what}, warm", on, times, "layerlake", slow, 50.0 if "scattered" in what else None)
    if what != "scan":
        yield row(f"{what}, warm, selecting included", on, times, "and selecting", ways)


def measure_cold(
    root: Path, run: Run, raw_path: Path, shards: list[Path], rows: int, on: str, repeats: int
) -> Iterator[Row]:
    """Measure with nothing in the page cache: a lake opened anew, its shards opened and checked within the time."""
    layout = run.layout(run.array("resid_post", 0))
    shape = (rows, *layout.trailing)
    read: dict[str, list[int]] = {}

    def ours(wanted: np.ndarray) -> None:
        start = bytes_read()
        Lake.open(root).rows("bench", wanted).bits(0)
        read.setdefault("layerlake", []).append(bytes_read() - start)

    def raw(what: str, wanted: np.ndarray) -> None:
        start = bytes_read()
        fresh = np.memmap(raw_path, layout.dtype.bits, "r", shape=shape)
        list(read_raw(fresh, what).values())[-1](wanted)
        read.setdefault("memmap", []).append(bytes_read() - start)

    for what, (wanted, *_) in requests(rows).items():
        read.clear()
        cases = {
            "layerlake": lambda w=wanted: ours(w),
            "memmap": lambda t=what, w=wanted: raw(t, w),
        }
        times = interleaved(cases, repeats, before=lambda: drop_cached([raw_path, *shards]))
        line = row(f"{what}, cold", on, times, "layerlake", ["memmap"], 0.8)
        share = {k: np.median(v) / layout.data_bytes / len(shards) for k, v in read.items()}
        line.note = f"(read {share['layerlake']:.0%} of the file, memmap {share['memmap']:.0%})"
        yield line


def measure_batches(lake: Lake, raw: np.memmap, on: str, dtype: str, repeats: int) -> Iterator[Row]:
    """Measure shuffled batches over the whole array, as float32 numbers, against gathering and converting by hand."""
    import ml_dtypes

    sel = lake.rows("bench", np.arange(len(raw)))
    size = 4096

    def ours() -> None:
        for batch in sel.batches(0, size=size, shuffle=True, seed=1):
            assert batch.array.dtype == np.float32

    def by_hand() -> None:
        order = np.random.default_rng(1).permutation(len(raw))
        for first in range(0, len(order), size):
            part = raw[order[first : first + size]]
            part.view(np.float32) if dtype == "float32" else part.view(ml_dtypes.bfloat16).astype(np.float32)

    times = interleaved({"layerlake": ours, "memmap gather": by_hand}, repeats)
    yield row("shuffled batches of 4,096, warm", on, times, "layerlake", ["memmap gather"], 0.5)


def measure_layers(folder: Path, repeats: int) -> Iterator[Row]:
    """Measure one sequence at seven layers, in one call."""
    layers, rows = 7, 65_536
    run = make_lake(folder / "layers", rows, 16, 384, "bfloat16", layers)
    raws = [np.asarray(raw_copy(run, i, folder / f"layers-{i}.bin")) for i in range(layers)]
    lake = Lake.open(folder / "layers")
    sel = lake.rows("bench", np.arange(10_000, 10_000 + LENGTH))
    cases = {
        "layerlake": lambda: sel.bits(range(layers)),
        "memmap slices": lambda: [np.array(r[10_000 : 10_000 + LENGTH]) for r in raws],
    }
    assert np.array_equal(cases["layerlake"](), np.stack(cases["memmap slices"]()))
    times = interleaved(cases, repeats * 8)
    yield row("one sequence, 7 layers, warm", "65,536 x 384 bfloat16", times, "layerlake", ["memmap slices"], 1 / 3)
