"""The vocabulary of sites: one name for one place in the computation, whatever the architecture calls it."""

from __future__ import annotations

import re
from typing import NamedTuple

SITES: dict[str, str] = {
    "embed": "what enters the first block: token embeddings, with positions and norm where the model adds them there",
    "resid_pre": "the residual stream as it enters block i",
    "z": "the heads' outputs before they are mixed by the output projection, (heads, head size)",
    "pattern": "the attention pattern: how much each head attends to each token of the sequence, (heads, tokens)",
    "attn_out": "what the attention of block i adds to the residual stream",
    "conv_out": "the output of the mixer's causal convolution, after its activation",
    "ssm_state": "the recurrent state after each token",
    "mixer_out": "what the recurrent mixer of block i (Mamba, Mamba-2) adds to the residual stream",
    "resid_mid": "the residual stream between the two halves of block i",
    "mlp_out": "what the MLP (or the experts) of block i adds to the residual stream",
    "gates": "the gates of a recurrent layer at each token, after their nonlinearity",
    "cell": "the cell state of an LSTM after each token",
    "hidden": "the output of recurrent layer i (LSTM, GRU, RNN)",
    "resid_post": "the output of block i, before any final norm",
    "final_norm": "the residual stream after the final norm",
    "logits": "the output of the language-model head",
}
"""Each site with what it is, in the order in which a model computes them."""

_LENS = {
    "resid_pre": "resid_pre",
    "resid_mid": "resid_mid",
    "resid_post": "resid_post",
    "attn_out": "attn_out",
    "mlp_out": "mlp_out",
    "attn.hook_z": "z",
    "attn.z": "z",
    "attn.hook_pattern": "pattern",
    "attn.pattern": "pattern",
}
_LENS_NAME = re.compile(r"blocks\.(\d+)\.(?:hook_)?([a-z_.]+)")
_SHORT_NAME = re.compile(r"hook_([a-z_]+)")


class SiteName(NamedTuple):
    """A site as a request names it; `layer` is None unless the name itself holds one."""

    site: str
    layer: int | None = None


def parse_site(name: str) -> SiteName:
    """Read the name of a site: one of `SITES`, TransformerLens' name of one, an array's name, or a module's path.

        resid_post                  every layer that has it
        resid_post-3                layer 3 of it
        blocks.3.hook_resid_post    the same, as TransformerLens writes it; hook_resid_post is every layer
        blocks.3.attn.hook_z        z-3
        layers.3.mlp.act            the output of a module, by its path in the model
        layers.3.mlp.down_proj:in   what enters a module

    TransformerLens' hook_embed is the token embedding alone, without positions; it is no alias: name the module.
    """
    site, dash, layer = name.rpartition("-")
    if dash and site in SITES and layer.isdecimal():
        return SiteName(site, int(layer))
    if found := _LENS_NAME.fullmatch(name):
        layer, inner = found.groups()
        if inner in _LENS:
            return SiteName(_LENS[inner], int(layer))
    if (found := _SHORT_NAME.fullmatch(name)) and found[1] in _LENS:
        return SiteName(_LENS[found[1]])
    return SiteName(name)
