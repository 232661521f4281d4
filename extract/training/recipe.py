"""How a model is trained: a frozen dataclass that says all of it, but for the seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...errors import RequestError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Lengths that grow from `start` to the recipe's, `grow` at a time: with the steps, or when they are learned.

    One of two rules says when. With `share`, the shorter lengths divide that share of all steps evenly among
    themselves, and the full length has the rest. With `accuracy`, the next length comes at the first evaluation at
    which the validation accuracy at the present one reaches it.
    """

    start: int
    grow: int = 5
    share: float | None = None
    accuracy: float | None = None

    def __post_init__(self) -> None:
        if self.start < 1 or self.grow < 1:
            raise RequestError(f"Start and growth of a curriculum are at least 1, not {self.start} and {self.grow}.")
        if (self.share is None) == (self.accuracy is None):
            raise RequestError("A curriculum grows by a share of the steps or by an accuracy: give one of the two.")
        for name in ("share", "accuracy"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise RequestError(f"The {name} of a curriculum is above 0 and at most 1, not {value}.")

    def lengths(self, end: int) -> tuple[int, ...]:
        """Give all lengths of a training that ends at the length `end`."""
        return (*range(self.start, end, self.grow), end)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Curriculum:
        """Read what `dataclasses.asdict` gave; an unknown field is an `UnknownNameError`."""
        _known(found, cls, "a curriculum")
        if "start" not in found:
            raise RequestError("A curriculum needs its start: the length of the first strings.")
        return cls(**found)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All of how a cell is trained but the seed: AdamW on the cross entropy of every position (arXiv 1711.05101)."""

    steps: int = 3000
    """Steps at most; the learning rate is planned for all of them."""
    batch_size: int = 64
    """Strings a step."""
    length: int = 40
    """Symbols of a training string."""
    lr: float = 1e-3
    """The learning rate at its highest."""
    warmup: int = 100
    """Steps over which the learning rate rises from 0, linearly."""
    floor: float = 0.0
    """What the cosine after the warm-up falls to at the last step, as a share of `lr`; 1 keeps it constant."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    """Decay of matrices and embeddings; norms, biases and what a model marks (a state space's A and D) have none."""
    clip: float | None = 1.0
    """The norm to which the gradient of all parameters together is clipped; None for not at all."""
    curriculum: Curriculum | None = None
    stop_at: float | None = 0.995
    """The token accuracy on validation strings of the full length at which training ends early; None for never."""
    evaluate_every: int = 50
    """Steps between two looks at the validation strings."""
    validation_strings: int = 256
    random_offset: bool = False
    """Each training string starts at a random one of the model's positions, so that all of them are trained."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("steps", "batch_size", "length", "evaluate_every", "validation_strings"):
            self._check(name, _whole(getattr(self, name)) and getattr(self, name) >= 1, "a whole number from 1 on")
        self._check("warmup", _whole(self.warmup) and self.warmup >= 0, "a whole number from 0 on")
        self._check("lr", _number(self.lr) and self.lr > 0, "above 0")
        self._check("floor", _number(self.floor) and 0 <= self.floor <= 1, "from 0 to 1")
        self._check("weight_decay", _number(self.weight_decay) and self.weight_decay >= 0, "a number from 0 on")
        betas = len(self.betas) == 2 and all(_number(b) and 0 <= b < 1 for b in self.betas)
        self._check("betas", betas, "two numbers from 0 to below 1")
        self._check("clip", self.clip is None or (_number(self.clip) and self.clip > 0), "above 0, or none")
        stop = self.stop_at
        self._check("stop_at", stop is None or (_number(stop) and 0 < stop <= 1), "above 0 and at most 1, or none")
        self._check("random_offset", isinstance(self.random_offset, bool), "true or false")
        if self.curriculum is not None and self.curriculum.start > self.length:
            raise RequestError(
                f"The curriculum starts at length {self.curriculum.start}, and the recipe's length is {self.length}. "
                "Give another curriculum, or none."
            )

    def learning_rate(self, step: int) -> float:
        """Give the learning rate of a step, from 0: warm-up, then a cosine that reaches `floor` at the last step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every length that is trained, in order."""
        return self.curriculum.lengths(self.length) if self.curriculum else (self.length,)

    def planned_length(self, step: int) -> int | None:
        """Give the length at a step, from 0, where steps alone decide it; None where an accuracy does."""
        if self.curriculum is None:
            return self.length
        if self.curriculum.share is None:
            return None
        lengths = self.lengths
        growing = self.curriculum.share * self.steps
        return self.length if step >= growing else lengths[int(step / growing * (len(lengths) - 1))]

    def to_json(self) -> dict[str, Any]:
        """Give all fields as plain data."""
        return asdict(self) | {"betas": list(self.betas)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Recipe:
        """Read what `to_json` gave; fields that are left out have their defaults, an unknown one is refused."""
        _known(found, cls, "a recipe")
        values = dict(found)
        if isinstance(values.get("curriculum"), Mapping):
            values["curriculum"] = Curriculum.from_json(values["curriculum"])
        elif values.get("curriculum") is not None and not isinstance(values["curriculum"], Curriculum):
            raise RequestError(f"A curriculum is a mapping of its fields or null, not {values['curriculum']!r}.")
        try:
            return cls(**values)
        except TypeError as error:
            raise RequestError(f"The recipe has a field of the wrong kind: {error}.") from error

    def _check(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise RequestError(f"The {name} of a recipe must be {what}, not {getattr(self, name)!r}.")


def _known(found: Mapping[str, Any], cls: type, what: str) -> None:
    known = [f.name for f in fields(cls)]
    for name in found:
        if name not in known:
            raise UnknownNameError.of("field", name, known, f" of {what}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
