"""The configuration of a checkpoint in the form of `mamba-ssm`, the Mamba authors' own code, as one of transformers.

Such a config.json has no `model_type`; its keys are the fields of `MambaConfig` in
github.com/state-spaces/mamba (mamba_ssm/models/config_mamba.py), and `ssm_cfg` holds arguments of their `Mamba`
or `Mamba2` (mamba_ssm/modules). The blocks themselves are those of transformers' classes of these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError

_NEEDED = ("d_model", "n_layer", "vocab_size")
_DEFAULTS: dict[str, Any] = {
    "d_intermediate": 0,
    "ssm_cfg": {},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,  # which kernel adds and normalises
    "pad_vocab_size_multiple": 8,
    "tie_embeddings": True,
}
_EPSILON = 1e-5  # of all their norms; no config.json of theirs names it


@dataclass(frozen=True)
class _Layer:
    """One value of `layer` in ssm_cfg: what transformers calls it, and what else may stand in ssm_cfg with it."""

    kind: str
    options: Mapping[str, tuple[str, Any]]
    """What changes values: the name in transformers, and the default in the authors' class."""
    fixed: Mapping[str, Any]
    """What changes values, and has one value only that transformers' class can express."""
    inert: frozenset[str]
    """What draws the first weights or picks a kernel: the same function of the same weights, whatever it says."""


_INIT = frozenset({"dt_min", "dt_max", "dt_init_floor"})
_LAYERS = {
    "Mamba1": _Layer(
        "mamba",
        {
            "d_state": ("state_size", 16),
            "d_conv": ("conv_kernel", 4),
            "expand": ("expand", 2),
            "dt_rank": ("time_step_rank", "auto"),
            "bias": ("use_bias", False),
            "conv_bias": ("use_conv_bias", True),
        },
        {},
        _INIT | {"dt_init", "dt_scale", "use_fast_path"},
    ),
    "Mamba2": _Layer(
        "mamba2",
        {
            "d_state": ("state_size", 128),
            "d_conv": ("conv_kernel", 4),
            "expand": ("expand", 2),
            "headdim": ("head_dim", 64),
            "ngroups": ("n_groups", 1),
            "bias": ("use_bias", False),
            "conv_bias": ("use_conv_bias", True),
            "chunk_size": ("chunk_size", 256),
            "dt_limit": ("time_step_limit", (0.0, float("inf"))),
        },
        {"d_ssm": None, "D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False, "process_group": None},
        _INIT | {"conv_init", "A_init_range", "use_mem_eff_path", "sequence_parallel"},
    ),
}


def is_mamba_form(config: Any) -> bool:
    """Tell whether the content of a config.json is in the form of `mamba-ssm`."""
    if not isinstance(config, Mapping) or "model_type" in config or "auto_map" in config:
        return False  # transformers', or that of code which comes with the model
    return "ssm_cfg" in config or {"d_model", "n_layer"} <= config.keys()


def to_transformers(config: Mapping[str, Any], name: str) -> Any:
    """Give the configuration of transformers' MambaForCausalLM or Mamba2ForCausalLM that computes the same.

    `ModelError`, naming the key, where the authors' code has no such key or transformers' class cannot do what it
    asks for; `name` is the model's.
    """
    given = {k: v for k, v in config.items() if k != "_commit_hash"}  # what transformers adds of a hub's
    _refuse_unknown(given, (*_NEEDED, *_DEFAULTS), name, "")
    for key in _NEEDED:
        if key not in given:
            raise ModelError(f"The config.json of {name} has no {key}, so its weights cannot be told apart.")
    empty = {k for k, v in given.items() if v is None and isinstance(_DEFAULTS.get(k), (dict, list))}
    told = _DEFAULTS | {k: v for k, v in given.items() if k not in empty}
    for key, value in told.items():
        _checked(key, value, _DEFAULTS.get(key, 1), name)
    _refuse_hybrid(told, name)
    if not told["rms_norm"]:
        raise _not_expressed(name, "rms_norm", False, "LayerNorm, where transformers' Mamba classes have RMSNorm only")
    ssm = dict(told["ssm_cfg"])
    layer_name = ssm.pop("layer", "Mamba1")
    layer = _LAYERS.get(layer_name) if isinstance(layer_name, str) else None
    if layer is None:
        raise _not_expressed(name, "layer", layer_name, f"and transformers has classes for {' and '.join(_LAYERS)}")
    options = _layer_options(layer, layer_name, ssm, told["d_model"], name)
    multiple = told["pad_vocab_size_multiple"]
    import transformers

    kind = transformers.MambaConfig if layer.kind == "mamba" else transformers.Mamba2Config
    try:
        made = kind(
            vocab_size=-(-told["vocab_size"] // multiple) * multiple,
            hidden_size=told["d_model"],
            num_hidden_layers=told["n_layer"],
            layer_norm_epsilon=_EPSILON,
            residual_in_fp32=told["residual_in_fp32"],
            tie_word_embeddings=told["tie_embeddings"],
            pad_token_id=None,  # the authors' config.json names no special tokens
            bos_token_id=None,
            eos_token_id=None,
            **options,
        )
    except Exception as error:  # transformers checks too, and raises what it likes
        raise ModelError(f"The config.json of {name} does not give a {layer.kind} model: {error}") from error
    made.architectures = ["MambaForCausalLM" if layer.kind == "mamba" else "Mamba2ForCausalLM"]
    made._commit_hash = config.get("_commit_hash")
    return made


def _layer_options(layer: _Layer, layer_name: str, ssm: dict[str, Any], d_model: int, name: str) -> dict[str, Any]:
    """Give the mixer's options under transformers' names, all of them, so that no default of its own comes in."""
    _refuse_unknown(ssm, (*layer.options, *layer.fixed, *layer.inert, "layer"), name, f" in ssm_cfg for {layer_name}")
    taken = {k: _checked(k, ssm.get(k, default), default, name) for k, (_, default) in layer.options.items()}
    inner = taken["expand"] * d_model
    for key, value in layer.fixed.items():
        if key in ssm and ssm[key] != value and not (key == "d_ssm" and ssm[key] == inner):
            raise _not_expressed(name, key, ssm[key], f"and transformers' {layer_name} has no such thing")
    options = {there: taken[key] for key, (there, _) in layer.options.items()}
    if layer.kind == "mamba2":
        heads, rest = divmod(inner, taken["headdim"])
        if rest or heads % taken["ngroups"]:
            raise ModelError(
                f"The config.json of {name} cannot be: {inner} channels (expand times d_model) do not make heads of "
                f"{taken['headdim']} (headdim) in {taken['ngroups']} groups (ngroups)."
            )
        options["num_heads"] = heads
    return options


def _refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...], name: str, where: str) -> None:
    if stray := sorted(set(given) - set(known)):
        raise ModelError(
            f"The config.json of {name} has {', '.join(map(repr, stray))}{where}, which the code of mamba-ssm that is "
            f"known here does not take: what it changes would be left out. Known: {', '.join(known)}."
        )


