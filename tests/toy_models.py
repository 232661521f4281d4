"""Small models for tests: real configurations with random weights, and torch modules of a user's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from layerlake.extract.batch import Batch
from layerlake.extract.torch_model import TorchModel
from torch import nn

VOCABULARY = 50
FAMILIES = ("bert", "gpt2", "mamba")
REGISTERED = (
    *FAMILIES,
    "bloom",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "jamba",
    "llama",
    "mamba2",
    "mistral",
    "opt",
    "qwen2",
    "qwen3",
)


def save_model(
    folder: Path, family: str, *, dtype: torch.dtype = torch.float32, layers: int = 3, **options: Any
) -> Path:
    """Save a small random model of a family in Hugging Face form; the same weights each time."""
    model = make_model(family, layers=layers, **options)
    model.to(dtype).save_pretrained(folder)
    return folder


def make_model(family: str, *, layers: int = 3, **options: Any) -> Any:
    """Make a small random model of a family from its real configuration and code; norms and biases are random too."""
    import transformers

    common: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.1}
    llama = common | {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    gemma = llama | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    mamba2 = {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2, "state_size": 4, "chunk_size": 8}
    settings: dict[str, tuple[str, str, dict[str, Any]]] = {
        "bert": (
            "BertConfig",
            "BertModel",
            common
            | {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 48},
        ),
        "gpt2": (
            "GPT2Config",
            "GPT2LMHeadModel",
            common | {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64},
        ),
        "mamba": (
            "MambaConfig",
            "MambaForCausalLM",
            common | {"hidden_size": 32, "num_hidden_layers": layers, "state_size": 4},
        ),
        "mamba2": (
            "Mamba2Config",
            "Mamba2ForCausalLM",
            common | {"hidden_size": 32, "num_hidden_layers": layers} | mamba2,
        ),
        "gpt_neox": (
            "GPTNeoXConfig",
            "GPTNeoXForCausalLM",
            {k: v for k, v in llama.items() if k != "num_key_value_heads"},
        ),
        "llama": ("LlamaConfig", "LlamaForCausalLM", llama),
        "mistral": ("MistralConfig", "MistralForCausalLM", llama | {"sliding_window": 8}),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", llama),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", llama | {"head_dim": 8}),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", gemma | {"final_logit_softcapping": 5.0}),
        "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", gemma),
        "opt": (
            "OPTConfig",
            "OPTForCausalLM",
            {k: v for k, v in llama.items() if k not in ("num_key_value_heads", "intermediate_size")}
            | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.1},
        ),
        "bloom": ("BloomConfig", "BloomForCausalLM", common | {"hidden_size": 32, "n_layer": layers, "n_head": 4}),
        "jamba": (
            "JambaConfig",
            "JambaForCausalLM",
            llama
            | {
                "num_hidden_layers": max(layers, 4),
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "expert_layer_period": 2,
                "expert_layer_offset": 1,
                "num_experts": 4,
                "mamba_d_state": 4,
                "mamba_dt_rank": 4,
            },
        ),
        # registered nowhere: found by their structure
        "phi": ("PhiConfig", "PhiForCausalLM", {k: v for k, v in llama.items() if k != "num_key_value_heads"}),
        "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", llama),
        "granite": ("GraniteConfig", "GraniteForCausalLM", llama | {"logits_scaling": 4.0, "residual_multiplier": 0.3}),
        "cohere": ("CohereConfig", "CohereForCausalLM", llama | {"logit_scale": 0.25}),
    }
    config_name, model_name, given = settings[family]
    config = getattr(transformers, config_name)(**(given | options))
    torch.manual_seed(7)
    model = getattr(transformers, model_name)(config)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith(("A_log", "dt_bias", ".D", "dt_proj.bias")):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


class TorchLSTM(nn.Module):
    """An embedding, a stacked nn.LSTM and a head."""

    def __init__(self, *, batch_first: bool = True, bidirectional: bool = False, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.rnn = nn.LSTM(
            12, 16, layers, batch_first=batch_first, bidirectional=bidirectional, dropout=0.5 * (layers > 1)
        )
        self.head = nn.Linear(16 * (1 + bidirectional), VOCABULARY)
        self.batch_first = batch_first

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids if self.batch_first else ids.t())
        y = self.head(self.rnn(x)[0])
        return y if self.batch_first else y.transpose(0, 1)


def lstm() -> nn.Module:
    return TorchLSTM()


def lstm_right() -> TorchModel:
    return TorchModel(TorchLSTM(), padding=("right",))


def lstm_time_first() -> nn.Module:
    return TorchLSTM(batch_first=False)


def lstm_bidirectional() -> nn.Module:
    return TorchLSTM(bidirectional=True)


class InPlace(nn.Module):
    """h = a(x); h += b(h); h.relu_(): what `a` returned is changed after it returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.a, self.b, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.a(self.embed(ids))
        h += self.b(h)
        return h.relu_()


def in_place() -> TorchModel:
    return TorchModel(InPlace(), blocks=("a", "b"))


def never_run() -> TorchModel:
    return TorchModel(InPlace(), blocks=("a", "unused"))


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + torch.tanh(self.inner(x)), None


class Tuples(nn.Module):
    """Blocks that return tuples, as some architectures' do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)[0]
        return x


def tuples() -> TorchModel:
    return TorchModel(Tuples(), blocks=("blocks.0", "blocks.1"), padding=("right", "left"))


def with_call() -> TorchModel:
    """A model that must be called in a way of its own."""

    def call(module: nn.Module, batch: Batch) -> Any:
        return module(batch.input_ids)

    return TorchModel(Tuples(), call=call, embed="embed", blocks=("blocks.0", "blocks.1"), max_length=20)


def big_values() -> TorchModel:
    """A model with a value that float16 cannot hold."""
    model = Tuples()
    with torch.no_grad():
        model.embed.weight[3, 2] = 70_000.0
    return TorchModel(model, blocks=("blocks.0", "blocks.1"), padding=("right",))


def huge_values() -> TorchModel:
    """A model with a float32 value that bfloat16 would round to infinity."""
    model = Tuples()
    with torch.no_grad():
        model.embed.weight[3, 2] = 3.4e38
    return TorchModel(model, blocks=("blocks.0", "blocks.1"), padding=("right",))


def with_nan() -> TorchModel:
    """A model whose second block has a NaN weight."""
    model = Tuples()
    with torch.no_grad():
        model.blocks[1].inner.weight[0, 0] = float("nan")
    return TorchModel(model, blocks=("blocks.0", "blocks.1"), padding=("right",))


def unseeded() -> nn.Module:
    """A model that has other weights each time."""
    torch.seed()
    model = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.GRU(4, 4, batch_first=True))
    return model


class Slow(Tuples):
    """A model that takes its time, so that a kill finds it at work."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(ids)


def slow() -> TorchModel:
    return TorchModel(Slow(), blocks=("blocks.0", "blocks.1"), padding=("right",))


class TwoPartError(Exception):
    def __init__(self, what: str, where: int) -> None:
        super().__init__(f"{what} at {where}")
        self.what, self.where = what, where


class Failing(Tuples):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 9:
            raise TwoPartError("the forward broke", ids.shape[1])
        return super().forward(ids)


def failing() -> TorchModel:
    return TorchModel(Failing(), blocks=("blocks.0", "blocks.1"))


def not_a_model() -> str:
    return "a string"


def raises() -> None:
    raise TwoPartError("no weights", 3)
