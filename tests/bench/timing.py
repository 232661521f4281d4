"""Timing for benchmarks: cases take turns, medians are reported, caches are told apart."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """One line of the report: ours against a reference; `ratio` is how many times as fast as the reference ours is."""

    what: str
    on: str
    ours_ms: float
    reference: str
    reference_ms: float
    target: float | None = None
    note: str = ""
    repeats: int = 0
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Reference time over our time: 1 is as fast, more is faster."""
        return self.reference_ms / self.ours_ms

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None where there is none."""
        return None if self.target is None else self.ratio >= self.target

    def to_json(self) -> dict[str, Any]:
        """Give the line as plain data."""
        return asdict(self) | {"ratio": self.ratio, "met": self.met}


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    repeats: int,
    before: Callable[[], None] | None = None,
    once: Iterable[str] = (),
) -> dict[str, list[float]]:
    """Run the cases in turns, `repeats` times each (those in `once` fewer), and give their times in seconds.

    `before` runs before every call, unmeasured (to drop caches). The order turns around each time, so that none has
    always the same predecessor.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    rare = set(once)
    for turn in range(repeats):
        names = list(cases) if turn % 2 == 0 else list(reversed(cases))
        for name in names:
            if name in rare and turn >= 2:
                continue
            if before:
                before()
            gc.collect()
            start = time.perf_counter()
            result = cases[name]()
            times[name].append(time.perf_counter() - start)
            del result
    return times


def row(
    what: str, on: str, times: dict[str, list[float]], ours: str, references: Iterable[str], target: float | None = None
) -> Row:
    """Make a line of the report from measured times: ours against the fastest of the references."""
    medians = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    fastest = min(references, key=lambda name: medians[name])
    spread = {name: (min(times[name]) * 1e3, max(times[name]) * 1e3) for name in (ours, fastest)}
    return Row(what, on, medians[ours], fastest, medians[fastest], target, "", len(times[ours]), spread)


def drop_cached(paths: Iterable[Path]) -> None:
    """Have the kernel forget the pages of files; those that are mapped by anybody stay."""
    gc.collect()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def bytes_read() -> int:
    """Give how many bytes this process has had read from disks."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def print_report(rows: Iterable[Row]) -> None:
    """Print the lines as a table."""
    shown = [("what", "on", "ours ms", "reference", "ms", "ratio", "target", "")]
    for r in rows:
        met = {True: "met", False: "MISSED", None: ""}[r.met]
        target = "" if r.target is None else f">= {r.target:.2g}"
        cells = (r.what, r.on, f"{r.ours_ms:.3f}", r.reference, f"{r.reference_ms:.3f}", f"{r.ratio:.2f}", target)
        shown.append((*cells, " ".join((met, r.note)).strip()))
    widths = [max(len(line[i]) for line in shown) for i in range(8)]
    for line in shown:
        right = {2, 4, 5}
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        print("  ".join(cells).rstrip())
