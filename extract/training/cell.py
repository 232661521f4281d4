"""A cell of a study: a model, a task and a recipe, which a seed makes a training of; kept in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ModelError, RequestError, SettingsDifferError
from ...store.durable import is_locked, publish, replace_file, write_temporary
from ..tasks import parse_task
from .recipe import Recipe
from .sources import TrainedModelSource, source_from_json
from .task_data import TaskData
from .trainer import check_positions

CELL_FILE = "cell.json"
_FORMAT = 1
_SHOWN = 6


@dataclass(frozen=True)
class Cell:
    """What is trained and how. All seeds of a cell share it, and so does its folder.

    `RequestError` where model, task and recipe do not fit together; nothing has been written then.
    """

    source: TrainedModelSource
    data: TaskData
    recipe: Recipe

    def __post_init__(self) -> None:
        self.source.check(self.data)
        check_positions(self.recipe, self.source.max_length)

    def to_json(self) -> dict[str, Any]:
        """Give all that decides the weights of a seed, as plain data."""
        return {
            "format": _FORMAT,
            "model": self.source.to_json(),
            "task": self.data.task.spec,
            "target": self.data.target,
            "vocabulary": list(self.data.task.symbols),
            "classes": list(self.data.classes),
            "recipe": self.recipe.to_json(),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Cell:
        """Read what `to_json` gave."""
        data = TaskData(parse_task(found["task"]), found["target"])
        return cls(source_from_json(found["model"]), data, Recipe.from_json(found["recipe"]))

    def about(self, seed: int) -> dict[str, Any]:
        """Give what a checkpoint says of itself: what its inputs and outputs stand for, and how it was trained."""
        whole = self.to_json()
        return {k: whole[k] for k in ("vocabulary", "task", "target", "classes", "recipe")} | {"seed": seed}

    def claim(self, folder: Path) -> None:
        """Make `folder` this cell's, or find that it is; `SettingsDifferError` names what another one has otherwise."""
        path = folder / CELL_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise RequestError(f"{folder} is no folder. Name another one with --out.") from None
        mine = json.loads(json.dumps(self.to_json()))
        if not path.exists():
            publish(write_temporary(folder, CELL_FILE, _text(mine)), path)
        try:
            kept = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read ({error}). Train into another folder.") from error
        lines = differences(kept, mine)
        if lines and _is_unused(folder):  # an asked-for cell of which nothing was ever saved
            replace_file(path, _text(mine))
        elif lines:
            shown = "; ".join([*lines[:_SHOWN], *(["and more"] if lines[_SHOWN:] else [])])
            raise SettingsDifferError(f"{folder} holds another training ({shown}). Name another folder with --out.")


def seed_lock(folder: Path, seed: int | str) -> Path:
    """Name the file that is locked while a seed of the cell is trained."""
    return folder / f".seed-{seed}.lock"


def seed_folder(folder: Path, seed: int) -> Path:
    """Name the folder of one seed of a cell, which is a MODEL of the other commands when it is trained."""
    return folder / f"seed-{seed}"


def differences(kept: Any, asked: Any, name: str = "") -> list[str]:
    """Name what of two nested mappings differs: ``recipe.lr: there it is 0.001, asked was 0.0005``."""
    if isinstance(kept, dict) and isinstance(asked, dict):
        lines = []
        for key in dict.fromkeys([*kept, *asked]):
            lines += differences(kept.get(key), asked.get(key), f"{name}.{key}" if name else str(key))
        return lines
    return [] if kept == asked else [f"{name}: there it is {_shown(kept)}, asked was {_shown(asked)}"]


def _is_unused(folder: Path) -> bool:
    """Tell whether no seed of the cell was saved or is being trained."""
    kept = (p for p in folder.glob("seed-*/*") if not p.name.endswith(".tmp"))
    return not any(kept) and not any(is_locked(p) for p in folder.glob(seed_lock(folder, "*").name))


def _text(cell: Mapping[str, Any]) -> bytes:
    return (json.dumps(cell, indent=2) + "\n").encode()


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)
