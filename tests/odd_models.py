"""Models of a user's own that do what users' models do: each would give wrong activations if nobody looked."""

from __future__ import annotations

import os
from typing import Any

import torch
from layerlake.extract.batch import Batch
from layerlake.extract.torch_model import TorchModel
from torch import nn

VOCABULARY = 50


class Base(nn.Module):
    """An embedding and two blocks; the others differ from it in one thing each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), float(os.environ.get("ODD_SCALE", "1"))), persistent=False)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) * self.scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embedded(ids)
        return self.b(h + torch.tanh(self.a(h)))


class RowsMixed(Base):
    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        h = super().embedded(ids)
        return h - 0.5 * h.mean(0, keepdim=True)


class Sorted(Base):
    """Sorts the sequences of a batch, as packing once asked for, and does not put them back."""

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embedded(ids[(ids != 0).sum(1).argsort()])


class Random(Base):
    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().embedded(ids), 0.1, training=True)


class Stateful(Base):
    calls = 0

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().embedded(ids) * self.calls


class Truncating(Base):
    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embedded(ids[:, :8])


class PadsItself(Base):
    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embedded(nn.functional.pad(ids, (0, 3)) if ids.shape[1] > 8 else ids)


def _of(kind: type[Base], **options: Any) -> TorchModel:
    return TorchModel(kind(), blocks=("a", "b"), **options)


def base() -> TorchModel:
    return _of(Base, padding=("right",))


def called_otherwise() -> TorchModel:
    """The same weights as `base`, called another way."""
    return _of(Base, call=lambda module, batch: module((batch.input_ids + 1) % VOCABULARY), padding=("right",))


def rows_mixed() -> TorchModel:
    return _of(RowsMixed)


def rows_sorted() -> TorchModel:
    return _of(Sorted, padding=("right",))


def random_numbers() -> TorchModel:
    return _of(Random)


def put_in_train_mode() -> TorchModel:
    def call(module: nn.Module, batch: Batch) -> Any:
        return nn.functional.dropout(module.train()(batch.input_ids), 0.1)

    model = _of(Base, call=call)
    model.module.b = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 8))
    return model


def stateful() -> TorchModel:
    return _of(Stateful)


def truncating() -> TorchModel:
    return _of(Truncating)


def pads_itself() -> TorchModel:
    return _of(PadsItself)


def blocks_out_of_order() -> TorchModel:
    return TorchModel(Base(), blocks=("b", "a"))


class Decoder(nn.Module):
    """Two recurrent layers, declared in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.second, self.first = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.embed(ids))[0])[0]


class Recurrent(nn.Module):
    """A stack that is asked for its facts, as models that make an initial state do."""

    def __init__(self, rnn: nn.RNNBase, *, state: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, rnn.input_size)
        self.rnn, self.state = rnn, state

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.rnn.flatten_parameters()
        sides = 1 + self.rnn.bidirectional
        zeros = torch.zeros(self.rnn.num_layers * sides, len(ids), self.rnn.hidden_size)
        return self.rnn(input=self.embed(ids), hx=zeros if self.state else None)[0]


def asks_for_facts() -> nn.Module:
    torch.manual_seed(1)
    return Recurrent(nn.GRU(8, 6, 2, batch_first=True, bidirectional=True))


def bidirectional_that_claims_padding() -> TorchModel:
    torch.manual_seed(1)
    rnn = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)
    return TorchModel(Recurrent(rnn, state=False), padding=("right",))


class Tripled(nn.LSTM):
    def forward(self, *arguments: Any, **named: Any) -> Any:
        output, state = super().forward(*arguments, **named)
        return output * 3, state


def stack_of_a_subclass() -> nn.Module:
    torch.manual_seed(1)
    return Recurrent(Tripled(8, 8, 2, batch_first=True), state=False)


def stack_of_a_subclass_as_one_block() -> TorchModel:
    return TorchModel(stack_of_a_subclass(), blocks=("rnn",))


def stack_with_normed_weights() -> nn.Module:
    torch.manual_seed(1)
    model = Recurrent(nn.GRU(8, 8, 2, batch_first=True))
    nn.utils.parametrizations.weight_norm(model.rnn, "weight_hh_l0")
    return model


class Twice(Base):
    """One module under two names, run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.b = self.a

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.embedded(ids)))


def twice() -> TorchModel:
    return _of(Twice)


class Tied(Base):
    """The table also is the output's weight, and stands under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.table = self.embed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(ids))


def tied() -> TorchModel:
    return _of(Tied, padding=("right",))


def leaves() -> None:
    raise SystemExit(3)


def wide() -> TorchModel:
    """Rows of 16 KiB that cost next to nothing to compute."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Embedding(VOCABULARY, 4096), nn.Tanh(), nn.ReLU())
    return TorchModel(module, embed="0", blocks=("1", "2"), padding=("right",))


def names_a_module_wrongly() -> TorchModel:
    return TorchModel(Base(), embed="embed", blocks=("model.a", "b"))


def without_values() -> nn.Module:
    """A model that was never loaded: its weights are on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(50, 4), nn.GRU(4, 4, batch_first=True))


class GivesDict(Base):
    def forward(self, ids: torch.Tensor) -> Any:
        return {"result": super().forward(ids)}


def gives_dict() -> TorchModel:
    return _of(GivesDict, padding=("right",))


class GivesNothing(Base):
    def forward(self, ids: torch.Tensor) -> Any:
        super().forward(ids)


def gives_nothing() -> TorchModel:
    return _of(GivesNothing, padding=("right",))


def names_a_block_twice() -> TorchModel:
    return TorchModel(Base(), blocks=("a", "a"))


def pads_in_the_middle() -> TorchModel:
    return _of(Base, padding=("middle",))


def hooked_for_long_sequences() -> TorchModel:
    model = _of(Base)
    model.module.a.register_forward_hook(lambda _m, _i, output: output * 2 if output.shape[1] > 8 else None)
    return model


def of_float64() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 4), nn.GRU(4, 4, batch_first=True)).double()
