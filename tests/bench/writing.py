"""How fast a unit of seven arrays becomes durable, against writing the same bytes by hand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from layerlake.store.record import ArraySpec
from layerlake.store.unit import UnitWriter
from making import SEQUENCE, bits_of, make_empty
from timing import Row, interleaved, row

ARRAYS, ROWS, WIDTH, BATCH = 7, 16_384, 384, 4096


def measure(folder: Path, repeats: int) -> Iterator[Row]:
    """Measure committing one unit; each call writes a unit of its own."""
    for dtype in ("bfloat16", "float32"):
        yield from _measure(folder, dtype, repeats)


def _measure(folder: Path, dtype: str, repeats: int) -> Iterator[Row]:
    arrays = tuple(ArraySpec("resid_post", i, dtype, (WIDTH,)) for i in range(ARRAYS))
    for name in ("written", "by-hand"):
        shutil.rmtree(folder / name, ignore_errors=True)
    run = make_empty(folder / "written", "bench", ROWS * repeats, repeats, arrays)
    values = np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)
    bits = [np.roll(bits_of(values, dtype), i, axis=0) for i in range(ARRAYS)]
    by_hand = folder / "by-hand"
    by_hand.mkdir()
    units, hands = iter(range(repeats)), iter(range(repeats))
    tokens = [run.planned_tokens(u) for u in range(repeats)]

    def ours() -> None:
        unit = next(units)
        with UnitWriter(run, unit) as writer:
            for first in range(0, ROWS, BATCH):
                for array, content in zip(run.record.arrays, bits, strict=True):
                    writer.write(array.name, first, content[first : first + BATCH])
            writer.commit(tokens[unit], ROWS // SEQUENCE, {"seconds": 0.0})

    def hand() -> None:
        # Batch by batch, as the values come from a model, then fsync and rename, and the folder once.
        number = next(hands)
        files = [(by_hand / f"{number}-{i}.tmp").open("xb", buffering=0) for i in range(ARRAYS)]
        for first in range(0, ROWS, BATCH):
            for file, content in zip(files, bits, strict=True):
                file.write(content[first : first + BATCH])
        for i, file in enumerate(files):
            os.fsync(file.fileno())
            file.close()
            (by_hand / f"{number}-{i}.tmp").rename(by_hand / f"{number}-{i}")
        fd = os.open(by_hand, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    times = interleaved({"layerlake": ours, "write + fsync + rename": hand}, repeats, before=os.sync)
    on = f"7 x {ROWS:,} x {WIDTH} {dtype}"
    line = row("a unit made durable", on, times, "layerlake", ["write + fsync + rename"], 0.8)
    megabytes = ARRAYS * bits[0].nbytes / 1e6
    line.note = f"({megabytes / line.ours_ms * 1e3:,.0f} MB/s; checksums, statistics and token table included)"
    yield line
    for name in ("written", "by-hand"):
        shutil.rmtree(folder / name)
