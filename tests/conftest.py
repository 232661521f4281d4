"""Shared set-up: refuse to test two copies of the package at once."""

from __future__ import annotations

import os
import sys
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
