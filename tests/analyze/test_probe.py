"""The probe against scikit-learn's pipeline, planted directions, and the cases P01, P04, P06, P08 and P09."""

from __future__ import annotations

import json
import time
import warnings

import ml_dtypes
import numpy as np
import pytest
from layerlake.analyze.probe import Probe
from layerlake.analyze.splits import Split, group_numbers
from layerlake.errors import RequestError
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def planted(n_classes=2, n_groups=60, per_group=20, width=12, seed=0, noise=1.0, dtype=np.float64):
    """Rows whose label is the largest of `n_classes` planted linear scores, with groups of equal size."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n_groups * per_group, width)) * rng.uniform(0.5, 4, width) + rng.normal(size=width) * 3
    W = rng.normal(size=(n_classes, width))
    scores = (X - X.mean(axis=0)) @ W.T
    y = (scores + noise * rng.normal(size=scores.shape)).argmax(axis=1)
    return X.astype(dtype), y, np.repeat(np.arange(n_groups), per_group), W


def split_of(groups, seed=0, share=0.2):
    numbers, _ = group_numbers(np.asarray(groups), np.arange(len(groups)))
    return Split.by_group(numbers, share, seed)


def folded(pipeline):
    """The coefficients of a StandardScaler + LogisticRegression pipeline in raw units."""
    scaler, model = pipeline[0], pipeline[1]
    coef = model.coef_ / scaler.scale_
    return coef, model.intercept_ - coef @ scaler.mean_


@pytest.mark.parametrize("n_classes", [2, 4])
def test_equals_sklearns_pipeline_on_the_same_split(n_classes):
    X, y, groups, _ = planted(n_classes)
    probe = Probe(tol=1e-8, max_iter=5000, seeds=(3,)).fit(X, y, groups)
    side = split_of(groups, 3)
    reference = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-8, max_iter=5000))
    reference.fit(X[side.train], y[side.train])
    coef, intercept = folded(reference)
    np.testing.assert_allclose(probe.coef_, coef, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(probe.intercept_, intercept, rtol=1e-4, atol=1e-5)
    truth, found = y[side.test], reference.predict(X[side.test])
    assert (probe.predict(X) == reference.predict(X)).all()
    np.testing.assert_allclose(probe.predict_proba(X), reference.predict_proba(X), atol=1e-5)
    np.testing.assert_allclose(probe.decision_function(X), reference.decision_function(X), atol=1e-3)
    assert probe.accuracy_ == (found == truth).mean()
    assert probe.balanced_accuracy_ == pytest.approx(balanced_accuracy_score(truth, found), abs=1e-12)
    proba = reference.predict_proba(X[side.test])
    expected = roc_auc_score(truth, proba[:, 1] if n_classes == 2 else proba, multi_class="ovr")
    assert probe.auroc_ == pytest.approx(expected, abs=1e-6)
    most = np.bincount(y[side.train]).argmax()
    assert probe.majority_ == (truth == most).mean()
    assert probe.score(X[side.test], truth) == probe.accuracy_


def test_random_label_equals_a_fit_on_labels_shuffled_inside_each_side():
    X, y, groups, _ = planted(3)
    probe = Probe(seeds=(5,), tol=1e-6).fit(X, y, groups)
    side = split_of(groups, 5)
    rng = np.random.default_rng([5, 1])
    train, test = rng.permutation(y[side.train]), rng.permutation(y[side.test])
    reference = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-6, max_iter=1000))
    assert probe.random_label_ == pytest.approx(reference.fit(X[side.train], train).score(X[side.test], test), abs=0.01)
    assert probe.random_label_ < 0.5 < probe.accuracy_
    assert probe.per_seed_[0]["random_label_shuffled"] == "rows"


def test_the_planted_direction_is_recovered_on_raw_activations():
    X, y, groups, W = planted(2, noise=0.3, n_groups=200)
    coef = Probe(seeds=(0,), C=100.0, tol=1e-6).fit(X, y, groups).coef_[0]
    direction = W[1] - W[0]
    cosine = coef @ direction / np.linalg.norm(coef) / np.linalg.norm(direction)
    assert cosine > 0.99
    scaled = coef * X.std(axis=0)  # what it would be if it had not been folded back
    assert scaled @ direction / np.linalg.norm(scaled) / np.linalg.norm(direction) < 0.98


def test_the_same_seeds_give_the_same_bits_and_other_seeds_do_not():
    X, y, groups, _ = planted(3, dtype=np.float32)
    one, two = (Probe(seeds=(4, 9)).fit(X, y, groups) for _ in range(2))
    assert one.coef_.tobytes() == two.coef_.tobytes()
    assert one.intercept_.tobytes() == two.intercept_.tobytes()
    assert one.per_seed_ == two.per_seed_
    assert Probe(seeds=(5, 9)).fit(X, y, groups).coef_.tobytes() != one.coef_.tobytes()


def test_numpys_global_generator_is_neither_read_nor_moved():
    X, y, groups, _ = planted()
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    first = Probe().fit(X, y, groups)
    assert (np.random.get_state()[1] == before).all()
    np.random.seed(2)
    assert Probe().fit(X, y, groups).per_seed_ == first.per_seed_


def test_the_split_depends_on_the_groups_not_on_the_order_of_the_rows():
    groups = np.repeat(["c", "a", "d", "b", "e"], 4)
    order = np.random.default_rng(0).permutation(len(groups))
    tested = set(groups[split_of(groups, 1, 0.4).test])
    assert tested == set(groups[order][split_of(groups[order], 1, 0.4).test])
    assert len(tested) == 2


@pytest.mark.parametrize(("share", "n_groups", "n_test"), [(0.01, 5, 1), (0.99, 5, 4), (0.2, 10, 2), (0.5, 2, 1)])
def test_each_side_has_at_least_one_group(share, n_groups, n_test):
    side = split_of(np.arange(n_groups), 0, share)
    assert (len(side.test), len(side.train)) == (n_test, n_groups - n_test)


def test_coefficients_are_those_of_the_first_seed():
    X, y, groups, _ = planted(noise=20.0)
    many, first = Probe(seeds=(7, 1, 2)).fit(X, y, groups), Probe(seeds=(7,)).fit(X, y, groups)
    assert (many.coef_ == first.coef_).all()
    accuracies = [s["accuracy"] for s in many.per_seed_]
    assert [s["seed"] for s in many.per_seed_] == [7, 1, 2]
    assert accuracies[0] == first.accuracy_ == first.score(*(a[split_of(groups, 7).test] for a in (X, y)))
    assert many.accuracy_ == pytest.approx(np.mean(accuracies))
    assert many.accuracy_std_ == pytest.approx(np.std(accuracies, ddof=1)) and many.accuracy_std_ > 0
    assert first.accuracy_std_ is None


def test_random_label_is_measured_for_the_first_seeds_only():
    X, y, groups, _ = planted()
    probe = Probe(random_label_seeds=2).fit(X, y, groups)
    measured = [s["random_label"] for s in probe.per_seed_]
    assert measured[2] is None and probe.random_label_ == pytest.approx(np.mean(measured[:2]))
    assert Probe(random_label_seeds=0).fit(X, y, groups).random_label_ is None


def test_follows_sklearns_parameter_contract():
    probe = Probe(C=0.5, seeds=(1,), label_name="depth")
    copy = clone(probe)
    assert copy.get_params() == probe.get_params() and copy.get_params()["C"] == 0.5
    assert probe.set_params(C=2.0).C == 2.0
    assert "C=2.0" in repr(probe)
    X, y, groups, _ = planted()
    assert probe.fit(X, y, groups) is probe
    with pytest.raises(NotFittedError, match="fit"):
        clone(probe).predict(X)


def test_summary_and_per_seed_are_json():
    X, y, groups, _ = planted(3)
    probe = Probe(label_name="depth").fit(X, y, groups)
    summary = probe.summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert json.loads(json.dumps(probe.per_seed_, allow_nan=False)) == probe.per_seed_
    assert summary["label"] == "depth" and summary["n_rows"] == 1200 and summary["n_groups"] == 60
    counts = probe.per_seed_[0]["train_counts"], probe.per_seed_[0]["test_counts"]
    assert {c: counts[0][c] + counts[1][c] for c in "012"} == {str(c): int((y == c).sum()) for c in range(3)}


def test_without_standardisation_the_fit_is_plain_logistic_regression():
    X, y, groups, _ = planted()
    probe = Probe(standardize=False, seeds=(0,), tol=1e-7, max_iter=5000).fit(X, y, groups)
    side = split_of(groups)
    plain = LogisticRegression(tol=1e-7, max_iter=5000).fit(X[side.train], y[side.train])
    np.testing.assert_allclose(probe.coef_, plain.coef_, rtol=1e-4)


# --- what X may be ---


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_short_floats_are_read_as_float32(dtype):
    X, y, groups, _ = planted()
    short = X.astype(dtype)
    probe = Probe(seeds=(0,)).fit(short, y, groups)
    assert (probe.coef_ == Probe(seeds=(0,)).fit(short.astype(np.float32), y, groups).coef_).all()
    assert (probe.predict(short) == probe.predict(short.astype(np.float32))).all()


def test_the_solver_works_in_float32_for_float32(monkeypatch):
    seen = []
    plain = LogisticRegression.fit
    monkeypatch.setattr(LogisticRegression, "fit", lambda self, X, y: seen.append(X.dtype) or plain(self, X, y))
    for dtype in (np.float32, np.float64):
        X, y, groups, _ = planted(dtype=dtype)
        Probe(seeds=(0,), random_label_seeds=0).fit(X, y, groups)
    assert seen == [np.float32, np.float64]


def test_fit_leaves_the_callers_arrays_as_they_were():
    X, y, groups, _ = planted(dtype=np.float32)
    before = X.copy()
    X.setflags(write=False)
    Probe().fit(X, y, groups)
    assert (before == X).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_constant_feature_gets_no_weight(dtype):
    X, y, groups, _ = planted(dtype=dtype)
    X[:, 3] = 1000.1  # not representable: its measured variance is a rounding error, not zero
    probe = Probe().fit(X, y, groups)
    assert np.isfinite(probe.coef_).all() and abs(probe.coef_[0, 3]) < 1e-6
    assert probe.accuracy_ > 0.8


def test_nan_and_infinity_are_refused_with_count_and_first_row():
    X, y, groups, _ = planted()
    X[7, 2], X[7, 3], X[900, 0] = np.nan, np.inf, -np.inf
    with pytest.raises(RequestError, match=r"3 NaN or infinite value\(s\) in 2 of 1200 rows, the first in row 7"):
        Probe().fit(X, y, groups)
    y = y.astype(object)
    y[[7, 900]] = None
    assert Probe().fit(X, y, groups).n_dropped_ == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, y, g: (X[0], y, g), r"1 dimension"),
        (lambda X, y, g: (X, y[:-2], g), r"X has 1200 rows and label 'y' has 1198"),
        (lambda X, y, g: (X, y, g[:5]), r"X has 1200 rows and groups has 5"),
        (lambda X, y, g: (X[:, :0], y, g), r"0 features"),
        (lambda X, y, g: (X.astype(str), y, g), r"dtype <U"),
        (lambda X, y, g: (X, np.stack([y, y], 1), g), r"one value a row"),
        (lambda X, y, g: (X, y, np.zeros_like(g)), r"belong to one group"),
        (lambda X, y, g: (X, y, [None, *g[1:]]), r"1 of 1200 rows have no group \(the first is row 0\)"),
        (lambda X, y, g: (X, y, ["a", *g[1:]]), r"types int\w*, str"),
    ],
)
def test_wrong_shapes_are_refused_with_both_numbers(change, message):
    X, y, groups, _ = planted()
    with pytest.raises(RequestError, match=message):
        Probe().fit(*change(X, y, groups))


def test_predict_on_another_width_is_refused():
    X, y, groups, _ = planted()
    probe = Probe().fit(X, y, groups)
    with pytest.raises(RequestError, match="11 features and the probe was fitted on 12"):
        probe.predict(X[:, :11])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_share": 0.0}, "test_share"),
        ({"test_share": 1.0}, "test_share"),
        ({"C": 0}, "C and tol"),
        ({"max_iter": 0}, "max_iter"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"seeds": (-1,)}, "seeds"),
        ({"seeds": (0.5,)}, "seeds"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    X, y, groups, _ = planted()
    with pytest.raises(RequestError, match=message):
        Probe(**settings).fit(X, y, groups)


# --- P01: the split ---


def sequence_vectors():
    """The trigger of P01: one random vector and one random label a sequence, 100 x 20 tokens, 512 wide."""
    rng = np.random.default_rng(1)
    X = np.repeat(rng.normal(size=(100, 512)), 20, axis=0) + 0.5 * rng.normal(size=(2000, 512))
    return X.astype(np.float32), np.repeat(rng.integers(0, 2, 100), 20), np.repeat(np.arange(100), 20)


def test_p01_a_random_label_a_sequence_is_not_decoded_by_default():
    X, y, groups = sequence_vectors()
    probe = Probe(seeds=range(10), random_label_seeds=3).fit(X, y, groups)
    assert 0.30 <= probe.accuracy_ <= 0.65
    for one in probe.per_seed_:
        side = split_of(groups, one["seed"])
        assert not set(groups[side.train]) & set(groups[side.test])
        assert (one["n_train"], one["n_test"]) == (len(side.train), len(side.test)) == (1600, 400)
        assert (one["n_groups_train"], one["n_groups_test"]) == (80, 20)
    assert len({tuple(split_of(groups, s).test) for s in range(10)}) == 10
    # the label is constant in each sequence, so it is shuffled over sequences
    assert [s["random_label_shuffled"] for s in probe.per_seed_[:3]] == ["groups"] * 3
    assert 0.2 <= probe.random_label_ <= 0.8


def test_p01_a_split_by_token_would_decode_it_and_must_be_asked_for():
    X, y, _ = sequence_vectors()
    with pytest.raises(RequestError, match=r"needs groups.*Tokens of one sequence.*allow_token_split"):
        Probe().fit(X, y)
    leaked = Probe(allow_token_split=True, seeds=(0,)).fit(X, y)
    assert leaked.accuracy_ > 0.95  # the fault that groups prevent: the test above can fail
    assert leaked.random_label_ < 0.65


def test_p01_a_given_split_with_a_sequence_on_both_sides_is_refused():
    X, y, groups = sequence_vectors()
    names = np.array([f"doc{g:02d}" for g in groups])
    split = np.where(groups < 80, "train", "test")
    fitted = Probe().fit(X, y, names, split=split)
    assert len(fitted.per_seed_) == 1 and fitted.per_seed_[0]["seed"] is None
    assert fitted.per_seed_[0]["n_test"] == 400 and fitted.accuracy_std_ is None
    assert fitted.accuracy_ == fitted.score(X[split == "test"], y[split == "test"])
    split[[0, 45]] = "test"
    with pytest.raises(RequestError, match=r"2 group\(s\) on both sides, the first: 'doc00', 'doc02'"):
        Probe().fit(X, y, names, split=split)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["train"] * 3 + ["validation"], "'validation'"),
        (["train"] * 3 + [None], "None"),
        (["test"] * 4, "none into 'train'"),
        (["train"] * 4, "none into 'test'"),
        (["train"] * 3, "X has 4 rows and split has 3"),
    ],
)
def test_a_given_split_must_say_train_or_test(split, message):
    with pytest.raises(RequestError, match=message):
        Probe().fit(np.eye(4), [0, 1, 0, 1], list("abcd"), split=split)


def test_groups_of_one_row_each_are_allowed_when_given():
    X, y, _, _ = planted(n_groups=200, per_group=1)
    probe = Probe(seeds=(0,)).fit(X, y, np.arange(200))
    assert probe.n_groups_ == 200 and probe.accuracy_ > 0.7


# --- P04: rare labels ---


def test_p04_a_rare_label_shows_majority_and_balanced_accuracy():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4000, 16))
    y = np.zeros(4000, dtype=int)
    y[rng.permutation(4000)[:200]] = 1
    summary = Probe().fit(X, y, np.repeat(np.arange(200), 20)).summary()
    assert summary["accuracy"] > 0.9
    assert abs(summary["accuracy"] - summary["majority"]) <= 0.02
    assert abs(summary["accuracy"] - summary["random_label"]) <= 0.03
    assert summary["balanced_accuracy"] == pytest.approx(0.5, abs=0.05)
    assert summary["auroc"] == pytest.approx(0.5, abs=0.1)


def test_p04_the_majority_baseline_answers_the_most_frequent_class_of_the_train_side():
    X, y = np.random.default_rng(0).normal(size=(10, 3)), list("aaaabbbbba")
    probe = Probe().fit(X, y, range(10), split=["train"] * 6 + ["test"] * 4)  # test: three b, one a
    assert probe.majority_ == 0.25 and probe.per_seed_[0]["majority_class"] == "a"


# --- P06: one class ---


def test_p06_one_class_stops_before_fitting_and_names_label_class_and_count(monkeypatch):
    def never(*_):
        raise AssertionError("fitted")

    monkeypatch.setattr(LogisticRegression, "fit", never)
    start = time.perf_counter()
    for _layer in range(12):
        X = np.zeros((20_000, 64), dtype=np.float32)
        with pytest.raises(RequestError, match=r"'depth' has only one class, 3, in all 20000 rows"):
            Probe(label_name="depth").fit(X, np.full(20_000, 3), np.arange(20_000))
    assert time.perf_counter() - start < 5
    with pytest.raises(RequestError, match=r"only one class, 'a', in all 2 rows \(1 of 3 rows are null\)"):
        Probe().fit(np.zeros((3, 2)), ["a", None, "a"], [0, 1, 2])
    with pytest.raises(RequestError, match=r"no value in any of its 3 rows"):
        Probe().fit(np.zeros((3, 2)), [None, None, np.nan], [0, 1, 2])


def test_p06_one_class_on_the_train_side_names_the_split():
    X, groups = np.random.default_rng(0).normal(size=(6, 2)), [0, 0, 1, 1, 2, 2]
    with pytest.raises(RequestError, match=r"split given holds only class 'a' of label 'y', in all its 4 rows"):
        Probe().fit(X, list("aaaabb"), groups, split=["train"] * 4 + ["test"] * 2)
    seed = next(s for s in range(20) if set(split_of(groups, s).test) == {4, 5})
    with pytest.raises(RequestError, match=f"drawn by seed {seed} holds only class 'a'"):
        Probe(seeds=(seed,)).fit(X, list("aaaabb"), groups)


# --- P08: a class only in test ---


def test_p08_a_class_only_in_test_is_listed_counts_as_error_and_leaves_auroc_undefined():
    rng = np.random.default_rng(0)
    y = np.array([0, 1] * 50 + [0, 2] * 20)
    X = rng.normal(size=(140, 4)) * 0.1
    X[:, 0] += y
    split = ["train"] * 100 + ["test"] * 40
    probe = Probe().fit(X, y, np.arange(140), split=split)
    assert probe.unseen_classes_ == [2] and probe.summary()["unseen_classes"] == [2]
    assert probe.per_seed_[0]["train_counts"] == {"0": 50, "1": 50, "2": 0}
    assert probe.per_seed_[0]["test_counts"] == {"0": 20, "1": 0, "2": 20}
    assert probe.accuracy_ == 0.5 and probe.balanced_accuracy_ == 0.5
    assert probe.auroc_ is None and probe.auroc_reason_ == "undefined: no rows of class 2 on the train side"
    assert probe.classes_.tolist() == [0, 1] and probe.coef_.shape == (1, 4)
    json.dumps(probe.summary(), allow_nan=False)


def test_p08_a_class_only_in_train_leaves_auroc_undefined_too():
    X, y = np.random.default_rng(0).normal(size=(9, 3)), list("aabbccaab")
    probe = Probe().fit(X, y, range(9), split=["train"] * 6 + ["test"] * 3)
    assert probe.auroc_ is None and probe.auroc_reason_ == "undefined: no rows of class c on the test side"
    assert probe.unseen_classes_ == []


# --- P09: scales and convergence ---


def badly_scaled():
    rng = np.random.default_rng(0)
    Z = rng.normal(size=(2000, 200))
    y = (Z @ rng.normal(size=200) + 4 * rng.normal(size=2000) > 0).astype(int)
    return Z * np.logspace(-3, 3, 200), Z, y, np.repeat(np.arange(100), 20)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_p09_scales_from_1e_minus_3_to_1e3_reach_the_scaled_converged_reference(dtype):
    X, Z, y, groups = badly_scaled()
    probe = Probe(seeds=(0,)).fit(X.astype(dtype), y, groups)
    side = split_of(groups)
    reference = LogisticRegression(tol=1e-8, max_iter=10_000).fit(Z[side.train], y[side.train])
    assert abs(probe.accuracy_ - reference.score(Z[side.test], y[side.test])) <= 0.03
    assert probe.converged_ is True and 1 < probe.per_seed_[0]["n_iter"] < 1000


def test_p09_a_solver_that_is_stopped_early_says_so_in_a_field_not_in_a_warning():
    X, _, y, groups = badly_scaled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe = Probe(max_iter=1).fit(X, y, groups)
    assert probe.converged_ is False and probe.summary()["converged"] is False
    assert [s["converged"] for s in probe.per_seed_] == [False] * 3
    assert [s["n_iter"] for s in probe.per_seed_] == [1] * 3


def test_p09_other_warnings_of_the_solver_pass_through(monkeypatch):
    X, _, y, groups = badly_scaled()
    plain = LogisticRegression.fit

    def noisy(self, X, y):
        warnings.warn("something else", UserWarning, stacklevel=1)
        return plain(self, X, y)

    monkeypatch.setattr(LogisticRegression, "fit", noisy)
    with pytest.warns(UserWarning, match="something else"):
        Probe(seeds=(0,)).fit(X, y, groups)
