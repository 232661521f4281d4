"""The check on real data, before anything is stored, that a sequence has the same activations alone as in a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from ..errors import ForwardError, ModelError
from .batch import Batch, Padding, plan_batches, split_sequences
from .hooks import SitePoint
from .loaded_model import LoadedModel
from .loading import refuse_hooks

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""By dtype of a site, how far a row may lie from the same row of another batch, as a share of the row's norm.

Far above what the shape of a batch does to the last bits (measured with MiniLM: 2e-6 in float32, 0.003 in float16,
0.02 in bfloat16), and far below what padding that is read, rows that are swapped, or dropout that is on, do."""

_STREAM = frozenset(("embed", "resid_pre", "resid_mid", "resid_post", "hidden", "final_norm", "logits"))
_UNITS_LOOKED_AT = 16


def check_batches(
    model: LoadedModel,
    points: Sequence[SitePoint],
    units: Sequence[pa.Table],
    batch_tokens: int,
    padding: Padding,
) -> None:
    """Compare sequences of one planned batch with the same sequences alone; `ModelError` names the site.

    `units` are the planned token tables. Of the first units' batches, the one with the most padding is run
    (without padding: the one with the most sequences), then its shortest and its longest sequence alone, and the
    shortest alone once more. So a padding side that is declared wrongly, a model that mixes or reorders the rows of a
    batch, keeps a state from call to call, or draws random numbers, is noticed; the choice depends on the data alone.

    Hooks of someone else that act on this batch, and not on the few ids that a model is loaded with, are refused too.
    A forward that fails is left to the workers, who report it with the unit that it belongs to.
    """
    batch = _choose(units[:_UNITS_LOOKED_AT], batch_tokens, padding)
    try:
        together = Batch.of(batch, padding, model.device)
        refuse_hooks(model, points, together)
        found, _ = model.run(together, points)
        alone = {i: _alone(model, points, batch[i]) for i in {len(batch) - 1, 0}}
        again = _alone(model, points, batch[-1])
    except ForwardError:
        return
    keys, sites = {p.name: p.keys for p in points}, {p.name: p.site for p in points}
    for name in keys:
        if too_far(model, sites[name], again[name][0], alone[len(batch) - 1][name][0]):
            raise ModelError(
                f"Site {name}: the same sequence ({_shown(batch[-1])}) has other values each time. A model must draw "
                "no random numbers, as dropout outside of evaluation mode does, and keep no state between calls."
            )
        for i, values in alone.items():
            if too_far(model, sites[name], together.rows(found[name], i, keys=keys[name]), values[name][0]):
                raise ModelError(
                    f"Site {name}: a sequence ({_shown(batch[i])}) has other values in a batch than alone. "
                    + (
                        f"It was padded on the {padding} to {together.input_ids.shape[1]} tokens, which must leave "
                        "real tokens unchanged: use --padding none, or leave that side out of the model's `padding`."
                        if len(batch[i]) < together.input_ids.shape[1]
                        else "The model lets the rows of a batch depend on each other, or changes their places: use "
                        "--batch-tokens 1, or mend the model."
                    )
                )


def _choose(units: Sequence[pa.Table], batch_tokens: int, padding: Padding) -> list[np.ndarray]:
    """Find the batch that would show most, among those that workers will run; longest sequence first."""
    best, chosen = (-1, -1), []
    for table in units:
        sequences = split_sequences(table)
        for members in plan_batches([len(s) for s in sequences], batch_tokens, padding):
            worth = (len(sequences[members[0]]) - len(sequences[members[-1]]), len(members))
            if worth > best:
                best, chosen = worth, [sequences[i] for i in members]
    return chosen


def _alone(model: LoadedModel, points: Sequence[SitePoint], ids: np.ndarray) -> dict[str, torch.Tensor]:
    return model.run(Batch.of([ids], "none", model.device), points)[0]


def row_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Give the largest distance of a row of `found`, (time, ...), from `expected`, as a share of the row's own norm.

    So one row of huge values, as many models have at the first token, does not hide the others. A row smaller than a
    thousandth of the rows' mean counts as that large: a row of zeros has no share of itself. Infinite when not the
    same values are finite.
    """
    a, b = (x.reshape(len(x), -1).double() for x in (found, expected))
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    norms = b.norm(dim=1)
    floor = 1e-3 * norms.square().mean().sqrt()
    apart = (a - b).norm(dim=1)
    return float((apart / torch.maximum(norms, floor).clamp_min(torch.finfo(torch.double).tiny)).max())


def allowed_distance(model: LoadedModel, dtype: torch.dtype, site: str) -> float:
    """Give how far a row of a site of `dtype` may lie: by that, or by the model's weights where these are coarser.

    Some models keep the residual stream in float32 and compute what they add to it in bfloat16. Three times as far
    where the site is none of the stream's: what is added to it is small beside what it was computed from, and moves
    more (measured with MiniLM in bfloat16: 0.02 in the stream, 0.07 in what attention adds).
    """
    kinds = {dtype, *(p.dtype for p in model.module.parameters())}
    return max(TOLERANCES.get(kind, 1e-3) for kind in kinds) * (1 if site in _STREAM else 3)


def column_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Give the largest distance of a column of `found`, (time, ...), from `expected`, as a share of the column's norm.

    A row's distance hardly shows a single column of a wide site. A column smaller than the median one counts as that
    large, and where most are next to nothing, as after a ReLU, as large as their root mean square. What is not finite
    is left to `row_distance`.
    """
    a, b = (x.reshape(len(x), -1).double().nan_to_num(0, 0, 0) for x in (found, expected))
    norms = b.norm(dim=0)
    median, size = norms.median(), norms.square().mean().sqrt()
    floor = torch.where(median > 0.05 * size, median, size).clamp_min(torch.finfo(torch.double).tiny)
    return float(((a - b).norm(dim=0) / torch.maximum(norms, floor)).max())


def too_far(model: LoadedModel, site: str, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether any row of `found` is farther from `expected` than the dtypes allow."""
    return row_distance(found, expected) > allowed_distance(model, found.dtype, site)


def _shown(ids: np.ndarray) -> str:
    start = ", ".join(map(str, ids[:4].tolist()))
    return f"{len(ids)} tokens, ids {start}{', ...' if len(ids) > 4 else ''}"
