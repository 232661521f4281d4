"""Small workers for the tests of the engines; each does one thing that a worker may do."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any


class Echo:
    """Gives back its spec and payload, and says where it ran."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec

    def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        time.sleep(payload.get("sleep", 0))
        return {"spec": self.spec, "payload": payload, "pid": os.getpid(), "path": sys.path}


class Flaky:
    """Fails an item as often as its payload asks; attempts are counted in a folder."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.folder = Path(spec["folder"])

    def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        attempts = self.folder / payload["name"]
        with attempts.open("a") as file:
            file.write("x")
        attempt = attempts.stat().st_size
        if attempt <= payload["fails"]:
            raise ValueError(f"attempt {attempt} of {payload['name']} failed")
        return {"attempt": attempt}


class TwoArgumentsError(Exception):
    """Cannot be unpickled: pickle would call it with one argument, and the lock cannot be pickled."""

    def __init__(self, layer: int, reason: str) -> None:
        super().__init__(f"layer {layer} broke: {reason}")
        self.lock = threading.Lock()


class TextlessError(Exception):
    """Raises when asked for its text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Breaks:
    """Ends in the way that the payload names."""

    def __init__(self, spec: dict[str, Any]) -> None:
        if spec.get("how"):
            self.run(spec)

    def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        how = payload["how"]
        if how == "two arguments":
            raise TwoArgumentsError(7, "forward")
        if how == "textless":
            raise TextlessError
        if how == "system exit":
            raise SystemExit("leaving with words")
        if how == "sys.exit":
            sys.exit(3)
        if how == "lock":
            return {"lock": threading.Lock()}
        if how == "circle":
            circle: dict[str, Any] = {}
            circle["self"] = circle
            return circle
        if how == "list":
            return [1, 2]  # pyright: ignore[reportReturnType] - the mistake is the point
        if how == "data error":
            from layerlake.errors import DataError

            raise DataError("column 'x' holds no numbers")
        if how == "own request error":
            from layerlake.errors import RequestError

            class NarrowError(RequestError):
                pass

            raise NarrowError("of the user's own")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        if how == "exit":
            print("last words", file=sys.stderr, flush=True)
            os._exit(9)
        return {"how": how}


class Noisy:
    """Prints and warns at every turn."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.run({})

    def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        print("NOISE on stdout")
        print("NOISE on stderr", file=sys.stderr)
        warnings.warn("NOISE as a warning", stacklevel=1)
        return {}


class Threads:
    """Reports the compute threads it has, after loosening them as a library might."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import numpy as np
        import torch

        np.dot(np.ones((2, 2)), np.ones((2, 2)))
        torch.set_num_threads(4)

    def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        import threadpoolctl
        import torch

        return {
            "torch": torch.get_num_threads(),
            "pools": sorted({pool["num_threads"] for pool in threadpoolctl.threadpool_info()}),
            "omp": os.environ["OMP_NUM_THREADS"],
        }
