"""The benchmark of training: ``python tests/bench/train.py``, or ``make bench-train``.

One run measures everything, the cases of a line taking turns, one thread each, and prints a table of medians; with
``--out`` there is a JSON file too. Nothing else may run meanwhile. A training step of each architecture (forward,
backward and AdamW, batch 64, length 40) is compared with torch's or transformers' own model of the same shape, and
Mamba's with the Transformer's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import stepping
from reporting import run_benchmark
from timing import Row

LIBRARIES = ("numpy", "torch", "transformers")


def sections(folder: Path, repeats: int, *, quick: bool) -> dict[str, Callable[[], Iterator[Row]]]:
    """Give the parts of the benchmark by name."""
    return {
        "steps": lambda: stepping.measure_among_ours(repeats, quick=quick),
        "others": lambda: stepping.measure_against_others(repeats, quick=quick),
    }


def main() -> int:
    """Run the benchmark and report it; exit code 1 when a target is missed."""
    return run_benchmark(__doc__ or "", sections, LIBRARIES)


if __name__ == "__main__":
    sys.exit(main())
