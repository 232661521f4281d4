"""A guard beside a driver's own Ray cluster, which cleans up when the driver is gone, however it went.

Run as a script of its own: ``ray_guard.py FOLDER PID...``. It waits for the end of its standard input, whose
other end the driver holds. Ray's processes die with the driver except for two agents, which would try for
another 60 seconds to report to a server that died too; and nobody would remove the cluster's folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 3.0  # seconds for processes to end by themselves


def start_guard(folder: Path, raylet: int) -> subprocess.Popen[bytes]:
    """Start a guard over `folder` and the agents that the process `raylet` has started."""
    agents = [str(pid) for pid in _children(raylet)]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(folder), *agents],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt from the terminal is meant for the driver
    )


def stop_guard(guard: subprocess.Popen[bytes]) -> None:
    """Have the guard do its work now, and wait for it."""
    if guard.stdin is not None:
        guard.stdin.close()
    try:
        guard.wait(PATIENCE + 5)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _stat(pid: int) -> list[str]:
    """Read the fields of a process from its state on, empty when it is gone (Linux only)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _children(parent: int) -> list[int]:
    if not sys.platform.startswith("linux"):
        return []
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (_stat(pid) or ["", "0"])[1] == str(parent)]


def _born(pid: int) -> str:
    """Say when a running process was started, to tell it from a later one that got its number."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def _main(folder: str, pids: list[int]) -> None:
    born = {pid: _born(pid) for pid in pids}
    sys.stdin.buffer.read()
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid, start in born.items() if start and _born(pid) == start]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(sys.argv[1], [int(pid) for pid in sys.argv[2:]])
