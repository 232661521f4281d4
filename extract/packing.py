"""Packing sequences into units: how many rows a unit has, and which sequences go into it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from ..errors import RequestError
from ..store.row_kinds import TOKENS, RowKinds

SMALLEST_UNIT_FACTOR = 8
LARGEST_UNIT = 1 << 20
MOST_READ = 1 << 18
"""Tokens that a unit reads at most, unless more rows are asked for, as it is made and retried whole."""
_LARGEST_DEFAULT_UNIT = 16_384
_SMALLEST_DEFAULT_UNIT = 256
_DEFAULT_UNITS = 16
_WORTH = 0.8


def choose_unit_rows(
    rows: SequenceOf[int],
    asked: int | None = None,
    lengths: SequenceOf[int] | None = None,
    *,
    largest: int = _LARGEST_DEFAULT_UNIT,
) -> int:
    """Choose the rows of a unit: a power of two, at least 8 times those of the sequence with the most.

    Less than that wastes more than a tenth of the rows. By default large enough that small data make about 16 units,
    and at most `largest` rows: above 16,384 scattered reads of tokens become slower. Where fewer tokens are stored than
    read, `lengths` being the tokens that are read of each sequence, the default is halved until no unit reads more than
    262,144 tokens, as a unit is made and retried whole.
    """
    smallest = _power_of_two(SMALLEST_UNIT_FACTOR * max(rows))
    most = max(LARGEST_UNIT, smallest)
    if asked is None:
        share = _power_of_two(max(1, sum(rows) // _DEFAULT_UNITS))
        size = max(smallest, min(largest, max(_SMALLEST_DEFAULT_UNIT, share)))
        while size > smallest and lengths is not None and _most_read(rows, lengths, size) > MOST_READ:
            size //= 2
        return size
    if asked < 1 or asked & (asked - 1):
        raise RequestError(f"A unit has a power of two of rows, not {asked}.")
    if asked > most:
        raise RequestError(f"A unit of {asked} rows is too large to be written and retried whole; use at most {most}.")
    if asked < smallest:
        raise RequestError(
            f"A unit of {asked} rows is less than {SMALLEST_UNIT_FACTOR} times the longest sequence "
            f"({max(rows)} tokens); use at least {smallest}."
        )
    return asked


def choose_pooled_rows(needs: Mapping[str, SequenceOf[int]], unit_rows: int, kinds: RowKinds) -> dict[str, int]:
    """Choose the rows of a unit in arrays of each pooled kind, `needs` being the rows of each sequence by kind.

    A power of two: first so many that units hold the sequences that `unit_rows` of tokens alone give them. Half as many
    are taken as long as all shards together get smaller by a fifth: the units become more and hold fewer empty rows.
    """
    sizes = {TOKENS: unit_rows}
    units = pack_kinds({TOKENS: needs[TOKENS]}, sizes)[0]
    for kind in kinds.pooled:
        sizes[kind] = _power_of_two(max(1, int(np.bincount(units, weights=needs[kind]).max())))
    stored = {k: needs[k] for k in (TOKENS, *kinds.pooled)}

    def cost(sizes: Mapping[str, int]) -> int:
        return (pack_kinds(stored, sizes)[0][-1] + 1) * sum(sizes[k] for k in kinds.kinds)

    least = cost(sizes)
    for kind in kinds.pooled:
        while sizes[kind] > _power_of_two(max(needs[kind])):
            smaller = sizes | {kind: sizes[kind] // 2}
            if (found := cost(smaller)) > _WORTH * least:
                break
            sizes, least = smaller, found
    return {kind: sizes[kind] for kind in kinds.pooled}


def pack_kinds(
    needs: Mapping[str, SequenceOf[int]], sizes: Mapping[str, int]
) -> tuple[list[int], dict[str, list[int]]]:
    """Place sequences in order, each into the current unit until any kind of rows would overflow, then a fresh one.

    `needs` are each sequence's rows by kind, `sizes` a unit's. Returns each sequence's unit, and its first row of each
    kind, counted over the whole array.
    """
    limits = [sizes[kind] for kind in needs]
    used = [0] * len(limits)
    unit = 0
    units: list[int] = []
    first: list[list[int]] = [[] for _ in limits]
    for each in zip(*needs.values(), strict=True):
        if any(u + n > limit for u, n, limit in zip(used, each, limits, strict=True)):
            unit, used = unit + 1, [0] * len(limits)
        units.append(unit)
        for k, limit in enumerate(limits):
            first[k].append(unit * limit + used[k])
            used[k] += each[k]
    return units, dict(zip(needs, first, strict=True))


def pack(lengths: SequenceOf[int], unit_rows: int) -> list[tuple[int, int]]:
    """Place sequences of `lengths` rows of tokens; returns the unit and the first row of each."""
    units, first = pack_kinds({TOKENS: lengths}, {TOKENS: unit_rows})
    return list(zip(units, first[TOKENS], strict=True))


def _most_read(rows: SequenceOf[int], lengths: SequenceOf[int], unit_rows: int) -> int:
    units = [unit for unit, _ in pack(rows, unit_rows)]
    return int(np.bincount(units, weights=np.asarray(lengths)).max())


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
