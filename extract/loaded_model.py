"""A model in memory: what names it, its sites, and the one way to run, read and edit it."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ForwardError, LayerlakeError, ModelError, RequestError, UnknownNameError
from .batch import Batch
from .failure import one_line, where_it_failed
from .hooks import Edit, SiteHooks, SitePoint
from .trial import settle

if TYPE_CHECKING:
    from .architectures import Architecture

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_INPUT = ":in"


@dataclass(frozen=True)
class ModelSource:
    """What names a model: a folder, a hub name with revision, or ``package.module:function``; all JSON-able."""

    name: str
    revision: str | None = None
    dtype: str = "auto"
    """The dtype of the weights in memory; ``auto`` keeps the checkpoint's."""
    trust_remote_code: bool = False
    attention: str = "auto"
    """The attention implementation of transformers (sdpa, eager, ...); ``auto`` is what transformers takes."""

    @property
    def title(self) -> str:
        """A short name for people: the end of a folder's path, or the name as it is."""
        if self.is_function or not Path(self.name).expanduser().is_dir():
            return self.name
        return short_path(Path(self.name).expanduser().resolve())

    @property
    def is_function(self) -> bool:
        """Whether the name is ``package.module:function``."""
        return bool(_FUNCTION.fullmatch(self.name))


def short_path(path: str | os.PathLike[str]) -> str:
    """Give the end of a path: enough for people to know it by, without where their files lie."""
    return "/".join(Path(path).absolute().parts[-2:])


@dataclass
class LoadedModel:
    """A model in evaluation mode with its sites; the one way to run a forward and to read or edit it."""

    source: ModelSource
    module: torch.nn.Module
    forward: Callable[[Batch, bool], Any]
    """Runs a batch; with True the whole model, else only what lies before its head."""
    points: list[SitePoint]
    """All sites, in the order in which the model computes them; those in `shapes` were seen in a trial forward."""
    padding: tuple[str, ...]
    tokenizer: Any
    vocab_size: int | None
    max_length: int | None
    identity: dict[str, Any]
    """What can change a value: kind, revision, hashes of config, code, tokenizer and weights, dtype, attention."""
    weights: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """A digest of each tensor, by name; empty where the weights were not hashed."""
    device: str = "cpu"
    prefix: str = ""
    """The path of the headless model inside the whole one; empty where there is no head."""
    architecture: Architecture | None = None
    """What is known of a Hugging Face model; None for a function's."""
    live: bool = False
    """Whether the module is somebody's who goes on with it, maybe to train it."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The trailing shape of each settled point, by name; 0 where an axis is over the tokens of a sequence."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """The dtype of each settled point, by name."""
    vocabulary: tuple[str, ...] | None = None
    """The symbols that the model was trained on, the id of each its index; None where they are not known."""

    def block_paths(self) -> list[str]:
        """Give the paths of the blocks in the model's own list of them; empty for a model without an architecture."""
        if self.architecture is None:
            return []
        path = f"{self.prefix}.{self.architecture.blocks}" if self.prefix else self.architecture.blocks
        return [f"{path}.{name}" for name, _ in self.module.get_submodule(path).named_children()]

    def place(self, site: str, layer: int | None) -> SitePoint:
        """Find a point by site, or by a module's path, and layer; the error lists what the model has.

        A point found by its module's path is not among `points` until it is settled.
        """
        of_site = [p for p in self.points if p.site == site]
        if not of_site:
            return self._module(site)
        for point in of_site:
            if point.layer == layer:
                return point
        raise UnknownNameError.of("layer", layer, [p.layer for p in of_site], f" of site {site!r}")

    def point(self, site: str, layer: int | None) -> SitePoint:
        """Find a point and settle it: its axes, shape and dtype are known then."""
        return self.settled([self.place(site, layer)])[0]

    def settled(self, points: Sequence[SitePoint]) -> list[SitePoint]:
        """Settle points by trial forwards where that was not done yet, and give them with their axes in order."""
        known = {p.name: p for p in self.points}
        if new := [p for p in points if p.name not in self.shapes]:
            for point in settle(self, new):
                if point.name not in known:
                    self.points.append(point)
                known[point.name] = point
            self.points = [known[p.name] for p in self.points]
        return [known[p.name] for p in points]

    def _module(self, name: str) -> SitePoint:
        path = name.removesuffix(_INPUT)
        paths = [n for n, _ in self.module.named_modules(remove_duplicate=False) if n]
        for full in (path, f"{self.prefix}.{path}"):
            if full in paths:
                return SitePoint(name, None, full, side="input" if name.endswith(_INPUT) else "output")
        if name == "pattern" and self.architecture is not None and "pattern" in self.architecture.places:
            how = "load it with attn_implementation='eager'" if self.live else "use --attention eager"
            raise UnknownNameError(f"There is no site 'pattern' in this model as it is loaded: {how}.")
        sites = dict.fromkeys(p.site for p in self.points if "." not in p.site)
        near = difflib.get_close_matches(path, [*sites, *paths], n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UnknownNameError(
            f"There is no site {name!r} in this model.{hint} Known: {', '.join(sites)}; and the path of any module, "
            "for what it returns."
        )

    def run(
        self, batch: Batch, points: Sequence[SitePoint], edits: Mapping[str, Edit] | None = None, *, whole: bool = False
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Run one forward without gradients; returns the values at `points`, (batch, time, ...), and the output.

        `edits` maps a point's name to a function of its value; it is an error when an edited point is not among
        `points`, or is never reached. The output is the last hidden state, or with `whole`, or a point behind it, that
        of the model's head. `ForwardError` says in which module the model failed, and keeps its text.
        """
        if stray := set(edits or {}) - {p.name for p in points}:
            raise RequestError(f"An edit names {sorted(stray)}, which are not among the points that are run.")
        whole = whole or any(not self._before_head(p) for p in points)
        shape = (batch.input_ids.shape[0], batch.input_ids.shape[1])
        hooks = SiteHooks(self.module, points, edits, shape)
        try:
            with hooks, self.no_gradients():
                output = self.forward(batch, whole)
        except LayerlakeError:
            raise
        except Exception as error:  # a model is a program, and raises what it likes
            raise ForwardError(
                f"{self.source.title} failed{where_it_failed(error, self)} on {len(batch.lengths)} sequences of up to "
                f"{shape[1]} tokens with {type(error).__name__}: {one_line(error)}"
            ) from error
        hooks.check()
        for name, value in hooks.values.items():
            expected = (*shape, *(n or shape[1] for n in self.shapes.get(name, ())))
            if name in self.shapes and tuple(value.shape) != expected:
                raise ModelError(
                    f"Site {name} has the shape {tuple(value.shape)} for {len(batch.lengths)} sequences of "
                    f"{expected[1]} tokens, not {expected}: the model cuts or adds tokens, so which token a row "
                    "belongs to is not clear."
                )
        return hooks.values, output

    def no_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Give the mode of a forward: what a live module keeps of one, such as a table, must be fit for training."""
        return torch.no_grad() if self.live else torch.inference_mode()

    def _before_head(self, point: SitePoint) -> bool:
        return not self.prefix or point.module == self.prefix or point.module.startswith(f"{self.prefix}.")
