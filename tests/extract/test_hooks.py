"""The one hook mechanism: what it reads, what it edits, and that it leaves nothing behind."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
import toy_models
from layerlake.errors import ModelError, RequestError
from layerlake.extract.batch import Batch
from layerlake.extract.hooks import SiteHooks, SitePoint
from layerlake.extract.loaded_model import ModelSource
from layerlake.extract.loading import load_model
from layerlake.extract.rnn import LayeredRNN, take_apart
from torch import nn

A, B = SitePoint("resid_post", 0, "blocks.0"), SitePoint("resid_post", 1, "blocks.1")


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) for m in model.modules())


def test_E03_tuples_and_tensors_are_told_apart_by_type_also_at_batch_size_one():
    for batch in (1, 2):
        ids = torch.arange(3).repeat(batch, 1)
        for model, module in ((toy_models.Tuples(), "blocks.0"), (toy_models.InPlace(), "a")):
            point = SitePoint("resid_post", 0, module)
            with SiteHooks(model, [point]) as hooks, torch.no_grad():
                model(ids)
            assert hooks.values[point.name].shape == (batch, 3, 8)


def test_a_named_tuple_stays_one_after_an_edit():
    Pair = namedtuple("Pair", "hidden extra")

    class Inner(nn.Module):
        def forward(self, x):
            return Pair(x + 1, "kept")

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            out = self.inner(x)
            return out.hidden, out.extra

    point = SitePoint("resid_post", 0, "inner")
    with SiteHooks(Outer(), [point], {point.name: lambda x: x * 0}) as hooks:
        hidden, extra = hooks.model(torch.ones(1, 2, 3))
    assert hidden.sum() == 0
    assert extra == "kept"


def test_I02_hooks_are_gone_after_an_error_in_an_edit_or_the_forward():
    model = toy_models.Tuples()
    ids = torch.tensor([[1, 2, 3]])
    plain = model(ids)
    for edit in (lambda x: x[:, :2], lambda x: 1 / 0):
        with pytest.raises((ModelError, ZeroDivisionError)), SiteHooks(model, [A, B], {B.name: edit}):
            model(ids)
        assert hooks_on(model) == 0
        assert torch.equal(model(ids), plain)
    with pytest.raises(KeyboardInterrupt), SiteHooks(model, [A]):
        raise KeyboardInterrupt
    with pytest.raises(ModelError, match="no module 'nowhere'"), SiteHooks(model, [A, SitePoint("x", None, "nowhere")]):
        pass
    assert hooks_on(model) == 0


def test_I08_an_edit_of_another_shape_is_refused_with_both_shapes():
    model = toy_models.Tuples()
    with (
        pytest.raises(ModelError, match=r"gave \(1, 3, 8\) for \(2, 3, 8\)"),
        SiteHooks(model, [A], {A.name: lambda x: x[:1]}),
    ):
        model(torch.ones(2, 3, dtype=torch.int64))


def test_I05_an_edit_that_is_never_reached_is_an_error():
    model = load_model(ModelSource("toy_models:tuples"))
    batch = Batch.of([np.array([1, 2])], "none")
    plain = model.run(batch, model.points)[1]
    for point in model.points:
        edited = model.run(batch, model.points, {point.name: torch.zeros_like})[1]
        assert not torch.equal(edited, plain), point.name
    with pytest.raises(RequestError, match="resid_post-7"):
        model.run(batch, model.points, {"resid_post-7": torch.zeros_like})


def test_a_module_that_runs_twice_in_one_forward_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Linear(4, 4)

        def forward(self, x):
            return self.block(self.block(x))

    with SiteHooks(Twice(), [SitePoint("resid_post", 0, "block")]) as hooks:
        hooks.model(torch.ones(1, 2, 4))
    with pytest.raises(ModelError, match="'block' was executed 2 times"):
        hooks.check()


# torch says once a process that oneDNN has no LSTM with projections and that it uses its own
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("kind", "proj_size"), [(nn.LSTM, 0), (nn.LSTM, 3), (nn.GRU, 0), (nn.RNN, 0)])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_stacked_rnn_taken_apart_gives_what_torch_gives(kind, bidirectional, batch_first, proj_size):
    extra = {"proj_size": proj_size} if proj_size else {}
    torch.manual_seed(0)
    stacked = kind(5, 7, 3, batch_first=batch_first, bidirectional=bidirectional, dropout=0.5, **extra).eval()
    apart = take_apart(stacked).eval()
    assert isinstance(apart, LayeredRNN)
    x = torch.randn(2, 4, 5)
    directions = 3 * (1 + bidirectional)
    batch = 2 if batch_first else 4
    state = torch.randn(directions, batch, proj_size or 7)
    given = (state, torch.randn(directions, batch, 7)) if kind is nn.LSTM else state
    for start in (None, given):
        expected, final = stacked(x, start)
        seen, ending = apart(x, start)
        assert torch.equal(seen, expected)
        for one, other in zip(
            final if kind is nn.LSTM else [final], ending if kind is nn.LSTM else [ending], strict=True
        ):
            assert torch.equal(one, other)
    packed = nn.utils.rnn.pack_padded_sequence(x, [2] * batch, batch_first=batch_first)
    assert torch.equal(apart(packed)[0].data, stacked(packed)[0].data)


def test_a_relu_rnn_keeps_its_nonlinearity():
    stacked = nn.RNN(3, 4, 2, nonlinearity="relu").eval()
    x = torch.randn(3, 2, 3)
    assert torch.equal(take_apart(stacked)(x)[0], stacked(x)[0])
