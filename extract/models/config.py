"""What every model built here is told: a frozen dataclass an architecture, whose options are its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn

from ...errors import RequestError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The options that all architectures share; each architecture adds its own.

    The embedding's deviation is an option because it decides which layer a state is readable from: a token that is
    small beside its position takes layers to be found again.
    """

    vocab_size: int
    """Rows of the embedding table: ids are 0 to vocab_size - 1."""
    outputs: int
    """Classes that the head tells apart at every position."""
    layers: int = 4
    d_model: int = 128
    """The width of the residual stream."""
    embedding_std: float = 0.02
    """The standard deviation of the token embeddings at the start."""

    architecture: ClassVar[str] = ""
    positions: ClassVar[str] = "none"
    """How a token's position enters; only attention needs one."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float", "bool", "str"):
                kinds = {"int": int, "float": (int, float), "bool": bool, "str": str}[field.type]
                if not isinstance(value, kinds) or (field.type != "bool" and isinstance(value, bool)):
                    raise self.refuse(field.name, f"is {value!r}, which is no {field.type}")
            if field.type == "int" and value < self.least(field.name):
                raise self.refuse(field.name, f"is {value}, and must be at least {self.least(field.name)}")
            if field.type == "float" and not 0 <= value < float("inf"):
                raise self.refuse(field.name, f"is {value}, and must be a number from 0 on")

    def least(self, name: str) -> int:
        """Give the least value of a whole-number option."""
        return 1

    def refuse(self, name: str, why: str) -> RequestError:
        """Build the error for an option that cannot be."""
        return RequestError(f"The option {name} of the architecture {self.architecture!r} {why}.")

    def one_of(self, name: str, known: tuple[str, ...]) -> None:
        """Raise `UnknownNameError` unless the option has one of the `known` values."""
        if getattr(self, name) not in known:
            raise UnknownNameError.of(name, getattr(self, name), known, f" in the architecture {self.architecture!r}")

    @property
    def max_length(self) -> int | None:
        """The longest sequence that there are positions for; None where there is no such end."""
        return None

    def block(self) -> nn.Module:
        """Build one block, without values."""
        raise NotImplementedError

    def final_norm(self) -> nn.Module | None:
        """Build the norm before the head, without values; None where the architecture has none."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Give the architecture and all options as plain data."""
        return {"architecture": self.architecture} | {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ModelConfig:
        """Build from options by name; an unknown or a missing one is a `RequestError`."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownNameError.of("option", name, known, f" of the architecture {cls.architecture!r}")
        for name in ("vocab_size", "outputs"):
            if name not in options:
                raise RequestError(f"The architecture {cls.architecture!r} needs the option {name}.")
        return cls(**options)
