"""Shared set-up: refuse to test two copies of the package at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import layerlake
import pytest
import torch

# Workers compute with one thread; a reference with two differs in the last bits. The hub is never asked.
torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"

_HOME = Path(layerlake.__file__).resolve().parent


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail when a file of layerlake was imported under a second name: its `Lake` would not be layerlake's."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name == "layerlake" or name.startswith("layerlake."):
            continue
        path = Path(file).resolve()
        inside = (
            Path(file).is_absolute()
            and path.is_relative_to(_HOME)
            and not any(part in ("tests", ".venv", "site-packages") for part in path.relative_to(_HOME).parts)
        )
        if inside:
            session.exitstatus = 1
            print(f"\n{path} was imported as {name!r}, a second copy beside layerlake")


@pytest.fixture
def small_disk() -> Iterator[Callable[[int], Path]]:
    """Mount file systems of a few hundred KiB; a call gives the folder of one of so many bytes."""
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    mounted = []

    def mount(size: int) -> Path:
        # not below tmp_path: another session of pytest may tidy that up, and cannot remove a mounted folder
        folder = Path(tempfile.mkdtemp(prefix="layerlake-disk-"))
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mounting a small file system is not permitted: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()
