"""Models in a folder: config.json with all options, and the weights in safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch

from ...errors import ModelError, RequestError
from ...store.durable import fsync_folder, sweep, write_temporary
from .architectures import make_config
from .backbone import SequenceModel

MODEL_TYPE = "layerlake"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
_FORMAT = 1


def save_checkpoint(folder: str | Path, model: SequenceModel, about: Mapping[str, Any]) -> None:
    """Write a model into a folder, with what is to be known about it: task, symbols, what its outputs stand for.

    `about` is plain data. The configuration holds the hash of the weights and is written last, so that a folder never
    holds a model half: weights that do not belong to the configuration are refused by `load_checkpoint`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    weights = safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in model.state_dict().items()})
    config = {
        "model_type": MODEL_TYPE,
        "format": _FORMAT,
        "options": model.config.to_json(),
        "parameters": model.parameter_count,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "about": dict(about),
    }
    for name, data in ((WEIGHTS, weights), (CONFIG, (json.dumps(config, indent=2) + "\n").encode())):
        write_temporary(folder, name, data).replace(folder / name)
        fsync_folder(folder)


def read_config(folder: str | Path) -> dict[str, Any] | None:
    """Give the configuration of a folder that `save_checkpoint` wrote; None for any other folder."""
    try:
        config = json.loads((Path(folder) / CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) and config.get("model_type") == MODEL_TYPE else None


def load_checkpoint(folder: str | Path) -> tuple[SequenceModel, dict[str, Any]]:
    """Load a model from a folder, in evaluation mode, and what was said about it.

    `RequestError` when the folder holds no model of this kind, `ModelError` when the model is damaged.
    """
    folder = Path(folder)
    config = read_config(folder)
    if config is None:
        raise RequestError(f"{folder} holds no model that layerlake made: it has no {CONFIG} of that kind.")
    if config.get("format") != _FORMAT:
        raise ModelError(f"{folder} was written by another version of layerlake (format {config.get('format')}).")
    try:
        options = dict(config["options"])
        made = make_config(options.pop("architecture"), **options)
        data = (folder / WEIGHTS).read_bytes()
        intact = hashlib.sha256(data).hexdigest() == config["weights_sha256"]
        about = dict(config["about"])
    except OSError as error:
        raise ModelError(f"{folder / WEIGHTS} cannot be read ({error.strerror}). Make the model again.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / CONFIG} is not as layerlake writes it: {error}. Make the model again.") from error
    if not intact:
        raise ModelError(f"The weights in {folder} are not those that its {CONFIG} was written for. Make it again.")
    model = SequenceModel(made)
    try:
        weights = safetensors.torch.load(data)
        model.load_state_dict(weights, assign=True)
    except (RuntimeError, ValueError, safetensors.SafetensorError) as error:
        raise ModelError(f"The weights in {folder} do not fit its {CONFIG}: {error}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval(), about


def fingerprint_of_options(config: Mapping[str, Any]) -> str:
    """Hash the options of a model's configuration, and none of what is only said about it."""
    return hashlib.sha256(json.dumps(config["options"], sort_keys=True).encode()).hexdigest()
