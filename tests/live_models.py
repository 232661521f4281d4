"""Ids for models that are in memory, and all that must be the same of a model before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from layerlake.extract.weights import weight_digests
from torch import nn
from toy_models import VOCABULARY

LENGTHS = (9, 3, 1, 17, 4, 4, 12)


def make_ids(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]


def write_ids(path: Path, ids: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": i}) + "\n" for i in ids))
    return path


def state_of(module: nn.Module) -> dict[str, Any]:
    """All that must be as it was: modules and their order, modes, hooks and their order, weights and gradients."""
    modules = list(module.named_modules(remove_duplicate=False))
    return {
        "modules": [(n, id(m), m.training) for n, m in modules],
        "hooks": [[list(h.items()) for h in (m._forward_hooks, m._forward_pre_hooks)] for _, m in modules],
        "with kwargs": [
            [list(m._forward_hooks_with_kwargs), list(m._forward_pre_hooks_with_kwargs)] for _, m in modules
        ],
        "gradients": [(n, id(p), p.requires_grad, p.device) for n, p in module.named_parameters()],
        "weights": weight_digests(module),
    }


def some_mode(module: nn.Module) -> None:
    """Training mode, but for one part, as a user who froze it leaves it."""
    module.train()
    list(module.modules())[-1].eval()
    next(module.parameters()).requires_grad_(False)
