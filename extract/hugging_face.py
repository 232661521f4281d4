"""Loading a Hugging Face model, so that what is in memory is what the checkpoint says, head and tokenizer included."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import LayerlakeError, MissingExtraError, ModelError, RequestError
from .architectures import ARCHITECTURES, Architecture, site_points
from .batch import Batch
from .failure import one_line
from .fingerprint import dtype_of, tokenizer_hash
from .loaded_model import LoadedModel, ModelSource
from .mamba_checkpoint import find_file, load_mamba_form
from .mamba_form import is_mamba_form
from .structure import find_architecture
from .weights import weight_digests, weights_fingerprint

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def load_hugging_face(source: ModelSource) -> LoadedModel:
    """Load a model folder or hub name: weights in safetensors only, nothing random, nothing left out.

    The class is the one that the checkpoint names, so a language model comes with its head. An architecture that is
    not registered is looked at, and its sites are found by its structure.
    """
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
    attention = {} if source.attention == "auto" else {"attn_implementation": source.attention}
    name = str(folder) if looks_local else source.name
    with quiet(transformers):
        try:
            given, _ = transformers.PreTrainedConfig.get_config_dict(name, revision=source.revision)
            form = is_mamba_form(given)
            if form:
                module, report = load_mamba_form(source, given)
            else:
                config = transformers.AutoConfig.from_pretrained(name, **options)
                _refuse_encoder_decoder(config, source)  # before its weights are read
                # use_safetensors: a pickle can run code, so weights in .bin files are not loaded
                module, report = _auto_class(transformers, config).from_pretrained(
                    name,
                    config=config,
                    dtype=source.dtype,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                    **attention,
                    **options,
                )
        except LayerlakeError:
            raise
        except Exception as error:  # a checkpoint can be wrong in any way, and code of a hub's raises what it likes
            raise ModelError(f"{source.name} does not load as a model: {one_line(error)}") from error
        module.eval()
        architecture = architecture_of(module, source)
        _check_weights(source, module, report, architecture.blocks)
        # of a checkpoint in mamba-ssm's form, only the configuration made of its own says which tokenizer it has
        more = {"config": module.config} if form else {}
        known = looks_local or form  # whether it can be told if there is one
        files = not known or any(find_file(source, f, given) for f in _TOKENIZER_FILES)
        tokenizer = _load_tokenizer(transformers, name, options | more) if files else None
    weights = weight_digests(module)
    model = of_transformers(source, module, tokenizer, architecture)
    model.weights, model.identity["fingerprint"] = weights, weights_fingerprint(weights)
    return model


def architecture_of(module: Any, source: ModelSource) -> Architecture:
    """Give the architecture of a transformers model: the registered one, or what is found by its structure."""
    _refuse_encoder_decoder(module.config, source)
    registered = ARCHITECTURES.get(module.config.model_type)
    if registered:
        return registered(module.config)
    return find_architecture(getattr(module, module.base_model_prefix, module), source.name)


def of_transformers(source: ModelSource, module: Any, tokenizer: Any, architecture: Architecture) -> LoadedModel:
    """Give a transformers model that is in memory, in evaluation mode, with its sites; its weights are not hashed."""
    config = module.config
    base = getattr(module, module.base_model_prefix, module)
    prefix = "" if base is module else module.base_model_prefix
    config_text = json.dumps(config.to_diff_dict(), sort_keys=True, default=str)
    identity = {
        "kind": config.model_type,
        "revision": getattr(config, "_commit_hash", None) or source.revision,  # a commit says more than a branch
        "config": hashlib.sha256(config_text.encode()).hexdigest(),
        "tokenizer": tokenizer_hash(tokenizer),
        "dtype": dtype_of(module),
        "attention": getattr(module.config, "_attn_implementation", None),
    }
    if architecture.found:
        identity["found"] = {"blocks": architecture.blocks, "final_norm": architecture.final_norm}
    return LoadedModel(
        source,
        module,
        _forward(module, base),
        site_points(
            module,
            prefix,
            architecture,
            getattr(config, "num_attention_heads", None),
            patterns=config.model_type == "bloom" or identity["attention"] == "eager",
        ),
        () if _turns_by_length(config) else architecture.padding,
        tokenizer,
        len(module.get_input_embeddings().weight),
        _longest(config),
        identity,
        prefix=prefix,
        architecture=architecture,
    )


def _turns_by_length(config: Any) -> bool:
    """Tell whether the longest sequence of a batch turns the rotary frequencies of all of them.

    Then only equal lengths may share one. Short trial sequences may never reach the length at which they turn.
    """
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [given, *(g for g in given.values() if isinstance(g, dict))]  # some models have them by kind of layer
    return any(g.get("rope_type") in ("dynamic", "longrope") for g in kinds)


def _longest(config: Any) -> int | None:
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None  # some write -1 for "any length"


def _refuse_encoder_decoder(config: Any, source: ModelSource) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{source.name} is an encoder-decoder model, which cannot be extracted yet.")


def _auto_class(transformers: Any, config: Any) -> Any:
    named = (config.architectures or [""])[0]
    if named.endswith(("ForCausalLM", "LMHeadModel")):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForMaskedLM if named.endswith("ForMaskedLM") else transformers.AutoModel


def _forward(module: Any, base: Any) -> Callable[[Batch, bool], Any]:
    """Give the function that runs a batch, with the positions and without the cache where the model takes them."""
    takes = inspect.signature(base.forward).parameters

    def forward(batch: Batch, whole: bool) -> Any:
        extra: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
        if "position_ids" in takes:
            extra["position_ids"] = batch.position_ids
        model = module if whole else base
        return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **extra)

    return forward


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


def _load_tokenizer(transformers: Any, name: str, options: dict[str, Any]) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # the library raises errors of many kinds, for files of many kinds
        raise ModelError(f"The tokenizer of {name} does not load: {one_line(error)}") from error


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
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
