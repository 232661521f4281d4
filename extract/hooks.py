"""The one hook mechanism: the same site is read in extraction and edited in replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from ..errors import ModelError

Edit = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SitePoint:
    """Where a site lies in a model: the output of a module, and the order of its axes."""

    site: str
    layer: int | None
    module: str
    """The module's path, as `named_modules` gives it."""
    time_first: bool = False
    """Whether the module's output is (time, batch, ...) instead of (batch, time, ...)."""

    @property
    def name(self) -> str:
        """The array's name in a run."""
        return self.site if self.layer is None else f"{self.site}-{self.layer}"


class SiteHooks:
    """Reads, and optionally edits, the values at sites during the forwards inside its ``with`` block.

    `values` maps a point's name to its (batch, time, ...) tensor, copied at the moment the module returned, so that
    a later in-place change in the model cannot reach it. A value is read after its edit. All hooks are removed on
    the way out, also after an error.
    """

    def __init__(
        self, model: torch.nn.Module, points: Sequence[SitePoint], edits: Mapping[str, Edit] | None = None
    ) -> None:
        self.model = model
        self.points = tuple(points)
        self.edits = dict(edits or {})
        self.values: dict[str, torch.Tensor] = {}
        self._runs: Counter[str] = Counter()
        self._handles: list[Any] = []

    def __enter__(self) -> SiteHooks:
        modules = dict(self.model.named_modules(remove_duplicate=False))
        try:
            for point in self.points:
                if point.module not in modules:
                    raise ModelError(f"Site {point.name}: the model has no module {point.module!r}.")
                hook = self._hook(point)
                self._handles.append(modules[point.module].register_forward_hook(hook))
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def check(self) -> None:
        """Raise `ModelError`, naming the module, unless every point was reached exactly once; then start anew."""
        for point in self.points:
            if (runs := self._runs[point.name]) != 1:
                raise ModelError(
                    f"Site {point.name}: module {point.module!r} was executed {runs} times in one forward, not once. "
                    + (
                        "A fused kernel may read its weights without calling it; choose another site."
                        if runs == 0
                        else "A shared module has no single output; choose the modules that call it."
                    )
                )
        self._runs.clear()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, point: SitePoint) -> Callable[..., Any]:
        edit = self.edits.get(point.name)

        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            self._runs[point.name] += 1
            value = main_output(output, point)
            if point.time_first:
                value = value.transpose(0, 1)
            if edit is None:
                self.values[point.name] = value.detach().clone()
                return None
            edited = edit(value)
            if edited.shape != value.shape:
                raise ModelError(
                    f"Site {point.name}: an edit gave {tuple(edited.shape)} for {tuple(value.shape)}; "
                    "an edit keeps the shape."
                )
            self.values[point.name] = edited.detach().clone()
            if point.time_first:
                edited = edited.transpose(0, 1)
            return replace_main_output(output, edited)

        return hook


def main_output(output: Any, point: SitePoint) -> torch.Tensor:
    """Give the hidden states in a module's output: the tensor itself, or the first item of a tuple.

    Which of the two it is, is decided by the type alone: taking item 0 of a tensor would drop the batch axis.
    """
    value = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(value, torch.Tensor):
        raise ModelError(
            f"Site {point.name}: module {point.module!r} returned {type(output).__name__}, neither a tensor nor a "
            "tuple that begins with one."
        )
    return value


def replace_main_output(output: Any, value: torch.Tensor) -> Any:
    """Put an edited tensor where `main_output` found it."""
    if isinstance(output, torch.Tensor):
        return value
    changed = [value, *output[1:]]
    if hasattr(output, "_fields"):  # a named tuple keeps its kind
        return type(output)(*changed)
    return type(output)(changed)
