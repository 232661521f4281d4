"""Real processes for tests: the program itself, its children, and ending them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import layerlake

_PACKAGE = Path(layerlake.__file__).parent


def environment() -> dict[str, str]:
    """Give the environment in which a child finds the same layerlake and the tests' own models."""
    folders = [str(Path(__file__).parent), *(p for p in sys.path if (Path(p) / "layerlake" / "__init__.py").is_file())]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders), "HF_HUB_OFFLINE": "1"}


def layerlake_command(*arguments: object) -> list[str]:
    """Give the command line of the program, as `layerlake ...` would run it."""
    return [sys.executable, "-m", "layerlake", *(str(a) for a in arguments)]


def run_layerlake(
    *arguments: object, cwd: Path | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run the program to its end and return what it printed and its exit code."""
    return subprocess.run(
        layerlake_command(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=environment(),
        check=False,
    )


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start the program; whatever of it is left at the end is killed."""
    process = subprocess.Popen(
        layerlake_command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        yield process
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def descendants(pid: int) -> list[int]:
    """List the processes below `pid`, nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(after_name[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(0), [])
        found += children
        todo += children
    return found


def actors_of(pid: int) -> list[int]:
    """List the Ray actors at work below a driver."""
    actors = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if b"LayerlakeWorker" in (Path("/proc") / str(child) / "cmdline").read_bytes():
                actors.append(child)
    return actors


def wait_until(condition, seconds: float, every: float = 0.01) -> bool:
    """Wait until `condition()` holds; says whether it came to hold."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(every)
    return bool(condition())


def killed_at_work(command: Sequence[object], lake: Path, run: str) -> int:
    """Start an extraction until one ends, each killed after two more units; returns how many were killed."""
    units = lake / "runs" / run / "units"
    for killed in range(30):
        with started(*command, "--lake", lake) as process:
            before = len(list(units.iterdir())) if units.is_dir() else 0
            wait_until(lambda p=process, b=before: p.poll() is not None or len(list(units.glob("*"))) > b + 1, 60)
            if process.poll() is not None:
                return killed
            process.kill()
            process.wait()
    return 30
