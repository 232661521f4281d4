"""Telling whether two tokenizers have the same rules, two functions the same code."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def dtype_of(module: torch.nn.Module) -> str:
    """Name the dtypes of a model's parameters, in the order in which they are met."""
    kinds = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in module.parameters())
    return ", ".join(kinds) or "none"


def tokenizer_hash(tokenizer: Any) -> str | None:
    """Hash the rules of a fast tokenizer, vocabulary and post-processing included; None when there is none.

    Padding and truncation are left out: they are not used, and calling the tokenizer can change them.
    """
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow one, which cannot say what a token stands for: texts are refused later on
        return None
    rules = json.loads(backend.to_str())
    rules["padding"] = rules["truncation"] = None
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def source_hash(module: str) -> str | None:
    """Hash the source of a module and of what it imports: a model's code can change values as its weights can.

    Followed are imports, wherever they stand in the code, of modules in the same package and of those that are
    installed nowhere, such as a script's neighbours; other installed packages are not. Names and
    contents are hashed, not where the files lie.
    """
    sources = dict(sorted(_sources(module)))
    if not sources:
        return None
    return hashlib.sha256(
        json.dumps([[n, hashlib.sha256(c).hexdigest()] for n, c in sources.items()]).encode()
    ).hexdigest()


def _sources(module: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, source) of `module` and of all modules of the user's own that it imports, each once."""
    own = module.partition(".")[0]
    todo, seen = [module], {module}
    while todo:
        name = todo.pop()
        origin = _origin(name)
        if origin is None:
            continue
        content = origin.read_bytes()
        yield name, content
        package = name if origin.name == "__init__.py" else name.rpartition(".")[0]
        for found in _imports(content, package):
            top = found.partition(".")[0]
            if found not in seen and (top == own or _is_own(top)):
                seen.add(found)
                todo.append(found)


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Yield the names that the code of a module imports, with all their parents; some may not be modules."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:i]) for i in range(1, len(parts) + 1) if parts[0])


def _origin(name: str) -> Path | None:
    """Find the source file of a module; None where there is none to read, or the name is no module."""
    try:
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
        origin = Path(spec.origin) if spec and spec.origin else None
    except (ImportError, AttributeError, ValueError):
        return None
    return origin if origin and origin.suffix == ".py" and origin.is_file() else None


@functools.cache
def _is_own(top: str) -> bool:
    """Tell whether a top-level module is neither Python's, nor installed, nor this package."""
    if top in sys.stdlib_module_names or top == (__package__ or "").partition(".")[0]:
        return False
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    places = [spec.origin] if spec and spec.origin else list(spec.submodule_search_locations or []) if spec else []
    installed = [Path(p).resolve() for k, p in sysconfig.get_paths().items() if "lib" in k]
    return bool(places) and not any(Path(str(places[0])).resolve().is_relative_to(p) for p in installed)
