"""Loading a model so that it can be called, read at its sites, and named exactly."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import LayerlakeError, ModelError, RequestError
from ..store.printing import count
from .batch import Batch
from .devices import check_device, device_of
from .fingerprint import dtype_of, source_hash, tokenizer_hash
from .hooks import SitePoint
from .hugging_face import load_hugging_face
from .loaded_model import LoadedModel, ModelSource
from .own_model import is_own, load_own
from .task_model import is_task_model, load_task_model
from .torch_model import TorchModel
from .weights import weight_digests, weights_fingerprint

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(source: ModelSource, *, device: str = "cpu") -> LoadedModel:
    """Load a model, check by trial forwards that its sites are where they must be, and fingerprint it.

    Raises `ModelError` when it does not load or run, `RequestError` when the name cannot be a model's.
    """
    if source.dtype not in _DTYPES:
        raise RequestError(f"{source.dtype!r} is not a model dtype; use one of {', '.join(_DTYPES)}.")
    check_device(device)
    model = read_model(source)
    model.module.to(device)
    model.device = device
    check_model(model)
    return model


def read_model(source: ModelSource) -> LoadedModel:
    """Bring a model into memory with its sites, whatever kind it is of; no forward was run, so nothing is checked."""
    if source.is_function:
        return _load_function(source)
    if is_own(source):
        return load_own(source)
    return load_task_model(source) if is_task_model(source) else load_hugging_face(source)


def check_model(model: LoadedModel) -> None:
    """Hold a model in memory to what is asked of one: no hooks that change it, blocks in the order of their layers."""
    refuse_hooks(model)
    model.settled([p for p in model.points if p.site in ("embed", "resid_post")])
    if model.architecture is not None and model.architecture.found:
        from .self_test import adopt  # it loads the reference, which loads models

        adopt(model)


def refuse_hooks(model: LoadedModel, sites: Sequence[SitePoint] = (), batch: Batch | None = None) -> None:
    """Raise `ModelError`, naming the module, when a model brings hooks of someone else that change what it computes.

    It is run on `batch`, or a few ids, with the hooks and without, and seen at every block and at `sites`. Hooks of
    torch itself, such as weight normalisation's, are part of the model; those that only look are left alone.
    """
    foreign = [
        (path, hooks, key)
        for path, module in model.module.named_modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for key, hook in hooks.items()
        if not _is_of(hook, "torch.") and not _is_of(hook, "accelerate.")
    ]
    if not foreign:
        return
    seen = [*(p for p in model.points if p.site in ("embed", "resid_post")), *sites]
    points = list({p.name: p for p in seen}.values())
    if batch is None:
        size = min(
            5, model.max_length or 5
        )  # no longer than what settles its sites: not every model runs at any length
        ids = np.random.default_rng(7).integers(0, model.vocab_size or 2, size, dtype=np.int64)
        batch = Batch.of([ids], "none", model.device)

    def run_without(left_out: Sequence[tuple[str, dict[int, Any], int]]) -> dict[str, torch.Tensor]:
        kept = [(hooks, list(hooks.items())) for _, hooks, _ in left_out]
        try:
            for _, hooks, key in left_out:
                del hooks[key]
            return model.run(batch, points)[0]
        finally:
            for hooks, items in reversed(kept):  # in the order in which they ran
                hooks.clear()
                hooks.update(items)

    def differ(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
        return any(
            (a.shape, a.dtype) != (b.shape, b.dtype) or not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
            for a, b in ((some[n], others[n]) for n in some)
        )

    plain = run_without(foreign)
    if not differ(run_without([]), plain) or differ(run_without(foreign), plain):
        return  # a model that draws random numbers is refused for that, elsewhere
    alone = (f for f in foreign if differ(run_without([g for g in foreign if g is not f]), plain))
    path, hooks, key = next(alone, foreign[0])
    raise ModelError(
        f"{model.source.title} comes with {count(len(foreign), 'hook')} of someone else, and the one on "
        f"{repr(path) if path else 'the whole model'} "
        f"({getattr(hooks[key], '__qualname__', type(hooks[key]).__name__)}) changes what it computes. Remove it, or "
        "write what it does into the model."
    )


def _is_of(hook: object, library: str) -> bool:
    return any(str(getattr(x, "__module__", "")).startswith(library) for x in (hook, type(hook)))


def _load_function(source: ModelSource) -> LoadedModel:
    module_name, _, function_name = source.name.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), function_name)()
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise RequestError(f"There is no module {error.name!r} to take {function_name!r} from.") from error
        raise ModelError(f"{source.name} failed: {error}") from error
    except AttributeError as error:
        raise RequestError(f"{source.name} cannot be called: {error}") from error
    except LayerlakeError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may also call exit()
        raise ModelError(f"{source.name} failed with {type(error).__name__}: {error}") from error
    if not isinstance(made, (torch.nn.Module, TorchModel)):
        raise ModelError(f"{source.name} returned {type(made).__name__}, not a torch module or a TorchModel.")
    wrapped = made if isinstance(made, TorchModel) else TorchModel(made)
    device_of(wrapped.module)  # a weight without a value, or on another device than the rest, is named
    wrapped.module.eval()
    if source.dtype != "auto":
        wrapped.module.to(getattr(torch, source.dtype))
    weights = weight_digests(wrapped.module)
    named = {"function": source.name, "code": source_hash(module_name), "fingerprint": weights_fingerprint(weights)}
    model = of_torch(source, wrapped, {"kind": "function"} | named)
    model.weights = weights
    return model


def of_torch(source: ModelSource, wrapped: TorchModel, identity: dict[str, Any]) -> LoadedModel:
    """Give a `TorchModel`, in evaluation mode, with its sites; `identity` is added to what it tells of itself."""
    points = wrapped.points()
    return LoadedModel(
        source,
        wrapped.module,
        lambda batch, whole: wrapped.forward(batch),
        points,
        tuple(wrapped.padding),
        wrapped.tokenizer,
        wrapped.table_size(),
        wrapped.max_length,
        identity
        | {
            "modules": {p.name: p.module for p in points},
            "tokenizer": tokenizer_hash(wrapped.tokenizer),
            "dtype": dtype_of(wrapped.module),
        },
    )
