"""Engines run a job: a worker class over many items, each item retried, quarantined or finished on its own.

A worker is a plain class, ``Worker(spec).run(payload) -> record``. The contract is generic: extraction,
probes, training seeds and sweeps all use it. Two engines keep it, with the same semantics:

- ``on_record(key, record)`` is called in the driver, once for each finished item, in any order.
- An exception in ``run`` is charged to its item. An item has three attempts, then it is quarantined while
  the others go on; at the end a ``JobError`` names every quarantined item with the original error. Eight
  quarantined items stop the job early.
- A ``RequestError``, and any exception while the worker is constructed, end the job at once.
- A worker process that dies is replaced. Its oldest unfinished item is charged an attempt, its other items
  go back to the queue free. (An inline worker lives in the driver, so it cannot be lost alone.)
- Payloads, records and specs cross as JSON in both engines, and exceptions cross as text. A record is small
  by contract: what is large is written by the worker itself.
- What a worker prints or warns does not reach the driver's terminal.

This module imports no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from ..errors import RequestError, UnknownNameError

MOST_THREADS = 1024

Record = dict[str, Any]
OnRecord = Callable[[str, Record], None]


@dataclass(frozen=True)
class Item:
    """One piece of work: a key that is unique in its job, and a payload that JSON can hold."""

    key: str
    payload: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A worker class by name, its spec, and the items it is to run.

    `worker` is ``"package.module:Class"`` and is imported in the worker's process; `import_path` names
    folders appended to ``sys.path`` there, for modules of the user's own. `items` may be a generator: it is
    read only as far as workers are fed. The keys are remembered (about 100 bytes each), to refuse duplicates.
    """

    worker: str
    spec: dict[str, Any]
    items: Iterable[Item]
    import_path: tuple[str, ...] = ()


class Worker(Protocol):
    """What a worker class offers: it is built from a spec and turns payloads into records."""

    def __init__(self, spec: dict[str, Any]) -> None: ...

    def run(self, payload: dict[str, Any]) -> Record:
        """Do one item and give back a small record that JSON can hold."""
        ...


@dataclass
class JobReport:
    """What a finished job can say about itself.

    `retried` maps the key of an item that succeeded late to its failed attempts; `lost_workers` describes
    each worker process that died, with the item that was charged for it.
    """

    done: int = 0
    retried: dict[str, int] = field(default_factory=dict)
    lost_workers: list[str] = field(default_factory=list)


class Engine(Protocol):
    """What runs jobs; close it, or use it as a context manager."""

    name: str
    workers: int
    threads: int

    def open(self) -> None:
        """Start what jobs need, now and not at the first job; opening twice does nothing."""
        ...

    def run(self, job: Job, on_record: OnRecord | None = None) -> JobReport:
        """Run every item of `job`; raise a ``JobError`` that names the items that failed for good."""
        ...

    def close(self) -> None:
        """Let go of processes and connections; closing twice does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_engine(
    name: str,
    *,
    workers: int = 1,
    threads: int = 1,
    device: str = "cpu",
    ray_address: str | None = None,
) -> Engine:
    """Build the engine called `name`, whose workers each compute with `threads` threads.

    Ray is imported, and its cluster started, at the first job. Without `ray_address` the ``ray`` engine
    starts a local cluster of its own, whatever else runs on the machine or is named in the environment.
    With `device` ``"cuda"`` each Ray worker asks for one GPU.
    """
    for what, count in (("workers", workers), ("threads", threads)):
        if count < 1:
            raise RequestError(f"An engine needs at least 1 of {what}, not {count}.")
    if threads > MOST_THREADS:  # torch crashes the process when it cannot start them
        raise RequestError(f"A worker computes with at most {MOST_THREADS} threads, not {threads}.")
    if name == "inline":
        from .inline_engine import InlineEngine

        if workers != 1 or ray_address is not None:
            raise RequestError(
                "The inline engine runs one worker, in this process: leave workers and ray_address out, "
                "or use the engine 'ray'."
            )
        return InlineEngine(threads=threads)
    if name == "ray":
        from .ray_engine import RayEngine

        return RayEngine(workers=workers, threads=threads, device=device, address=ray_address)
    raise UnknownNameError.of("engine", name, ("inline", "ray"))
