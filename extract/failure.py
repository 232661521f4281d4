"""What a model's own error says: its text on one line, and in which module it was raised."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import ForwardError
from .batch import Batch

if TYPE_CHECKING:
    from .hooks import SitePoint
    from .loaded_model import LoadedModel


def one_line(error: BaseException) -> str:
    """Give an error's text on one line of bearable length."""
    return " ".join(str(error).split())[:400] or type(error).__name__


def where_it_failed(error: BaseException, model: LoadedModel) -> str:
    """Say in which module of `model` an error was raised, and in which block that lies; "" where none was running.

    It is read off the error's traceback: the innermost frame that is a method of one of the model's modules.
    """
    paths = {id(m): n for n, m in model.module.named_modules()}
    running = [
        paths[id(frame.f_locals["self"])]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if isinstance(frame.f_locals.get("self"), torch.nn.Module) and id(frame.f_locals["self"]) in paths
    ]
    blocks = {p.module: p.layer for p in model.points if p.site == "resid_post"}
    inside = next((f" in block {blocks[p]}" for p in reversed(running) if p in blocks), "")
    module = f", module {running[-1]!r}," if running and running[-1] and running[-1] not in blocks else ""
    return inside + module


def failing_alone(
    model: LoadedModel, points: Sequence[SitePoint], members: Mapping[int, np.ndarray]
) -> tuple[int, ForwardError] | None:
    """Find the first of a batch's sequences that the model fails on alone, with what it says; None when there is none.

    `members` are the sequences' ids by the name that they are told by.
    """
    for name, ids in members.items():
        try:
            model.run(Batch.of([ids], "none", model.device), points)
        except ForwardError as alone:
            return name, alone
    return None
