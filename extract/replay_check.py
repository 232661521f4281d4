"""The proof of a unit: what is about to be committed is what the model gives a sequence that runs alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ReplayError
from ..store.row_kinds import SPANS, TOKENS
from ..store.run import ArraySpec, Run
from .batch import Batch
from .batch_check import allowed_distance, column_distance, row_distance
from .bits import bits_of, from_bits
from .hooks import SitePoint
from .loaded_model import LoadedModel
from .pools import rounded_once
from .reference import PlainForward, first_tensor, plain_forward
from .tail import apply_tail, scaled_head
from .unit_sequences import UnitSequences

BUDGET = 0.02
"""The share of a worker's tokens that its proofs may run again; its first unit is always proved."""

_HALF_ULP = {"float32": 2**-24, "bfloat16": 2**-9, "float16": 2**-11}
_TAIL_ROWS = 16
_COLUMNS = 5
"""How many times as far as a row a single column may be: what moves a row spreads over its columns, not evenly."""
_FIRST_TOKENS = 192

Stored = Callable[[str, int, int], np.ndarray]
"""Reads back raw bits that were written: (array, first row of the unit, rows)."""


@dataclass(frozen=True)
class ReplayedSequence:
    """How far one sequence's stored rows are from what a plain forward of it alone gives; 0 is bit for bit.

    Distances are the largest of a row's, as a share of the row's norm. `head` is of the model's output, computed from
    the stored rows of the last block, `patch` of its output with the stored rows patched in; None where the run stores
    no site for it.
    """

    values: float
    head: float | None
    patch: float | None
    tokens: int
    """Tokens that were run for it."""


