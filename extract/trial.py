"""What a model is found to do before it is trusted: where its axes are, in which order its sites run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ModelError
from .batch import Batch
from .hooks import SitePoint

if TYPE_CHECKING:
    from .loaded_model import LoadedModel


def settle(model: LoadedModel, points: Sequence[SitePoint]) -> list[SitePoint]:
    """Run two small forwards of unlike shapes; settles the axes, shape and dtype of every point by looking.

    A module that never runs is an error naming it, and so are blocks that do not run in the order of their layers.
    The batch is never as large as the time here, which leaves no doubt which axis of an output is which, also where
    real batches happen to be square.
    """
    shapes, dtypes = {}, {}
    for batch_size, time in ((4, 3), (7, 5)):
        length = min(time, model.max_length or time)
        batch = Batch.of([np.zeros(length, np.int64)] * batch_size, "none", model.device)
        values, _ = model.run(batch, points)
        _check_order(points, list(values))
        settled = []
        for point in points:
            value = values[point.name]
            seen = tuple(value.shape[:2])
            if value.ndim < 3 or seen not in ((batch_size, length), (length, batch_size)):
                raise ModelError(
                    f"Site {point.name}: module {point.module!r} returned {tuple(value.shape)} for {batch_size} "
                    f"sequences of {length} tokens; it must be (batch, time, ...) or (time, batch, ...)."
                )
            swapped = seen == (length, batch_size)
            settled.append(replace(point, time_first=True) if swapped else point)
            shapes[point.name] = (*value.shape[2:-1], 0) if point.keys else tuple(value.shape[2:])
            dtypes[point.name] = str(value.dtype).removeprefix("torch.")
        points = settled
    model.shapes |= shapes
    model.dtypes |= dtypes
    return list(points)


def _check_order(points: Sequence[SitePoint], ran: list[str]) -> None:
    """Refuse blocks that run in another order than theirs: layer i would not be block i."""
    modules = {p.name: p.module for p in points if p.site in ("embed", "resid_post")}
    order = [n for n in ran if n in modules]
    if order != list(modules):
        raise ModelError(
            f"The modules {', '.join(map(repr, modules.values()))} run in the order "
            f"{', '.join(repr(modules[n]) for n in order)}, and layers are counted as the model computes them. "
            "Return a TorchModel that names embed and blocks in the order in which they run."
        )
