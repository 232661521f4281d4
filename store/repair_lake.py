"""Repairing what is no run's own: what dead processes left, the catalog; and saying what stays damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import LayerlakeError, WorldError
from .catalog import publish_catalog
from .durable import exclusive_lock, is_locked
from .layout import is_run_name
from .orphans import lake_orphans, remove
from .printing import count
from .repair import CANNOT, RECREATED, SWEPT, Outcome
from .verify import Problem, verify_around


def mend_lake(
    root: Path, run: str | None, lost: dict[str, set[int]], *, changed: bool, dry_run: bool
) -> tuple[list[Outcome], list[Problem]]:
    """Repair a lake outside of its runs, after them, and say what remains; with `run`, the catalog only.

    `lost` are units, by run, that the catalog has and that could not be recreated; `changed` says whether anything was
    repaired. A catalog that alone knows what is missing is not made anew.
    """
    outcomes: list[Outcome] = []
    if run is None:
        for path in sorted(set(lake_orphans(root))):
            outcomes.append(_swept(root, path, lambda p=path: dry_run or remove(p)))
        outcomes += _sweep_catalog(root, dry_run=dry_run)
    stale: list[Problem] = []
    found = verify_around(root, run)
    keeps = [f"{count(len(units), 'unit')} of run {name}" for name, units in sorted(lost.items()) if units]
    for problem in found:
        folder, _, name = problem.path.partition("/")
        if folder == "runs":
            if problem.run is None:
                outcomes.append(_outcome(problem, CANNOT, _no_run(name.partition("/")[0])))
            elif name.split("/")[1] != "units":  # units are the business of their run's repair
                outcomes.append(_outcome(problem, CANNOT, "only what made it can make it again"))
                keeps.append(problem.path)
        elif folder.startswith("catalog"):
            stale.append(problem)
        else:
            outcomes.append(_outcome(problem, CANNOT, "only what made it can make it again: move it away and ask anew"))
            if folder == "results":
                keeps.append(problem.path)
    if keeps:
        why = f"it alone says what is missing of {', '.join(keeps)}"
        return outcomes + [_outcome(p, CANNOT, why) for p in stale], found
    failed = ""
    if not dry_run and (stale or changed):
        try:
            publish_catalog(root)
        except LayerlakeError as error:
            failed = str(error)
    if failed and not stale:
        stale.append(Problem(None, "catalog.json", "is not up to date"))
    remaining = found if dry_run else verify_around(root, run)
    left = [] if dry_run else remaining
    for problem in stale:
        why = failed or ("it leaves out what is damaged" if problem in left else "")
        outcomes.append(_outcome(problem, CANNOT if why else RECREATED, why))
    return outcomes, remaining


def _sweep_catalog(root: Path, *, dry_run: bool) -> Iterator[Outcome]:
    """Remove what killed publishers left; who holds the lock knows that none is at work."""
    folder = root / "catalog"
    if not any(folder.glob("*.tmp*")):
        return
    if dry_run:
        if not is_locked(folder / "lock"):
            yield from (_swept(root, p, lambda: None) for p in sorted(folder.glob("*.tmp*")))
        return
    with exclusive_lock(folder / "lock", "", wait=True):
        for path in sorted(folder.glob("*.tmp*")):
            yield _swept(root, path, lambda p=path: remove(p))


def _swept(root: Path, path: Path, action: Callable[[], object]) -> Outcome:
    problem = Problem(None, str(path.relative_to(root)), "was left by a dead process")
    try:
        action()
    except WorldError as error:
        return _outcome(problem, CANNOT, str(error))
    return _outcome(problem, SWEPT)


def _no_run(name: str) -> str:
    how = f"`layerlake rm {name}` removes what is there" if is_run_name(name) else "move it away by hand"
    return f"a run is made by `layerlake extract` only; {how}"


def _outcome(problem: Problem, done: str, why: str = "") -> Outcome:
    return Outcome(problem.run, problem.path, problem.what, done, why)
