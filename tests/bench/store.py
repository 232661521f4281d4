"""The store's benchmarks: ``python tests/bench/store.py``, or ``make bench-store``.

One run measures everything, the cases of a line taking turns, and prints a table of medians; with ``--out`` there is a
JSON file too. Nothing else may run meanwhile. Reading, writing and memory are compared with what a person would do by
hand with raw files (the fastest of the sensible ways), and with zarr-python; queries with plain DuckDB on a table of
its own.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import memory
import querying
import reading
import writing
from timing import Row, print_report

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


def discard(folder: Path) -> None:
    """Make room: what is made next takes gigabytes too."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> int:
    """Run the benchmark and report it; exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("bench-lakes"), help="where lakes are made, and removed")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--only", action="append", help="a section: write, layers, read, growth, query, memory")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small arrays: to see that it works, not how fast")
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    found: list[Row] = []
    load = [os.getloadavg()[0]]
    try:
        for name, section in sections(asked.folder, asked.repeats, quick=asked.quick).items():
            if asked.only and name not in asked.only:
                continue
            rows = []
            for line in section():
                rows.append(line)
                print(f"{name}: {line.what}, {line.on}", file=sys.stderr)
            print_report(rows)
            print(flush=True)
            found += rows
            discard(asked.folder)
            load.append(os.getloadavg()[0])
    finally:
        shutil.rmtree(asked.folder)
    missed = [r for r in found if r.met is False]
    print(f"{sum(r.met is True for r in found)} targets met, {len(missed)} missed.")
    if asked.out:
        about = {
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load": load,
            "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        }
        asked.out.write_text(json.dumps(about | {"rows": [r.to_json() for r in found]}, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
