"""The state of a training that is not finished: one file, which is there whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ...errors import ModelError, SettingsDifferError, TrainingError
from ...store.durable import replace_file
from .cell import differences
from .trainer import Trainer, TrainerState

STATE_FILE = "state.safetensors"


def save_state(folder: Path, trainer: Trainer, compute: Mapping[str, Any]) -> None:
    """Write weights, what AdamW keeps, and the rest of the state, in place of what was written before.

    Tensors and JSON share one file, so that they cannot be of two moments. `compute` is what moves the last bits of a
    step here. `TrainingError` when a weight is no number any more; the state before is kept.
    """
    tensors = {k: t.detach().cpu().contiguous() for k, t in trainer.tensors().items()}
    broken = [k for k, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]
    if broken:
        raise TrainingError(
            f"{broken[0]} is no finite number any more at step {trainer.state.step} of seed {trainer.seed}. "
            "Train with a lower lr, a longer warmup or a smaller clip, in another folder."
        )
    text = json.dumps({"seed": trainer.seed, "state": asdict(trainer.state), "compute": dict(compute)})
    metadata = {"training": text, "sha256": _digest(tensors, text)}
    replace_file(folder / STATE_FILE, safetensors.torch.save(tensors, metadata))


def load_state(folder: Path, trainer: Trainer, compute: Mapping[str, Any]) -> bool:
    """Take a training back to where `save_state` left it; False when nothing is there.

    `ModelError` when the file is damaged, `SettingsDifferError` when its steps were computed in another way.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return False
    again = "Remove it to train this seed from the start."
    try:
        with safetensors.safe_open(path, "pt") as file:  # pyright: ignore[reportPrivateImportUsage]
            metadata = file.metadata() or {}
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 - it is no mapping
        text = metadata["training"]
        intact = metadata["sha256"] == _digest(tensors, text)
        found = json.loads(text)
        state = TrainerState(**found["state"])
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise ModelError(f"The state of the training {path} cannot be read ({error}). {again}") from error
    if not intact:
        raise ModelError(f"The state of the training {path} was changed after it was written. {again}")
    lines = differences(found["compute"], json.loads(json.dumps(dict(compute))))
    if lines:
        raise SettingsDifferError(
            f"The training in {folder} was begun otherwise ({'; '.join(lines)}), and might end at other weights. "
            "Go on with what it was begun with, or train into another folder."
        )
    trainer.restore(tensors, state)
    return True


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
