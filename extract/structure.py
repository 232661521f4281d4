"""Finding the blocks and the final norm of an architecture that nobody registered, by looking at the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from .architectures import ARCHITECTURES, Architecture
from .failure import one_line


def find_architecture(base: Any, title: str) -> Architecture:
    """Find the blocks of a headless model, its longest list of like modules, and the norm that follows the last one.

    What is found is a guess until `adopt` has held the model to it. `ModelError` when there is no such list.
    """
    lists = [(path, m) for path, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    # A list inside of another's items, such as the experts of a block, is a part of a block.
    outer = [(p, m) for p, m in lists if not any(p.startswith(f"{q}.") for q, _ in lists if q != p)]
    if not outer:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{title} has no list of blocks that could be found ({type(base).__name__}). Registered architectures: "
            f"{known}. For another write a function that returns a TorchModel with `embed` and `blocks`."
        )
    blocks, items = max(outer, key=lambda found: len(found[1]))
    return Architecture(
        blocks, final_norm=_norm_after(base, items[-1], title), embedding=None, additive=False, found=True
    )


def _norm_after(base: Any, last: nn.Module, title: str) -> str | None:
    """Give the path of the first norm that runs after the last block, outside of all blocks."""
    ran: list[str] = []
    inside = set(map(id, last.modules()))
    handles = []
    end = next(path for path, module in base.named_modules() if module is last)
    try:
        for path, module in base.named_modules():
            if path and (id(module) not in inside or module is last):
                handles.append(module.register_forward_hook(lambda *_, path=path: ran.append(path)))
        with torch.no_grad():
            device = base.get_input_embeddings().weight.device
            base(input_ids=torch.zeros((1, 3), dtype=torch.long, device=device))
    except Exception as error:  # a model that nobody registered may need arguments that are not known here
        raise ModelError(
            f"{title} ({type(base).__name__}) is of no registered architecture, and does not run on ids alone "
            f"({type(error).__name__}: {one_line(error)}). Write a function that returns a TorchModel."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    after = ran[ran.index(end) + 1 :] if end in ran else []
    return next((p for p in after if "norm" in type(base.get_submodule(p)).__name__.lower()), None)
