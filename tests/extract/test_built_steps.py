"""Every fast path beside the plain sequential form of it, values and gradients, and beside other people's code."""

from __future__ import annotations

import math

import built_models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layerlake.extract.models.convolution import CausalConv
from layerlake.extract.models.positions import rotate, sinusoidal
from layerlake.extract.models.recurrent_steps import gru_steps, lstm_steps
from layerlake.extract.models.scan import selective_scan, selective_scan_steps
from layerlake.extract.models.ssd import ssd, ssd_steps
from torch import Tensor, nn
from torch.nn import functional

ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = list(ALLOWED)


def drawn(dtype: torch.dtype, *shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def held_together(fast, plain, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """Compare two ways to compute the same, and the gradients of a random sum of their values."""
    values = [fast(*inputs), plain(*inputs)]
    weights = drawn(dtype, tuple(values[0].shape), seed=9)[0].detach()
    grads = [torch.autograd.grad((v * weights).sum(), inputs) for v in values]
    assert distance(values[0], values[1]) < ALLOWED[dtype]
    for found, expected in zip(*grads, strict=True):
        assert distance(found, expected) < ALLOWED[dtype]


def scan_inputs(dtype: torch.dtype, sequences: int, time: int, width: int = 5, size: int = 3) -> list[Tensor]:
    x, delta, a, b, c = drawn(
        dtype,
        *[(sequences, time, width)] * 2,
        (width, size),
        *[(sequences, time, size)] * 2,
        seed=sequences * 100 + time,
    )
    with torch.no_grad():
        delta.copy_(functional.softplus(delta))
        a.copy_(-torch.exp(a))
    return [x, delta, a, b, c]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sequences", "time"), [(1, 1), (3, 7), (16, 2), (37, 11)])
def test_the_selective_scan_is_its_recurrence(dtype, sequences, time):
    held_together(selective_scan, lambda *v: selective_scan_steps(*v)[0], scan_inputs(dtype, sequences, time), dtype)


def test_the_gradient_of_the_scan_is_that_of_finite_differences():
    assert torch.autograd.gradcheck(selective_scan, scan_inputs(torch.float64, 2, 4), check_batched_grad=False)


def test_a_gradient_of_only_some_arguments_is_the_same():
    inputs = scan_inputs(torch.float64, 3, 5)
    whole = torch.autograd.grad(selective_scan(*inputs).sum(), inputs)
    for i, wanted in enumerate(inputs):
        some = [v if j == i else v.detach() for j, v in enumerate(inputs)]
        assert torch.equal(torch.autograd.grad(selective_scan(*some).sum(), wanted)[0], whole[i])
    with torch.no_grad():
        assert torch.equal(selective_scan(*inputs), selective_scan(*(v.detach() for v in inputs)))


def ssd_inputs(dtype: torch.dtype, time: int, heads: int = 4, groups: int = 2) -> list[Tensor]:
    shapes = [(2, time, heads, 3), (2, time, heads), (heads,), *[(2, time, groups, 5)] * 2]
    x, delta, a, b, c = drawn(dtype, *shapes, seed=time)
    with torch.no_grad():
        delta.copy_(functional.softplus(delta))
        a.copy_(-torch.exp(a))
    return [x, delta, a, b, c]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("time", [1, 4, 13])
def test_the_scan_in_chunks_is_its_recurrence(dtype, chunk, time):
    held_together(lambda *v: ssd(*v, chunk=chunk), lambda *v: ssd_steps(*v)[0], ssd_inputs(dtype, time), dtype)


def test_a_scan_of_thousands_of_steps_stays_finite_and_right():
    inputs = [v.detach() for v in ssd_inputs(torch.float32, 2_000)]
    assert distance(ssd(*inputs), ssd_steps(*inputs)[0]) < 1e-5
    inputs = [v.detach() for v in scan_inputs(torch.float32, 2, 2_000)]
    assert distance(selective_scan(*inputs), selective_scan_steps(*inputs)[0]) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "time"), [(4, 9), (4, 2), (1, 5), (3, 1), (0, 6)])
def test_the_convolution_is_the_sum_of_its_taps_and_torchs_own(dtype, width, time):
    conv = CausalConv(6, width).to(dtype)
    with torch.no_grad():
        conv.initialise(torch.Generator().manual_seed(1))
    (x,) = drawn(dtype, (3, time, 6))
    held_together(lambda x, *p: conv(x), lambda x, *p: conv.steps(x), [x, *conv.parameters()], dtype)
    if width:
        padded = functional.pad(x.transpose(1, 2), (width - 1, 0))
        torchs = functional.conv1d(padded, conv.weight, conv.bias, groups=6).transpose(1, 2)
        assert distance(conv(x), functional.silu(torchs)) < ALLOWED[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [v for v in built_models.VARIANTS if not v.startswith(("lstm", "gru"))])
def test_a_mixer_is_its_sequential_form(dtype, variant):
    model = built_models.build(variant, dtype=dtype)
    mixer = model.backbone.layers[1].mixer
    (x,) = drawn(dtype, (3, 11, 16))
    positions = torch.arange(11) + torch.tensor([[0], [2], [5]])  # sequences that start elsewhere

    def plain(x, *_):
        return mixer.steps(x, positions) if variant.startswith("transformer") else mixer.steps(x).out

    held_together(lambda x, *_: mixer(x, positions), plain, [x, *mixer.parameters()], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "plain"), [(nn.LSTM, lstm_steps), (nn.GRU, gru_steps)])
def test_the_steps_of_a_recurrent_layer_are_torchs_own(dtype, kind, plain):
    torch.manual_seed(3)
    layer = kind(7, 5, batch_first=True).to(dtype)
    (x,) = drawn(dtype, (3, 9, 7))
    weights = list(layer.parameters())
    held_together(lambda x, *w: layer(x)[0], lambda x, *w: plain(x, w).hidden, [x, *weights], dtype)
    if kind is nn.LSTM:  # the last cell state that torch returns
        assert distance(plain(x, weights).cell[:, -1], layer(x)[1][1][0]) < ALLOWED[dtype]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(0, 500), st.integers(0, 2**31))
def test_rotations_depend_on_distance_alone_and_keep_lengths(time, offset, seed):
    q, k = (v.detach() for v in drawn(torch.float64, (1, 2, time, 8), (1, 2, time, 8), seed=seed))
    at = torch.arange(time)
    here = rotate(q, at) @ rotate(k, at).transpose(2, 3)
    there = rotate(q, at + offset) @ rotate(k, at + offset).transpose(2, 3)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-9)
    torch.testing.assert_close(rotate(q, at).norm(dim=-1), q.norm(dim=-1))


def test_rotations_are_those_of_transformers():
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    config = GPTNeoXConfig(hidden_size=16, num_attention_heads=2, rotary_pct=1.0)
    config.rope_parameters["partial_rotary_factor"] = 1.0
    q, k = (v.detach() for v in drawn(torch.float32, (2, 2, 11, 8), (2, 2, 11, 8)))
    at = torch.arange(11)
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(q, at[None])
    theirs = neox.apply_rotary_pos_emb(q, k, cos, sin)
    for mine, other in zip((rotate(q, at), rotate(k, at)), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def test_sinusoidal_codes_are_the_formula_of_the_paper():
    code = sinusoidal(torch.arange(50), 12)
    for position in (0, 1, 7, 49):
        for pair in range(6):
            angle = position / 10_000 ** (2 * pair / 12)
            assert abs(code[position, pair] - math.sin(angle)) < 1e-12
            assert abs(code[position, 6 + pair] - math.cos(angle)) < 1e-12
