"""Extraction: models, sites, data and the engine; from a model and data to a run in a lake.

The package can be called: after ``from layerlake import extract``, ``extract(model, data, lake, ...)`` is
`driver.extract`. A name that is a function and a folder at once would be one or the other, as imports come.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from .driver import extract

        return extract(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
