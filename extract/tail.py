"""From the last block's output to the model's: the final norm and the head, applied by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .loaded_model import LoadedModel


def apply_tail(model: LoadedModel, resid: Tensor) -> tuple[Tensor, Tensor | None]:
    """Apply the final norm and the head to the last resid_post, (time, width).

    Returns what comes after the final norm (as it is where there is none) and the model's output: the logits, or of a
    headless model the last hidden state; None where the head is of a kind that is not known. For models with an
    architecture only.
    """
    assert model.architecture is not None
    base: Any = model.module.get_submodule(model.prefix)
    norm, after = model.architecture.final_norm, model.architecture.after_norm
    normed = resid if norm is None else base.get_submodule(norm)(resid[None])[0]
    hidden = normed if after is None else base.get_submodule(after)(normed)
    if not model.prefix:
        return normed, hidden
    whole: Any = model.module
    head = getattr(whole, "cls", None) or whole.get_output_embeddings()
    if head is None:
        return normed, None
    logits = head(hidden[None].to(next(head.parameters()).dtype))[0]  # a stream in float32 meets a head in bfloat16
    if cap := getattr(whole.config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return normed, logits


def scaled_head(model: LoadedModel, output: Tensor, expected: Tensor) -> tuple[Tensor, float]:
    """Multiply what `apply_tail` gave by the factor that brings it nearest to the model's output, and give both.

    Some architectures scale their logits. Of a registered one it is known what it does, and the factor is 1.
    """
    assert model.architecture is not None
    if not model.architecture.found or output.shape != expected.shape:
        return output, 1.0
    size = output.double().square().sum()
    scale = float((output.double() * expected.double().to(output.device)).sum() / size) if size else 1.0
    if not abs(scale - 1) > 1e-3:
        return output, 1.0
    return (output * scale).to(output.dtype), scale
