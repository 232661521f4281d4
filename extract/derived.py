"""Sites that no module returns, computed from one call of the module that has them inside: recurrent states and gates.

They follow the equations in the papers step by step, in float32, from the module's own input and weights. The module
itself may take another way (a parallel scan, a fused kernel); the self-test of a model holds the two together:
`mamba_output`, `mamba2_output`, `lstm_output` and `gates_output` give the module's output back from what was derived.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ModelError
from .hooks import Call
from .models.recurrent_steps import RecurrentSteps, gru_steps, lstm_steps


class _Scan(NamedTuple):
    """The inputs of a selective scan. B: batch, T: time, D: inner channels, N: size of the state."""

    x: Tensor
    """(B, T, D) for Mamba, (B, T, heads, head size) for Mamba-2."""
    decay: Tensor
    """exp(Delta A): (B, T, D, N) or (B, T, heads, 1, 1)."""
    drive: Tensor
    """Delta B x: (B, T, D, N) or (B, T, heads, head size, N)."""
    c: Tensor
    """(B, T, N) or (B, T, heads, N)."""
    gate: Tensor


def attention_pattern(attention: nn.Module, call: Call) -> Tensor:
    """Give the attention pattern that an attention module returns beside its output, (batch, time, heads, time)."""
    weights = call.output[1] if isinstance(call.output, tuple) and len(call.output) > 1 else None
    if not isinstance(weights, Tensor) or weights.ndim != 4:
        raise ModelError(
            f"{type(attention).__name__} returns no attention pattern: load the model with --attention eager."
        )
    return weights.transpose(1, 2)


def mamba_ssm_state(mixer: nn.Module, call: Call) -> Tensor:
    """Give the state of a Mamba mixer after each token, (batch, time, d_inner, d_state) float32.

    h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t x_t: Gu and Dao 2023 (arXiv 2312.00752), algorithm 2, with the
    discretisation of equation 4 as the authors' code has it (B is discretised by Delta B).
    """
    return _states(_mamba_scan(mixer, call))


def mamba_output(mixer: Any, call: Call, states: Tensor) -> Tensor:
    """Give back what the mixer returns, from its states: y_t = C_t h_t + D x_t, gated and projected."""
    scan = _mamba_scan(mixer, call)
    y = torch.einsum("btdn,btn->btd", states, scan.c) + mixer.D.float() * scan.x
    y = y * functional.silu(scan.gate.float())
    return functional.linear(y.to(mixer.out_proj.weight.dtype), mixer.out_proj.weight, mixer.out_proj.bias)


def mamba2_conv_out(mixer: Any, call: Call) -> Tensor:
    """Give the output of a Mamba-2 mixer's convolution, (batch, time, d_inner + 2 groups d_state): x, B and C."""
    return _convolved(mixer, call, _project(mixer, call)[..., mixer.intermediate_size : -mixer.num_heads])


def mamba2_ssm_state(mixer: nn.Module, call: Call) -> Tensor:
    """Give the state of a Mamba-2 mixer after each token, (batch, time, heads, head size, d_state) float32.

    h_t = exp(Delta_t A) h_{t-1} + Delta_t x_t B_t^T with a scalar A a head: Dao and Gu 2024 (arXiv 2405.21060), eq. 4.
    """
    return _states(_mamba2_scan(mixer, call))


def mamba2_output(mixer: Any, call: Call, states: Tensor) -> Tensor:
    """Give back what the mixer returns, from its states."""
    scan = _mamba2_scan(mixer, call)
    y = torch.einsum("bthpn,bthn->bthp", states, scan.c) + mixer.D.float()[:, None] * scan.x
    y = mixer.norm.forward(y.flatten(2), scan.gate)
    return functional.linear(y.to(mixer.out_proj.weight.dtype), mixer.out_proj.weight, mixer.out_proj.bias)


def _states(scan: _Scan) -> Tensor:
    state = torch.zeros_like(scan.drive[:, 0])
    states = torch.empty_like(scan.drive)
    for t in range(scan.drive.shape[1]):
        state = scan.decay[:, t] * state + scan.drive[:, t]
        states[:, t] = state
    return states


def _mask(call: Call, value: Tensor) -> Tensor:
    mask = call.input("attention_mask", 2)
    return value if mask is None else (value * mask[:, :, None]).to(value.dtype)


def _project(mixer: Any, call: Call) -> Tensor:
    # The weights are read and the modules not called: a call would run the hooks of whoever reads those.
    return functional.linear(_mask(call, call.input()), mixer.in_proj.weight, mixer.in_proj.bias)


def _convolved(mixer: Any, call: Call, x: Tensor) -> Tensor:
    width = mixer.conv_kernel_size
    padded = functional.pad(x.transpose(1, 2), (width - 1, 0))
    mixed = functional.conv1d(padded, mixer.conv1d.weight, mixer.conv1d.bias, groups=x.shape[-1])
    return _mask(call, mixer.act.forward(mixed).transpose(1, 2))


