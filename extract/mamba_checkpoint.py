"""The weights of a checkpoint in the form of `mamba-ssm`, put into transformers' class, every one accounted for.

transformers' names are the authors' but for the embedding: `backbone.embedding.weight` there,
`backbone.embeddings.weight` here.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..errors import ModelError
from .failure import one_line
from .loaded_model import ModelSource
from .mamba_form import to_transformers

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
_EMBEDDING, _HEAD = "backbone.embedding.weight", "lm_head.weight"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Weights = dict[str, Tensor]


def load_mamba_form(source: ModelSource, config: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Load a model of this form from safetensors; `config` is the content of its config.json.

    Gives the module and transformers' report of loading it. `ModelError` says what does not fit, and for a checkpoint
    whose weights are in a pickle, how to convert it.
    """
    made = to_transformers(config, source.name)
    path = find_file(source, SAFE, config)
    if path is None:
        raise _no_safetensors(source, config)
    return build_module(source, made, read_safetensors(path, source.name))


def find_file(source: ModelSource, file: str, config: Mapping[str, Any]) -> Path | None:
    """Give the path of a file of a model's folder, or of a hub's in the cache; None where the model has none.

    A hub's file is of the commit that the config.json is of.
    """
    folder = Path(source.name).expanduser()
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    from transformers.utils.hub import cached_file

    revision = config.get("_commit_hash") or source.revision
    try:
        found = cached_file(source.name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    except Exception as error:  # the hub's client raises errors of many kinds
        raise ModelError(f"{file} of {source.name} cannot be fetched: {one_line(error)}") from error
    return None if found is None else Path(found)


def read_safetensors(path: Path, name: str) -> Weights:
    """Read all tensors of a safetensors file; `ModelError` for a damaged one."""
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(
            f"The weights of {name} cannot be read: {path.name} is damaged ({one_line(error)})."
        ) from error


def build_module(source: ModelSource, config: Any, weights: Weights) -> tuple[Any, Mapping[str, Any]]:
    """Make the module of a transformers configuration and fill it with weights under the authors' names.

    With the dtype ``auto`` the module has that of the weights. Where they are of several, as in checkpoints in half
    precision whose A_log and D are float32, it has the narrowest that holds all of them exactly.
    """
    import transformers

    made = getattr(transformers, config.architectures[0])
    weights = dict(weights)
    with torch.device("meta"):
        expected = {_theirs(n): tuple(t.shape) for n, t in made(config).state_dict().items()}
    if config.tie_word_embeddings:
        _tie(weights, source.name)
        del expected[_HEAD]
    _check(weights, expected, source.name)
    dtypes = sorted({t.dtype for t in weights.values()}, key=str)
    dtype = functools.reduce(torch.promote_types, dtypes) if source.dtype == "auto" else getattr(torch, source.dtype)
    attention = {} if source.attention == "auto" else {"attn_implementation": source.attention}
    module, report = made.from_pretrained(
        None,
        config=config,
        state_dict={_here(n): t for n, t in weights.items()},
        dtype=dtype,
        output_loading_info=True,
        **attention,
    )
    return module, report


def _here(name: str) -> str:
    return name.replace("backbone.embedding.", "backbone.embeddings.")


def _theirs(name: str) -> str:
    return name.replace("backbone.embeddings.", "backbone.embedding.")


def _tie(weights: Weights, name: str) -> None:
    """Leave one of the two names of a tied head's weight; a file may hold either or both."""
    head = weights.pop(_HEAD, None)
    if head is None:
        return
    table = weights.setdefault(_EMBEDDING, head)
    if (head.dtype, head.shape) != (table.dtype, table.shape) or not head.equal(table):
        raise ModelError(
            f"{name} has a {_HEAD} with other values than {_EMBEDDING}, and its config.json says that they are one "
            "tensor (tie_embeddings). Which of them was meant cannot be told."
        )


def _check(weights: Weights, expected: Mapping[str, tuple[int, ...]], name: str) -> None:
    """Refuse weights that are not exactly those of the architecture: nothing random, nothing left out."""
    sizes = [n for n in expected.keys() & weights.keys() if tuple(weights[n].shape) != expected[n]]
    kinds = [n for n, t in weights.items() if t.dtype not in _DTYPES or t.layout != torch.strided or t.is_meta]
    for wrong, what in (
        (expected.keys() - weights.keys(), "lacks weights that its config.json asks for ({})."),
        (weights.keys() - expected.keys(), "has weights that its config.json has no place for ({})."),
        (sizes, "has weights of other sizes than its config.json says ({})."),
        (kinds, "has weights that are not dense floating-point numbers of 16, 32 or 64 bits ({})."),
    ):
        if wrong:
            shown = [f"{n} {_size(weights, expected, n)}" if wrong is sizes else n for n in sorted(wrong)[:3]]
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ModelError(f"{name} {what.format(', '.join(shown) + more)}")


def _size(weights: Weights, expected: Mapping[str, tuple[int, ...]], name: str) -> str:
    return f"{tuple(weights[name].shape)} for {expected[name]}"


def _no_safetensors(source: ModelSource, config: Mapping[str, Any]) -> ModelError:
    if find_file(source, PICKLED, config) is None:
        return ModelError(f"{source.name} has no weights: there is no {SAFE} beside its config.json.")
    command = ["layerlake", "convert", source.name, *(["--revision", source.revision] if source.revision else [])]
    return ModelError(
        f"{source.name} has its weights in a pickle ({PICKLED}). A pickle can run code when it is read, so it is not "
        f"loaded as a model. If you trust it, convert it once: {shlex.join(command)} --out DIR"
    )