def _refuse_hybrid(told: Mapping[str, Any], name: str) -> None:
    if told["attn_layer_idx"]:
        layers = ", ".join(map(str, told["attn_layer_idx"]))
        why = "attention in these layers: a hybrid, which transformers' Mamba classes are not"
        raise _not_expressed(name, "attn_layer_idx", f"[{layers}]", why)
    if told["d_intermediate"]:
        why = "an MLP in each block, which transformers' Mamba classes do not have"
        raise _not_expressed(name, "d_intermediate", told["d_intermediate"], why)


def _not_expressed(name: str, key: str, value: Any, why: str) -> ModelError:
    return ModelError(f"{name} cannot be loaded: its config.json says {key}: {value}, {why}.")


def _checked(key: str, value: Any, default: Any, name: str) -> Any:
    """Give a value if it is of its default's kind; a whole number is positive where the default is."""
    if isinstance(default, tuple):
        numbers = isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value))
        if numbers and 0 <= value[0] <= value[1]:
            return tuple(map(float, value))
        what = "two numbers in order, none below 0"
    elif isinstance(default, int) and not isinstance(default, bool):
        if _is_whole(value, min(1, default)):
            return value
        what = f"a whole number from {min(1, default)} on"
    elif isinstance(default, str):
        if value == default or _is_whole(value, 1):
            return value
        what = f"{default!r} or a whole number from 1 on"
    else:
        if isinstance(value, type(default)):
            return value
        what = {bool: "true or false", dict: "an object", list: "a list"}[type(default)]
    raise ModelError(f"The config.json of {name} has {key}: {value!r}, and it must be {what}.")


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
