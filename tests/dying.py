"""Processes that kill themselves between two steps of what they do, at every step in turn."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

Step = tuple[Any, str]
"""A module or class, and the name of the function in it that counts as a step."""


def die_at_each_step(steps: list[Step], prepare: Callable[[int], Callable[[], object]], stride: int = 1) -> int:
    """Run a piece of work in children that die by SIGKILL before their first, second, ... step, until one lives.

    `prepare(moment)` runs here and returns the work of that moment's child. Returns the number of children.
    """
    moment, status = 0, signal.SIGKILL
    while status == signal.SIGKILL:
        work = prepare(moment * stride)
        child = os.fork()
        if not child:
            _count_down(steps, moment * stride)
            work()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        moment += 1
    assert status == 0, f"the last child ended with status {status}"
    return moment


def _count_down(steps: list[Step], left: int) -> None:
    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for module, name in steps:
        setattr(module, name, counted(getattr(module, name)))
