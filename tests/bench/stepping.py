"""Training steps of the architectures, beside other people's models of the same shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from layerlake.extract.models import ARCHITECTURES, SequenceModel, make_config
from timing import Row, interleaved, row
from torch import Tensor, nn

BATCH, LENGTH, SYMBOLS = 64, 40, 6


class Plain(nn.Module):
    """An embedding, somebody's layers, and a head."""

    def __init__(self, layers: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], longest: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 128)
        self.positions = nn.Parameter(torch.randn(longest, 128) * 0.02) if longest else None
        self.layers, self.run = layers, run
        self.head = nn.Linear(128, SYMBOLS)

    def forward(self, ids: Tensor) -> Tensor:
        """Give logits."""
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions[: ids.shape[1]]
        return self.head(self.run(self.layers, x))


def torchs_transformer() -> nn.Module:
    """Build torch's encoder with a causal mask, four pre-norm layers."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, "gelu", batch_first=True, norm_first=True)
    stack = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(128), enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return Plain(stack, lambda layers, x: layers(x, mask=mask, is_causal=True), longest=128)


def torchs_recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    """Build torch's stack of four layers."""
    return Plain(kind(128, 128, 4, batch_first=True), lambda layers, x: layers(x)[0])


def transformers_mamba() -> nn.Module:
    """Build transformers' Mamba with our inner width; without its CUDA kernels it takes a loop over time."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=SYMBOLS, hidden_size=128, num_hidden_layers=4, residual_in_fp32=False)
    config.intermediate_size = 448
    return MambaForCausalLM(config)


def transformers_mamba2() -> nn.Module:
    """Build transformers' Mamba-2 with our inner width, and chunks of our length (its default is far slower)."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=SYMBOLS, hidden_size=128, num_hidden_layers=4, num_heads=4, head_dim=64, n_groups=1, expand=2,
        chunk_size=LENGTH, residual_in_fp32=False,
    )  # fmt: skip
    config.num_heads = 7
    object.__setattr__(config, "expand", 3.5)  # a whole number for its validation, any for its model
    return Mamba2ForCausalLM(config)


OTHERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "transformer": ("torch.nn.TransformerEncoder", torchs_transformer),
    "mamba": ("transformers' Mamba", transformers_mamba),
    "mamba2": ("transformers' Mamba-2", transformers_mamba2),
    "lstm": ("torch.nn.LSTM", lambda: torchs_recurrent(nn.LSTM)),
    "gru": ("torch.nn.GRU", lambda: torchs_recurrent(nn.GRU)),
}


def measure_among_ours(repeats: int, *, quick: bool) -> Iterator[Row]:
    """Measure a step of each architecture built here against the Transformer's, all in turns."""
    torch.set_num_threads(1)
    cases, names = ours(4 if quick else BATCH)
    for case in (*cases.values(), *cases.values()):
        case()
    times = interleaved(cases, repeats)
    for name, target in (("mamba", 1 / 3), ("mamba2", None), ("lstm", None), ("gru", None)):
        yield row("a training step against the Transformer's", names[name], times, name, ["transformer"], target)


def measure_against_others(repeats: int, *, quick: bool) -> Iterator[Row]:
    """Measure a step of each architecture beside other people's model of the same shape, all in turns.

    transformers' Mamba takes and gives back gigabytes in each of its steps, which slows whoever comes next.
    """
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    batch = 4 if quick else BATCH
    cases, names = ours(batch)
    cases |= {theirs: step(make(), batch) for theirs, make in OTHERS.values()}
    for case in cases.values():
        case()
    times = interleaved(cases, repeats, once=[OTHERS["mamba"][0]])
    for name, (theirs, _) in OTHERS.items():
        yield row("a training step", names[name], times, name, [theirs])


def ours(batch: int) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Give a training step of each architecture built here, and what the report calls it."""
    cases: dict[str, Callable[[], object]] = {}
    names: dict[str, str] = {}
    for name in ARCHITECTURES:
        model = SequenceModel(make_config(name, vocab_size=SYMBOLS, outputs=SYMBOLS), torch.Generator().manual_seed(0))
        cases[name], names[name] = step(model, batch), f"{name}, {model.parameter_count:,} parameters"
    return cases, names


def step(model: nn.Module, batch: int) -> Callable[[], object]:
    """Give a training step on random ids."""
    ids = torch.randint(0, SYMBOLS, (batch, LENGTH), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> None:
        output = model(ids)
        logits = getattr(output, "logits", output)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return run
