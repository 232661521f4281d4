"""The tasks by name, and how a task is written as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import unquote

from ...errors import RequestError, UnknownNameError
from .code_depth import CodeDepth
from .dyck import Dyck
from .flip_flop import FlipFlop
from .groups import S3, GroupComposition, ModularAddition
from .parity import Parity
from .relabelled import Relabelled
from .task import Task

_KINDS = (Parity, S3, GroupComposition, Dyck, CodeDepth, ModularAddition, FlipFlop)
TASKS: dict[str, type[Task]] = {kind.name: kind for kind in _KINDS}
"""Each task by its name."""
_LABELS = "labels"
_CONVERT = {"int": int, "float": float, "str": unquote}


def parse_task(spec: str) -> Task:
    """Read a task: a name, and options after a question mark.

        parity                                 the defaults
        dyck?k=3&max_depth=5                   with options
        parity?labels=dyck?k=1;max_depth=5     the strings of the first, the labels of the second

    Characters that part options (``& ; %``) are written as in a URL, as ``%26``. An unknown name or option is an
    `UnknownNameError`, a value that cannot be a `RequestError`.
    """
    return parse_task_with(spec, {})[0]


def parse_task_with(spec: str, more: Mapping[str, str]) -> tuple[Task, dict[str, Any]]:
    """Read a task that is written with options which are not its own, and give both.

    `more` are the names of these and their types: int, float or str.
    """
    name, _, text = spec.partition("?")
    if name not in TASKS:
        raise UnknownNameError.of("task", name, TASKS)
    kind = TASKS[name]
    own = {f.name: str(f.type) for f in fields(kind)}
    given: dict[str, str] = {}
    for part in filter(None, text.split("&")):
        key, _, value = part.partition("=")
        if key not in {*own, *more, _LABELS}:
            raise UnknownNameError.of("option", key, [*own, _LABELS, *more], f" of the task {name!r}")
        if key in given:
            raise RequestError(f"The option {key} of the task {name!r} is given twice. Give it once.")
        given[key] = value
    labels = given.pop(_LABELS, None)
    values = {key: _value(name, key, value, (own | dict(more))[key]) for key, value in given.items()}
    task: Task = kind(**{key: value for key, value in values.items() if key in own})
    if labels is not None:
        task = Relabelled(strings=task, labels=parse_task(labels.replace(";", "&")))
    return task, {key: value for key, value in values.items() if key not in own}


def _value(name: str, key: str, text: str, kind: str) -> Any:
    try:
        return _CONVERT[kind](text)
    except ValueError:
        raise RequestError(f"The option {key} of the task {name!r} is {text!r}, which is no {kind}.") from None
