"""A live model is held to what a loaded one is held to, and left as it was found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import odd_models
import pytest
import torch
import toy_models
from layerlake import capture
from layerlake.errors import (
    ForwardError,
    LakeWarning,
    LayerlakeError,
    ModelError,
    RequestError,
    UnknownNameError,
)
from layerlake.extract.torch_model import TorchModel
from live_models import make_ids, some_mode, state_of
from processes import environment
from torch import nn
from toy_models import make_model


def test_hooks_that_look_are_left_where_they_are_and_one_that_steers_is_refused_by_its_module():
    model, ids = make_model("gpt2"), make_ids()
    expected = capture(model, ids)["resid_post-2"]
    looked = []
    model.transformer.h[0].register_forward_hook(lambda m, i, o: looked.append(1))
    block = model.transformer.h[1]
    block.register_forward_hook(lambda m, i, o: looked.append(2))
    before = state_of(model)
    assert torch.equal(capture(model, ids)["resid_post-2"], expected)
    assert state_of(model) == before
    assert set(looked) == {1, 2}

    def steer(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.1

    handle = block.register_forward_hook(steer, prepend=True)
    before = state_of(model)
    with pytest.raises(
        ModelError, match=r"3 hooks of someone else, and the one on 'transformer.h.1' \(.*steer\) changes"
    ):
        capture(model, ids)
    assert state_of(model) == before
    handle.remove()
    model.transformer.ln_f.register_forward_hook(steer)  # behind the last block: felt at the sites there only
    assert torch.equal(capture(model, ids)["resid_post-2"], expected)
    with pytest.raises(ModelError, match=r"the one on 'transformer.ln_f' \(.*steer\) changes"):
        capture(model, ids, sites=["logits"])


def test_a_hook_that_steers_some_positions_only_is_refused_when_the_texts_reach_them():
    model = make_model("gpt2")

    def steer_late(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:, :10], output[:, 10:] + 1], 1)

    model.transformer.h[0].register_forward_hook(steer_late)
    assert len(capture(model, make_ids((9, 3)))) == 12
    with pytest.raises(ModelError, match=r"the one on 'transformer.h.0' \(.*steer_late\) changes"):
        capture(model, make_ids((3, 9, 12)))

    def cut(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output[..., :1].double()

    other = make_model("gpt2")
    other.transformer.h[2].register_forward_hook(cut)
    with pytest.raises(ModelError):
        capture(other, make_ids((3,)))


class Fails(nn.Module):
    """A block that fails on long sequences, in a layer of its own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.inner.register_forward_pre_hook(lambda m, i: None)
        self.error = error

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if x.shape[1] > 9:
            raise self.error
        return self.inner(x), None


def test_an_interrupt_while_hooks_are_set_leaves_none(monkeypatch):
    """Wherever it comes in the self-test, whose forwards set hooks of their own."""
    model = make_model("phi", layers=2)
    model.register_forward_hook(lambda m, i, o: None)
    before, set_hook, calls = state_of(model), nn.Module.register_forward_hook, 0

    def interrupted(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        handle = set_hook(self, *arguments, **options)
        calls -= 1
        if calls == 0:
            raise KeyboardInterrupt
        return handle

    monkeypatch.setattr(nn.Module, "register_forward_hook", interrupted)
    came = 0
    for number in (1, 2, 7, 40, 90, 150, 400):
        calls = number
        try:
            capture(model, [[1, 2, 3]])
        except KeyboardInterrupt:
            came += 1
        assert state_of(model) == before
    assert came >= 5


@pytest.mark.parametrize("error", [toy_models.TwoPartError("it broke", 7), KeyboardInterrupt()])
def test_an_error_in_a_forward_keeps_its_words_and_names_text_and_block_and_leaves_nothing(error):
    module = toy_models.Tuples()
    module.blocks[1] = Fails(error)
    some_mode(module)
    before = state_of(module)
    model = TorchModel(module, blocks=("blocks.0", "blocks.1"), padding=("right",))
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            capture(model, make_ids((3, 5, 11, 4)))
    else:
        words = r"texts\[2\] \(11 tokens\): Tuples failed in block 1 .* with TwoPartError: it broke at 7"
        with pytest.raises(ForwardError, match=words):
            capture(model, make_ids((3, 5, 11, 4)))
    assert state_of(module) == before


def test_dropout_is_off_and_a_train_method_of_the_models_own_is_not_called():
    class Merges(nn.Dropout):
        def train(self, mode: bool = True) -> Any:
            raise AssertionError("merges its weights, which has no way back")

    module = nn.Sequential(nn.Embedding(50, 8), nn.GRU(8, 8, batch_first=True))
    module[0] = nn.Sequential(module[0], Merges(0.5))
    assert module[0][1].training
    cache = capture(module, make_ids())
    ids = torch.tensor(cache.tokens["token_id"].to_pylist())
    assert torch.equal(cache["embed"], module[0][0](ids))


def test_a_model_can_be_trained_afterwards_and_the_values_used_in_a_loss():
    class Table(nn.Module):
        """Keeps a table that it makes in its first forward, as rotary embeddings do."""

        table: torch.Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Embedding(50, 8), nn.Linear(8, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.linspace(1, 2, 8)
            return self.block(self.embed(ids) * self.table)

    module = Table()
    model = TorchModel(module, blocks=("block",))
    cache = capture(model, make_ids())
    module(torch.tensor([[1, 2]])).sum().backward()
    assert module.embed.weight.grad is not None
    scale = torch.ones(8, requires_grad=True)
    (cache[0, "resid_post"] * scale).sum().backward()
    assert scale.grad is not None
    cache[0, "resid_post"].add_(1)


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (odd_models.rows_mixed, r"resid_post-0|embed.*lets the rows of a batch depend on each other"),
        (odd_models.random_numbers, r"other values each time.*draw no random numbers"),
        (odd_models.put_in_train_mode, r"other values each time"),
        (odd_models.bidirectional_that_claims_padding, r"resid_post-0: texts\[2\] .*padded on the right from 1 to 17"),
        (odd_models.truncating, "cuts or adds tokens"),
        (odd_models.blocks_out_of_order, "run in the order"),
    ],
)
def test_a_model_whose_values_depend_on_the_batch_is_refused(make, pattern):
    model = make()
    before = state_of(model.module)
    ids = [*make_ids(), [1, 2, 3]]
    with pytest.raises(ModelError, match=pattern):
        capture(model, ids)
    assert state_of(model.module) == before


