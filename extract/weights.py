"""The weights of a model, a digest a tensor: whether two models have the same ones, and what differs if not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CorruptLakeError
from ..store.create import WEIGHTS_FILE
from ..store.durable import canonical_json, read_sealed
from ..store.run import Run

Digests = Mapping[str, Mapping[str, Any]]
"""By a tensor's name: `dtype`, `shape`, and `sha256` of its bytes (the first 128 bits, hexadecimal)."""

_SHOWN = 3


def weight_digests(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Hash every parameter and buffer of a model on its own, by name, in the order of the names.

    Buffers that no checkpoint would hold are hashed too, because a forward reads them just as well. A tensor under
    several names, as tied weights are, counts once, under the first of them in alphabetical order; two tensors of
    equal values count twice.
    """
    tensors: dict[str, Any] = {
        **model.state_dict(),  # also what a module of its own kind puts there
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    found: dict[str, dict[str, Any]] = {}
    seen: set[Any] = set()
    for name, tensor in sorted(tensors.items()):
        if not isinstance(tensor, torch.Tensor):  # a module's own "extra state"
            continue
        if (place := _place(tensor)) in seen:
            continue
        seen.add(place)
        value: torch.Tensor = tensor.detach().to("cpu").contiguous()
        data = value.reshape(-1).view(torch.uint8).numpy().data
        found[name] = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "sha256": hashlib.sha256(data).hexdigest()[:32],
        }
    return found


def weights_fingerprint(digests: Digests) -> str:
    """Hash names, dtypes, shapes and digests of all tensors; the order in which a model registers them is nothing."""
    return hashlib.sha256(canonical_json(dict(digests))).hexdigest()


def weights_difference(kept: Digests, found: Digests) -> str:
    """Say what `found` has otherwise than `kept`: at most three tensors by name, and how many; "" where nothing.

    weights: h.3.attn.c_attn.weight has other values, lm_head.weight is missing (2 of 148 tensors)
    """
    names = sorted(kept.keys() | found.keys())
    other = [(n, what) for n in names if (what := _difference(kept.get(n), found.get(n)))]
    if not other:
        return ""
    shown = ", ".join(f"{name} {what}" for name, what in other[:_SHOWN])
    return f"weights: {shown} ({len(other)} of {len(names)} tensors)"


def kept_weights(run: Run) -> Digests:
    """Give the digests that were kept with a run; none where it has none, or has them no longer as written."""
    if WEIGHTS_FILE not in run.record.files:
        return {}
    try:
        return read_sealed(run.intact(WEIGHTS_FILE))["tensors"]
    except CorruptLakeError:
        return {}  # `verify` names the file; here it would only have said more


def other_weights(run: Run, found: Digests) -> str:
    """Say what of a model's weights differs from those that a run was made with; "" where that cannot be told."""
    kept = kept_weights(run)
    return weights_difference(kept, found) if kept else ""


def _difference(kept: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> str:
    if kept == found:
        return ""
    if found is None:
        return "is missing"
    if kept is None:
        return "is new"
    if kept["shape"] != found["shape"]:
        return f"has shape {tuple(found['shape'])}, not {tuple(kept['shape'])}"
    if kept["dtype"] != found["dtype"]:
        return f"is {found['dtype']}, not {kept['dtype']}"
    return "has other values"


def _place(tensor: torch.Tensor) -> Any:
    """Give what two names of one tensor share; an empty tensor shares nothing."""
    if not tensor.numel() or tensor.layout is not torch.strided or not tensor.data_ptr():
        return object()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
