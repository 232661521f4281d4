"""The store's benchmarks: ``python tests/bench/store.py``, or ``make bench-store``.

One run measures everything, the cases of a line taking turns, and prints a table of medians; with ``--out`` there is a
JSON file too. Nothing else may run meanwhile. Reading, writing and memory are compared with what a person would do by
hand with raw files (the fastest of the sensible ways), and with zarr-python; queries with plain DuckDB on a table of
its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import memory
import querying
import reading
import writing
from reporting import discard, run_benchmark
from timing import Row

LIBRARIES = ("numpy", "zarr", "tensorstore", "duckdb", "pyarrow", "torch")


def sections(folder: Path, repeats: int, *, quick: bool) -> dict[str, Callable[[], Iterator[Row]]]:
    """Give the parts of the benchmark by name."""

    def read() -> Iterator[Row]:
        rows, many = (32_768, 512) if quick else (262_144, 4_096)
        for width in (384, 1024):
            for dtype in ("bfloat16", "float32"):
                for units in (16, many):
                    yield from reading.measure(folder, rows, units, width, dtype, repeats)
                    discard(folder)

    def growth() -> Iterator[Row]:
        for rows in (26_214, 262_144, 2_621_440):
            if quick and rows > 100_000:
                break
            yield from reading.measure(
                folder, rows // 16_384 * 16_384 or 16_384, max(1, rows // 16_384), 384, "bfloat16", repeats
            )
            discard(folder)

    def query() -> Iterator[Row]:
        for units in (12,) if quick else (122, 1221):
            yield from querying.measure(folder, units, repeats)
            discard(folder)
        yield from querying.measure_opening(folder, 5 if quick else 100, 48, repeats)
        discard(folder)

    return {
        "write": lambda: writing.measure(folder, repeats),
        "layers": lambda: reading.measure_layers(folder, repeats),
        "read": read,
        "growth": growth,
        "query": query,
        "memory": lambda: iter(()) if quick else memory.measure(folder),
    }


def main() -> int:
    """Run the benchmark and report it; exit code 1 when a target is missed."""
    return run_benchmark(__doc__ or "", sections, LIBRARIES)


if __name__ == "__main__":
    sys.exit(main())
