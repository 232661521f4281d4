"""The tasks by name, and how a task is written as text."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from urllib.parse import parse_qsl

from ...errors import RequestError, UnknownNameError
from .dyck import Dyck
from .flip_flop import FlipFlop
from .groups import S3, GroupComposition, ModularAddition
from .parity import Parity
from .relabelled import Relabelled
from .task import Task

TASKS: dict[str, type[Task]] = {t.name: t for t in (Parity, S3, GroupComposition, Dyck, ModularAddition, FlipFlop)}
"""Each task by its name."""


def parse_task(spec: str) -> Task:
    """Read a task: a name, and options after a question mark.

        parity                                 the defaults
        dyck?k=3&max_depth=5                   with options
        parity?labels=dyck?k=1;max_depth=5     the strings of the first, the labels of the second

    An unknown name or option is an `UnknownNameError`, a value that cannot be a `RequestError`.
    """
    name, _, text = spec.partition("?")
    own, labels = _labels_apart(text)
    task = _task(name, own)
    return task if labels is None else Relabelled(strings=task, labels=parse_task(labels))


def _labels_apart(text: str) -> tuple[str, str | None]:
    parts = [p for p in text.split("&") if p]
    labels = [p.removeprefix("labels=") for p in parts if p.startswith("labels=")]
    if len(labels) > 1:
        raise RequestError("labels= is given twice: a string has the labels of one task.")
    rest = "&".join(p for p in parts if not p.startswith("labels="))
    return rest, labels[0].replace(";", "&") if labels else None


def _task(name: str, text: str) -> Task:
    if name not in TASKS:
        raise UnknownNameError.of("task", name, TASKS)
    kind = TASKS[name]
    types = {f.name: f.type for f in fields(kind)}
    options: dict[str, Any] = {}
    for key, value in parse_qsl(text, keep_blank_values=True):
        if key not in types:
            raise UnknownNameError.of("option", key, [*types, "labels"], f" of the task {name!r}")
        if key in options:
            raise RequestError(f"The option {key} of the task {name!r} is given twice. Give it once.")
        options[key] = _value(name, key, value, str(types[key]))
    return kind(**options)


def _value(name: str, key: str, text: str, kind: str) -> Any:
    convert = {"int": int, "float": float, "str": str}[kind]
    try:
        return convert(text)
    except ValueError:
        raise RequestError(f"The option {key} of the task {name!r} is {text!r}, which is no {kind}.") from None
