"""How right a model is on strings of a task: of all positions, of the last ones, and of whole strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RequestError
from .task_data import TaskData

LENGTHS = (40, 60, 80, 100, 120)
STRINGS = 500
_TOKENS_A_BATCH = 64 * 40


@dataclass(frozen=True)
class Accuracy:
    """Shares of what a model gets right: `token` of all positions, `last` of last positions, `string` of strings."""

    token: float
    last: float
    string: float


@dataclass(frozen=True, kw_only=True)
class LengthResult:
    """What a model gets right at a length of the test side; no accuracy where it has no positions for that length.

    `majority` is the share of positions that the most frequent class of the training strings is right at.
    """

    length: int
    accuracy: Accuracy | None
    majority: float

    def to_json(self) -> dict[str, Any]:
        """Give it as plain data; `measured` says whether the model has positions there."""
        found = {"length": self.length, "measured": self.accuracy is not None, "majority": self.majority}
        return found | (asdict(self.accuracy) if self.accuracy else {})


def accuracy(model: nn.Module, ids: Tensor, labels: Tensor) -> Accuracy:
    """Measure a model on ids and classes, each (n, T) int64, in evaluation mode, which it is taken out of again."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            batches = zip(*(t.split(max(1, _TOKENS_A_BATCH // ids.shape[1])) for t in (ids, labels)), strict=True)
            right = torch.cat([model(i).argmax(-1) == wanted for i, wanted in batches])
    finally:
        model.train(training)
    shares = (right, right[:, -1], right.all(1))
    return Accuracy(*(round(float(s.double().mean()), 6) for s in shares))


def check_evaluation(lengths: Sequence[int], strings: int) -> None:
    """Raise `RequestError` for lengths or a number of strings that nothing can be measured with."""
    if not lengths or any(length < 1 for length in lengths):
        raise RequestError(f"Lengths to test at are whole numbers from 1 on, not {list(lengths)}.")
    if strings < 1:
        raise RequestError(f"At least 1 string a length is needed to test on, not {strings}.")


def evaluate(
    model: nn.Module,
    data: TaskData,
    *,
    majority: int,
    max_length: int | None,
    lengths: Sequence[int] = LENGTHS,
    strings: int = STRINGS,
) -> list[LengthResult]:
    """Measure a model at each of the `lengths` on so many test strings, the same for every model and seed.

    `majority` is the class of the baseline. A length beyond `max_length` is not measured: what a model does at
    positions that it does not have, or that were never trained, is no number.
    """
    results = []
    for length in lengths:
        ids, labels = data.test(strings, length)
        beyond = max_length is not None and length > max_length
        results.append(
            LengthResult(
                length=length,
                accuracy=None if beyond else accuracy(model, ids, labels),
                majority=round(float((labels == majority).double().mean()), 6),
            )
        )
    return results
