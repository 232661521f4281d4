"""layerlake is a distributed activation store and query system.

Ray actors run models and write layerwise activations into chunked Zarr arrays, indexed in DuckDB; jobs then
query slices in SQL, fit probes and replay interventions through the reloaded model.

    from layerlake import Lake, capture, extract, Probe

The public nouns are imported on first use, so that ``import layerlake`` stays fast and needs no optional extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .analyze.probe import Probe
    from .extract.capture import capture
    from .extract.driver import extract
    from .store.lake import Lake

__all__ = ["Lake", "Probe", "__version__", "capture", "extract"]

_HOMES = {"Lake": ".store.lake", "Probe": ".analyze.probe", "capture": ".extract.capture"}


def __getattr__(name: str) -> Any:
    if name == "extract":  # the package, which can be called
        return importlib.import_module(".extract", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
