"""The worker of a training job: one seed of a cell, from wherever it was left to its checkpoint and its figures."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...errors import ModelError, TrainingError
from ...store.durable import exclusive_lock, replace_file
from .cell import Cell, seed_folder, seed_lock
from .evaluation import evaluate
from .saved_state import STATE_FILE, load_state, save_state
from .sources import parameter_count
from .trainer import Trainer
from .watch import PROGRESS_FILE, write_progress

RESULT_FILE = "training.json"
_FORMAT = 1
_BUSY = "{what} is being trained by another process ({{holder}}). Wait for it, or train into another folder."


class TrainWorker:
    """Trains a seed of the cell that its spec holds, saving the state every ``save_every_s`` seconds."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.out = Path(spec["out"])
        self.cell = Cell.from_json(spec["cell"])
        self.lengths: list[int] = spec["lengths"]
        self.strings: int = spec["strings"]
        self.save_every_s: float = spec["save_every_s"]

    def run(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Train `payload["seed"]`; the record holds a sentence under ``diverged`` when its loss was no number."""
        seed = payload["seed"]
        folder = seed_folder(self.out, seed)
        folder.mkdir(exist_ok=True)
        with exclusive_lock(seed_lock(self.out, seed), _BUSY.format(what=folder)):
            for left in folder.glob("*.tmp"):  # nobody else writes here while the lock is held
                shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
            try:
                self._train(seed, folder)
            except TrainingError as error:
                # Not an error of the job: the other seeds go on, and trying again would end at the same step.
                kept = f" Its last good state is in {folder}." if (folder / STATE_FILE).exists() else ""
                return {"diverged": f"{error}{kept}"}
            finally:
                (folder / PROGRESS_FILE).unlink(missing_ok=True)
        return {"diverged": None}

    def _train(self, seed: int, folder: Path) -> None:
        result = read_result(folder)
        if result is None:
            trainer = self._go_on(seed, folder)
            self.cell.source.save(folder, trainer.model, self.cell.about(seed))
            model, state = trainer.model, trainer.state
            result = {
                "format": _FORMAT,
                "cell": self.cell.to_json(),
                "seed": seed,
                "parameters": parameter_count(model),
                "steps": state.step,
                "stopped": state.stopped,
                "loss": state.loss,
                "cpu_seconds": round(state.cpu_seconds, 2),
                "compute": compute_here() | dict(self.cell.source.compute),
                "python": platform.python_version(),
                "history": state.history,
            }
        else:
            model = load_trained(self.cell, folder, seed)
        if not self._is_evaluated(result):
            result |= {"evaluation": self._evaluate(model)}
            replace_file(folder / RESULT_FILE, (json.dumps(result, indent=2) + "\n").encode())
        (folder / STATE_FILE).unlink(missing_ok=True)

    def _go_on(self, seed: int, folder: Path) -> Trainer:
        """Train to the end from the state that is there, or from the start."""
        cell, compute = self.cell, compute_here() | dict(self.cell.source.compute)
        trainer = Trainer(cell.source.build(seed), cell.data, cell.recipe, seed=seed, max_length=cell.source.max_length)
        load_state(folder, trainer, compute)
        begun, begun_at = trainer.state.step, time.monotonic()
        saved = told = begun_at

        def after_step() -> None:
            nonlocal saved, told
            now = time.monotonic()
            if now - saved >= self.save_every_s or trainer.state.stopped is not None:
                save_state(folder, trainer, compute)
                saved = now
            if now - told >= 0.5:
                write_progress(folder, trainer, (trainer.state.step - begun) / (now - begun_at))
                told = now

        trainer.run(after_step)
        return trainer

    def _is_evaluated(self, result: Mapping[str, Any]) -> bool:
        found = result.get("evaluation")
        return found is not None and is_evaluation(found, self.lengths, self.strings)

    def _evaluate(self, model: torch.nn.Module) -> dict[str, Any]:
        cell = self.cell
        majority = cell.data.majority(cell.recipe.length)
        results = evaluate(
            model,
            cell.data,
            majority=majority,
            max_length=cell.source.longest_trained(cell.recipe),
            lengths=self.lengths,
            strings=self.strings,
        )
        return {
            "strings": self.strings,
            "majority_class": cell.data.classes[majority],
            "lengths": [r.to_json() for r in results],
        }


def read_result(folder: Path) -> dict[str, Any] | None:
    """Read what a finished training says of itself; None when it is not finished."""
    with contextlib.suppress(FileNotFoundError):
        path = folder / RESULT_FILE
        try:
            return json.loads(path.read_bytes())
        except ValueError as error:
            raise ModelError(f"{path} cannot be read ({error}). Train into another folder.") from error
    return None


def load_trained(cell: Cell, folder: Path, seed: int) -> torch.nn.Module:
    """Load what a finished training wrote; `ModelError` when another model lies there."""
    model, about = cell.source.load(folder)
    if about != json.loads(json.dumps(cell.about(seed))):
        raise ModelError(f"The model in {folder} is not the one that was trained there. Train into another folder.")
    return model


def is_evaluation(found: Mapping[str, Any], lengths: list[int], strings: int) -> bool:
    """Tell whether an evaluation was made at these lengths, on so many strings each."""
    return found["strings"] == strings and [r["length"] for r in found["lengths"]] == list(lengths)


def compute_here() -> dict[str, Any]:
    """Name what moves the last bits of a training step: a training that was begun otherwise is not gone on with."""
    return {
        "layerlake": __version__,
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
