"""Small models of every architecture that is built here, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from layerlake.extract.models import SequenceModel, make_config, save_checkpoint

SMALL: dict[str, dict[str, Any]] = {
    "transformer": {"heads": 2, "d_ff": 24, "longest": 16},
    "mamba": {"d_inner": 32, "d_state": 4},
    "mamba2": {"d_inner": 32, "d_state": 6, "head_dim": 8, "groups": 2},
    "lstm": {},
    "gru": {},
}
"""Options that make each architecture small; they differ from each other so that no two axes are of one length."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in SMALL},
    "transformer-rotary": ("transformer", {"positions": "rotary"}),
    "transformer-sinusoidal": ("transformer", {"positions": "sinusoidal", "embedding_std": 1.0}),
    "transformer-none": ("transformer", {"positions": "none", "start": "torch"}),
    "mamba-no-conv": ("mamba", {"d_conv": 0}),
    "mamba2-no-conv": ("mamba2", {"d_conv": 0}),
    "lstm-residual": ("lstm", {"residual": True, "forget_bias": 1.0}),
    "gru-residual": ("gru", {"residual": True, "start": "orthogonal"}),
}
"""Every architecture with the options that change what it computes."""

SYMBOLS = tuple("abcdefg")


def build(variant: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> SequenceModel:
    """Build a small model, in evaluation mode."""
    name, options = VARIANTS[variant]
    sizes = {"vocab_size": len(SYMBOLS), "outputs": 3, "layers": 2, "d_model": 16}
    config = make_config(name, **(sizes | SMALL[name] | options | more))
    return SequenceModel(config, torch.Generator().manual_seed(seed)).to(dtype).eval()


def save(folder: Path, variant: str, **more: Any) -> Path:
    """Save a small model as a folder that is a MODEL."""
    about = {"vocabulary": SYMBOLS, "task": "letters", "target": "kind", "classes": [0, 1, 2]}
    save_checkpoint(folder, build(variant, **more), about)
    return folder
