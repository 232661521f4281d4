"""Compute threads of a worker, held to a number because another number gives other bits."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Self

from threadpoolctl import threadpool_limits

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ThreadLimit:
    """Holds BLAS, OpenMP and torch in this process to `threads`; used as a context, it restores them.

    Three means, as none suffices: environment variables reach libraries that are loaded later,
    threadpoolctl those that are loaded already, and torch honours its own call only. `apply` is cheap and
    is called again before each item: the worker may have loaded, or set, something since.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._environment: dict[str, str | None] = {}
        self._pools: list[threadpool_limits] = []
        self._modules = -1
        self._torch: int | None = None

    def __enter__(self) -> Self:
        self._environment = {name: os.environ.get(name) for name in THREAD_VARIABLES}
        # What torch would choose by itself, should it be imported only after the variables are set.
        self._torch = int(os.environ.get("OMP_NUM_THREADS") or 0) or _cores()
        if "torch" in sys.modules:
            self._torch = sys.modules["torch"].get_num_threads()
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(self.threads)))
        self.apply()
        return self

    def apply(self) -> None:
        """Set the limits again, on whatever is loaded by now."""
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._pools.append(threadpool_limits(self.threads))
        torch = sys.modules.get("torch")
        # A partly imported torch, seen from inside its own import, has no such function yet.
        if torch is not None and hasattr(torch, "set_num_threads"):
            torch.set_num_threads(self.threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in reversed(self._pools):
            pool.restore_original_limits()
        self._pools.clear()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if "torch" in sys.modules and self._torch is not None:
            sys.modules["torch"].set_num_threads(self._torch)


def _cores() -> int:
    """Count the cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
