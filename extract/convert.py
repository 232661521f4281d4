"""Writing a checkpoint in the form of `mamba-ssm`, its weights in a pickle or not, as a folder that is a model."""

from __future__ import annotations

import pickle
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from ..errors import MissingExtraError, ModelError, RequestError, WorldError
from ..store.durable import new_folder
from .failure import one_line
from .fingerprint import dtype_of
from .hugging_face import load_hugging_face, quiet
from .loaded_model import ModelSource
from .mamba_checkpoint import PICKLED, SAFE, Weights, build_module, find_file, read_safetensors
from .mamba_form import is_mamba_form, to_transformers
from .weights import weight_digests, weights_difference, weights_fingerprint

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Converted:
    """What `convert` wrote."""

    out: str
    kind: str
    """transformers' `model_type`."""
    layers: int
    parameters: int
    tensors: int
    dtype: str
    fingerprint: str
    """The hash of names, dtypes, shapes and values of all tensors, as a run of this model has it."""
    tokenizer: tuple[str, ...]
    """The tokenizer's files that were copied."""
    read: str
    """The file that the weights were read from."""

    def to_json(self) -> dict[str, Any]:
        """Give it as plain data."""
        return asdict(self)


def convert(source: str, out: str | Path, *, revision: str | None = None) -> Converted:
    """Read a checkpoint in the form of `mamba-ssm` and write it into the folder `out` in that of transformers.

    Weights are taken from model.safetensors, or where there is none, from the pickle pytorch_model.bin, which is read
    by ``torch.load(weights_only=True)``: it makes tensors, containers, numbers and strings, and refuses a file that
    names anything else to be called. What was written is loaded again and every tensor compared before `out` has its
    name: it is never there half. A kill can leave a folder beside it whose name ends in .tmp. `RequestError` for an
    `out` that holds something, `ModelError` for a checkpoint that does not fit its configuration or a pickle that is
    refused.
    """
    folder = _free(out)
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError.of("hf", f"Converting {source}") from error
    model = ModelSource(source, revision)
    if Path(source).expanduser().is_dir():
        model = ModelSource(str(Path(source).expanduser()), revision)
    with quiet(transformers):
        config = _config(transformers, model)
        made = to_transformers(config, source)
        path = find_file(model, SAFE, config)
        pickled = None if path else find_file(model, PICKLED, config)
        if path is not None:
            weights = read_safetensors(path, source)
        elif pickled is not None:
            weights = _read_pickle(pickled, source)
        else:
            raise ModelError(f"{source} has no weights: there is no {SAFE} and no {PICKLED} beside its config.json.")
        module, _ = build_module(model, made, weights)
        module.eval()
        digests = weight_digests(module)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(folder) as temporary:
            try:
                module.save_pretrained(temporary)
            except (OSError, safetensors.SafetensorError) as error:
                raise WorldError(f"{out} cannot be written: {one_line(error)}") from error
            for file in temporary.iterdir():  # safetensors lets its owner alone read a file
                file.chmod((temporary / "config.json").stat().st_mode)
            copied = [f for f in _TOKENIZER_FILES if _copy(find_file(model, f, config), temporary / f)]
            written = load_hugging_face(ModelSource(str(temporary)))
            if difference := weights_difference(digests, written.weights):
                raise ModelError(f"What was written of {source} is not what was read ({difference}). Report this.")
            inode = temporary.stat().st_ino
    if folder.stat().st_ino != inode:
        raise RequestError(f"{folder} was filled by another process meanwhile; name another folder, or remove it.")
    return Converted(
        str(folder),
        made.model_type,
        made.num_hidden_layers,
        sum(p.numel() for p in module.parameters()),
        len(digests),
        dtype_of(module),
        weights_fingerprint(digests),
        tuple(copied),
        (path or pickled or Path()).name,
    )


def _free(out: str | Path) -> Path:
    """Give the folder to write, which is not there or empty."""
    if not str(out).strip():
        raise RequestError("The folder to write has no name: say --out DIR.")
    folder = Path(out).expanduser().resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise RequestError(f"{out} is there already and not an empty folder: name another, or remove it.")
    return folder


def _config(transformers: Any, source: ModelSource) -> dict[str, Any]:
    folder = Path(source.name)
    if (folder.exists() or source.name.startswith((".", "/", "~"))) and not (folder / "config.json").is_file():
        raise RequestError(f"{source.name} is not a model folder: it has no config.json.")
    try:
        config, _ = transformers.PreTrainedConfig.get_config_dict(source.name, revision=source.revision)
    except Exception as error:  # no folder and no hub, or JSON that is none
        raise ModelError(f"{source.name} has no config.json that can be read: {one_line(error)}") from error
    if not is_mamba_form(config):
        raise RequestError(
            f"{source.name} is not in the form of mamba-ssm, which has a config.json with d_model, n_layer and ssm_cfg "
            "and no model_type. Only that form is converted."
        )
    return config


def _read_pickle(path: Path, name: str) -> Weights:
    """Read tensors from a pickle without calling what it names; `ModelError` for one that holds anything else."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of old or new ways to write a pickle
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))  # torch's own text goes on to say how to read it regardless
        what = f"it names {named[1]}, which makes no tensor" if named else "it holds more than tensors"
        raise ModelError(
            f"{name} was not converted: {path.name} is damaged, or made to do more than to give tensors ({what}). "
            "Nothing that it names was called. Do not use it."
        ) from error
    except Exception as error:  # whatever a file of any content makes an unpickler raise
        raise ModelError(f"{name} was not converted: {path.name} cannot be read ({one_line(error)}).") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{name} was not converted: {path.name} holds a {type(loaded).__name__}, no named tensors.")
    for key, value in loaded.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise ModelError(
                f"{name} was not converted: {path.name} holds a {type(value).__name__} under {key!r}, where the "
                "authors' code puts named tensors only."
            )
    return {key: value.detach() for key, value in loaded.items()}


def _copy(found: Path | None, to: Path) -> bool:
    if found is not None:
        shutil.copyfile(found, to)
    return found is not None
