"""The configurations of the pretrained models of the study, cut down, with random weights and a real fast tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from some_tokenizers import byte_level_bpe

PYTHIA_160M: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
MAMBA_130M: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "bos_token_id": 0,
    "conv_kernel": 4,
    "eos_token_id": 0,
    "expand": 2,
    "fused_add_norm": True,
    "hidden_act": "silu",
    "hidden_size": 768,
    "initializer_range": 0.1,
    "intermediate_size": 1536,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba",
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 16,
    "time_step_floor": 0.0001,
    "time_step_init_scheme": "random",
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 48,
    "time_step_scale": 1.0,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 50280,
}
CUT: dict[str, dict[str, Any]] = {
    "pythia": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mamba": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "time_step_rank": 2},
}
"""What is cut of each; all else is as on the hub, but for the rows of the table of tokens."""


def save_pretrained_model(folder: Path, name: str, *, seed: int = 0, tokenizer: bool = True, **changed: Any) -> Path:
    """Save a model of the study, cut down, as a folder in Hugging Face form."""
    import transformers

    given = {"pythia": PYTHIA_160M, "mamba": MAMBA_130M}[name] | CUT[name] | {"vocab_size": 384} | changed
    config = transformers.AutoConfig.for_model(**given)
    torch.manual_seed(seed)
    model = getattr(transformers, given["architectures"][0])(config)
    model.to(getattr(torch, given["torch_dtype"])).save_pretrained(folder)
    if tokenizer:
        byte_level_bpe().save_pretrained(folder)
    return folder
