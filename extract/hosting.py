"""The worker's side of a job: build the worker, run items, and turn every outcome into JSON text.

Exceptions never leave as objects. A class with two constructor arguments, or one that holds a lock, does not
survive pickling; its name, text and traceback do.
"""

from __future__ import annotations

import importlib
import json
import traceback
from dataclasses import asdict, dataclass
from typing import Any, cast

from .. import errors
from .engine import Record, Worker
from .threads import ThreadLimit


@dataclass(frozen=True)
class Failure:
    """An exception as data.

    `final` says that trying again is of no use; `ours` is the name of the class in ``errors.py`` when the
    exception was exactly of that class, and empty otherwise.
    """

    type_name: str
    text: str
    traceback: str
    final: bool = False
    ours: str = ""

    @property
    def words(self) -> str:
        """The exception as a person would write it: its type, and its text if it has one."""
        return f"{self.type_name}: {self.text}" if self.text else self.type_name

    @classmethod
    def of(cls, error: BaseException, *, final: bool = False) -> Failure:
        """Describe `error`; an error whose own text cannot be made is described by its type alone."""
        kind = type(error)
        try:
            text = str(error)
            trace = "".join(traceback.format_exception(error))
        except Exception as second:  # noqa: BLE001 - the error's own __str__ may raise anything
            text = f"(its text could not be made: {type(second).__name__})"
            trace = "".join(traceback.format_tb(error.__traceback__))
        is_ours = getattr(errors, kind.__name__, None) is kind
        final = final or isinstance(error, (errors.RequestError, errors.ReplayError))
        return cls(kind.__name__, text, trace, final, kind.__name__ if is_ours else "")

    def exception(self, message: str) -> errors.LayerlakeError:
        """Build what the driver raises: an error of the same class of ours, or ``JobError(message)``."""
        if self.ours and self.ours != "JobError":
            error = cast("errors.LayerlakeError", getattr(errors, self.ours)(self.text))
        else:
            error = errors.JobError(message)
        error.add_note(f"In the worker:\n{self.traceback}")
        return error


def read_reply(reply: str) -> Record | Failure:
    """Read what a host answered: the record of an item, or the failure."""
    data = json.loads(reply)
    return Failure(**data["failure"]) if "failure" in data else data["record"]


def failure_reply(error: BaseException, *, final: bool = False) -> str:
    """Write `error` as the answer of a host."""
    return json.dumps({"failure": asdict(Failure.of(error, final=final))})


class Host:
    """One worker of a job in this process; call `start` once, then `run` for each item."""

    def __init__(self, worker: str, spec: str, limit: ThreadLimit) -> None:
        self._name = worker
        self._spec = spec
        self._limit = limit
        self._worker: Worker | None = None

    def start(self) -> str:
        """Import and construct the worker; any exception is final."""
        try:
            module, _, attribute = self._name.partition(":")
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
            self._limit.apply()
            self._worker = found(json.loads(self._spec))
            self._limit.apply()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a worker may raise anything, SystemExit too
            return failure_reply(error, final=True)
        return json.dumps({"record": {}})

    def run(self, payload: str) -> str:
        """Run one item and answer its record, or the exception as data."""
        assert self._worker is not None, "start() comes first"
        try:
            self._limit.apply()
            record = self._worker.run(json.loads(payload))
            if not isinstance(record, dict):
                raise TypeError(f"run() must return a dict, not {type(record).__name__}")
            try:
                return json.dumps({"record": record})
            except (TypeError, ValueError, RecursionError) as error:
                raise TypeError(f"the record that run() returned does not fit into JSON: {error}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a worker may raise anything, SystemExit too
            return failure_reply(error)
