"""The kinds of rows that an array can have: a row a token, or a mean over the tokens of a sequence or of a span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import RequestError

TOKENS, SEQUENCES, SPANS = "tokens", "sequences", "spans"
POOLED = (SEQUENCES, SPANS)
ROW_KINDS = (TOKENS, *POOLED)


@dataclass(frozen=True)
class RowKinds:
    """The kinds of rows that a run stores, in the order of `ROW_KINDS`; `label` is what its spans are of."""

    kinds: tuple[str, ...] = (TOKENS,)
    label: str | None = None

    @classmethod
    def parse(cls, asked: str | Sequence[str]) -> RowKinds:
        """Read kinds, as ``tokens,sequences,spans:LABEL``; `RequestError` for what is none, or two labels."""
        parts = [p.strip() for one in ([asked] if isinstance(asked, str) else asked) for p in one.split(",")]
        kinds, labels = [], []
        for part in filter(None, parts):
            kind, colon, label = part.partition(":")
            if kind not in ROW_KINDS or bool(colon) != (kind == SPANS) or (colon and not label.strip()):
                raise RequestError(
                    f"{part!r} is no kind of rows: use tokens, sequences, and spans:LABEL with the name of a label of "
                    "tokens."
                )
            kinds.append(kind)
            labels += [label.strip()] if colon else []
        if not kinds:
            raise RequestError("Name at least one kind of rows: tokens, sequences or spans:LABEL.")
        if len(set(labels)) > 1:
            raise RequestError(f"A run has spans of one label, not of {' and '.join(dict.fromkeys(labels))}.")
        return cls(tuple(k for k in ROW_KINDS if k in kinds), labels[0] if labels else None)

    @property
    def pooled(self) -> tuple[str, ...]:
        """The kinds whose rows are means."""
        return tuple(k for k in self.kinds if k != TOKENS)

    def __str__(self) -> str:
        return ", ".join(f"{k}:{self.label}" if k == SPANS else k for k in self.kinds)
