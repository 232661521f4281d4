"""The benchmarks of extraction: ``python tests/bench/extract.py``, or ``make bench-extract``.

One run measures everything, the cases of a line taking turns, and prints a table of medians; with ``--out`` there is a
JSON file too. Nothing else may run meanwhile. A worker that makes units durable and proves them is compared with a bare
forward of the same batches, with a loop of hooks and memory maps written by hand, and with transformers'
`output_hidden_states` and `torch.save`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import extracting
from reporting import run_benchmark
from timing import Row

LIBRARIES = ("numpy", "torch", "transformers", "tokenizers", "pyarrow")


def sections(folder: Path, repeats: int, *, quick: bool) -> dict[str, Callable[[], Iterator[Row]]]:
    """Give the parts of the benchmark by name."""
    return {
        "rate": lambda: extracting.measure_rate(folder, repeats, quick=quick),
        "memory": lambda: extracting.measure_memory(folder, quick=quick),
        "start": lambda: extracting.measure_start(folder, min(repeats, 3)),
        "models": lambda: extracting.measure_models(folder, quick=quick),
    }


def main() -> int:
    """Run the benchmark and report it; exit code 1 when a target is missed."""
    return run_benchmark(__doc__ or "", sections, LIBRARIES)


if __name__ == "__main__":
    sys.exit(main())