def _mamba_scan(mixer: Any, call: Call) -> _Scan:
    x, gate = _project(mixer, call).chunk(2, dim=-1)
    x = _convolved(mixer, call, x)
    rank, size = mixer.time_step_rank, mixer.ssm_state_size
    step, b, c = functional.linear(x, mixer.x_proj.weight).split([rank, size, size], dim=-1)
    if hasattr(mixer, "dt_layernorm"):  # Jamba
        step, b, c = mixer.dt_layernorm.forward(step), mixer.b_layernorm.forward(b), mixer.c_layernorm.forward(c)
    delta = functional.softplus(functional.linear(step, mixer.dt_proj.weight).float() + mixer.dt_proj.bias.float())
    a = -torch.exp(mixer.A_log.float())
    x, b, c = x.float(), b.float(), c.float()
    return _Scan(x, torch.exp(delta[..., None] * a), (delta * x)[..., None] * b[:, :, None, :], c, gate)


def _mamba2_scan(mixer: Any, call: Call) -> _Scan:
    projected = _project(mixer, call)
    inner, groups, size, heads = mixer.intermediate_size, mixer.n_groups, mixer.ssm_state_size, mixer.num_heads
    gate, mixed, step = projected.split([inner, mixer.conv_dim, heads], dim=-1)
    x, b, c = _convolved(mixer, call, mixed).float().split([inner, groups * size, groups * size], dim=-1)
    x = x.unflatten(-1, (heads, mixer.head_dim))
    b, c = (v.unflatten(-1, (groups, size)).repeat_interleave(heads // groups, dim=2) for v in (b, c))
    delta = functional.softplus(step.float() + mixer.dt_bias.float()).clamp(*mixer.time_step_limit)
    decay = torch.exp(delta * -torch.exp(mixer.A_log.float()))[..., None, None]
    return _Scan(x, decay, (delta[..., None] * x)[..., None] * b[..., None, :], c, gate)


def rnn_gates(layer: nn.Module, call: Call) -> Tensor:
    """Give a recurrent layer's gates at each token, (..., 4, hidden): i, f, g, o of an LSTM; 3: r, z, n of a GRU.

    Names and equations are those in torch's documentation of `nn.LSTM` and `nn.GRU`.
    """
    return _unroll(layer, call).gates


def lstm_cell(layer: nn.Module, call: Call) -> Tensor:
    """Give an LSTM layer's cell state after each token, (..., hidden)."""
    cell = _unroll(layer, call).cell
    assert cell is not None
    return cell


def lstm_output(layer: nn.Module, call: Call, cell: Tensor) -> Tensor:
    """Give back what an LSTM layer returns, from its cell states: h_t = o_t tanh(c_t)."""
    return _unroll(layer, call).gates[..., 3, :] * cell.tanh()


def gates_output(layer: Any, call: Call, gates: Tensor) -> Tensor:
    """Give back what a recurrent layer returns, from its gates alone."""
    gates = gates.transpose(0, 1) if layer.batch_first else gates
    start = call.input("hx", 1)
    size = gates.shape[-1]
    h = c = gates.new_zeros(gates.shape[1], size)
    if start is not None:
        h, c = (start[0][0], start[1][0]) if layer.mode == "LSTM" else (start[0], start[0])
    hidden = []
    for step in gates:
        if layer.mode == "LSTM":
            i, f, g, o = step.unbind(1)
            c = f * c + i * g
            h = o * c.tanh()
        else:
            _, z, n = step.unbind(1)
            h = (1 - z) * n + z * h
        hidden.append(h)
    stacked = torch.stack(hidden)
    return stacked.transpose(0, 1) if layer.batch_first else stacked


def _unroll(layer: Any, call: Call) -> RecurrentSteps:
    """Give what a layer computes at each token, in the layer's own order of axes."""
    x = call.input("input")
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise ModelError(
            "The gates and cells of a recurrent layer are computed from a padded batch, and the model gives its layer "
            f"a {type(x).__name__}. Call the layer with (batch, time, features)."
        )
    start = call.input("hx", 1)
    b_ih, b_hh = (layer.bias_ih_l0, layer.bias_hh_l0) if layer.bias else (None, None)
    weights = (layer.weight_ih_l0, layer.weight_hh_l0, b_ih, b_hh)
    x = x if layer.batch_first else x.transpose(0, 1)
    if layer.mode == "LSTM":
        steps = lstm_steps(x, weights, None if start is None else (start[0][0], start[1][0]))
    else:
        steps = gru_steps(x, weights, None if start is None else start[0])
    if layer.batch_first:
        return steps
    cell = None if steps.cell is None else steps.cell.transpose(0, 1)
    return RecurrentSteps(steps.hidden.transpose(0, 1), steps.gates.transpose(0, 1), cell)