def test_without_the_check_nothing_is_run_twice_and_one_sequence_needs_none():
    calls = []

    def call(module: nn.Module, batch: Any) -> Any:
        calls.append(tuple(batch.input_ids.shape))
        return module(batch.input_ids)

    model = TorchModel(toy_models.Tuples(), call=call, blocks=("blocks.0", "blocks.1"), padding=("right",))
    trials = 2
    for texts, check, expected in (
        (make_ids((5, 3)), False, [(2, 5)]),
        (make_ids((5, 3)), True, [(2, 5), (1, 3)]),
        (make_ids((5,)), True, [(1, 5)]),
    ):
        calls.clear()
        capture(model, texts, check=check)
        assert calls[trials:] == expected
    unmoved = capture(odd_models.rows_mixed(), make_ids((4, 4)), check=False)
    assert len(unmoved) == 8


def test_values_that_are_no_numbers_are_told_and_too_large_ones_refused():
    with pytest.warns(LakeWarning, match=r"resid_post-1 is the first site with values that are NaN or infinite \(7 of"):
        cache = capture(toy_models.with_nan(), make_ids((4, 3)))
    assert cache[1, "resid_post"].isnan().any(1).all()
    with pytest.raises(RequestError, match="Site embed has the value 70000, which float16 cannot hold"):
        capture(toy_models.big_values(), [[3]], dtype="float16")


@pytest.mark.parametrize(
    ("model", "options", "error", "pattern"),
    [
        (lambda: make_model("gpt2"), {"layers": [3]}, UnknownNameError, "no layer '3' of site 'resid_post'"),
        (lambda: make_model("gpt2"), {"sites": ["cell"]}, UnknownNameError, "no site 'cell' in this model"),
        (lambda: make_model("gpt2"), {"sites": []}, RequestError, "at least one site"),
        (lambda: make_model("gpt2"), {"dtype": "int8"}, UnknownNameError, "no dtype 'int8'"),
        (lambda: make_model("gpt2"), {"padding": "middle"}, RequestError, "'middle' is not a padding"),
        (lambda: make_model("gpt2"), {"batch_tokens": 0}, RequestError, "at least one token"),
        (
            lambda: make_model("gpt2"),
            {"device": "cpu", "revision": "x"},
            RequestError,
            "revision and device: that is for",
        ),
        (lambda: make_model("gpt2").to("meta"), {}, RequestError, r"wte.weight is on the meta device"),
        (
            lambda: torch.compile(make_model("gpt2"), backend="eager"),
            {},
            RequestError,
            "wrapped in a OptimizedModule.*: ._orig_mod",
        ),
        (lambda: nn.DataParallel(make_model("gpt2")), {}, RequestError, "wrapped in a DataParallel.*: .module"),
        (lambda: nn.Linear(2, 2), {}, ModelError, "0 embedding tables"),
        (lambda: 3, {}, RequestError, "not int"),
        (lambda: "/nowhere/at/all", {}, RequestError, "is not a model folder"),
    ],
)
def test_a_wrong_request_is_a_sentence(model, options, error, pattern):
    with pytest.raises(error, match=pattern) as caught:
        capture(model(), [[1, 2]], **options)
    assert isinstance(caught.value, LayerlakeError)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_model_on_two_devices_is_refused_and_one_on_a_gpu_is_run_there():
    model = make_model("gpt2")
    expected = capture(model, make_ids())
    model.transformer.h[1].to("cuda")
    with pytest.raises(RequestError, match="has weights on cpu .* and cuda:0 .*one device"):
        capture(model, make_ids())
    some_mode(model.to("cuda"))
    before = state_of(model)
    found = capture(model, make_ids())
    assert state_of(model) == before
    for name in found.sites:
        torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=1e-3)


def test_the_values_of_a_site_are_in_memory_once(tmp_path):
    """128 MiB of values in batches of 4 MiB: no list of batches that is put together in the end."""
    code = (
        "import resource, sys, torch\n"
        "from layerlake import capture\n"
        "import odd_models\n"
        "ids = torch.arange(8192).reshape(64, 128) % 50\n"
        "capture(odd_models.wide(), ids[:2], sites=['resid_post-1'])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "cache = capture(odd_models.wide(), ids, sites=['resid_post-1'], batch_tokens=256)\n"
        "values = cache['resid_post-1'].untyped_storage().nbytes()\n"
        "grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024\n"
        "assert values == 8192 * 4096 * 4, values\n"
        "assert grown < 1.4 * values, (grown, values)\n"
    )
    env = environment() | {"PYTHONPATH": f"{Path(__file__).parent.parent}:{environment().get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
