"""What one split says about a probe: accuracies, baselines, AUROC, counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from .labels import Labels, count_by_class
from .logistic import LogisticFit, Solver
from .splits import Split, permute_within_sides


def score_split(fit: LogisticFit, X: np.ndarray, labels: Labels, groups: np.ndarray, split: Split) -> dict[str, Any]:
    """Score `fit`, trained on ``split.train``, on ``split.test``; return a flat, JSON-able dict.

    `groups` is (n,) group numbers. Balanced accuracy is the mean recall over the classes of the test side.
    The majority baseline answers the most frequent class of the train side (the first of them, if several). A
    class that training did not hold cannot be answered, so its rows count as errors, and AUROC is None, with
    the reason.
    """
    names = labels.names()
    train, truth = labels.codes[split.train], labels.codes[split.test]
    scores = fit.decision(X, split.test)
    correct = fit.choose(scores) == truth
    tested = np.bincount(truth, minlength=len(names))
    recalled = np.bincount(truth[correct], minlength=len(names))
    trained = np.bincount(train, minlength=len(names))
    present = tested > 0
    majority = int(trained.argmax())
    auroc, reason = _auroc(fit, scores, truth, names)
    return {
        "seed": split.seed,
        "n_train": len(split.train),
        "n_test": len(split.test),
        "n_groups_train": len(np.unique(groups[split.train])),
        "n_groups_test": len(np.unique(groups[split.test])),
        "accuracy": float(correct.mean()),
        "balanced_accuracy": float((recalled[present] / tested[present]).mean()),
        "majority": float((truth == majority).mean()),
        "majority_class": names[majority],
        "auroc": auroc,
        "auroc_reason": reason,
        "converged": fit.converged,
        "n_iter": fit.n_iter,
        "train_counts": count_by_class(train, names),
        "test_counts": count_by_class(truth, names),
        "unseen_classes": [labels.classes.tolist()[i] for i in np.flatnonzero(trained == 0)],
    }


def score_random_label(
    solver: Solver | None, X: np.ndarray, labels: Labels, groups: np.ndarray, split: Split, seed: int
) -> dict[str, Any]:
    """Fit and score shuffled labels on `split` as true ones are, or, without a solver, say None: not measured."""
    if solver is None:
        return {"random_label": None, "random_label_shuffled": None, "random_label_converged": None}
    codes, shuffled = permute_within_sides(labels.codes, groups, split, seed)
    fit = solver.fit(X, codes, split.train)
    hits = fit.choose(fit.decision(X, split.test)) == codes[split.test]
    return {
        "random_label": float(hits.mean()),
        "random_label_shuffled": shuffled,
        "random_label_converged": fit.converged,
    }


def _auroc(
    fit: LogisticFit, scores: np.ndarray, truth: np.ndarray, names: list[str]
) -> tuple[float | None, str | None]:
    """Return the area under the ROC curve (macro one-vs-rest above two classes), or None and why not."""
    seen, tested = set(fit.codes.tolist()), set(truth.tolist())
    for classes, side in ((tested - seen, "train"), (seen - tested, "test")):
        if classes:
            lacking = ", ".join(names[c] for c in sorted(classes)[:5])
            return None, f"undefined: no rows of class {lacking} on the {side} side"
    if scores.ndim == 1:
        return float(roc_auc_score(truth == fit.codes[1], scores)), None
    return float(roc_auc_score(truth, fit.probabilities(scores), multi_class="ovr", average="macro")), None
