"""What a capture gives: values by all their names, beside their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layerlake import capture
from layerlake.errors import (
    RequestError,
    UnknownNameError,
)
from layerlake.extract.cache import Cache
from live_models import LENGTHS, make_ids
from toy_models import make_model


@pytest.fixture(scope="module")
def cache() -> Cache:
    return capture(make_model("llama"), make_ids(), sites=["embed", "resid_post", "z", "layers.1.mlp.act_fn"])


def test_a_site_has_one_value_by_all_its_names(cache):
    third = cache["resid_post-2"]
    for key in ((2, "resid_post"), ("resid_post", 2), (np.int64(2), "resid_post"), "blocks.2.hook_resid_post"):
        assert cache[key] is third
    assert cache["hook_resid_post", 2] is third
    assert cache["embed"] is cache["embed", None] is cache[None, "embed"]
    assert cache["blocks.1.attn.hook_z"] is cache["z", 1]
    assert cache["z", 1].shape == (sum(LENGTHS), 4, 8)
    assert cache["layers.1.mlp.act_fn"].shape == (sum(LENGTHS), 48)
    assert "resid_post-2" in cache and (2, "z") in cache and (3, "z") not in cache and "cell" not in cache


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ((3, "resid_post"), "no layer '3' of site 'resid_post' in this capture. Known: 0, 1, 2"),
        ((-1, "resid_post"), "no layer '-1' of site"),
        ("resid_pots-1", "no site 'resid_pots-1' in this capture.*Known: embed, z, "),
        ("resid_post", "Give a layer of site 'resid_post' in this capture: 0, 1, 2"),
        (("embed", 0), "'embed' in this capture belongs to no layer"),
        (0, "0 names no values: ask by layer and site. There are embed, z-0"),
        (("resid_post", True), "names no values"),
        (("resid_post", "2"), "names no values"),
        ((1, 2), "names no values"),
        (slice(0, 3), "names no values"),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_those_that_are(cache, key, pattern):
    with pytest.raises(RequestError, match=pattern):
        cache[key]


def test_a_sequence_is_a_view_with_its_own_tokens(cache):
    whole, at = cache[1, "resid_post"], 0
    for n, length in enumerate(LENGTHS):
        own = cache.sequence(n)
        assert (len(own), own.sequences, own.tokens.num_rows) == (length, 1, length)
        assert own[1, "resid_post"].data_ptr() == whole[at].data_ptr()
        assert torch.equal(own["z", 0], cache["z", 0][at : at + length])
        assert own.tokens["pos"].to_pylist() == list(range(length))
        assert set(own.tokens["seq"].to_pylist()) == {n}
        at += length
    assert len(cache) == at == cache.tokens.num_rows
    for wrong in (len(LENGTHS), -1, "0"):
        with pytest.raises(UnknownNameError, match=f"no sequence '{wrong}' in this capture"):
            cache.sequence(wrong)
    with pytest.raises(TypeError):
        iter(cache)


def test_arrays_are_float32_copies_as_those_of_a_selection(cache):
    found = cache.array(1)
    assert found.dtype == np.float32
    assert np.array_equal(found, cache[1, "resid_post"].numpy())
    found[:] = 0
    assert cache[1, "resid_post"].abs().sum() > 0
    several = cache.array([0, 2], "z")
    assert several.shape == (2, sum(LENGTHS), 4, 8)
    assert np.array_equal(several[1], cache.array(2, "z"))
    half = capture(make_model("llama"), make_ids(), dtype=torch.bfloat16)
    assert half[1, "resid_post"].dtype == torch.bfloat16
    assert torch.equal(half[1, "resid_post"], cache[1, "resid_post"].to(torch.bfloat16))
    assert half.array(1).dtype == np.float32
    double = capture(make_model("llama").double(), make_ids())
    assert double[1, "resid_post"].dtype == torch.float64
    with pytest.raises(RequestError, match="list of layers is empty"):
        cache.array([])


def test_a_probe_that_was_written_for_a_lake_takes_a_capture(cache):
    from layerlake import Probe

    seq = cache.tokens["seq"].to_numpy()
    labels = (cache.tokens["token_id"].to_numpy() % 2 == 0).astype(int)
    probe = Probe(seeds=(0,)).fit(cache.array(0, "resid_post"), labels, groups=seq.tolist())
    assert 0 <= probe.accuracy_ <= 1
