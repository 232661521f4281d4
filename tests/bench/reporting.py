"""Running the sections of a benchmark and reporting them: a table for people, JSON for programs, an exit code."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from timing import Row, print_report


class Sections(Protocol):
    """Gives the parts of a benchmark by name; each yields the lines of its report."""

    def __call__(self, folder: Path, repeats: int, /, *, quick: bool) -> dict[str, Callable[[], Iterator[Row]]]: ...


def discard(folder: Path) -> None:
    """Make room: what is made next takes gigabytes too."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_benchmark(description: str, sections: Sections, libraries: Sequence[str]) -> int:
    """Run a benchmark as its command line asks, and report it; returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, default=Path("bench-lakes"), help="where lakes are made, and removed")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--only", action="append", help="a section; repeat for more")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works, not how fast")
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
            "libraries": {name: importlib.metadata.version(name) for name in libraries},
        }
        asked.out.write_text(json.dumps(about | {"rows": [r.to_json() for r in found]}, indent=1) + "\n")
    return 1 if missed else 0
