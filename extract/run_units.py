"""Having an engine do units of a run, for a first extraction and for a repair alike."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import WorldError
from ..store.catalog import publish_catalog
from ..store.orphans import clear_scratch
from ..store.run import Run
from .engine import Engine, Item, Job
from .loaded_model import ModelSource
from .progress import Progress
from .settings import loadable

PUBLISH_EVERY_S = 30.0


@dataclass(frozen=True)
class UnitsDone:
    """What became of some units: all were committed, or there is an error instead of this."""

    done: int = 0
    retried: dict[str, int] = field(default_factory=dict)
    lost_workers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def import_from_here() -> None:
    """Let ``package.module:function`` name a module in the current folder, as `python -m` does."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def run_units(
    run: Run, units: Mapping[int, int], source: ModelSource, device: str, engine: Engine, *, publish: bool = True
) -> UnitsDone:
    """Have `engine` do `units`, a mapping of unit to tokens; the caller holds the driver's lock of `run`.

    With `publish` the catalog is published now and then, and when the job fails. Workers find the modules that this
    process finds. Raises ``JobError``, naming the units that failed for good; the others are committed then.
    """
    clear_scratch(run)
    if not units:
        return UnitsDone()
    nonfinite: dict[str, int] = {}
    published = time.monotonic()
    spec = {"lake": str(run.root), "run": run.name, "model": loadable(source), "device": device}
    items = (Item(unit_key(u), {"unit": u}) for u in sorted(units))
    job = Job("layerlake.extract.worker:ExtractWorker", spec, items, tuple(p for p in sys.path if p))
    with Progress(len(units), "units", "tokens", total_amount=sum(units.values())) as progress:

        def on_record(key: str, record: dict[str, Any]) -> None:
            nonlocal published
            progress.advance(record["tokens"])
            for name, count in record["nonfinite"].items():
                nonfinite[name] = nonfinite.get(name, 0) + count
            if publish and time.monotonic() - published >= PUBLISH_EVERY_S:
                publish_catalog(run.root)
                published = time.monotonic()

        try:
            report = engine.run(job, on_record)
        except BaseException:
            if publish:
                with contextlib.suppress(WorldError):  # it must not hide why the job ended
                    publish_catalog(run.root)
            raise
    first = next((a.name for a in run.record.arrays if a.name in nonfinite), None)
    warning = (
        f"{first} is the first site with values that are NaN or infinite ({nonfinite[first]} of them, stored as they "
        "are); see the view stats."
        if first
        else None
    )
    return UnitsDone(report.done, report.retried, report.lost_workers, [warning] if warning else [])


def unit_key(unit: int) -> str:
    """Give the key of a unit's item, by which errors name it."""
    return f"unit {unit}"
