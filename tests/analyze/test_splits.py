"""Splits and shuffles, seen from inside."""

from __future__ import annotations

import numpy as np
import pytest
from layerlake.analyze.splits import Split, permute_within_sides

GROUPS = np.repeat(np.arange(20), 5)
SPLIT = Split.by_group(GROUPS, 0.4, 0)


def test_a_label_constant_in_each_group_is_shuffled_over_groups():
    of_group = np.arange(20) % 4
    shuffled, what = permute_within_sides(of_group[GROUPS], GROUPS, SPLIT, 0)
    assert what == "groups"
    assert all(len(set(shuffled[g == GROUPS])) == 1 for g in range(20))
    assert (shuffled != of_group[GROUPS]).any()
    for side in (SPLIT.train, SPLIT.test):
        members = np.unique(GROUPS[side])
        assert sorted(shuffled[members * 5]) == sorted(of_group[members])


def test_any_other_label_is_shuffled_over_rows_inside_each_side():
    codes = np.random.default_rng(0).integers(0, 3, 100)
    shuffled, what = permute_within_sides(codes, GROUPS, SPLIT, 0)
    assert what == "rows" and (shuffled != codes).any()
    for side in (SPLIT.train, SPLIT.test):
        assert sorted(shuffled[side]) == sorted(codes[side])
    assert (permute_within_sides(codes, GROUPS, SPLIT, 0)[0] == shuffled).all()
    assert (permute_within_sides(codes, GROUPS, SPLIT, 1)[0] != shuffled).any()


@pytest.mark.parametrize("seed", range(5))
def test_sides_are_whole_groups_and_together_all_rows(seed):
    side = Split.by_group(GROUPS, 0.3, seed)
    assert sorted([*side.train, *side.test]) == list(range(100))
    assert len(side.test) == 30 and not set(GROUPS[side.train]) & set(GROUPS[side.test])
