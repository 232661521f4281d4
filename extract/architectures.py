"""Where the sites of each Hugging Face architecture lie, and how its values hang together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .derived import attention_pattern, mamba2_conv_out, mamba2_output, mamba2_ssm_state, mamba_output, mamba_ssm_state
from .hooks import Derive, GiveBack, SitePoint
from .sites import SITES


@dataclass(frozen=True)
class Place:
    """Where a site lies inside a block; the fields are those of `SitePoint`."""

    module: str
    side: Literal["output", "input"] = "output"
    flat: bool = False
    heads: bool = False
    derive: Derive | None = None
    keys: bool = False
    gives_back: GiveBack | None = None
    read_only: bool = False


@dataclass(frozen=True)
class Architecture:
    """The module paths of one architecture, below its headless model, and the equations that hold in it.

    Layer i is the output of block i, before any final norm; `embed` is what enters block 0. A site of `places` that a
    block has no module for, as in models whose blocks differ, that block has not.
    """

    blocks: str
    places: Mapping[str, Place] = field(default_factory=dict)
    final_norm: str | None = None
    after_norm: str | None = None
    """A module between the final norm and the head."""
    embedding: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    """What enters block 0, computed from the tables: (headless model, ids, positions) -> (time, width)."""
    additive: bool = True
    """Whether a block is the residual stream plus its branches: resid_pre + attn_out + mlp_out = resid_post."""
    post_norms: tuple[str, str] | None = None
    """For a block that normalises after each sum: the two norms, in the block."""
    padding: tuple[str, ...] = ("right", "left")
    """The sides on which padding leaves real tokens unchanged, mask and position ids given."""
    found: bool = False
    """Whether this was found by looking at the model, not registered."""


def _pattern(attention: str) -> Place:
    return Place(attention, derive=attention_pattern, keys=True)


def _rows(base: Any, ids: Tensor, positions: Tensor) -> Tensor:
    return base.get_input_embeddings().weight[ids]


def _gpt2_embedding(base: Any, ids: Tensor, positions: Tensor) -> Tensor:
    return base.wte.weight[ids] + base.wpe.weight[positions]


def _opt_embedding(base: Any, ids: Tensor, positions: Tensor) -> Tensor:
    rows = base.decoder.embed_tokens.weight[ids]
    if base.decoder.project_in is not None:
        rows = rows @ base.decoder.project_in.weight.T
    return rows + base.decoder.embed_positions.weight[positions + 2]


def _bloom_embedding(base: Any, ids: Tensor, positions: Tensor) -> Tensor:
    return base.word_embeddings_layernorm(base.word_embeddings.weight[ids])


def _bert_embedding(base: Any, ids: Tensor, positions: Tensor) -> Tensor:
    e = base.embeddings
    summed = e.word_embeddings.weight[ids] + e.token_type_embeddings.weight[0] + e.position_embeddings.weight[positions]
    return e.LayerNorm(summed)


def _gemma_embedding(base: Any, ids: Tensor, positions: Tensor) -> Tensor:
    weight = base.get_input_embeddings().weight
    return weight[ids] * torch.tensor(weight.shape[1] ** 0.5, dtype=weight.dtype)


def _gpt2(config: Any) -> Architecture:
    places = {
        "z": Place("attn.c_proj", "input", heads=True),
        "pattern": _pattern("attn"),
        "attn_out": Place("attn"),
        "resid_mid": Place("ln_2", "input", read_only=True),
        "mlp_out": Place("mlp"),
    }
    cross = bool(getattr(config, "add_cross_attention", False))
    return Architecture("h", places, "ln_f", embedding=_gpt2_embedding, additive=not cross)


def _gpt_neox(config: Any) -> Architecture:
    places = {
        "z": Place("attention.dense", "input", heads=True),
        "pattern": _pattern("attention"),
        "attn_out": Place("attention"),
        "mlp_out": Place("mlp"),
    }
    if not config.use_parallel_residual:  # in parallel, nothing lies between the two halves
        places["resid_mid"] = Place("post_attention_layernorm", "input", read_only=True)
    return Architecture("layers", places, "final_layer_norm", embedding=_rows)


def _llama(config: Any) -> Architecture:
    places = {
        "z": Place("self_attn.o_proj", "input", heads=True),
        "pattern": _pattern("self_attn"),
        "attn_out": Place("self_attn"),
        "resid_mid": Place("post_attention_layernorm", "input", read_only=True),
        "mlp_out": Place("mlp"),
    }
    return Architecture("layers", places, "norm", embedding=_rows)


def _gemma(config: Any) -> Architecture:
    # Norms also after attention and MLP: what is added to the residual stream is the norm's output.
    places = {
        "z": Place("self_attn.o_proj", "input", heads=True),
        "pattern": _pattern("self_attn"),
        "attn_out": Place("post_attention_layernorm"),
        "resid_mid": Place("pre_feedforward_layernorm", "input", read_only=True),
        "mlp_out": Place("post_feedforward_layernorm"),
    }
    return Architecture("layers", places, "norm", embedding=_gemma_embedding)


def _opt(config: Any) -> Architecture:
    before = bool(config.do_layer_norm_before)
    places = {
        "z": Place("self_attn.out_proj", "input", heads=True),
        "pattern": _pattern("self_attn"),
        "attn_out": Place("self_attn"),
        "resid_mid": Place("final_layer_norm", "input", flat=True, read_only=True)
        if before
        else Place("self_attn_layer_norm"),
        "mlp_out": Place("fc2", flat=True),
    }
    return Architecture(
        "decoder.layers",
        places,
        "decoder.final_layer_norm" if before and not config._remove_final_layer_norm else None,
        after_norm="decoder.project_out" if config.word_embed_proj_dim != config.hidden_size else None,
        embedding=_opt_embedding,
        additive=before,
        post_norms=None if before else ("self_attn_layer_norm", "final_layer_norm"),
    )


def _bloom(config: Any) -> Architecture:
    # Attention and MLP add the residual stream themselves: what they add to it is what their last layer returns.
    places = {
        "z": Place("self_attention.dense", "input", heads=True),
        "pattern": _pattern("self_attention"),
        "attn_out": Place("self_attention.dense"),
        "resid_mid": Place("post_attention_layernorm", "input", read_only=True),
        "mlp_out": Place("mlp.dense_4h_to_h"),
    }
    additive = not config.apply_residual_connection_post_layernorm
    return Architecture("h", places, "ln_f", embedding=_bloom_embedding, additive=additive)


def _bert(config: Any) -> Architecture:
    places = {
        "z": Place("attention.output.dense", "input", heads=True),
        "pattern": _pattern("attention.self"),
        "attn_out": Place("attention.output.dense"),
        "resid_mid": Place("attention.output"),
        "mlp_out": Place("output.dense"),
    }
    norms = ("attention.output.LayerNorm", "output.LayerNorm")
    return Architecture("encoder.layer", places, embedding=_bert_embedding, additive=False, post_norms=norms)


def _mamba(config: Any) -> Architecture:
    places = {
        # Editing what enters x_proj would leave the scan's own copy as it is.
        "conv_out": Place("mixer.x_proj", "input", read_only=True),
        "ssm_state": Place("mixer", derive=mamba_ssm_state, gives_back=mamba_output),
        "mixer_out": Place("mixer"),
    }
    return Architecture("layers", places, "norm_f", embedding=_rows, padding=_recurrent_padding(config.use_bias))


def _recurrent_padding(bias: bool) -> tuple[str, ...]:
    # The mixer multiplies its input and its convolution's output by the mask, so that pads neither enter the
    # convolution nor the state; but a bias of the projection between the two is added to pads as well, and the
    # convolution carries it from pads on the left into the first real tokens.
    return ("right",) if bias else ("right", "left")


def _mamba2(config: Any) -> Architecture:
    places = {
        "conv_out": Place("mixer", derive=mamba2_conv_out),
        "ssm_state": Place("mixer", derive=mamba2_ssm_state, gives_back=mamba2_output),
        "mixer_out": Place("mixer"),
    }
    return Architecture("layers", places, "norm_f", embedding=_rows, padding=_recurrent_padding(config.use_bias))


def _jamba(config: Any) -> Architecture:
    places = {
        "z": Place("self_attn.o_proj", "input", heads=True),
        "pattern": _pattern("self_attn"),
        "attn_out": Place("self_attn"),
        "conv_out": Place("mamba.x_proj", "input", read_only=True),
        "ssm_state": Place("mamba", derive=mamba_ssm_state, gives_back=mamba_output),
        "mixer_out": Place("mamba"),
        "resid_mid": Place("pre_ff_layernorm", "input", read_only=True),
        "mlp_out": Place("feed_forward"),
    }
    padding = _recurrent_padding(config.mamba_proj_bias)
    return Architecture("layers", places, "final_layernorm", embedding=_rows, padding=padding)


ARCHITECTURES: dict[str, Callable[[Any], Architecture]] = {
    "bert": _bert,
    "bloom": _bloom,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "jamba": _jamba,
    "llama": _llama,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "mistral": _llama,
    "opt": _opt,
    "qwen2": _llama,
    "qwen3": _llama,
}
"""By the `model_type` of a configuration. Every one passes the self-test in the tests, on its real code."""


def site_points(
    model: nn.Module, prefix: str, architecture: Architecture, heads: int | None, *, patterns: bool
) -> list[SitePoint]:
    """Give all sites of a loaded model, in the order in which it computes them; `prefix` leads to its headless part.

    `patterns` says whether its attention computes patterns, as the eager implementation does.
    """
    start = f"{prefix}." if prefix else ""
    try:
        blocks = [path for path, _ in model.get_submodule(start + architecture.blocks).named_children()]
    except AttributeError as error:
        raise ModelError(f"The model is not built as its architecture is known to be: {error}") from error
    names = dict(model.named_modules(remove_duplicate=False))
    points = [SitePoint("embed", None, f"{start}{architecture.blocks}.{blocks[0]}", side="input")]
    for layer, child in enumerate(blocks):
        block = f"{start}{architecture.blocks}.{child}"
        points.append(SitePoint("resid_pre", layer, block, side="input"))
        for site in sorted(architecture.places, key=list(SITES).index):
            place = architecture.places[site]
            if (path := f"{block}.{place.module}") in names and (patterns or site != "pattern"):
                points.append(
                    SitePoint(
                        site,
                        layer,
                        path,
                        side=place.side,
                        flat=place.flat,
                        heads=heads if place.heads else None,
                        derive=place.derive,
                        keys=place.keys,
                        gives_back=place.gives_back,
                        read_only=place.read_only,
                    )
                )
        points.append(SitePoint("resid_post", layer, block))
    if architecture.final_norm is not None:
        points.append(SitePoint("final_norm", None, start + architecture.final_norm))
    if prefix:
        points.append(SitePoint("logits", None, ""))
    return points
