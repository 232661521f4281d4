"""The cost of an extraction in words."""

from __future__ import annotations

from collections.abc import Sequence

from ..store.printing import count
from ..store.row_kinds import TOKENS
from .cost import ArrayCost, Cost
from .space import shown_bytes


def cost_lines(cost: Cost) -> list[str]:
    """Say what an extraction would take, a line a thing."""
    stored = "" if cost.tokens == cost.tokens_read else f"{cost.tokens:,} stored of "
    lines = [
        f"Run {cost.run}: {stored}{count(cost.tokens_read, 'token')} in {count(cost.sequences, 'sequence')} of "
        f"{count(cost.documents, 'document')}.",
        f"Units: {cost.units:,} of {_sizes(cost)}; batches are {cost.padding / (1 + cost.padding):.0%} padding.",
        f"Disk: {shown_bytes(cost.bytes)} in {count(len(cost.arrays), 'array')} "
        f"({'; '.join(_kinds(cost.arrays))}); {shown_bytes(cost.free)} are free.",
    ]
    if cost.memory is not None:
        lines.append(f"Memory: about {shown_bytes(cost.memory)} a worker, the model included.")
    if cost.seconds is not None and cost.tokens_per_second is not None and cost.disk_bytes_per_second is not None:
        lines.append(
            f"Time: about {_duration(cost.seconds)}, at {cost.tokens_per_second:,.0f} tokens a second a worker; this "
            f"disk stores {shown_bytes(cost.disk_bytes_per_second)} a second."
        )
        lines.append(
            "Computing the values again takes less time than storing them and reading them back once: store fewer, or "
            "none."
            if cost.recomputing_is_cheaper
            else "Storing the values and reading them back once takes less time than computing them again."
        )
    return lines


def _sizes(cost: Cost) -> str:
    """Say how many rows of each kind a unit has."""
    parts = [f"{n:,} rows of {kind}" for kind, n in cost.unit_sizes.items() if kind != TOKENS]
    if TOKENS in cost.unit_sizes:
        parts = [f"{cost.unit_rows:,} rows, {cost.waste:.0%} of them unused", *parts]
    return ", ".join(parts)


def _kinds(arrays: Sequence[ArrayCost]) -> list[str]:
    """Group arrays of one dtype and shape: '7 of 384 bfloat16, 44.6 MB each'."""
    kinds: dict[tuple[str, str, int], int] = {}
    for a in arrays:
        key = " x ".join(map(str, a.shape)), a.dtype, a.bytes
        kinds[key] = kinds.get(key, 0) + 1
    return [f"{n} of {shape} {dtype}, {shown_bytes(size)} each" for (shape, dtype, size), n in kinds.items()]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
