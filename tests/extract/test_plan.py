"""Packing and batching: every token in one row, units that no sequence crosses, batches from the unit alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layerlake.errors import DataError, RequestError
from layerlake.extract.batch import Batch, plan_batches
from layerlake.extract.document import Document
from layerlake.extract.packing import choose_unit_rows, pack
from layerlake.extract.plan import make_plan
from layerlake.extract.windows import Sequence

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def sequence(index: int, ids: list[int], /, **labels) -> Sequence:
    n = len(ids)
    blank = np.full(n, -1, np.int32)
    return Sequence(index, 0, n, np.array(ids, np.int32), np.zeros(n, bool), blank, blank, None, labels)


def documents(count: int) -> list[Document]:
    return [Document(f"d{i}", None, (i,), {}, None) for i in range(count)]


@settings(max_examples=200, deadline=None)
@given(lengths_lists, st.integers(0, 3))
def test_any_lengths_pack_without_overlap_and_without_crossing_units(lengths, more):
    unit_rows = choose_unit_rows(lengths) << more
    places = pack(lengths, unit_rows)
    taken: set[int] = set()
    last = (0, -1)
    for (unit, first), length in zip(places, lengths, strict=True):
        rows = range(first, first + length)
        assert first // unit_rows == unit == (first + length - 1) // unit_rows
        assert taken.isdisjoint(rows)
        taken.update(rows)
        assert (unit, first) > last
        last = (unit, first)
    assert {u for u, _ in places} == set(range(places[-1][0] + 1))
    # a unit is left only when the next sequence did not fit
    for (unit, first), (after, _), length, coming in zip(places, places[1:], lengths, lengths[1:], strict=False):
        if after > unit:
            assert first + length + coming > (unit + 1) * unit_rows
    if len(set(u for u, _ in places)) > 2:
        full = sum(length for (u, _), length in zip(places, lengths, strict=True) if u < places[-1][0])
        assert full / (places[-1][0] * unit_rows) > 1 - 1 / 8


@given(lengths_lists)
def test_unit_rows_are_a_power_of_two_of_at_least_eight_sequences(lengths):
    rows = choose_unit_rows(lengths)
    assert rows & (rows - 1) == 0
    assert rows >= 8 * max(lengths)


def test_unit_rows_that_do_not_fit_are_refused():
    assert choose_unit_rows([16], 128) == 128
    with pytest.raises(RequestError, match="at least 128"):
        choose_unit_rows([16], 64)
    for rows in (0, -2, 100):
        with pytest.raises(RequestError, match="power of two"):
            choose_unit_rows([1], rows)


@settings(max_examples=200, deadline=None)
@given(lengths_lists, st.integers(1, 300), st.sampled_from(["right", "left", "none"]))
def test_batches_hold_each_sequence_once_within_the_budget(lengths, budget, padding):
    batches = plan_batches(lengths, budget, padding)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    for batch in batches:
        sizes = {lengths[i] for i in batch}
        assert len(batch) == 1 or len(batch) * max(sizes) <= budget
        assert padding != "none" or len(sizes) == 1
    assert plan_batches(lengths, budget, padding) == batches


@given(lengths_lists, st.sampled_from(["right", "left"]))
def test_a_batch_gives_each_sequence_its_own_tokens_back(lengths, padding):
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 9, n) for n in lengths]  # 0, the padding id, stands in the text too
    batch = Batch.of(parts, padding)
    assert batch.attention_mask.sum().item() == sum(lengths)
    for i, part in enumerate(parts):
        assert batch.rows(batch.input_ids, i).tolist() == part.tolist()
        assert batch.rows(batch.position_ids, i).tolist() == list(range(len(part)))
        assert batch.rows(batch.attention_mask, i).all()


def test_batches_without_padding_refuse_unequal_lengths():
    with pytest.raises(ValueError, match="lengths 1 to 2"):
        Batch.of([np.array([1]), np.array([1, 2])], "none")


def test_the_token_table_says_which_token_stands_where():
    plan = make_plan(
        documents(2),
        [sequence(0, [5, 6], tag=[1, None]), sequence(1, [7], tag=[2]), sequence(1, [8, 9, 3], tag=[None, 0, 1])],
        unit_rows=32,
    )
    table = plan.units[0]
    assert table["row"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert table["seq"].to_pylist() == [0, 0, 1, 2, 2, 2]
    assert table["pos"].to_pylist() == [0, 1, 0, 0, 1, 2]
    assert table["token_id"].to_pylist() == [5, 6, 7, 8, 9, 3]
    assert table["tag"].to_pylist() == [1, None, 2, None, 0, 1]
    assert plan.sequences["document"].to_pylist() == ["d0", "d1", "d1"]
    assert plan.tokens == 6
    assert plan.waste == pytest.approx(1 - 6 / 32)


def test_the_plan_hash_sees_tokens_and_places_and_the_table_hash_labels_too():
    def hashes(ids=(5, 6), tag=(1, 0), rows=32):
        plan = make_plan(documents(1), [sequence(0, list(ids), tag=list(tag))], unit_rows=rows)
        return plan.plan_hash, plan.tokens_hash

    base = hashes()
    assert hashes() == base
    assert hashes(tag=(1, 1))[0] == base[0]
    assert hashes(tag=(1, 1))[1] != base[1]
    assert hashes(ids=(5, 7))[0] != base[0]


@pytest.mark.parametrize("name", ["row", "TOKEN", "split", "document", "run"])
def test_a_label_may_not_take_a_columns_name(name):
    with pytest.raises(RequestError, match=name):
        make_plan(documents(1), [sequence(0, [1], **{name: [1]})])


def test_labels_that_differ_in_case_alone_or_mix_types_are_refused():
    with pytest.raises(RequestError, match="upper from lower"):
        make_plan(documents(1), [sequence(0, [1], tag=[1], Tag=[1])])
    with pytest.raises(DataError, match="mixes int, str"):
        make_plan(documents(1), [sequence(0, [1, 2], tag=[1, "x"])])


def test_no_sequences_are_refused():
    with pytest.raises(DataError, match="no tokens"):
        make_plan([], [])


def test_a_unit_of_short_documents_is_not_padding_for_the_greater_part():
    """Lengths as lines of source code have them; a large budget of tokens holds hundreds of them."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(2.2, 0.8, 1500), 2, 200).astype(int).tolist()
    for budget in (4096, 16_384):
        batches = plan_batches(lengths, budget, "right")
        padded = sum(len(b) * max(lengths[i] for i in b) for b in batches)
        assert padded < 1.25 * sum(lengths)
        assert len(batches) < 40
