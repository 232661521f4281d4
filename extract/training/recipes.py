"""The recipe of each cell of the study: one for an architecture on a task, the same for all seeds."""

from __future__ import annotations

from typing import Any

from .recipe import Recipe

_GROWING = {"start": 8, "grow": 4, "accuracy": 0.98}

RECIPES: dict[tuple[str, str], dict[str, Any]] = {
    # (architecture, task): what differs from Recipe's own fields
    ("transformer", "parity"): {"lr": 5e-4, "steps": 4000, "curriculum": _GROWING},
    ("transformer", "s3"): {"steps": 8000, "curriculum": _GROWING},
    ("gru", "s3"): {"lr": 3e-3},
    # With the usual 0.999 a Mamba's loss leaps up every few hundred steps, and takes dozens to come back.
    ("mamba", "dyck"): {"betas": (0.9, 0.95)},
    ("mamba", "parity"): {"betas": (0.9, 0.95), "steps": 4000, "curriculum": _GROWING},
    ("mamba", "s3"): {"betas": (0.9, 0.95), "steps": 8000, "curriculum": _GROWING},
    ("mamba2", "parity"): {"steps": 4000, "curriculum": _GROWING},
    ("mamba2", "s3"): {"steps": 8000, "curriculum": _GROWING},
    # What opens a block may lie before the string, so no model is right everywhere: a budget, not a goal.
    **{(a, "code-depth"): {"steps": 1500} for a in ("transformer", "mamba2", "lstm", "gru")},
    ("mamba", "code-depth"): {"betas": (0.9, 0.95), "steps": 1500},
}

FINE_TUNING: dict[str, Any] = {"lr": 1e-4, "warmup": 100, "clip": 1.0}
"""The recipe of a pretrained model, whichever it is and on every task."""

OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    # (architecture, task): options of the model without which the recipe is not known to work
    ("transformer", "parity"): {"positions": "learned"},
}


def default_recipe(architecture: str | None, task: str) -> Recipe:
    """Give the recipe of a cell; `task` is its specification, whose name counts and whose options do not.

    The architecture None is a pretrained model.
    """
    if architecture is None:
        return Recipe.from_json(FINE_TUNING)
    return Recipe.from_json(RECIPES.get((architecture, _name(task)), {}))


def default_options(architecture: str, task: str) -> dict[str, Any]:
    """Give the options of a cell's model that are not the architecture's own defaults."""
    return dict(OPTIONS.get((architecture, _name(task)), {}))


def _name(task: str) -> str:
    return task.partition("?")[0]
