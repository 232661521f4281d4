"""Loading a model so that it can be called, read at its sites, and named exactly."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import LayerlakeError, MissingExtraError, ModelError, RequestError, WorldError
from .architectures import architecture_of, site_points
from .batch import Batch
from .fingerprint import source_hash, tokenizer_hash, weights_fingerprint
from .loaded_model import LoadedModel, ModelSource
from .torch_model import TorchModel
from .trial import one_line, settle_points

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(source: ModelSource, *, device: str = "cpu") -> LoadedModel:
    """Load a model, check by trial forwards that its sites are where they must be, and fingerprint it.

    Raises `ModelError` when it does not load or run, `RequestError` when the name cannot be a model's.
    """
    if source.dtype not in _DTYPES:
        raise RequestError(f"{source.dtype!r} is not a model dtype; use one of {', '.join(_DTYPES)}.")
    check_device(device)
    model = _load_function(source) if source.is_function else _load_hugging_face(source)
    model.module.to(device)
    model.device = device
    settle_points(model)
    return model


def check_device(device: str) -> None:
    """Raise `RequestError` for a device that is neither cpu nor cuda, `WorldError` for one that is not there."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise RequestError(f"{device!r} is not a device; use cpu or cuda.")
    if device != "cpu" and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise WorldError(f"This process sees no device {device}: use --device cpu, or a torch built for your GPU.")


def _load_function(source: ModelSource) -> LoadedModel:
    module_name, _, function_name = source.name.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), function_name)()
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise RequestError(f"There is no module {error.name!r} to take {function_name!r} from.") from error
        raise ModelError(f"{source.name} failed: {error}") from error
    except AttributeError as error:
        raise RequestError(f"{source.name} cannot be called: {error}") from error
    except LayerlakeError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may also call exit()
        raise ModelError(f"{source.name} failed with {type(error).__name__}: {error}") from error
    if not isinstance(made, (torch.nn.Module, TorchModel)):
        raise ModelError(f"{source.name} returned {type(made).__name__}, not a torch module or a TorchModel.")
    wrapped = made if isinstance(made, TorchModel) else TorchModel(made)
    module = wrapped.module.eval()
    points = wrapped.points()
    if source.dtype != "auto":
        module.to(getattr(torch, source.dtype))
    return LoadedModel(
        source,
        module,
        wrapped.forward,
        points,
        tuple(wrapped.padding),
        wrapped.tokenizer,
        wrapped.table_size(),
        wrapped.max_length,
        {
            "kind": "function",
            "function": source.name,
            "modules": {p.name: p.module for p in points},
            "code": source_hash(module_name),
            "tokenizer": tokenizer_hash(wrapped.tokenizer),
            "fingerprint": weights_fingerprint(module),
            "dtype": _dtype_of(module),
        },
    )


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _load_hugging_face(source: ModelSource) -> LoadedModel:
    if not source.name.strip() or ":" in source.name:
        raise RequestError(
            f"{source.name!r} names no model: give a folder, a hub name, or a function as package.module:function."
        )
    folder = Path(source.name).expanduser()
    module_name, _, function_name = source.name.rpartition(".")
    if not folder.exists() and re.fullmatch(r"[A-Za-z_][\w.]*", module_name) and _is_module(module_name):
        raise RequestError(
            f"{source.name} is not a model folder. "
            f"For the function {function_name} write {module_name}:{function_name}."
        )
    looks_local = folder.exists() or source.name.startswith((".", "/", "~"))
    if looks_local and not (folder / "config.json").is_file():
        raise RequestError(f"{source.name} is not a model folder: it has no config.json.")
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError.of("hf", f"Loading {source.name}") from error
    options: dict[str, Any] = {"revision": source.revision, "trust_remote_code": source.trust_remote_code}
    name = str(folder) if looks_local else source.name
    with _quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(name, **options)
            architecture = architecture_of(config.model_type)
            # use_safetensors: a pickle can run code, so weights in .bin files are not loaded
            module, report = transformers.AutoModel.from_pretrained(
                name,
                config=config,
                dtype=source.dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **options,
            )
        except LayerlakeError:
            raise
        except Exception as error:
            raise ModelError(f"{source.name} does not load as a model: {one_line(error)}") from error
        _check_weights(source, module, report, architecture.blocks)
        tokenizer = _load_tokenizer(transformers, name, options, looks_local)
    module.eval()

    def forward(batch: Batch) -> Any:
        extra = {"position_ids": batch.position_ids} if architecture.positions else {"use_cache": False}
        return module(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **extra)

    limit = getattr(config, "max_position_embeddings", None) if architecture.positions else None
    config_text = json.dumps(config.to_diff_dict(), sort_keys=True, default=str)
    return LoadedModel(
        source,
        module,
        forward,
        site_points(module, architecture),
        architecture.padding,
        tokenizer,
        module.get_input_embeddings().num_embeddings,
        limit,
        {
            "kind": config.model_type,
            "revision": getattr(config, "_commit_hash", None) or source.revision,  # a commit says more than a branch
            "config": hashlib.sha256(config_text.encode()).hexdigest(),
            "tokenizer": tokenizer_hash(tokenizer),
            "fingerprint": weights_fingerprint(module),
            "dtype": _dtype_of(module),
            "attention": getattr(config, "_attn_implementation", None),
        },
    )


def _check_weights(source: ModelSource, module: torch.nn.Module, report: Mapping[str, Any], blocks: str) -> None:
    """Refuse a checkpoint that does not fit its configuration, which would give plausible activations.

    Weights that it lacks would be random numbers; blocks that it has too many would be left out in silence.
    """
    missing = {k for k in report["missing_keys"] if not k.startswith("pooler.")}
    sizes = [k if isinstance(k, str) else k[0] for k in report["mismatched_keys"]]
    stray = [k for k in report["unexpected_keys"] if re.search(rf"(^|\.){re.escape(blocks)}\.\d+\.", k)]
    for wrong, what in (
        (missing, "lacks weights of its architecture ({}); they would be random numbers."),
        (sizes, "has weights of other sizes than its config.json says ({}); they would be random numbers."),
        (stray, "has weights that its config.json has no block for ({}); they would be left out."),
    ):
        if wrong:
            shown = ", ".join(sorted(wrong)[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            raise ModelError(f"{source.name} {what.format(shown)}")
    if missing != set(report["missing_keys"]) and hasattr(module, "pooler"):
        # the checkpoint has none, and no site lies behind it
        module.pooler = None  # pyright: ignore[reportArgumentType]


def _load_tokenizer(transformers: Any, name: str, options: dict[str, Any], local: bool) -> Any:
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model")
    if local and not any((Path(name) / f).is_file() for f in files):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:
        raise ModelError(f"The tokenizer of {name} does not load: {one_line(error)}") from error


def _dtype_of(module: torch.nn.Module) -> str:
    kinds = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in module.parameters())
    return ", ".join(kinds) or "none"


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers' load reports and progress bars off the user's terminal; what matters becomes an error."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled() if hasattr(logging, "is_progress_bar_enabled") else True
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
