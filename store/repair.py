"""Repairing a run, as far as that needs no model: what can be made again from what is there, byte for byte."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import CorruptLakeError, LayerlakeError
from .create import zarr_metadata
from .durable import write_temporary
from .orphans import remove, scratch_orphans
from .parquet import read_table, table_bytes
from .plan import SPANS_FILE, UNITS_A_FILE, tokens_file, tokens_file_bytes
from .row_kinds import SPANS
from .run import Run
from .set_aside import SetAside
from .spans import spans_bytes, unit_spans
from .verify import Problem, planned_unit, verify_run

RECREATED = "recreated"
SWEPT = "swept"
SET_ASIDE = "set aside"
CANNOT = "cannot be recreated"
LEFT = "left"
_NOT_STORED = (
    "the plan has tokens that are read and not stored, which stand nowhere else: extract the data again, as a run of "
    "another name"
)
_OTHER_BYTES = "the libraries installed here write other bytes than those that the run was made with"


@dataclass(frozen=True)
class Outcome:
    """What a repair did about one thing that was wrong (`what`, at `path` in the lake), and why, where it did not."""

    run: str | None
    path: str
    what: str
    done: str
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Give the outcome as plain data."""
        return asdict(self)


class RunRepair:
    """The repair of one run; the caller holds its driver's lock, unless it is a dry run, which changes nothing.

    `mend` does what needs no model and finds `units`, which only the model can do again; whoever has it calls
    `take_out` before the units are redone, and `finish` at the end in any case. `indexed` are the units that the
    catalog has, None when there is none that can be read. `of_model` makes the bytes of files that only the model can
    make again, by name.
    """

    def __init__(
        self,
        run: Run,
        indexed: Iterable[int] | None,
        *,
        dry_run: bool = False,
        of_model: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> None:
        self.run = run
        self.dry_run = dry_run
        self.of_model = dict(of_model or {})
        self.outcomes: list[Outcome] = []
        self.units: dict[int, list[Problem]] = {}
        self.aside = SetAside(run)
        self.problems: list[Problem] = []
        """What is wrong: first what was found, after `finish` what remains."""
        self._indexed = set(indexed or ())
        self._catalog_is_read = indexed is not None
        self._broken_records: set[int] = set()
        self._taken: list[tuple[int, Path]] = []

    def mend(self) -> None:
        """Do everything that needs no model, and find out what does."""
        for path in scratch_orphans(self.run):
            self._do(self._problem(path, "was left by a dead process"), SWEPT, lambda p=path: remove(p))
        if not self.dry_run:
            self.aside.settle()
        self.problems = verify_run(self.run)
        try:
            record = self.run.record
        except LayerlakeError:
            for problem in self.problems:
                self.note(problem, CANNOT, "it alone says what was asked; `layerlake rm` removes the run")
            return
        committed = self.run.committed() & set(range(record.units))
        found = {p.path: p for p in reversed(self.problems)}  # the first of each path
        of_units: dict[int, list[Problem]] = {}
        foreign: list[Problem] = []
        for problem in [found[path] for path in dict.fromkeys(p.path for p in self.problems)]:
            path = self.run.root / problem.path
            name = str(path.relative_to(self.run.folder))
            if name in record.files or name == "plan":
                self._mend_file(problem, name)
            elif not name.startswith(("activations.zarr/", "tokens/", "units/")):
                self.note(problem, CANNOT, "only what made it can make it again")
            elif (unit := planned_unit(self.run, path)) is None:
                foreign.append(problem)
            else:
                of_units.setdefault(unit, []).append(problem)
        for unit in sorted(of_units.keys() | ((self._indexed & set(range(record.units))) - committed)):
            self._mend_unit(unit, of_units.get(unit, []), unit in committed)
        for problem in foreign:
            self._do(problem, SET_ASIDE, lambda p=problem: self.aside.move(self.run.root / p.path))

    def take_out(self) -> None:
        """Take what is damaged out of the places of `units`, and hold what else is there by a second name."""
        folders = [self.run.folder / name for name in ("units", "tokens", "tmp")]
        folders += [self.run.folder / "activations.zarr" / a.name for a in self.run.record.arrays]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for unit, problems in self.units.items():
            if unit in self._broken_records:
                # Nothing vouches for the unit's files any more: the model says which of them stay.
                for path in self._unit_files(unit):
                    self._taken.append((unit, path))
                    self.aside.keep(path)
                self._taken.append((unit, self.run.unit_path(unit)))
                self.aside.move(self.run.unit_path(unit))
            else:
                # The record stays: what is intact is read meanwhile, and what is made anew is held against it.
                for problem in problems:
                    self._taken.append((unit, self.run.root / problem.path))
                    self.aside.move(self.run.root / problem.path)

    def finish(self, failures: dict[int, str] | None = None, failure: str = "") -> None:
        """See what became of it all: what is still wrong is said to be, with the words of `failures` by unit."""
        if self.dry_run:
            for problems in self.units.values():
                for problem in problems:
                    self.note(problem, CANNOT if failure else RECREATED, failure)
            self.problems = [_problem_of(o) for o in self.outcomes if o.done == CANNOT]
            return
        if any(o.done != CANNOT for o in self.outcomes) or self.units:
            self.problems = self._verify_again(failures or {}, failure)
            self.aside.settle()
        if self._taken:  # whoever has the run open sees by its record's time that shards are to be mapped anew
            os.utime(self.run.folder / "run.json")

    def give_up(self, unit: int, why: str) -> None:
        """Say why a unit cannot be redone; nothing of it is touched."""
        for problem in self.units.pop(unit):
            self.note(problem, CANNOT, why)

    def tokens_of(self, unit: int) -> int:
        """Count the tokens that the plan has a unit read; `CorruptLakeError` when the plan does not say."""
        plan = tokens_file(self.run.folder / "plan", unit)
        name = str(plan.relative_to(self.run.root))
        if self.dry_run and any(o.path == name and o.done == RECREATED for o in self.outcomes):
            return 0  # it would say
        return self.run.planned_tokens(unit).num_rows

    def lost(self) -> set[int]:
        """Give the units that the catalog has and the run has not."""
        return self._indexed - self.run.committed()

    def note(self, problem: Problem, done: str, why: str = "") -> None:
        """Take down what became of a problem."""
        self.outcomes.append(Outcome(problem.run, problem.path, problem.what, done, why))

    def _verify_again(self, failures: dict[int, str], failure: str) -> list[Problem]:
        remaining = verify_run(self.run)
        left = {p.path: p.what for p in remaining}
        undone = False
        for unit, problems in self.units.items():
            held = unit in self.run.committed()
            paths = {p.path for p in problems} | {p.path for p in remaining if self._unit_of(p) == unit}
            if held and not paths & left.keys():
                for problem in problems:  # it has its checksum, even if the model did not do all of the unit so
                    self.note(problem, RECREATED, failures.get(unit, ""))
                named = {p.path for p in problems}
                for path in [path for taken, path in self._taken if taken == unit and self.aside.was_replaced(path)]:
                    problem = self._problem(path, "held other values than the model gives, and no record spoke for it")
                    if problem.path not in named:
                        self.note(problem, RECREATED)
                continue
            still = next((left[p] for p in sorted(paths) if p in left), "it is still not there")
            why = failures.get(unit) or failure or still
            for path in [path for taken, path in self._taken if taken == unit]:
                self.aside.restore(path)
                undone = True
            for problem in problems:
                self.note(problem, CANNOT, f"{why} It is as it was before.")
        self.outcomes = [
            replace(o, done=CANNOT, why=left[o.path]) if o.done != CANNOT and o.path in left else o
            for o in self.outcomes
        ]
        return verify_run(self.run) if undone else remaining

    def _unit_of(self, problem: Problem) -> int | None:
        return planned_unit(self.run, self.run.root / problem.path)

    def _unit_files(self, unit: int) -> list[Path]:
        return [self.run.tokens_path(unit), *(self.run.shard_path(a, unit) for a in self.run.record.arrays)]

    def _problem(self, path: Path, what: str) -> Problem:
        return Problem(self.run.name, str(path.relative_to(self.run.root)), what)

    def _do(self, problem: Problem, done: str, action: Callable[[], object]) -> None:
        try:
            if not self.dry_run:
                action()
        except OSError as error:
            self.note(problem, CANNOT, f"{error.strerror} ({error.filename})")
        except LayerlakeError as error:
            self.note(problem, CANNOT, str(error))
        else:
            self.note(problem, done)

    def _mend_file(self, problem: Problem, name: str) -> None:
        """Make one of the files again that were written with the run."""
        try:
            data = self._written(name)
        except LayerlakeError as error:
            self.note(problem, CANNOT, str(error))
            return
        if hashlib.sha256(data).hexdigest() != self.run.record.files.get(name):
            less = name.startswith("plan/") and not self.run.record.stores_all
            self.note(problem, CANNOT, _NOT_STORED if less else _OTHER_BYTES)
            return
        self._put(problem, self.run.folder / name, data)

    def _written(self, name: str) -> bytes:
        record, plan = self.run.record, self.run.folder / "plan"
        if name in self.of_model:
            return self.of_model[name]()
        if name.startswith("activations.zarr/"):
            made = zarr_metadata(record)
            if name in made:
                return made[name]
        label = record.row_kinds.label
        if self.run.folder / name == plan / SPANS_FILE and label is not None:
            units = range(record.units)
            found = (unit_spans(self.run.planned_tokens(u), label, u, record.rows[SPANS]) for u in units)
            return spans_bytes(pa.concat_tables(found))
        for first in range(0, record.units, UNITS_A_FILE):
            if self.run.folder / name == tokens_file(plan, first):
                units = range(first, min(first + UNITS_A_FILE, record.units))
                try:
                    return tokens_file_bytes([read_table(self.run.tokens_path(u)) for u in units])
                except (LayerlakeError, ValueError) as error:
                    raise CorruptLakeError(f"it is made from the token tables of its units: {error}") from error
        raise CorruptLakeError("the plan comes from the data: extract them again, as a run of another name")

    def _put(self, problem: Problem, path: Path, data: bytes) -> None:
        def put() -> None:
            self.run.scratch.mkdir(exist_ok=True)
            self.aside.replace(write_temporary(self.run.scratch, path.name, data), path)

        self._do(problem, RECREATED, put)

    def _mend_unit(self, unit: int, problems: list[Problem], committed: bool) -> None:
        record = self._problem(self.run.unit_path(unit), "is missing")
        if not committed and not self._was_committed(unit):
            for problem in problems:
                path = self.run.root / problem.path
                if self._catalog_is_read and (path.is_symlink() or path.is_file()):
                    self._do(problem, SWEPT, lambda p=path: remove(p))
                else:  # nothing says that the unit never was committed, or it is a folder of somebody's
                    self._do(problem, SET_ASIDE, lambda p=path: self.aside.move(p))
            return
        if not committed:
            why = "although the catalog has its unit" if unit in self._indexed else "although its unit was written"
            problems = [replace(record, what=f"is missing, {why}")]
        if not committed or any(p.path == record.path for p in problems):
            self._broken_records.add(unit)
        tokens = self._problem(self.run.tokens_path(unit), "").path
        if needed := [p for p in problems if p.path != tokens]:
            self.units[unit] = needed
        for problem in problems:
            if problem.path == tokens and not self._mend_tokens(problem, unit) and needed:
                self.give_up(unit, "the unit's token table cannot be recreated either")

    def _was_committed(self, unit: int) -> bool:
        """Tell whether a unit without a record has lost it, and is no remnant of one that was never committed."""
        if unit in self._indexed or all(os.path.lexists(p) for p in self._unit_files(unit)):
            return True
        return self.run.unit_path(unit) in self._held

    @functools.cached_property
    def _held(self) -> set[Path]:
        return set(self.aside.held())

    def _mend_tokens(self, problem: Problem, unit: int) -> bool:
        """Make a unit's token table again from the plan; says whether that can be done."""
        try:
            data = table_bytes(self.run.stored_tokens(unit))
            expected = self.run.unit_record(unit)["tokens"]["sha256"]
        except LayerlakeError as error:
            self.note(problem, CANNOT, str(error))
            return False
        if hashlib.sha256(data).hexdigest() != expected:
            self.note(problem, CANNOT, f"{_OTHER_BYTES}, or the plan gives the unit other tokens")
            return False
        self._put(problem, self.run.tokens_path(unit), data)
        return self.outcomes[-1].done == RECREATED


def _problem_of(outcome: Outcome) -> Problem:
    return Problem(outcome.run, outcome.path, outcome.what)
