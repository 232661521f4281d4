"""The engine that runs a job on Ray Core actors, fed by ``ray.wait``.

The driver owns the queue, the attempts and the replacement of dead actors: Ray restarts and retries nothing,
so that no item is lost, run for ever, or charged for the death of another. Nothing but the JSON texts of
payloads and records passes through the object store; workers write what is large themselves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from ..errors import JobError, WorldError
from .engine import Job, JobReport, OnRecord
from .hosting import Failure, read_reply
from .ledger import Ledger, Task
from .ray_actor import actor_class, package_folders
from .ray_cluster import RayCluster, wait_until_gone

IN_FLIGHT = 2  # items an actor: one runs while the next waits beside it
START_DEATHS = 3  # deaths in a row while starting, after which the job ends
PLACE_SECONDS = 120  # for Ray to find a place for a worker on our own cluster
PLACE_SECONDS_GIVEN = 900  # the same on a cluster that may have to grow first


class RayEngine:
    """Runs the items of a job on `workers` Ray actors, with the semantics that all engines share.

    The connection is made by `open` or at the first job that has an item, and held until `close`. With `device` "cuda"
    each actor asks for one GPU.
    """

    name = "ray"

    def __init__(self, *, workers: int = 1, threads: int = 1, device: str = "cpu", address: str | None = None) -> None:
        self.workers = workers
        self.threads = threads
        self.device = device
        self.address = address
        self._cluster: RayCluster | None = None

    def open(self) -> None:
        """Start the engine's own cluster, or connect to the one that was given."""
        if self._cluster is None:
            cluster = RayCluster(cpus=self.workers, address=self.address)
            cluster.open()
            self._cluster = cluster

    def run(self, job: Job, on_record: OnRecord | None = None) -> JobReport:
        """Run every item of `job`; raise a ``JobError`` that names the items that failed for good."""
        ledger = Ledger(job, on_record)
        if not ledger.fill(1):
            return ledger.close()
        self.open()
        assert self._cluster is not None
        crew = _Crew(self, self._cluster, job, ledger)
        try:
            crew.work()
        finally:
            crew.dismiss()
        return ledger.close()

    def close(self) -> None:
        """Shut the engine's own cluster down, or disconnect from the one that was given."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(eq=False)
class _Seat:
    """One actor, with the references to what it has yet to answer, oldest first.

    A seat goes through three stages: "placing" until the process answers, "starting" until the worker is
    constructed, then "ready". Items are given to ready seats only, and only those can be charged.
    """

    actor: Any
    refs: deque[Any] = field(default_factory=deque)
    tasks: deque[Task] = field(default_factory=deque)
    stage: str = "placing"
    pid: int = 0
    place: str = "?"

    @property
    def words(self) -> str:
        return f"worker process {self.pid} on {self.place}" if self.pid else "worker process"


class _Crew:
    """The actors of one job, and the loop that feeds them."""

    def __init__(self, engine: RayEngine, cluster: RayCluster, job: Job, ledger: Ledger) -> None:
        self._engine = engine
        self._cluster = cluster
        self._ray = cluster.ray
        self._job = job
        self._ledger = ledger
        self._seats: list[_Seat] = []
        self._pids: set[int] = set()
        self._start_deaths = 0

    def work(self) -> None:
        """Run until no item waits and none is in flight."""
        for _ in range(min(self._engine.workers, self._ledger.fill(self._engine.workers))):
            self._hire()
        while True:
            for seat in self._seats:
                self._feed(seat)
            # An actor answers in order, so the oldest reference of each is the only one to wait for.
            heads = {seat.refs[0]: seat for seat in self._seats if seat.refs}
            if not any(seat.tasks for seat in self._seats) and not self._ledger.fill(1):
                return  # whatever still starts is not needed
            placed = any(seat.stage != "placing" for seat in heads.values())
            patience = PLACE_SECONDS if self._cluster.own else PLACE_SECONDS_GIVEN
            if not self._ray.wait(list(heads), num_returns=1, timeout=None if placed else patience)[0]:
                raise self._nowhere(patience)
            ready, _ = self._ray.wait(list(heads), num_returns=len(heads), timeout=0)
            for ref in ready:
                self._hear(heads[ref])

    def dismiss(self) -> None:
        """Kill every actor of the job; on a cluster of our own, also wait until the processes are gone."""
        for seat in self._seats:
            self._ray.kill(seat.actor, no_restart=True)
        self._seats.clear()
        if self._cluster.own:
            wait_until_gone(self._pids)

    def _hire(self) -> None:
        engine, own = self._engine, self._cluster.own
        options: dict[str, Any] = {
            # A cluster of our own has one CPU a worker; on another one, claim what will be used.
            "num_cpus": 1 if own else engine.threads,
            "num_gpus": 1 if engine.device.startswith("cuda") else 0,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if not own:
            options["scheduling_strategy"] = "SPREAD"
        folders = [*package_folders(), *self._job.import_path]
        package = (__package__ or "").partition(".")[0]
        remote = self._ray.remote(actor_class()).options(**options)
        actor = remote.remote(package, folders, self._job.worker, self._ledger.spec, engine.threads)
        seat = _Seat(actor)
        seat.refs.append(actor.where.remote())
        self._seats.append(seat)

    def _feed(self, seat: _Seat) -> None:
        while seat.stage == "ready" and len(seat.tasks) < IN_FLIGHT:
            task = self._ledger.take()
            if task is None:
                return
            seat.refs.append(seat.actor.run.remote(task.payload))
            seat.tasks.append(task)

    def _hear(self, seat: _Seat) -> None:
        """Take the oldest answer of `seat`, which is there, and move on."""
        try:
            answer = self._ray.get(seat.refs[0])
        except self._ray.exceptions.RayError as error:
            # Ray cannot carry an exception of the worker (they come as data), so the actor itself is lost.
            self._lose(seat, error)
            return
        seat.refs.popleft()
        if seat.stage == "placing":
            seat.pid, seat.place = answer
            self._pids.add(seat.pid)
            seat.stage = "starting"
            seat.refs.append(seat.actor.start.remote())
        elif seat.stage == "starting":
            outcome = read_reply(answer)
            if isinstance(outcome, Failure):
                raise self._ledger.no_start(outcome)
            seat.stage = "ready"
            self._start_deaths = 0
        else:
            self._ledger.settle(seat.tasks.popleft(), read_reply(answer))

    def _lose(self, seat: _Seat, error: Exception) -> None:
        self._seats.remove(seat)
        self._pids.discard(seat.pid)  # its number may become another process's
        self._ray.kill(seat.actor, no_restart=True)  # it may only be out of reach, and must not go on
        log = f"{self._cluster.log_tail(seat.pid)}\n{error}".strip()
        self._ledger.lose(seat.words, list(seat.tasks), log)
        if seat.stage != "ready":
            self._start_deaths += 1
            if self._start_deaths == START_DEATHS:
                raise JobError(
                    f"The worker {self._job.worker} could not be started: its process died {START_DEATHS} "
                    "times while the worker was constructed (killed, out of memory, or crashed). "
                    "Give it more memory, or use fewer workers.",
                    tracebacks={"": log},
                )
        # One that died last, with nothing left to do, needs no successor.
        if self._ledger.fill(1):
            self._hire()

    def _nowhere(self, seconds: int) -> WorldError:
        asked = f"{1 if self._cluster.own else self._engine.threads} CPU"
        if self._engine.device.startswith("cuda"):
            asked += " and 1 GPU"
        return WorldError(
            f"Ray placed no worker within {seconds} s; each asks for {asked}. "
            "Ask for fewer workers or threads, or give the cluster a node that has that."
        )
