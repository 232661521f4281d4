"""Labels as SQL gives them: cases P12 and Q07."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
from layerlake.analyze.probe import Probe
from layerlake.errors import RequestError


def fit_labels(y, **settings):
    rng = np.random.default_rng(0)
    return Probe(label_name="kind", seeds=(0,), **settings).fit(rng.normal(size=(len(y), 3)), y, np.arange(len(y)))


def test_p12_strings_with_nulls_drop_the_nulls_with_a_count():
    y = np.array(["noun", None, "verb", "noun", "verb"] * 8, dtype=object)
    probe = fit_labels(y)
    assert probe.classes_.tolist() == ["noun", "verb"]
    assert (probe.n_rows_, probe.n_dropped_, probe.n_groups_) == (32, 8, 32)
    assert probe.summary()["n_dropped"] == 8 and probe.summary()["classes"] == ["noun", "verb"]
    assert set(probe.predict(np.zeros((1, 3)))) <= {"noun", "verb"}


def test_p12_dropped_rows_leave_the_other_rows_with_their_own_activations():
    rng = np.random.default_rng(0)
    X, groups = rng.normal(size=(1200, 12)), np.repeat(np.arange(60), 20)
    y = (X[:, 0] + X[:, 1] + 0.3 * rng.normal(size=1200) > 0).astype(int)
    holes = np.arange(0, 1200, 3)
    with_nulls = y.astype(object)
    with_nulls[holes] = None
    kept = np.setdiff1d(np.arange(1200), holes)
    one = Probe().fit(X, with_nulls, groups)
    two = Probe().fit(X[kept], y[kept], groups[kept])
    assert (one.coef_ == two.coef_).all() and one.n_dropped_ == 400
    split = np.where(groups < 50, "train", "test")
    one = Probe().fit(X, with_nulls, groups, split=split)
    assert (one.coef_ == Probe().fit(X[kept], y[kept], groups[kept], split=split[kept]).coef_).all()
    assert one.score(X, with_nulls) == one.score(X[kept], y[kept])


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (np.array([0.0, 1.0, np.nan] * 10), [0, 1]),
        ([0.0, 1.0, None] * 10, [0, 1]),
        ([Decimal(2), Decimal(1), None] * 10, [1, 2]),
        (np.array([0.0, 1.0] * 10, dtype=np.float32), [0, 1]),
    ],
)
def test_p12_whole_floats_become_integers_and_nan_is_null(y, classes):
    probe = fit_labels(y)
    assert probe.classes_.tolist() == classes and probe.classes_.dtype == np.int64
    assert probe.n_dropped_ == len(y) // 3 if len(y) == 30 else probe.n_dropped_ == 0


def test_p12_integers_as_text_stay_text_and_integers_sort_as_numbers():
    assert fit_labels(["10", "2", "9"] * 10).classes_.tolist() == ["10", "2", "9"]
    assert fit_labels(np.array(["10", "2", "9"] * 10)).classes_.tolist() == ["10", "2", "9"]
    assert fit_labels([10, 2, 9] * 10).classes_.tolist() == [2, 9, 10]


def test_p12_booleans_stay_booleans():
    probe = fit_labels(np.array([True, False] * 10))
    assert probe.classes_.dtype == bool and probe.classes_.tolist() == [False, True]
    assert probe.predict(np.zeros((2, 3))).dtype == bool
    assert list(probe.per_seed_[0]["train_counts"]) == ["False", "True"]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([0.25, 1.0, 2.0], r"'kind' holds real values \(1 of 3 .* first is 0.25\).*Bin them"),
        ([0.0, 1.0, np.inf], r"real values \(1 of 3 .* first is inf\)"),
        ([1, "a", 2], r"mixes types: 2 number, 1 text"),
        ([True, 1, 0], r"mixes types: 2 number, 1 boolean"),
        ([b"a", b"b", b"a"], r"type bytes"),
        (np.array(["2020-01-01", "2020-01-02"], dtype="M8[D]"), r"type date"),
    ],
)
def test_p12_labels_that_are_no_classes_are_refused_with_advice(y, message):
    with pytest.raises(RequestError, match=message):
        fit_labels(y)
