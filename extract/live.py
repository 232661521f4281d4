"""A live model, which somebody made and goes on with: run for a while, and left as it was found."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import RequestError
from .devices import device_of
from .hugging_face import architecture_of, of_transformers
from .loaded_model import LoadedModel, ModelSource
from .loading import check_model, of_torch
from .rnn import stacks
from .torch_model import TorchModel

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@contextlib.contextmanager
def borrowed(model: torch.nn.Module | TorchModel, tokenizer: Any = None) -> Iterator[LoadedModel]:
    """Give a live model, with its sites and in evaluation mode, for the length of a ``with`` block.

    It is held to what a loaded model is held to. Afterwards, also after an error, every module has the mode, the
    parts and the hooks that it had. Neither weights nor `requires_grad` nor the device are touched, and weights are
    not hashed.
    """
    module = model.module if isinstance(model, TorchModel) else model
    _refuse_wrapper(module)
    device = device_of(module)
    modes = [(m, m.training) for m in module.modules()]
    hooks = [(kept, list(kept.items())) for m in module.modules() for kept in (getattr(m, n) for n in _HOOKS)]
    parts = [] if isinstance(model, TorchModel) else stacks(module)
    try:
        if _is_transformers(module) and not isinstance(model, TorchModel):
            _evaluate(module)
            source = ModelSource(getattr(module.config, "_name_or_path", "") or type(module).__name__)
            loaded = of_transformers(source, module, None, architecture_of(module, source))
        else:
            wrapped = model if isinstance(model, TorchModel) else TorchModel(module)  # which takes stacks apart
            _evaluate(wrapped.module)
            loaded = of_torch(ModelSource(type(module).__name__), wrapped, {"kind": "live"})
        loaded.live, loaded.device = True, str(device)
        loaded.tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
        check_model(loaded)
        yield loaded
    finally:
        for parent, name, part in parts:
            setattr(parent, name, part)
        for each, training in modes:
            each.training = training
        for now, before in hooks:
            if list(now.items()) != before:  # an interrupt can come between setting a hook and noting that
                now.clear()
                now.update(before)


def _evaluate(module: torch.nn.Module) -> None:
    # The flag alone: `eval` may be a model's own and do more that has no way back, such as merging weights.
    for each in module.modules():
        each.training = False


def _is_transformers(module: torch.nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _refuse_wrapper(module: torch.nn.Module) -> None:
    """Refuse torch's own wrappers around a model: hooks on what is inside may be compiled away, or run on copies."""
    if not type(module).__module__.startswith(("torch._dynamo", "torch.nn.parallel")):
        return
    for name in ("_orig_mod", "module"):
        if isinstance(getattr(module, name, None), torch.nn.Module):
            raise RequestError(f"The model is wrapped in a {type(module).__name__}. Hand over what is inside: .{name}")
