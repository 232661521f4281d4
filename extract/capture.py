"""Activations of a few texts in memory, for a notebook: the hooks and the checks of an extraction, without a lake."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from ..errors import (
    ForwardError,
    LakeWarning,
    ModelError,
    RequestError,
    UnknownNameError,
    WorldError,
)
from ..store.printing import count
from ..store.record import ArraySpec
from .batch import Batch, Padding, plan_batches
from .batch_check import too_far
from .bits import rounded_to
from .cache import Cache
from .failure import failing_alone
from .given import read_given, token_table
from .hooks import SitePoint
from .live import borrowed
from .loaded_model import LoadedModel, ModelSource
from .loading import load_model, refuse_hooks
from .run_units import import_from_here
from .settings import check_special_tokens, choose_padding, choose_points, layer_numbers, site_names
from .torch_model import TorchModel

_DTYPES = ("float64", "float32", "bfloat16", "float16")


def capture(
    model: str | os.PathLike[str] | torch.nn.Module | TorchModel,
    texts: Any,
    *,
    sites: str | Sequence[str] = ("embed", "resid_post"),
    layers: int | str | Sequence[int | str] | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: Any = None,
    special_tokens: str = "auto",
    padding: str | None = None,
    batch_tokens: int = 4096,
    check: bool = True,
    revision: str | None = None,
    model_dtype: str = "auto",
    trust_remote_code: bool = False,
    attention: str = "auto",
    device: str | None = None,
) -> Cache:
    """Run a model over texts and give the activations of every token in memory.

    `model` is what `extract` takes (a folder, a hub name, ``package.module:function``), or a live object: a
    transformers model, with its `tokenizer`, a torch module, or a `TorchModel`. A live one is run where it is and as it
    is, in evaluation mode, and left exactly as it was found, also after an error. `texts` are a text, a list of texts,
    a list of lists of ids, or a tensor or array of ids without padding, (time,) or (sequences, time).

    `sites`, `layers`, `special_tokens`, `padding` and `batch_tokens` are those of `extract`, and so are the values: the
    same texts, sites and batches with the same number of torch threads give the same bits. They lie in the CPU's
    memory, without gradients, in the dtype of the site, or rounded to `dtype`; one that would overflow is refused. With
    `check` a sequence of the batch with the most padding is run once more alone, and its values are compared.
    `revision`, `model_dtype`, `trust_remote_code`, `attention` and `device` are for a model that is named.
    """
    sites, layers = site_names((sites,) if isinstance(sites, str) else sites), layer_numbers(layers)
    add_special_tokens = check_special_tokens(special_tokens)
    if batch_tokens < 1:
        raise RequestError(f"A batch needs at least one token, not {batch_tokens}.")
    rounded_to = None if dtype is None else str(dtype).removeprefix("torch.")
    if rounded_to is not None and rounded_to not in _DTYPES:
        raise UnknownNameError.of("dtype", rounded_to, _DTYPES)
    loading = ModelSource("", revision, model_dtype, trust_remote_code, attention)
    with _opened(model, loading, device, tokenizer) as loaded:
        given = read_given(texts, loaded, special_tokens=add_special_tokens)
        side = choose_padding(loaded, padding)
        points = choose_points(loaded, sites, layers)
        kept = [rounded_to or loaded.dtypes[p.name] for p in points]
        sequences = [g.ids for g in given]
        longest_batch = [sequences[i] for i in plan_batches(list(map(len, sequences)), batch_tokens, side)[0]]
        with contextlib.suppress(ForwardError):  # which is told with its text when that is run
            refuse_hooks(loaded, points, Batch.of(longest_batch, side, loaded.device))
        longest = max(map(len, sequences))  # the width of an attention pattern
        arrays = [
            ArraySpec(p.site, p.layer, kind, tuple(n or longest for n in loaded.shapes[p.name]))
            for p, kind in zip(points, kept, strict=True)
        ]
        values = _run(loaded, points, arrays, sequences, batch_tokens, side, check=check)
    first = np.cumsum([0, *map(len, sequences)]).tolist()
    return Cache(loaded.source.title, arrays, values, token_table(given), first, [g.text for g in given])


@contextlib.contextmanager
def _opened(model: object, loading: ModelSource, device: str | None, tokenizer: Any) -> Iterator[LoadedModel]:
    if isinstance(model, (torch.nn.Module, TorchModel)):
        asked = [k for k, v in asdict(loading).items() if v != getattr(ModelSource(""), k)]
        asked += [] if device is None else ["device"]
        if asked:
            raise RequestError(
                f"{' and '.join(asked)}: that is for a model loaded by name; this one is in memory. Leave it out."
            )
        with borrowed(model, tokenizer) as loaded:
            yield loaded
        return
    if not isinstance(model, (str, os.PathLike)):
        raise RequestError(
            f"A model is named by text (a folder, a hub name, 'package.module:function'), or is a torch module or a "
            f"TorchModel, not {type(model).__name__}."
        )
    import_from_here()
    loaded = load_model(replace(loading, name=os.fspath(model)), device=device or "cpu")
    loaded.tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
    yield loaded


def _run(
    model: LoadedModel,
    points: Sequence[SitePoint],
    arrays: Sequence[ArraySpec],
    sequences: Sequence[np.ndarray],
    batch_tokens: int,
    padding: Padding,
    *,
    check: bool,
) -> dict[str, torch.Tensor]:
    """Run all batches; every value is written once, to its row of a tensor that is made before."""
    lengths = [len(s) for s in sequences]
    first = np.cumsum([0, *lengths]).tolist()
    values = {a.name: _allocated(a, first[-1]) for a in arrays}
    batches = plan_batches(lengths, batch_tokens, padding)
    # The batch that would show most: the one with the most padding, or with the most sequences.
    telling = max(batches, key=lambda b: (lengths[b[0]] - lengths[b[-1]], len(b)))
    nonfinite: dict[str, int] = {}
    for members in batches:
        batch = Batch.of([sequences[i] for i in members], padding, model.device)
        found = _forward(model, batch, points, members, sequences)
        if check and members is telling and len(members) > 1:
            _check_alone(model, batch, points, found, members[-1], sequences[members[-1]])
        for array, point in zip(arrays, points, strict=True):
            value = rounded_to(found.pop(array.name), array.dtype, array.name, "Take a wider dtype.").cpu()
            for k, i in enumerate(members):
                rows = batch.rows(value, k, keys=point.keys)
                values[array.name][first[i] : first[i + 1], ..., : rows.shape[-1]] = rows
                if wrong := int((~torch.isfinite(rows)).sum()):
                    nonfinite[array.name] = nonfinite.get(array.name, 0) + wrong
    if name := next((a.name for a in arrays if a.name in nonfinite), None):
        warnings.warn(
            f"{name} is the first site with values that are NaN or infinite ({nonfinite[name]} of them).",
            LakeWarning,
            stacklevel=3,
        )
    return values


def _allocated(array: ArraySpec, rows: int) -> torch.Tensor:
    kind = getattr(torch, array.dtype)
    try:
        # zeros, as a pattern is as wide as the longest sequence, and an extraction widens the others with zeros
        return torch.zeros((rows, *array.shape), dtype=kind, device="cpu")
    except RuntimeError as error:
        size = rows * int(np.prod(array.shape)) * kind.itemsize
        raise WorldError(
            f"There is no memory for the values of {array.name}: {rows} rows are {size / 2**30:.1f} GiB. Ask for fewer "
            "texts, sites or layers at once, or store them with layerlake.extract."
        ) from error


def _forward(
    model: LoadedModel,
    batch: Batch,
    points: Sequence[SitePoint],
    members: Sequence[int],
    sequences: Sequence[np.ndarray],
) -> dict[str, torch.Tensor]:
    """Run a batch; a forward that fails is tried on each sequence alone, to name the one that it fails on."""
    try:
        return model.run(batch, points)[0]
    except ForwardError as error:
        if found := failing_alone(model, points, {i: sequences[i] for i in members}):
            name, alone = found
            raise ForwardError(f"texts[{name}] ({count(len(sequences[name]), 'token')}): {alone}") from error
        shown = ", ".join(map(str, members[:8])) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
        raise ForwardError(f"Texts {shown} in one batch, and none of them alone: {error}") from error


def _check_alone(
    model: LoadedModel,
    batch: Batch,
    points: Sequence[SitePoint],
    found: dict[str, torch.Tensor],
    index: int,
    ids: np.ndarray,
) -> None:
    """Hold the last sequence of a batch to what it gives alone; `ModelError` names the site and why that may be."""
    single = Batch.of([ids], "none", model.device)
    alone, _ = model.run(single, points)
    for point in points:
        own = batch.rows(found[point.name], len(batch.lengths) - 1, keys=point.keys)
        if not too_far(model, point.site, own, alone[point.name][0]):
            continue
        if too_far(model, point.site, alone[point.name][0], model.run(single, points)[0][point.name][0]):
            raise ModelError(
                f"Site {point.name}: texts[{index}] has other values each time. A model must draw no random numbers, "
                "as dropout outside of evaluation mode does, and keep no state between calls."
            )
        raise ModelError(
            f"Site {point.name}: texts[{index}] has other values in a batch than alone. "
            + (
                f"It was padded on the {batch.padding} from {len(ids)} to {batch.input_ids.shape[1]} tokens, which "
                "must leave real tokens unchanged: say padding='none', or leave that side out of the model's `padding`."
                if len(ids) < batch.input_ids.shape[1]
                else "The model lets the rows of a batch depend on each other, or changes their places: say "
                "batch_tokens=1, or mend the model."
            )
        )
