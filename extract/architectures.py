"""Where the sites of each Hugging Face architecture lie, and which padding leaves its real tokens unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ModelError, UnknownNameError
from .hooks import SitePoint


@dataclass(frozen=True)
class Architecture:
    """The module paths of one architecture, below its headless model, and how it may be called.

    `embed` is the module whose output enters the first block: token embeddings plus positions, and the embedding
    norm where the model has one. `blocks` is the list of blocks: layer i is the output of block i, before any final
    norm. `padding` lists the sides on which padding is safe when mask and position ids are given.
    """

    embed: str
    blocks: str
    positions: bool
    padding: tuple[str, ...] = ("right", "left")


ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture("embeddings", "encoder.layer", positions=True),
    "gpt2": Architecture("drop", "h", positions=True),
    # The mixer multiplies its input and its convolution's output by the mask, so that pads neither enter the
    # convolution nor the state.
    "mamba": Architecture("embeddings", "layers", positions=False),
}


def architecture_of(model_type: str) -> Architecture:
    """Look up an architecture by the `model_type` of its configuration; an unknown one is an error, not a guess."""
    if model_type not in ARCHITECTURES:
        raise UnknownNameError.of("architecture", model_type, ARCHITECTURES)
    return ARCHITECTURES[model_type]


def site_points(model: torch.nn.Module, architecture: Architecture) -> list[SitePoint]:
    """Give the sites `embed` and `resid_post` of a headless model."""
    try:
        model.get_submodule(architecture.embed)
        blocks = model.get_submodule(architecture.blocks)
    except AttributeError as error:
        raise ModelError(f"The model is not built as its architecture is known to be: {error}") from error
    count = sum(1 for _ in blocks.children())
    points = [SitePoint("embed", None, architecture.embed)]
    return points + [SitePoint("resid_post", i, f"{architecture.blocks}.{i}") for i in range(count)]
