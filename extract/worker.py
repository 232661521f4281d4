"""The worker of an extraction: it loads the model once and writes whole units."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ForwardError, ModelError, RequestError, WorldError
from ..store.run import ArraySpec, Run
from ..store.unit import UnitWriter
from .batch import Batch, Padding, plan_batches, split_sequences
from .hooks import SitePoint
from .loaded_model import ModelSource
from .models import load_model
from .replay_check import ReplayCheck
from .settings import other_compute, other_model


class ExtractWorker:
    """Runs the model over the sequences of one unit and commits the unit; activations go straight to its shards."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.run_ = Run(Path(spec["lake"]), spec["run"])
        self.model = load_model(ModelSource(**spec["model"]), device=spec["device"])
        settings = self.run_.record.settings
        if other := other_model(self.model.identity, settings):
            raise ModelError(
                f"{spec['model']['name']} has other {' and '.join(other)} in the worker than when the run was planned. "
                "A function that makes a model must give the same one each time, and every machine the same files."
            )
        if other := other_compute(self.run_.record, spec["device"]):
            raise WorldError(
                f"A worker on another machine would give other bytes: it has {'; '.join(other)}. Use machines that are "
                "alike."
            )
        self.padding: Padding = settings["padding"]
        self.batch_tokens: int = settings["batch_tokens"]
        arrays = self.run_.record.arrays
        points = self.model.settled([self.model.place(a.site, a.layer) for a in arrays])
        self.points = list(zip(arrays, points, strict=True))
        self.replay = ReplayCheck(self.run_, self.model, self.points)

    def run(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Extract and commit the unit `payload["unit"]`; returns what the driver shows, not the activations."""
        unit = int(payload["unit"])
        start = time.perf_counter()
        tokens = self.run_.planned_tokens(unit)
        sequences = split_sequences(tokens)
        lengths = [len(s) for s in sequences]
        first = np.cumsum([0, *lengths])
        names = tokens["seq"].to_numpy()[first[:-1]].tolist()
        points = [p for _, p in self.points]
        padded = [0] * len(lengths)
        with UnitWriter(self.run_, unit) as writer:
            for members in plan_batches(lengths, self.batch_tokens, self.padding):
                batch = Batch.of([sequences[i] for i in members], self.padding, self.model.device)
                try:
                    values, _ = self.model.run(batch, points)
                except ForwardError as error:
                    raise self._blamed(error, unit, {names[i]: sequences[i] for i in members}) from error
                for array, point in self.points:
                    bits = to_bits(values.pop(point.name), array, point)
                    for k, i in enumerate(members):
                        rows = batch.rows(bits, k, keys=True) if point.keys else batch.rows(bits, k)
                        writer.write(array.name, int(first[i]), widened(rows, array) if point.keys else rows)
                for i in members:
                    padded[i] = batch.input_ids.shape[1] - lengths[i]
            replay = self.replay.check(unit, sequences, names, first.tolist(), padded, writer.read)
            made = {"seconds": round(time.perf_counter() - start, 3), "process": os.getpid(), "replay": replay}
            record = writer.commit(tokens, len(lengths), made)
        nonfinite = {n: a["statistics"]["nonfinite"] for n, a in record["arrays"].items()}
        return {
            "unit": unit,
            "tokens": tokens.num_rows,
            "seconds": made["seconds"],
            "nonfinite": {n: c for n, c in nonfinite.items() if c},
        }

    def _blamed(self, error: ForwardError, unit: int, members: Mapping[int, np.ndarray]) -> ForwardError:
        """Find which of a batch's sequences the model fails on alone, and name it with the unit."""
        points = [p for _, p in self.points]
        for name, ids in members.items():
            try:
                self.model.run(Batch.of([ids], "none", self.model.device), points)
            except ForwardError as alone:
                return ForwardError(f"Unit {unit}, sequence {name} ({len(ids)} tokens): {alone}")
        shown = ", ".join(map(str, members)) if len(members) < 9 else f"{min(members)} to {max(members)}"
        return ForwardError(f"Unit {unit}, sequences {shown} together, and none of them alone: {error}")


def widened(rows: np.ndarray, array: ArraySpec) -> np.ndarray:
    """Widen the last axis of a pattern, over a sequence's tokens, to the array's: no token attends to what is not."""
    missing = array.shape[-1] - rows.shape[-1]
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])


def to_bits(value: torch.Tensor, array: ArraySpec, point: SitePoint) -> Any:
    """Round a captured value to the stored dtype and give its raw bits as a NumPy array of the same shape.

    Rounding is to nearest even, as torch converts. A finite value that would become infinite is refused, naming site
    and value, instead of stored as something else: float16 ends at 65,504, bfloat16 just below float32.
    """
    stored = value.to(getattr(torch, array.dtype))
    if stored.dtype != value.dtype:
        lost = torch.isinf(stored) & torch.isfinite(value)
        if lost.any():
            raise RequestError(
                f"Site {point.name} has the value {value[lost][0].item():.6g}, which {array.dtype} cannot hold. "
                "Store this run with a wider --dtype."
            )
    unsigned = stored.cpu().contiguous()
    if array.dtype == "float32":
        return unsigned.view(torch.int32).numpy().view(np.uint32)
    return unsigned.view(torch.int16).numpy().view(np.uint16)
