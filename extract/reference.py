"""A plain forward of one sequence: what the values must be, from code that shares nothing with the capture.

No batch, no padding, no mask, no position ids, and hooks of its own that copy whatever they see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import ModelError
from .batch import Batch
from .hooks import Call, SitePoint
from .loaded_model import LoadedModel


@dataclass
class PlainForward:
    """What one forward of one sequence showed at the modules that were asked for.

    `inputs` and `outputs` are by module path, the first tensor that went in or came out, as the model has it;
    `result` is the model's own output.
    """

    length: int
    calls: dict[str, Call] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    result: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def value(self, model: LoadedModel, point: SitePoint) -> torch.Tensor:
        """Give the value at a point, (length, ...)."""
        if point.derive is not None:
            with torch.inference_mode():
                value = point.derive(model.module.get_submodule(point.module), self.calls[point.module])
        else:
            value = (self.inputs if point.side == "input" else self.outputs)[point.module]
        # One sequence: in whichever order the two leading axes are, one of them has length one.
        rest = value.shape[1:] if point.flat and value.shape[0] == self.length > 1 else value.shape[2:]
        value = value.reshape(self.length, *rest)
        return value if point.heads is None else value.reshape(self.length, point.heads, -1)


def plain_forward(model: LoadedModel, ids: np.ndarray, modules: Iterable[str], *, whole: bool) -> PlainForward:
    """Run one sequence alone and copy what enters and leaves `modules`, by path; `whole` is with the model's head."""
    seen = PlainForward(len(ids))
    handles = []
    for path in dict.fromkeys(modules):

        def before(module: Any, args: Any, kwargs: Any, path: str = path) -> None:
            first = next(
                (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.is_floating_point()), None
            )
            if first is not None:
                seen.inputs[path] = first.clone()

        def after(module: Any, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            seen.calls[path] = Call(args, kwargs, output)
            seen.outputs[path] = first_tensor(output).clone()

        module = model.module.get_submodule(path)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        with model.no_gradients():
            if model.architecture is None:  # a function's model is called as the function says
                output = model.forward(Batch.of([ids], "none", model.device), whole)
            else:
                called = model.module if whole or not model.prefix else model.module.get_submodule(model.prefix)
                output = called(input_ids=torch.from_numpy(np.asarray(ids, np.int64))[None].to(model.device))
    finally:
        for handle in handles:
            handle.remove()
    seen.result = first_tensor(output)
    return seen


def first_tensor(output: Any) -> torch.Tensor:
    """Give the logits or hidden states in what a module returned: a tensor, or the first in a tuple, list or dict."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(output, name, None), torch.Tensor):
            return found
    if isinstance(output, torch.Tensor):
        return output
    items = list(output.values()) if isinstance(output, Mapping) else output
    if not isinstance(items, (tuple, list)) or not items:
        raise ModelError(
            f"A forward of the model, or of a module that was looked at, returned {type(output).__name__}, where a "
            "tensor, or a tuple or dict that begins with one, is needed to prove what is stored."
        )
    return first_tensor(items[0])
