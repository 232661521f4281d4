"""What a run takes on the disk, and whether the disk has it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from ..errors import WorldError
from ..store.run import ArraySpec, RunRecord

_BESIDE = 0.02
"""What token tables, records and the catalog take beside the shards, as a share of these."""


def array_bytes(record: RunRecord, array: ArraySpec) -> int:
    """Give the bytes of an array's shards; of a compressed one, the most that it can take."""
    return record.units * array.layout(record.unit_size(array.rows)).file_bytes


def free_bytes(root: Path) -> int:
    """Give the free space of the file system that a lake lies on, or will."""
    while not root.exists():
        root = root.parent
    return shutil.disk_usage(root).free


def check_space(root: Path, record: RunRecord, committed: Collection[int], *, ignore: bool) -> None:
    """Raise `WorldError` when the units that are still to be made do not fit on the disk, unless `ignore` is set."""
    if ignore or not record.units:
        return
    missing = 1 - len(committed) / record.units
    shards = sum(array_bytes(record, a) for a in record.arrays if a.codec == "none")
    needed = int(missing * shards * (1 + _BESIDE))
    if needed > (free := free_bytes(root)):
        raise WorldError(
            f"The run takes {shown_bytes(needed)} and the disk of {os.fspath(root)} has {shown_bytes(free)} free. "
            "Store fewer layers or sites, a narrower --dtype, or fewer tokens with --keep; --ignore-free-space tries "
            "all the same."
        )


def shown_bytes(count: float) -> str:
    """Write a number of bytes for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
