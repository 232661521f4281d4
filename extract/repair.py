"""Repairing a lake: what is broken is made again, from the lake where that is enough, by the model where it is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import JobError, LayerlakeError, RunLockedError, UnknownNameError
from ..store.catalog import published_units
from ..store.create import WEIGHTS_FILE, weights_json
from ..store.durable import is_locked
from ..store.layout import check_lake, lake_path
from ..store.printing import count
from ..store.repair import CANNOT, LEFT, Outcome, RunRepair
from ..store.repair_lake import mend_lake
from ..store.run import DRIVER_LOCK, Run, run_names
from ..store.verify import Problem
from .engine import Engine, make_engine
from .loaded_model import ModelSource
from .run_models import RunModels
from .run_units import import_from_here, run_units, unit_key


@dataclass(frozen=True)
class RepairReport:
    """What a repair did, or would do: an outcome for everything that was wrong, and the `problems` that remain.

    `set_aside` are the folders, in the lake, of what was taken out of its place; they can be deleted.
    """

    outcomes: list[Outcome]
    problems: list[Problem]
    set_aside: list[str]
    dry_run: bool
    lost_workers: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether the lake now is as it was written; of a dry run, whether it would be."""
        return not self.problems and not any(o.done in (CANNOT, LEFT) for o in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Give the report as plain data."""
        return {
            "outcomes": [o.to_json() for o in self.outcomes],
            "problems": [p.to_json() for p in self.problems],
            "set_aside": self.set_aside,
            "dry_run": self.dry_run,
            "whole": self.whole,
        }


def repair(
    lake: str | os.PathLike[str],
    *,
    run: str | None = None,
    model: str | None = None,
    trust_remote_code: bool = False,
    dry_run: bool = False,
    engine: str = "inline",
    workers: int = 1,
    ray_address: str | None = None,
) -> RepairReport:
    """Make again what `verify` finds broken in a lake, or in one run, byte for byte; nothing else is touched.

    Units whose values are damaged or whose record is gone are redone by the model, over the tokens that the plan holds:
    the data are not needed. The model is the one that the run names, or `model` when it lies elsewhere now; it must
    have the weights, and this machine the libraries, that the run was made with, else nothing is moved. What is damaged
    is set aside, not deleted. With `dry_run` nothing is changed.
    """
    root = lake_path(lake)
    check_lake(root)
    names = [Run(root, run).name] if run is not None else run_names(root)
    make_engine(engine, workers=workers, ray_address=ray_address)  # what is asked wrongly is refused before anything
    import_from_here()
    models = RunModels(model, trust_remote_code)

    def engine_of(threads: int, device: str) -> Engine:
        return make_engine(engine, workers=workers, threads=threads, device=device, ray_address=ray_address)

    indexed = published_units(root)
    outcomes: list[Outcome] = []
    problems: list[Problem] = []
    set_aside: list[str] = []
    lost_workers: list[str] = []
    lost: dict[str, set[int]] = {}
    for name in names:
        try:
            opened = Run(root, name)
            mend = RunRepair(
                opened,
                None if indexed is None else indexed.get(name, ()),
                dry_run=dry_run,
                of_model={WEIGHTS_FILE: lambda r=opened: weights_json(models.weights(r))},
            )
            lost_workers += _repair_run(mend, models, engine_of)
        except UnknownNameError:
            if run is not None:
                raise
            continue  # it was removed a moment ago
        except RunLockedError as error:
            outcomes.append(Outcome(name, f"runs/{name}", "is being worked on", LEFT, str(error)))
            continue
        outcomes += mend.outcomes
        problems += mend.problems
        if not dry_run:
            lost[name] = mend.lost()
            if mend.aside.folder.is_dir():
                set_aside.append(str(mend.aside.folder.relative_to(root)))
        elif any(o.done == CANNOT and o.path.startswith(f"runs/{name}/units/") for o in mend.outcomes):
            lost[name] = mend.lost()
    changed = any(o.done not in (CANNOT, LEFT) for o in outcomes)
    around, remaining = mend_lake(root, run, lost, changed=changed, dry_run=dry_run)
    outcomes += around
    if dry_run:
        problems = [Problem(o.run, o.path, o.what) for o in outcomes if o.done == CANNOT]
    else:
        problems += remaining
    return RepairReport(outcomes, problems, set_aside, dry_run, lost_workers)


def _repair_run(mend: RunRepair, models: RunModels, engine_of: Callable[[int, str], Engine]) -> list[str]:
    """Repair one run under its driver's lock; returns the workers that were lost."""
    run = mend.run
    if mend.dry_run and not is_locked(run.folder / DRIVER_LOCK):
        return _repair_locked(mend, models, engine_of)
    with run.driver_lock():
        return _repair_locked(mend, models, engine_of)


def _repair_locked(mend: RunRepair, models: RunModels, engine_of: Callable[[int, str], Engine]) -> list[str]:
    mend.mend()
    tokens: dict[int, int] = {}
    for unit in list(mend.units):
        try:
            tokens[unit] = mend.tokens_of(unit)
        except LayerlakeError as error:
            mend.give_up(unit, str(error))
    lost_workers: list[str] = []
    failures: dict[int, str] = {}
    failure = ""
    try:
        if mend.units:
            source, threads, device = models.check(mend.run)
            if not mend.dry_run:
                lost_workers = _redo(mend, tokens, source, device, engine_of(threads, device))
    except JobError as error:
        failures = {u: error.failures[unit_key(u)] for u in mend.units if unit_key(u) in error.failures}
        failure = str(error)
    except LayerlakeError as error:
        failure = str(error)
    except OSError as error:
        failure = f"{error.strerror} ({error.filename})."
    mend.finish(failures, failure)
    return lost_workers


def _redo(mend: RunRepair, tokens: dict[int, int], source: ModelSource, device: str, engine: Engine) -> list[str]:
    """Have the units redone that need it; nothing is moved before the engine has started."""
    with engine:
        engine.open()
        mend.take_out()
        return run_units(mend.run, tokens, source, device, engine, publish=False).lost_workers


def report_lines(report: RepairReport) -> list[str]:
    """Say in words what was done, or would be, about everything that was wrong, and what remains."""
    lines = []
    for outcome in report.outcomes:
        would = "would be " if report.dry_run and outcome.done not in (CANNOT, LEFT) else ""
        what = outcome.what.partition(" Run `layerlake verify`")[0]
        lines.append(f"{outcome.path}: {what} -> {would}{outcome.done}{': ' if outcome.why else ''}{outcome.why}")
    lines += [f"What was set aside lies in {folder} and can be deleted." for folder in report.set_aside]
    named = {o.path for o in report.outcomes}
    lines += [f"{p.path}: {p.what}" for p in report.problems if p.path not in named]
    remain = len({p.path for p in report.problems} | {o.path for o in report.outcomes if o.done in (CANNOT, LEFT)})
    if remain:
        ending = f"{count(remain, 'problem')} {'would remain' if report.dry_run else 'left'}."
    elif report.dry_run and report.outcomes:
        ending = "Then everything would be as it was written."
    else:
        ending = "Everything is as it was written."
    return [*lines, ending]
