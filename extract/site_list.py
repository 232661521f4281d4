"""What sites a model has, for people to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .loaded_model import LoadedModel
from .sites import SITES


@dataclass(frozen=True)
class SiteListing:
    """A site of a model: at which layers, the shape and dtype of a token's value, and whether it can be edited.

    `layers` is empty for a site that belongs to none; `access` is ``read-write`` or ``derived``: read only.
    """

    site: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    access: str
    what: str

    @property
    def layers_text(self) -> str:
        """The layers as a person writes them: 0-5, or 1,3,5."""
        return layers_text(self.layers)

    @property
    def shape_text(self) -> str:
        """The shape with a multiplication sign between its axes; an axis over a sequence's tokens is called so."""
        return " x ".join(str(n) if n else "tokens" for n in self.shape)

    def to_json(self) -> dict[str, Any]:
        """Give the listing as plain data."""
        return asdict(self)


def layers_text(layers: Sequence[int]) -> str:
    """Write layers as a person does: 0-5, or 1,3,5."""
    if not layers:
        return ""
    first, last = layers[0], layers[-1]
    if list(layers) == list(range(first, last + 1)):
        return f"{first}-{last}" if last > first else str(first)
    return ",".join(map(str, layers))


def list_sites(model: LoadedModel) -> list[SiteListing]:
    """List the sites of a model in the order in which it computes them; one line a site and shape."""
    found: dict[tuple[str, tuple[int, ...], str, str], list[int]] = {}
    for point in model.settled(model.points):
        access = "read-write" if point.editable else "derived"
        key = (point.site, model.shapes[point.name], model.dtypes[point.name], access)
        layers = found.setdefault(key, [])
        if point.layer is not None:
            layers.append(point.layer)
    return [
        SiteListing(site, tuple(layers), shape, dtype, access, SITES.get(site, ""))
        for (site, shape, dtype, access), layers in found.items()
    ]
