"""The tokens that stand for a task's symbols in a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import RequestError


def symbol_ids(tokenizer: Any, symbols: Sequence[str]) -> tuple[int, ...]:
    """Give the id of the one token that stands for each symbol, distinct ids for distinct symbols.

    It is the token of a space and the symbol where the two are one token, as inside of a text; else the token of the
    symbol alone. `RequestError` names a symbol that is no single token, or that the tokenizer does not tell from
    another one.
    """
    ids: dict[int, str] = {}
    for symbol in symbols:
        spaced, alone = (_encoded(tokenizer, text) for text in (f" {symbol}", symbol))
        one = next((found[0] for found in (spaced, alone) if _is_one(tokenizer, found)), None)
        if one is None:
            pieces = tokenizer.convert_ids_to_tokens(alone)
            raise RequestError(
                f"The symbol {symbol!r} is no single token of the tokenizer, which makes {pieces} of it. Take a task "
                "whose symbols are single tokens, or a model that was trained on the task."
            )
        if one in ids:
            raise RequestError(
                f"The symbols {ids[one]!r} and {symbol!r} are one token of the tokenizer, "
                f"{tokenizer.convert_ids_to_tokens(one)!r}. Take a task whose symbols it tells apart."
            )
        ids[one] = symbol
    return tuple(ids)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _is_one(tokenizer: Any, ids: Sequence[int]) -> bool:
    return len(ids) == 1 and ids[0] != getattr(tokenizer, "unk_token_id", None)
