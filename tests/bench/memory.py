"""How much memory of its own a process needs to read an array of 4 GiB in shuffled batches."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from making import make_lake
from timing import Row

LIMIT_MB = 500
UNITS, UNIT_ROWS, WIDTH = 342, 16_384, 384

READER = """
    import resource, sys, threading, time
    from pathlib import Path
    if sys.argv[2] == "limited":
        resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[3]) << 20,) * 2)
    import numpy as np
    from layerlake import Lake
    def own():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3
    peak, stop = [own()], threading.Event()
    def watch():
        while not stop.wait(0.01):
            peak.append(own())
    threading.Thread(target=watch, daemon=True).start()
    lake = Lake.open(sys.argv[1])
    if sys.argv[2] == "sql":
        sel = lake.select("SELECT run, row FROM tokens")
    else:
        sel = lake.rows("bench", np.arange(int(sys.argv[4])))
    rows = 0
    for batch in sel.batches(0, size=4096, shuffle=True, seed=0):
        rows += len(batch.array)
    stop.set()
    print(rows, max(peak))
"""


def measure(folder: Path) -> Iterator[Row]:
    """Read every row once, in a process that is watched, and in one that may not have more (RLIMIT_DATA)."""
    rows = UNITS * UNIT_ROWS
    root = folder / "memory"
    make_lake(root, rows, UNITS, WIDTH, "bfloat16")
    size = rows * WIDTH * 2 / (1 << 30)
    for how, what in (
        ("rows", "rows given"),
        ("limited", f"rows given, RLIMIT_DATA {LIMIT_MB} MB"),
        ("sql", "rows from SQL"),
    ):
        code = [sys.executable, "-c", textwrap.dedent(READER), str(root), how, str(LIMIT_MB), str(rows)]
        start = time.perf_counter()
        done = subprocess.run(
            code, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        seconds = time.perf_counter() - start
        on = f"{rows:,} x {WIDTH} bfloat16, {size:.1f} GiB, shuffled batches of 4,096"
        if done.returncode:
            raise SystemExit(f"{what}: {done.stderr[-2000:]}")
        read, peak = done.stdout.split()
        assert int(read) == rows
        line = Row(f"peak anonymous memory in MB, {what}", on, float(peak), "limit", LIMIT_MB, 1.0, "", 1)
        line.note = f"({seconds:.0f} s, {rows / seconds / 1e3:,.0f} thousand rows a second)"
        yield line
