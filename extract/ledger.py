"""The driver's account of a job: which items wait, how often each failed, and how the job ends.

Every engine keeps its books here, so that attempts, quarantine and errors mean the same in all of them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import JobError, LayerlakeError, RequestError
from .engine import Item, Job, JobReport, OnRecord, Record
from .hosting import Failure

ATTEMPTS = 3
QUARANTINE_LIMIT = 8  # a job in which everything fails must not try a million items three times each


@dataclass(frozen=True)
class Task:
    """An item on its way to a worker, with its payload as JSON text."""

    key: str
    payload: str


class Ledger:
    """Hands out the items of one job and books what became of them.

    Only what is in flight, requeued or looked at ahead is held; of the other items, their keys.
    """

    def __init__(self, job: Job, on_record: OnRecord | None = None) -> None:
        module, _, attribute = job.worker.partition(":")
        if not module or not attribute:
            raise RequestError(f"{job.worker!r} does not name a worker: write it as 'package.module:Class'.")
        self.worker = job.worker
        self.spec = _as_json(job.spec, f"The spec of the worker {job.worker}")
        self.report = JobReport()
        self._on_record = on_record
        self._items: Iterator[Item] = iter(job.items)
        self._waiting: deque[Task] = deque()
        self._seen: set[str] = set()
        self._failed: dict[str, int] = {}  # failed attempts of items that are neither done nor quarantined
        self._quarantined: dict[str, Failure] = {}
        if isinstance(job.items, Sequence):  # refuse before any work, where that is possible
            keys: set[str] = set()
            for item in job.items:
                _check_new(item.key, keys)

    def fill(self, count: int) -> int:
        """Read ahead until `count` items wait, or no more come; return how many wait."""
        while len(self._waiting) < count:
            item = next(self._items, None)
            if item is None:
                break
            _check_new(item.key, self._seen)
            self._waiting.append(Task(item.key, _as_json(item.payload, f"The payload of item {item.key!r}")))
        return len(self._waiting)

    def take(self) -> Task | None:
        """Give the next item to run, requeued ones first; None when none waits."""
        return self._waiting.popleft() if self.fill(1) else None

    def settle(self, task: Task, outcome: Record | Failure) -> None:
        """Book what a worker answered for `task`."""
        if isinstance(outcome, Failure):
            self._charge(task, outcome)
            return
        self.report.done += 1
        if failed := self._failed.pop(task.key, 0):
            self.report.retried[task.key] = failed
        if self._on_record is not None:
            self._on_record(task.key, outcome)

    def lose(self, worker: str, tasks: Sequence[Task], log: str = "") -> None:
        """Book the death of `worker`: the first of its open `tasks` is charged, the others wait again."""
        self._waiting.extendleft(reversed(tasks[1:]))
        if not tasks:
            self.report.lost_workers.append(f"{worker} died while it was starting")
            return
        key = tasks[0].key
        attempt = self._failed.get(key, 0) + 1
        self.report.lost_workers.append(
            f"{worker} died while working on item {key!r} (attempt {attempt} of {ATTEMPTS})"
        )
        words = f"the {worker} died while working on it (killed, out of memory, or crashed)"
        self._charge(tasks[0], Failure("WorkerDied", words, log))

    def no_start(self, failure: Failure) -> LayerlakeError:
        """Build the error for a worker that could not be constructed."""
        return failure.exception(
            f"The worker {self.worker} could not be started: {failure.words}. "
            "No further item was tried; mend that and start the job again."
        )

    def close(self) -> JobReport:
        """Give the report of a job that has run to its end, or raise the error that names what failed."""
        if self._quarantined:
            raise self._job_error("Every other item was finished.")
        return self.report

    def _charge(self, task: Task, failure: Failure) -> None:
        if failure.final:
            raise failure.exception(f"Item {task.key!r} cannot be done: {failure.words}.")
        attempts = self._failed.get(task.key, 0) + 1
        if attempts < ATTEMPTS:
            self._failed[task.key] = attempts
            self._waiting.appendleft(task)
            return
        self._failed.pop(task.key, None)
        self._quarantined[task.key] = failure
        if len(self._quarantined) >= QUARANTINE_LIMIT:
            raise self._job_error(
                f"The job stopped early because {QUARANTINE_LIMIT} items failed; the rest was not tried."
            )

    def _job_error(self, ending: str) -> JobError:
        failures = {key: failure.words for key, failure in self._quarantined.items()}
        count = f"{len(failures)} item{'s' if len(failures) > 1 else ''}"
        lines = "".join(f"\n  {key!r}: {words}" for key, words in failures.items())
        return JobError(
            f"{count} failed {ATTEMPTS} times and will not be tried again:{lines}\n"
            f"{ending} Mend the cause, then start the job again.",
            failures,
            {key: failure.traceback for key, failure in self._quarantined.items()},
        )


def _check_new(key: str, seen: set[str]) -> None:
    if key in seen:
        raise RequestError(f"Two items of the job have the key {key!r}; give each item a key of its own.")
    seen.add(key)


def _as_json(value: dict[str, Any], what: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} does not fit into JSON: {error}. Pass plain values.") from error
