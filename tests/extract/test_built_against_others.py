"""The architectures built here against implementations of other people, with the same weights."""

from __future__ import annotations

import built_models
import pytest
import torch
from torch import Tensor, nn

IDS = torch.randint(0, 7, (3, 12), generator=torch.Generator().manual_seed(5))


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm() / expected.norm())


def mamba_of_transformers(model) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    c = model.config
    config = MambaConfig(
        vocab_size=7, hidden_size=16, state_size=4, num_hidden_layers=2, expand=2, conv_kernel=4,
        time_step_rank=c.dt_rank, layer_norm_epsilon=1e-5, tie_word_embeddings=False, residual_in_fp32=False,
    )  # fmt: skip
    return copied(model, MambaForCausalLM(config))


def mamba2_of_transformers(model) -> nn.Module:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    c = model.config
    config = Mamba2Config(
        vocab_size=7, hidden_size=16, state_size=6, num_hidden_layers=2, expand=2, conv_kernel=4,
        num_heads=c.heads, head_dim=8, n_groups=2, layer_norm_epsilon=1e-5, tie_word_embeddings=False, chunk_size=5,
        residual_in_fp32=False,
    )  # fmt: skip
    return copied(model, Mamba2ForCausalLM(config))


def name_there(name: str) -> str:
    first, _, rest = name.partition(".")
    first = {"embedding": "embeddings", "norm": "norm_f"}.get(first, first)
    return f"{first}.{rest}".replace(".conv.", ".conv1d.")


def copied(model, other: nn.Module) -> nn.Module:
    """Copy the backbone's weights by their names; the head is left, as it has a bias here."""
    renamed = {name_there(name): value for name, value in model.backbone.state_dict().items()}
    found = other.backbone.load_state_dict(renamed, strict=True)
    assert not found.missing_keys and not found.unexpected_keys
    return other.to(next(model.parameters()).dtype).eval()


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
@pytest.mark.parametrize(("variant", "theirs"), [("mamba", mamba_of_transformers), ("mamba2", mamba2_of_transformers)])
def test_mamba_and_mamba2_are_those_of_transformers(variant, theirs, dtype, allowed):
    # transformers computes parts of both in float32 whatever the dtype, so float64 is held to that only
    model = built_models.build(variant, dtype=dtype)
    other = theirs(model)
    with torch.no_grad():
        for layer in model.backbone.layers:  # weights away from their start, where some are all alike
            for parameter in layer.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).to(dtype))
        other = theirs(model)
    mine = model.backbone(IDS)
    expected = other.backbone(IDS).last_hidden_state
    assert distance(mine, expected) < allowed
    weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (mine * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs = dict(other.backbone.named_parameters())
    compared = 0
    for name, parameter in model.backbone.named_parameters():
        assert distance(parameter.grad, pairs[name_there(name)].grad) < 20 * allowed, name
        compared += 1
    assert compared == len(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_of_the_transformer_is_torchs_encoder_layer(dtype):
    model = built_models.build("transformer", dtype=dtype)
    block = model.backbone.layers[0]
    layer = nn.TransformerEncoderLayer(
        16, 2, 24, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=dtype
    ).eval()
    pairs = {
        "self_attn.in_proj_": "mixer.in_proj.", "self_attn.out_proj.": "mixer.out_proj.", "linear1.": "mlp.in_proj.",
        "linear2.": "mlp.out_proj.", "norm1.": "norm.", "norm2.": "mlp_norm.",
    }  # fmt: skip
    own = block.state_dict()
    both = [(theirs + end, mine + end) for theirs, mine in pairs.items() for end in ("weight", "bias")]
    layer.load_state_dict({theirs: own[mine] for theirs, mine in both})
    x = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(4), dtype=dtype)
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=dtype)
    assert distance(block(x), layer(x, src_mask=mask, is_causal=True)) < (1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("variant", ["lstm", "gru"])
def test_a_plain_stack_is_torchs_stack(variant):
    model = built_models.build(variant, dtype=torch.float64)
    stack = (nn.LSTM if variant == "lstm" else nn.GRU)(16, 16, num_layers=2, batch_first=True, dtype=torch.float64)
    own = [layer.layer for layer in model.backbone.layers]
    stack.load_state_dict({n[:-1] + str(i): p for i, one in enumerate(own) for n, p in one.state_dict().items()})
    x = model.backbone.embedding(IDS)
    assert distance(model(IDS), model.head(stack(x)[0])) < 1e-10