class ReplayCheck:
    """Proves units of one worker against plain forwards, within a `budget`, a share of its tokens.

    The forwards share no code with the capture: one sequence, no padding, no mask, hooks of their own. Which sequences
    are taken depends on the run's identity and the unit.
    """

    def __init__(
        self,
        run: Run,
        model: LoadedModel,
        points: Sequence[tuple[ArraySpec, SitePoint]],
        *,
        budget: float = BUDGET,
    ) -> None:
        self.budget = budget
        self.run = run
        self.model = model
        self.points = list(points)
        self._of_tokens = [(a, p) for a, p in self.points if a.rows == TOKENS]
        self.tokens_run = 0
        self.tokens_replayed = 0
        self._blocks = model.block_paths()

    def check(
        self,
        unit: int,
        sequences: UnitSequences,
        padded: Sequence[int],
        stored: Stored,
    ) -> dict[str, Any] | None:
        """Prove some of a unit's sequences; returns what its record says of it, None when none was taken.

        `padded` is how many pads stood beside each. Of a sequence that is stored in part, the stored tokens are proved.
        Raises `ReplayError`, naming unit, site, sequence and token.
        """
        chosen = self._choose(unit, sequences, padded)
        tokens = sum(sequences.lengths)
        if not chosen:
            self.tokens_run += tokens
            return None
        found = [self._replay(f"unit {unit}, sequence {sequences.names[i]}", i, sequences, stored) for i in chosen]

        self.tokens_run += tokens  # after the proof: a unit that is tried again is proved again

        def worst(values: list[float | None]) -> float | None:
            numbers = [v for v in values if v is not None]
            return max(numbers) if numbers else None

        return {
            "sequences": len(found),
            "values": worst([f.values for f in found]),
            "head": worst([f.head for f in found]),
            "patch": worst([f.patch for f in found]),
        }

    def _choose(self, unit: int, sequences: UnitSequences, padded: Sequence[int]) -> list[int]:
        lengths = sequences.lengths
        is_first = self.tokens_run == 0
        room = self.budget * (self.tokens_run + sum(lengths)) - self.tokens_replayed
        if self.budget >= 1:
            return list(range(len(lengths)))
        digest = hashlib.sha256(f"{self.run.record.identity} {unit}".encode()).digest()
        order = np.random.default_rng(int.from_bytes(digest[:8], "little")).permutation(len(lengths)).tolist()
        order = [i for i in order if sequences.has_rows(i)]  # the others prove nothing
        chosen: list[int] = []
        if is_first and order:
            # A fault of padding shows beside padding, one of places not in a sequence of one token.
            fitting = [i for i in order if lengths[i] > 1 and 3 * lengths[i] <= max(room, _FIRST_TOKENS)]
            fitting = fitting or [min(order, key=lambda i: (lengths[i] == 1, lengths[i]))]
            chosen.append(max(fitting, key=lambda i: (padded[i], lengths[i])))
            room -= lengths[chosen[0]] * 3
        for i in order:
            if i not in chosen and lengths[i] * 3 <= room:
                chosen.append(i)
                room -= lengths[i] * 3
        return chosen

    def _replay(self, where: str, index: int, sequences: UnitSequences, stored: Stored) -> ReplayedSequence:
        ids, at, first = sequences.ids[index], sequences.kept[index], sequences.first[index]
        kept = {a.name: from_bits(stored(a.name, first, len(at)), a.dtype) for a, _ in self._of_tokens}
        last = self._last_block()
        plain = plain_forward(
            self.model,
            ids,
            [*(self._reference(p).module for _, p in self.points), *self._blocks[-1:]],
            whole=any(p.site == "logits" for _, p in self.points) or last is not None,
        )
        tokens = len(ids)
        whole = {array.name: self._expected(plain, array, point) for array, point in self.points}
        expected = {array.name: whole[array.name][at].cpu() for array, _ in self._of_tokens}
        values = max(self._values(where, at, kept, expected), self._means(where, index, sequences, whole, stored))
        head = self._head(where, at, kept, plain, last)
        patch = None
        editable = [(a, p) for a, p in self._of_tokens if p.editable]
        if editable:
            array, point = editable[index % len(editable)]
            rounded = expected[array.name].to(kept[array.name].dtype)
            if np.array_equal(bits_of(kept[array.name]), bits_of(rounded)):
                patch = 0.0  # the same values in the same forward: exactly nothing changes
            else:
                patched = [whole[array.name].clone(), whole[array.name].clone()]
                for value, rows in zip(patched, (kept[array.name], rounded), strict=True):
                    value[at] = rows.to(value.device, value.dtype)
                patch = self._patched(where, ids, array, point, *patched)
                tokens += 2 * len(ids)
        self.tokens_replayed += tokens
        return ReplayedSequence(values, head, patch, tokens)

    def _expected(self, plain: PlainForward, array: ArraySpec, point: SitePoint) -> Tensor:
        value = plain.value(self.model, self._reference(point))
        return torch.nn.functional.pad(value, (0, array.shape[-1] - value.shape[-1])) if point.keys else value

    def _reference(self, point: SitePoint) -> SitePoint:
        """Give where a site must lie: in block i of the model's own list, whatever the capture was told."""
        if point.layer is None or not self._blocks:
            return point
        block = self._blocks[point.layer]
        if point.module != block and not point.module.startswith(f"{block}."):
            raise ReplayError(
                f"Site {point.name} was read at module {point.module!r}, which is not in block {point.layer} "
                f"({block!r})."
            )
        return point

    def _values(self, where: str, at: np.ndarray, kept: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
        worst = 0.0
        for array, point in self._of_tokens:
            own, reference = kept[array.name], expected[array.name]
            limit = tolerance(self.model, reference.dtype, array.dtype, array.site)
            rounded = reference.to(own.dtype)
            distance = row_distance(own, rounded) if own.shape == rounded.shape else math.inf
            nearer = self._nearer(array, distance, kept, expected)
            if distance > limit or nearer:
                row, far = _farthest(own, rounded)
                raise ReplayError(
                    f"Replay of {where}: what was to be stored at site {point.name} is not what the model gives this "
                    f"sequence alone. Token {at[row]} is {far:.3g} of its norm away, and {limit:.2g} is what another "
                    + (f"batch explains; it is nearer to {nearer}. " if nearer else "batch explains. ")
                    + "The unit is not committed. `layerlake doctor` tells what of the model does not hold."
                )
            if (apart := column_distance(own, rounded)) > _COLUMNS * limit:
                raise ReplayError(
                    f"Replay of {where}: a column of what was to be stored at site {point.name} is {apart:.3g} of its "
                    f"norm away from what the model gives this sequence alone, where {_COLUMNS * limit:.2g} is "
                    "allowed. The unit is not committed."
                )
            worst = max(worst, distance)
        return worst

    def _means(
        self, where: str, index: int, sequences: UnitSequences, whole: dict[str, Tensor], stored: Stored
    ) -> float:
        """Hold the pooled rows of a sequence to the means of the plain values; gives the largest distance.

        A mean of values that cancel is small, and what another batch does to them is not: the distance is a share of
        the mean norm of the values that it is of.
        """
        kept: dict[str, Tensor] = {}
        expected: dict[str, Tensor] = {}
        scales: dict[str, Tensor] = {}
        for array, _ in self.points:
            pool = sequences.pools.get(array.rows)
            groups = pool.groups(index) if pool else []
            if pool is None or not groups:
                continue
            parts = [whole[array.name][torch.from_numpy(g)].cpu().double() for g in groups]
            kept[array.name] = from_bits(stored(array.name, pool.first[index], len(groups)), array.dtype)
            means = torch.stack([part.mean(0) for part in parts]).numpy()
            expected[array.name] = rounded_once(means, array.dtype).to(kept[array.name].dtype)
            scales[array.name] = torch.stack([part.reshape(len(part), -1).norm(dim=1).mean() for part in parts])
        worst = 0.0
        for array, point in self.points:
            if array.name not in kept:
                continue
            own, reference = kept[array.name], expected[array.name]
            distances = _distances(own, reference, scales[array.name])
            row = int(distances.argmax())
            far = float(distances[row])
            limit = tolerance(self.model, whole[array.name].dtype, array.dtype, array.site)
            nearer = self._nearer(array, far, kept, expected)
            if far > limit or nearer:
                what = f"its mean over span {row}" if array.rows == SPANS else "its mean"
                raise ReplayError(
                    f"Replay of {where}: {what} that was to be stored at site {point.name} is not that of what the "
                    f"model gives this sequence alone. It is {far:.3g} of the tokens' norm away, and {limit:.2g} is "
                    f"what another batch explains{f'; it is nearer to {nearer}' if nearer else ''}. The unit is not "
                    "committed. `layerlake doctor` tells what of the model does not hold."
                )
            worst = max(worst, far)
        return worst

    def _nearer(self, array: ArraySpec, distance: float, kept: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
        """Name another layer of the same site whose values the stored ones are nearer to than to their own."""
        if array.layer is None or distance == 0:
            return ""
        own = kept[array.name]
        for other, _ in self.points:
            alike = (other.site, other.rows) == (array.site, array.rows) and other.name in expected
            next_to = alike and other.layer in (array.layer - 1, array.layer + 1)
            if next_to and expected[other.name].shape == own.shape:
                theirs, mine = (expected[n].to(own.dtype) for n in (other.name, array.name))
                if _total(own, theirs) < _total(own, mine):
                    return other.name
        return ""

    def _last_block(self) -> ArraySpec | None:
        if self.model.architecture is None:
            return None
        top = len(self._blocks) - 1
        return next((a for a, p in self._of_tokens if p.site == "resid_post" and p.layer == top), None)

    def _head(
        self, where: str, at: np.ndarray, kept: dict[str, Tensor], plain: PlainForward, last: ArraySpec | None
    ) -> float | None:
        if last is None:
            return None
        resid = plain.outputs[self._blocks[-1]]
        with torch.inference_mode():
            given = kept[last.name][-_TAIL_ROWS:].to(resid.device, resid.dtype)
            _, output = apply_tail(self.model, given)
        if output is None:
            return None
        expected = plain.result[0][at[-_TAIL_ROWS:]]
        output, _ = scaled_head(self.model, output, expected)
        distance = row_distance(output.cpu(), expected.cpu())
        # The head turns what rounding to the stored dtype moved; a wrong place, or a second norm, moves all of it.
        limit = max(10 * tolerance(self.model, resid.dtype, last.dtype), 0.05)
        if distance > limit:
            raise ReplayError(
                f"Replay of {where}: the stored {last.name} through the final norm and the head is {distance:.3g} away "
                f"from the model's output, where {limit:.2g} is allowed. The unit is not committed."
            )
        return distance

    def _patched(
        self, where: str, ids: np.ndarray, array: ArraySpec, point: SitePoint, stored: Tensor, plain: Tensor
    ) -> float:
        """Compare the outputs with the two values, (time, ...), patched in: what is stored, and what should be."""
        batch = Batch.of([ids], "none", self.model.device)

        def output(value: Tensor) -> Tensor:
            edit = {point.name: lambda v: value[None].to(v.device, v.dtype)}
            return _rows(self.model.run(batch, [point], edit)[1], len(ids))

        ours, theirs = output(stored), output(plain)
        distance = row_distance(ours.cpu(), theirs.cpu())
        limit = max(10 * tolerance(self.model, theirs.dtype, array.dtype), 0.05)
        if distance > limit:
            raise ReplayError(
                f"Replay of {where}: its stored {point.name}, patched into a fresh forward, moves the output by "
                f"{distance:.3g}, where {limit:.2g} is allowed. The unit is not committed."
            )
        return distance


def tolerance(model: LoadedModel, computed: torch.dtype, stored: str, site: str = "resid_post") -> float:
    """Give how far a row may be from the plain forward's: by the dtypes it was computed in and the one it is stored in.

    Both sides are rounded to the stored dtype, so what remains of it is a rounding to the other side.
    """
    return allowed_distance(model, computed, site) + 2 * _HALF_ULP[stored]


def _distances(own: Tensor, expected: Tensor, scale: Tensor) -> Tensor:
    """Give the distance of each row from the expected one, as a share of `scale`, (rows,)."""
    a, b = (x.double().reshape(len(x), -1) for x in (own, expected))
    if a.shape != b.shape:
        return torch.full((1,), math.inf)
    same = (a.isfinite() == b.isfinite()).all(dim=1)
    apart = (a.nan_to_num(0, 0, 0) - b.nan_to_num(0, 0, 0)).norm(dim=1)
    apart = apart / scale.nan_to_num(0, 0, 0).clamp_min(torch.finfo(torch.double).tiny)
    return torch.where(same, apart, math.inf)


def _total(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).nan_to_num(0, 0, 0).norm())


def _farthest(own: Tensor, expected: Tensor) -> tuple[int, float]:
    if own.shape != expected.shape:
        return 0, math.inf
    distances = [row_distance(own[i : i + 1], expected[i : i + 1]) for i in range(len(own))]
    worst = int(np.argmax(distances))
    return worst, distances[worst]


def _rows(output: Any, length: int) -> Tensor:
    found = first_tensor(output)
    return found.reshape(length, -1) if found.numel() % length == 0 else found.reshape(1, -1)
