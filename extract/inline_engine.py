"""The engine that runs a job in the driver's own process."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from .engine import Job, JobReport, OnRecord
from .hosting import Failure, Host, read_reply
from .ledger import Ledger
from .threads import ThreadLimit


class InlineEngine:
    """Runs items one after another in this process, with the semantics that all engines share.

    The worker's prints (Python's, not those of C libraries) and warnings are swallowed, ``sys.path``, thread
    counts and their environment variables are put back when the job ends. An interrupt ends the job.
    """

    name = "inline"
    workers = 1

    def __init__(self, *, threads: int = 1) -> None:
        self.threads = threads

    def run(self, job: Job, on_record: OnRecord | None = None) -> JobReport:
        """Run every item of `job`; raise a ``JobError`` that names the items that failed for good."""
        ledger = Ledger(job, on_record)
        if not ledger.fill(1):
            return ledger.close()
        with ThreadLimit(self.threads) as limit, _on_path(job.import_path):
            host = Host(job.worker, ledger.spec, limit)
            with _quiet():
                started = read_reply(host.start())
            if isinstance(started, Failure):
                raise ledger.no_start(started)
            while task := ledger.take():
                with _quiet():
                    reply = host.run(task.payload)
                ledger.settle(task, read_reply(reply))
        return ledger.close()

    def open(self) -> None:
        """Do nothing: there is nothing to start."""

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _on_path(folders: tuple[str, ...]) -> Iterator[None]:
    """Have `folders` at the end of ``sys.path`` for a while."""
    added = [folder for folder in folders if folder not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            with contextlib.suppress(ValueError):  # the worker may have taken it out itself
                sys.path.remove(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallow what is printed or warned."""
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
