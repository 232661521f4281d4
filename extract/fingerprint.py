"""Telling whether two models have the same weights, and two tokenizers the same rules."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Hash all parameters and buffers that a checkpoint would hold: names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        value = tensor.detach().to("cpu").contiguous()
        total.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str | None:
    """Hash the rules of a fast tokenizer, vocabulary and post-processing included; None when there is none.

    Padding and truncation are left out: they are not used, and calling the tokenizer can change them.
    """
    if tokenizer is None:
        return None
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["padding"] = rules["truncation"] = None
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def source_hash(module: str) -> str | None:
    """Hash the source file of an importable module: a model's code can change values as its weights can."""
    spec = importlib.util.find_spec(module) if module not in sys.modules else sys.modules[module].__spec__
    origin = spec.origin if spec else None
    if not origin or not Path(origin).is_file():
        return None
    return hashlib.sha256(Path(origin).read_bytes()).hexdigest()
