"""Loading a model so that it can be called, read at its sites, and named exactly."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import LayerlakeError, MissingExtraError, ModelError, RequestError
from .architectures import architecture_of, site_points
from .batch import Batch
from .fingerprint import source_hash, tokenizer_hash, weights_fingerprint
from .hooks import Edit, SiteHooks, SitePoint
from .torch_model import TorchModel

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


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
        from ..errors import UnknownNameError

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
        return hooks.values, output


def load_model(source: ModelSource, *, device: str = "cpu", import_path: Sequence[str] = ()) -> LoadedModel:
    """Load a model, check by trial forwards that its sites are where they must be, and fingerprint it.

    `import_path` are folders in which ``package.module`` may lie. Raises `ModelError` when it does not load or run,
    `RequestError` when the name cannot be a model's.
    """
    if source.dtype not in _DTYPES:
        raise RequestError(f"{source.dtype!r} is not a model dtype; use one of {', '.join(_DTYPES)}.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
        raise RequestError(f"Device {device!r} cannot be used here: {_sentence(error)}.") from error
    model = _load_function(source, import_path) if source.is_function else _load_hugging_face(source)
    model.module.to(device)
    model.device = device
    _trial(model)
    return model


def _load_function(source: ModelSource, import_path: Sequence[str]) -> LoadedModel:
    module_name, _, function_name = source.name.partition(":")
    sys.path.extend(p for p in import_path if p not in sys.path)
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
    except Exception as error:
        raise ModelError(f"{source.name} failed with {type(error).__name__}: {error}") from error
    if not isinstance(made, (torch.nn.Module, TorchModel)):
        raise ModelError(f"{source.name} returned {type(made).__name__}, not a torch module or a TorchModel.")
    wrapped = made if isinstance(made, TorchModel) else TorchModel(made)
    module = wrapped.module.eval()
    if source.dtype != "auto":
        module.to(getattr(torch, source.dtype))
    return LoadedModel(
        source,
        module,
        wrapped.forward,
        wrapped.points(),
        tuple(wrapped.padding),
        wrapped.tokenizer,
        wrapped.table_size(),
        wrapped.max_length,
        {
            "kind": "function",
            "code": source_hash(module_name),
            "tokenizer": tokenizer_hash(wrapped.tokenizer),
            "fingerprint": weights_fingerprint(module),
            "dtype": _dtype_of(module),
        },
    )


def _load_hugging_face(source: ModelSource) -> LoadedModel:
    folder = Path(source.name).expanduser()
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
                **options,
            )
        except LayerlakeError:
            raise
        except Exception as error:
            raise ModelError(f"{source.name} does not load as a model: {_sentence(error)}") from error
        _check_weights(source, module, report)
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
            "revision": source.revision or getattr(config, "_commit_hash", None),
            "config": hashlib.sha256(config_text.encode()).hexdigest(),
            "tokenizer": tokenizer_hash(tokenizer),
            "fingerprint": weights_fingerprint(module),
            "dtype": _dtype_of(module),
            "attention": getattr(config, "_attn_implementation", None),
        },
    )


def _check_weights(source: ModelSource, module: torch.nn.Module, report: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that leaves weights at random values, which would give plausible activations."""
    missing = {k for k in report["missing_keys"] if not k.startswith("pooler.")}
    wrong = sorted(missing) or sorted(str(k) for k in report["mismatched_keys"])
    if wrong:
        raise ModelError(
            f"{source.name} lacks weights of its architecture ({', '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}); they would be random numbers."
        )
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
        raise ModelError(f"The tokenizer of {name} does not load: {_sentence(error)}") from error


def _trial(model: LoadedModel) -> None:
    """Run two small forwards of unlike shapes; settles the axes, shape and dtype of every point by looking.

    A module that never runs is an error naming it. The batch is never as large as the time here, which leaves no
    doubt which axis of an output is which, also where real batches happen to be square.
    """
    points = model.points
    for batch_size, time in ((4, 3), (7, 5)):
        length = min(time, model.max_length or time)
        batch = Batch.of([np.zeros(length, np.int64)] * batch_size, "none", model.device)
        try:
            values, _ = model.run(batch, points)
        except LayerlakeError:
            raise
        except Exception as error:
            raise ModelError(
                f"{model.source.name} fails on {batch_size} sequences of {length} tokens with "
                f"{type(error).__name__}: {_sentence(error)}"
            ) from error
        settled = []
        for point in points:
            value = values[point.name]
            seen = tuple(value.shape[:2])
            if value.ndim < 3 or seen not in ((batch_size, length), (length, batch_size)):
                raise ModelError(
                    f"Site {point.name}: module {point.module!r} returned {tuple(value.shape)} for {batch_size} "
                    f"sequences of {length} tokens; it must be (batch, time, ...) or (time, batch, ...)."
                )
            swapped = seen == (length, batch_size)
            if point.time_first and swapped:
                raise ModelError(f"Site {point.name}: the axes of module {point.module!r} change from call to call.")
            if swapped:
                point = SitePoint(point.site, point.layer, point.module, time_first=True)
            model.shapes[point.name] = tuple(value.shape[2:])
            model.dtypes[point.name] = str(value.dtype).removeprefix("torch.")
            settled.append(point)
        points = settled
    model.points = points


def _dtype_of(module: torch.nn.Module) -> str:
    kinds = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in module.parameters())
    return ", ".join(kinds) or "none"


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


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
