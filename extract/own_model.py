"""Loading a model that was made here, so that it is read and replayed as any other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError
from .architectures import site_points
from .batch import Batch
from .fingerprint import dtype_of
from .loaded_model import LoadedModel, ModelSource
from .models.checkpoint import CONFIG, fingerprint_of_options, load_checkpoint, read_config
from .models.places import architecture_of
from .weights import weight_digests, weights_fingerprint

OWN_KIND = "layerlake-"


def is_own(source: ModelSource) -> bool:
    """Tell whether a model's name is a folder that `save_checkpoint` wrote."""
    return not source.is_function and read_config(Path(source.name).expanduser()) is not None


def load_own(source: ModelSource) -> LoadedModel:
    """Load a model folder that was made here, with all its sites; its weights are held to its configuration."""
    folder = Path(source.name).expanduser()
    module, about = load_checkpoint(folder)
    config = read_config(folder)
    assert config is not None
    if source.dtype != "auto":
        module.to(getattr(torch, source.dtype))
    weights = weight_digests(module)
    architecture = architecture_of(module.config)

    def forward(batch: Batch, whole: bool) -> Any:
        return (module if whole else module.backbone)(batch.input_ids)

    return LoadedModel(
        source,
        module,
        forward,
        site_points(module, "backbone", architecture, getattr(module.config, "heads", None), patterns=True),
        architecture.padding,
        None,
        module.config.vocab_size,
        module.config.max_length,
        {
            "kind": OWN_KIND + module.config.architecture,
            "config": fingerprint_of_options(config),
            "tokenizer": None,
            "dtype": dtype_of(module),
            "fingerprint": weights_fingerprint(weights),
        },
        weights,
        prefix="backbone",
        architecture=architecture,
        vocabulary=_vocabulary(about, folder, module.config.vocab_size),
    )


def _vocabulary(about: Mapping[str, Any], folder: Path, vocab_size: int) -> tuple[str, ...] | None:
    """Give the symbols that the model was trained on, when that is said about it."""
    symbols = about.get("vocabulary")
    if symbols is None:
        return None
    named = isinstance(symbols, list) and all(isinstance(s, str) for s in symbols)
    if not named or len(set(symbols)) < len(symbols) or len(symbols) > vocab_size:
        raise ModelError(
            f"The vocabulary in {folder / CONFIG} is no list of at most {vocab_size} different symbols. Make the model "
            "again."
        )
    return tuple(symbols)
