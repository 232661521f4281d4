"""Errors a user can meet, grouped by what a handler would do.

    LayerlakeError
    ├── RequestError (ValueError)          asked wrongly: change the request            exit code 2
    │   ├── UnknownNameError                 a run, site, layer, label or column that is not there
    │   ├── DataError                        the data cannot be read as asked
    │   ├── SettingsDifferError              the run exists and was made with other settings
    │   └── SqlRefusedError                  SQL that is not one SELECT or EXPLAIN
    └── WorldError (RuntimeError)          the world failed: mend it and ask again       exit code 1
        ├── LakeFormatError                  no lake, or a lake of another format version
        ├── CorruptLakeError                 what is stored is not what was written
        ├── RunLockedError                   another driver works on the run
        ├── ModelError                       the model does not load or does not run
        │   ├── ForwardError                   a forward of the model raised an error of its own
        │   ├── ReplayError                    what was to be stored is not what the model gives a sequence alone
        │   └── TrainingError                  a training cannot go on: its loss is no number
        ├── MissingExtraError (ImportError)  an optional dependency is not installed
        └── JobError                         work items failed for good; ``failures`` names them

`LakeWarning` is a warning: an answer was given, and something was left out of it.

Every message says what happened to what, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import ClassVar


class LakeWarning(UserWarning):
    """Something of a lake is left out or not as it should be, and the answer is given without it."""


class LayerlakeError(Exception):
    """The root of all errors that layerlake raises on purpose."""

    exit_code: ClassVar[int] = 1


class RequestError(LayerlakeError, ValueError):
    """The request cannot be met as it was made."""

    exit_code: ClassVar[int] = 2


class UnknownNameError(RequestError):
    """A name in the request is not one that exists."""

    @classmethod
    def of(cls, kind: str, name: object, known: Iterable[object], where: str = "") -> UnknownNameError:
        """Build the error for an unknown `name` of a `kind`, listing near and known names."""
        names = [str(k) for k in known]
        near = [] if isinstance(name, int) else difflib.get_close_matches(str(name), names, n=3)
        hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        return cls(f"There is no {kind} {str(name)!r}{where}.{hint} Known: {shown or 'none'}.")


class DataError(RequestError):
    """The data cannot be read as asked."""


class SettingsDifferError(RequestError):
    """The run exists and was made with other settings."""


class SqlRefusedError(RequestError):
    """The SQL is not exactly one SELECT or EXPLAIN statement, or DuckDB refused it."""


class WorldError(LayerlakeError, RuntimeError):
    """Something outside of the request failed."""


class LakeFormatError(WorldError):
    """The folder is not a lake, or is a lake of another format version."""


class CorruptLakeError(WorldError):
    """What is stored is not what was written."""


class RunLockedError(WorldError):
    """Another driver works on the run."""


class ModelError(WorldError):
    """The model does not load, or does not run as it must."""


class ForwardError(ModelError):
    """A forward of the model raised an error of its own, whose text this one carries."""


class ReplayError(ModelError):
    """What was to be stored, or is stored, is not what the model gives a sequence that runs alone."""


class TrainingError(ModelError):
    """A training cannot go on: its loss, or its gradient, is no finite number."""


class MissingExtraError(WorldError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, extra: str, what: str) -> MissingExtraError:
        """Build the error for `what` that needs the optional `extra`, with the pip line."""
        return cls(f"{what} needs an optional extra: pip install 'layerlake[{extra}]'")


class JobError(WorldError):
    """Work items failed for good; `failures` maps an item's key to its last error in words.

    `tracebacks` maps the same keys to the traceback in the worker, as text, for whoever wants to see it.
    """

    def __init__(
        self,
        message: str,
        failures: Mapping[str, str] | None = None,
        tracebacks: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.failures: dict[str, str] = dict(failures or {})
        self.tracebacks: dict[str, str] = dict(tracebacks or {})
