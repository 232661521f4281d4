"""The one hook mechanism: the same site is read in extraction and edited in replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch

from ..errors import ModelError, RequestError

Edit = Callable[[torch.Tensor], torch.Tensor]
Derive = Callable[[torch.nn.Module, "Call"], torch.Tensor]
GiveBack = Callable[[torch.nn.Module, "Call", torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One call of a module: what it was given and what it returned, for a derived site to compute from."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    def input(self, name: str = "hidden_states", index: int = 0) -> Any:
        """Give an argument by its name or else by its place; None when it was not given."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[index] if index < len(self.args) else None


@dataclass(frozen=True)
class SitePoint:
    """Where a site lies in a model: what enters or leaves a module, or what follows from one call of it."""

    site: str
    layer: int | None
    module: str
    """The module's path, as `named_modules` gives it."""
    side: Literal["output", "input"] = "output"
    time_first: bool = False
    """Whether the value is (time, batch, ...) in the model instead of (batch, time, ...)."""
    flat: bool = False
    """Whether the model has (batch * time, ...) there."""
    heads: int | None = None
    """Into how many heads the last axis is divided: a row is (heads, size of a head)."""
    derive: Derive | None = None
    """How the value is computed from a call of the module, for what no module returns."""
    keys: bool = False
    """Whether the last axis is over the tokens of the sequence, as in an attention pattern."""
    gives_back: GiveBack | None = None
    """How the module's output follows from the derived value, so that a self-test can hold the two together."""
    read_only: bool = False
    """Whether editing here would not change what the site stands for; a derived site cannot be edited either."""

    @property
    def name(self) -> str:
        """The array's name in a run."""
        return self.site if self.layer is None else f"{self.site}-{self.layer}"

    @property
    def editable(self) -> bool:
        """Whether an intervention can edit it."""
        return self.derive is None and not self.read_only


class SiteHooks:
    """Reads, and optionally edits, the values at sites during the forwards inside its ``with`` block.

    `values` maps a point's name to its (batch, time, ...) tensor, copied at the moment the module was called or
    returned, so that a later in-place change in the model cannot reach it. A value is read after its edit. `shape` is
    the (batch, time) of the forward, which points in flat layout need. All hooks are removed on the way out, also
    after an error. Editing a point that is derived or read-only is a `RequestError`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        points: Sequence[SitePoint],
        edits: Mapping[str, Edit] | None = None,
        shape: tuple[int, int] | None = None,
    ) -> None:
        self.model = model
        self.points = tuple(points)
        self.edits = dict(edits or {})
        self.shape = shape
        self.values: dict[str, torch.Tensor] = {}
        self._runs: Counter[str] = Counter()
        self._handles: list[Any] = []
        for point in self.points:
            if point.name in self.edits and not point.editable:
                raise RequestError(
                    f"Site {point.name} can be read but not edited: it is "
                    + (
                        "computed from what the model returns."
                        if point.derive
                        else "not all that the model goes on with."
                    )
                )

    def __enter__(self) -> SiteHooks:
        modules = dict(self.model.named_modules(remove_duplicate=False))
        try:
            for point in self.points:
                if point.module not in modules:
                    raise ModelError(f"Site {point.name}: the model has no module {point.module!r}.")
                module = modules[point.module]
                if point.side == "input":
                    handle = module.register_forward_pre_hook(self._before(point), with_kwargs=True)
                else:
                    handle = module.register_forward_hook(self._after(point), with_kwargs=True)
                self._handles.append(handle)
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

    def _before(self, point: SitePoint) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._runs[point.name] += 1
            key = next((k for k in ("hidden_states", "input", "x") if k in kwargs), None)
            value = args[0] if args else kwargs[key] if key else None
            if not isinstance(value, torch.Tensor):
                raise ModelError(
                    f"Site {point.name}: module {point.module!r} was not called with a tensor of hidden states first."
                )
            edited = self._take(point, value)
            if edited is None:
                return None
            return ((edited, *args[1:]), kwargs) if args else (args, kwargs | {key: edited})

        return hook

    def _after(self, point: SitePoint) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            self._runs[point.name] += 1
            if point.derive is not None:
                derived = point.derive(module, Call(args, kwargs, output))
                self.values[point.name] = self._laid_out(point, derived).detach().contiguous()
                return None
            edited = self._take(point, main_output(output, point))
            return None if edited is None else replace_main_output(output, edited)

        return hook

    def _take(self, point: SitePoint, raw: torch.Tensor) -> torch.Tensor | None:
        """Copy the value at a point; with an edit, edit it first and give what the model shall go on with."""
        value = self._laid_out(point, raw)
        edit = self.edits.get(point.name)
        if edit is None:
            self.values[point.name] = value.detach().clone(memory_format=torch.contiguous_format)
            return None
        edited = edit(value)
        if edited.shape != value.shape:
            raise ModelError(
                f"Site {point.name}: an edit gave {tuple(edited.shape)} for {tuple(value.shape)}; an edit keeps the "
                "shape."
            )
        self.values[point.name] = edited.detach().clone(memory_format=torch.contiguous_format)
        if point.time_first:
            edited = edited.transpose(0, 1)
        return edited.reshape(raw.shape)

    def _laid_out(self, point: SitePoint, value: torch.Tensor) -> torch.Tensor:
        """View the model's tensor as (batch, time, ...), heads apart."""
        if point.flat and self.shape is not None and value.shape[0] == self.shape[0] * self.shape[1]:
            value = value.reshape(*self.shape, *value.shape[1:])
        if point.time_first:
            value = value.transpose(0, 1)
        if point.heads is not None:
            value = value.reshape(*value.shape[:-1], point.heads, value.shape[-1] // point.heads)
        return value


def main_output(output: Any, point: SitePoint) -> torch.Tensor:
    """Give the hidden states in a module's output: the tensor itself, or the first item of a tuple.

    Which of the two it is, is decided by the type alone: taking item 0 of a tensor would drop the batch axis. Of a
    whole language model's output it is the logits.
    """
    value = output[0] if isinstance(output, (tuple, list)) and output else output
    value = getattr(value, "logits", value)
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
    if hasattr(output, "logits"):
        output.logits = value
        return output
    changed = [value, *output[1:]]
    if hasattr(output, "_fields"):  # a named tuple keeps its kind
        return type(output)(*changed)
    return type(output)(changed)
