"""Holding a lake's stored activations to the reloaded model, any time after they were made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import LayerlakeError, RequestError, UnknownNameError
from ..store.lake import Lake
from ..store.layout import unit_name
from ..store.run import Run
from ..store.verify import Problem
from .loaded_model import LoadedModel
from .replay_check import ReplayCheck
from .run_models import RunModels
from .run_units import import_from_here
from .settings import array_points
from .unit_sequences import UnitSequences


@dataclass
class ReplayReport:
    """What a replay of stored rows found: `problems` name units, sites and sequences.

    `values` is the largest distance of a stored row from a plain forward's, as a share of its norm, of the sequences
    that passed; None when no sequence was replayed.
    """

    sequences: int = 0
    units: int = 0
    values: float | None = None
    problems: list[Problem] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Give the report as plain data."""
        return {
            "sequences": self.sequences,
            "units": self.units,
            "values": self.values,
            "problems": [p.to_json() for p in self.problems],
        }


def verify_replay(
    lake: str | os.PathLike[str],
    *,
    run: str | None = None,
    model: str | None = None,
    trust_remote_code: bool = False,
    share: float = 0.02,
) -> ReplayReport:
    """Hold stored rows of a lake, or of one run, to plain forwards of the reloaded model.

    At least one sequence of each run, and sequences of at most a `share` of its tokens, are run again, chosen by the
    run's identity; a `share` of 1 is every sequence. The model is the one that the run names, or `model`; it must have
    the run's weights. Nothing is changed.
    """
    if not 0 < share <= 1:
        raise RequestError(f"A share of {share} of the tokens cannot be replayed; give more than 0, at most 1.")
    opened = Lake.open(lake)
    import_from_here()
    models = RunModels(model, trust_remote_code)
    report = ReplayReport()
    for name in [run] if run is not None else opened.runs():
        try:
            found = opened.run(name)
        except UnknownNameError:
            if run is not None:
                raise
            continue
        try:
            loaded = models.load(found)
        except LayerlakeError as error:
            if run is not None:
                raise
            report.problems.append(Problem(name, f"runs/{name}", f"cannot be replayed: {error}"))
            continue
        _replay_run(opened, found, loaded, share, report)
    return report


def _replay_run(lake: Lake, run: Run, model: LoadedModel, share: float, report: ReplayReport) -> None:
    arrays = run.record.arrays
    check = ReplayCheck(run, model, array_points(model, arrays), budget=share)
    sites = {a.name: a for a in arrays}
    for unit in sorted(run.committed()):

        def stored(array: str, first: int, rows: int, unit: int = unit) -> np.ndarray:
            spec = sites[array]
            start = unit * run.record.unit_size(spec.rows)
            numbers = np.arange(start + first, start + first + rows)
            return lake.rows(run.name, numbers).bits(spec.layer, spec.site, rows=spec.rows)

        path = f"runs/{run.name}/units/{unit_name(unit)}.json"
        try:
            sequences = UnitSequences(run.planned_tokens(unit), run.record.row_kinds)
            found = check.check(unit, sequences, [0] * len(sequences.ids), stored)
        except LayerlakeError as error:
            report.problems.append(Problem(run.name, path, str(error)))
            continue
        if found is not None:
            report.units += 1
            report.sequences += found["sequences"]
            report.values = max(report.values or 0.0, found["values"])
