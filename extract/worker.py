"""The worker of an extraction: it loads the model once and writes whole units."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ForwardError, ModelError, WorldError
from ..store.plan import stored_tokens
from ..store.row_kinds import TOKENS
from ..store.run import ArraySpec, Run
from ..store.unit import UnitWriter
from .batch import Batch, Padding, plan_batches
from .bits import bits_of, rounded_to
from .failure import failing_alone
from .hooks import SitePoint
from .loaded_model import ModelSource
from .loading import load_model
from .offload import Convert, Offload, Store
from .pools import BatchPools, rounded_once
from .replay_check import ReplayCheck
from .settings import array_points, other_compute, other_model
from .unit_sequences import BatchRows, UnitSequences
from .weights import other_weights


class ExtractWorker:
    """Runs the model over the sequences of one unit and commits the unit; activations go straight to its shards."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.run_ = Run(Path(spec["lake"]), spec["run"])
        self.model = load_model(ModelSource(**spec["model"]), device=spec["device"])
        settings = self.run_.record.settings
        if other := other_model(self.model.identity, settings):
            differs = other_weights(self.run_, self.model.weights)
            raise ModelError(
                f"{spec['model']['name']} has other {' and '.join(other)} in the worker than when the run was planned"
                f"{f' ({differs})' if differs else ''}. "
                "A function that makes a model must give the same one each time, and every machine the same files."
            )
        if other := other_compute(self.run_.record, spec["device"]):
            raise WorldError(
                f"A worker on another machine would give other bytes: it has {'; '.join(other)}. Use machines that are "
                "alike."
            )
        self.padding: Padding = settings["padding"]
        self.batch_tokens: int = settings["batch_tokens"]
        self.kinds = self.run_.record.row_kinds
        self.points = array_points(self.model, self.run_.record.arrays)
        self.offload = Offload(self.model.device)
        self.replay = ReplayCheck(self.run_, self.model, self.points)

    def run(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Extract and commit the unit `payload["unit"]`; returns what the driver shows, not the activations."""
        unit = int(payload["unit"])
        start = time.perf_counter()
        tokens = self.run_.planned_tokens(unit)
        sequences = UnitSequences(tokens, self.kinds)
        points = self._places()
        padded = [0] * len(sequences.ids)
        with UnitWriter(self.run_, unit) as writer, self.offload as offload:
            for members in plan_batches(sequences.lengths, self.batch_tokens, self.padding):
                batch = Batch.of([sequences.ids[i] for i in members], self.padding, self.model.device)
                rows = sequences.batch_rows(batch, members)
                try:
                    values, _ = self.model.run(batch, points)
                except ForwardError as error:
                    raise self._blamed(error, unit, {sequences.names[i]: sequences.ids[i] for i in members}) from error
                of_arrays = [values[p.name] for _, p in self.points]
                values.clear()
                offload.put(of_arrays, *self._storing(writer, rows, BatchPools(batch, sequences.pools, members)))
                del of_arrays
                for i in members:
                    padded[i] = batch.input_ids.shape[1] - sequences.lengths[i]
            offload.wait()
            replay = self.replay.check(unit, sequences, padded, writer.read)
            made = {"seconds": round(time.perf_counter() - start, 3), "process": os.getpid(), "replay": replay}
            record = writer.commit(stored_tokens(tokens), len(sequences.ids), made, sequences.pooled_rows)
        nonfinite = {n: a["statistics"]["nonfinite"] for n, a in record["arrays"].items()}
        return {
            "unit": unit,
            "tokens": tokens.num_rows,
            "seconds": made["seconds"],
            "nonfinite": {n: c for n, c in nonfinite.items() if c},
        }

    def _storing(self, writer: UnitWriter, rows: BatchRows, pools: BatchPools) -> tuple[Convert, Store]:
        """Give what turns the values of a batch into what is stored of them, and what writes that into the shards.

        Values that go into means are taken as they are, and averaged on the host.
        """

        def convert(index: int, value: torch.Tensor) -> torch.Tensor:
            array, point = self.points[index]
            if array.rows != TOKENS:
                return pools.select(value, array.rows)
            return to_stored(rows.select(value), array, point)

        def store(index: int, stored: torch.Tensor) -> None:
            array, point = self.points[index]
            keys = array.shape[-1] if point.keys else None
            if array.rows == TOKENS:
                for first, part in rows.runs(bits_of(stored), keys):
                    writer.write(array.name, first, part)
                return
            places, means = pools.means(stored, array.rows, keys)
            bits = bits_of(to_stored(rounded_once(means, array.dtype), array, point))
            at = 0
            for first, n in places:
                writer.write(array.name, first, bits[at : at + n])
                at += n

        return convert, store

    def _places(self) -> list[SitePoint]:
        """Give each point once, whatever the number of arrays that are made of it."""
        return list({p.name: p for _, p in self.points}.values())

    def _blamed(self, error: ForwardError, unit: int, members: Mapping[int, np.ndarray]) -> ForwardError:
        """Find which of a batch's sequences the model fails on alone, and name it with the unit."""
        if found := failing_alone(self.model, self._places(), members):
            name, alone = found
            return ForwardError(f"Unit {unit}, sequence {name} ({len(members[name])} tokens): {alone}")
        shown = ", ".join(map(str, members)) if len(members) < 9 else f"{min(members)} to {max(members)}"
        return ForwardError(f"Unit {unit}, sequences {shown} together, and none of them alone: {error}")


def to_stored(value: torch.Tensor, array: ArraySpec, point: SitePoint) -> torch.Tensor:
    """Round a captured value to the array's dtype; one that would overflow is refused by site and value."""
    return rounded_to(value, array.dtype, point.name, "Store this run with a wider --dtype.")
