"""A model in memory: what names it, its sites, and the one way to run, read and edit it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError, RequestError, UnknownNameError
from .batch import Batch
from .hooks import Edit, SiteHooks, SitePoint

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class ModelSource:
    """What names a model: a folder, a hub name with revision, or ``package.module:function``; all JSON-able."""

    name: str
    revision: str | None = None
    dtype: str = "auto"
    """The dtype of the weights in memory; ``auto`` keeps the checkpoint's."""
    trust_remote_code: bool = False

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
    forward: Callable[[Batch], Any]
    points: list[SitePoint]
    padding: tuple[str, ...]
    tokenizer: Any
    vocab_size: int | None
    max_length: int | None
    identity: dict[str, Any]
    """What can change a value: kind, revision, hashes of config, code, tokenizer and weights, dtype, attention."""
    device: str = "cpu"
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The trailing shape of each point, by name, as a trial forward gave it."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """The dtype of each point, by name, as a trial forward gave it."""

    def point(self, site: str, layer: int | None) -> SitePoint:
        """Find a point by site and layer; the error lists what the model has."""
        of_site = [p for p in self.points if p.site == site]
        if not of_site:
            raise UnknownNameError.of("site", site, dict.fromkeys(p.site for p in self.points), " in this model")
        for point in of_site:
            if point.layer == layer:
                return point
        raise UnknownNameError.of("layer", layer, [p.layer for p in of_site], f" of site {site!r}")

    def run(
        self, batch: Batch, points: Sequence[SitePoint], edits: Mapping[str, Edit] | None = None
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Run one forward without gradients; returns the values at `points`, (batch, time, ...), and the output.

        `edits` maps a point's name to a function of its value; it is an error when an edited point is not among
        `points`, or is never reached.
        """
        if stray := set(edits or {}) - {p.name for p in points}:
            raise RequestError(f"An edit names {sorted(stray)}, which are not among the points that are run.")
        hooks = SiteHooks(self.module, points, edits)
        with hooks, torch.inference_mode():
            output = self.forward(batch)
        hooks.check()
        for name, value in hooks.values.items():
            expected = (*batch.input_ids.shape, *self.shapes.get(name, ()))
            if name in self.shapes and tuple(value.shape) != expected:
                raise ModelError(
                    f"Site {name} has the shape {tuple(value.shape)} for {len(batch.lengths)} sequences of "
                    f"{expected[1]} tokens, not {expected}: the model cuts or adds tokens, so which token a row "
                    "belongs to is not clear."
                )
        return hooks.values, output
