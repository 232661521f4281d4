"""What an extraction would cost, told before it is paid: rows, bytes, memory and time."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .batch import Batch, plan_batches, split_sequences
from .batch_check import check_batches
from .prepare import Prepared, prepare, torch_threads
from .replay_check import BUDGET
from .request import ExtractRequest
from .settings import array_points
from .space import array_bytes, check_space, free_bytes
from .worker import to_stored

_SECONDS = 10.0
"""How long batches are timed; the first is the warming up."""
_FEWEST = 3
_DISK_PROBE = 64 << 20


@dataclass(frozen=True)
class ArrayCost:
    """An array of a planned run: `bytes` of all its shards; of a compressed one, the most that it can take."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """What an extraction would take. Of what is not asked to be timed, the fields are None."""

    run: str
    documents: int
    sequences: int
    tokens: int
    """Tokens that are stored."""
    tokens_read: int
    units: int
    unit_rows: int
    unit_sizes: dict[str, int]
    """Rows of a unit by the kinds of rows that are stored."""
    waste: float
    """The share of planned rows of tokens that stay unused."""
    padding: float
    """Pads a token that is read, in the batches of the first units."""
    arrays: list[ArrayCost]
    bytes: int
    free: int
    fits: bool
    memory: int | None
    """Peak anonymous memory of a worker in bytes, as the timed batches showed it."""
    tokens_per_second: float | None
    """Tokens read a second by one worker."""
    seconds: float | None
    """Of the whole extraction, with its workers."""
    disk_bytes_per_second: float | None
    """How fast this disk made a file durable."""
    recomputing_is_cheaper: bool | None
    """Whether the forwards take less time than writing what they give and reading it back once, at the disk's speed."""
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Give the cost as plain data."""
        return asdict(self)


def plan(
    model: str,
    data: str | os.PathLike[str],
    lake: str | os.PathLike[str],
    *,
    timed: bool = True,
    ignore_free_space: bool = False,
    **options: Any,
) -> Cost:
    """Tell what ``extract(model, data, lake, **options)`` would take, without writing anything into the lake.

    The data are read, the model is loaded, and a planned batch is compared with its sequences alone, as extraction does
    first. With `timed`, batches of the plan are run for some ten seconds and a file of 64 MiB is written next to the
    lake, and removed. Raises `WorldError` when the disk would not hold the run, unless `ignore_free_space` is set.
    """
    asked = ExtractRequest(model, data, lake, **options)
    ready = prepare(asked)
    record = ready.record
    check_space(ready.root, record, (), ignore=ignore_free_space)
    arrays = [
        ArrayCost(a.name, a.dtype, a.shape, record.units * record.unit_size(a.rows), array_bytes(record, a))
        for a in record.arrays
    ]
    size, free = sum(a.bytes for a in arrays), free_bytes(ready.root)
    batches = list(_batches(ready))
    real = sum(sum(b.lengths) for b in batches)
    rate = memory = seconds = disk = cheaper = None
    if timed:
        with torch_threads(int(record.settings["compute"]["threads"])):
            check_batches(
                ready.loaded,
                ready.points,
                ready.plan.units,
                record.settings["batch_tokens"],
                record.settings["padding"],
            )
            rate, memory = _time(ready, batches)
        disk = _disk_speed(ready.root)
        workers = 1 if asked.engine == "inline" else asked.workers
        computing = ready.plan.read / rate
        seconds = max(computing * (1 + BUDGET), size / disk) / workers
        cheaper = computing < 2 * size / disk
    return Cost(
        run=record.name,
        documents=ready.documents,
        sequences=record.sequences,
        tokens=record.tokens,
        tokens_read=ready.plan.read,
        units=record.units,
        unit_rows=record.unit_rows,
        unit_sizes={kind: record.unit_size(kind) for kind in record.row_kinds.kinds},
        waste=ready.plan.waste,
        padding=sum(b.input_ids.numel() for b in batches) / real - 1,
        arrays=arrays,
        bytes=size,
        free=free,
        fits=size <= free,
        memory=memory,
        tokens_per_second=rate,
        seconds=seconds,
        disk_bytes_per_second=disk,
        recomputing_is_cheaper=cheaper,
        warnings=ready.warnings,
    )


def _batches(ready: Prepared) -> Iterator[Batch]:
    """Make the batches of the first units, those of one unit after another."""
    settings = ready.record.settings
    for table in ready.plan.units[:16]:
        sequences = split_sequences(table)
        for members in plan_batches([len(s) for s in sequences], settings["batch_tokens"], settings["padding"]):
            yield Batch.of([sequences[i] for i in members], settings["padding"], ready.loaded.device)


def _time(ready: Prepared, batches: list[Batch]) -> tuple[float, int | None]:
    """Run batches spread over the first units; returns tokens a second, and the peak anonymous memory in bytes."""
    chosen = batches[:: max(1, len(batches) // 64)]
    points = array_points(ready.loaded, ready.record.arrays)
    spent, tokens, peak = 0.0, 0, _anonymous()
    for turn, batch in enumerate([chosen[0], *chosen]):
        start = time.perf_counter()
        values, _ = ready.loaded.run(batch, ready.points)
        peak = max(peak, _anonymous())
        for array, point in points:
            to_stored(values[point.name], array, point)
        if batch.input_ids.device.type == "cuda":
            torch.cuda.synchronize()
        if turn:
            spent, tokens = spent + time.perf_counter() - start, tokens + sum(batch.lengths)
        if turn >= _FEWEST and spent > _SECONDS:
            break
    return tokens / spent, peak or None


def _anonymous() -> int:
    """Give the anonymous memory of this process in bytes; 0 where the system does not say."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _disk_speed(root: Path) -> float:
    """Write a file durably beside the lake, and give bytes a second."""
    while not root.exists():
        root = root.parent
    size = min(_DISK_PROBE, shutil.disk_usage(root).free // 4)
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=root) as file:
        start = time.perf_counter()
        for _ in range(max(1, size >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return max(1, size >> 20) * len(block) / (time.perf_counter() - start)
