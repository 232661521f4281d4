"""The ids that stand for a task's symbols in a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import RequestError
from .document import Document
from .loaded_model import LoadedModel
from .symbol_ids import symbol_ids


def place_symbols(documents: Sequence[Document], model: LoadedModel) -> list[Document]:
    """Give the documents with the ids of a model for those that are strings of a task.

    - A model with a vocabulary has the ids by name.
    - A model with a tokenizer has the ids of single tokens, which `symbol_ids` chooses. The tokenizer adds nothing:
      a string has no special tokens.
    - Of any other model an id is the number of the symbol in the task.

    `RequestError` names a symbol that the model does not have.
    """
    ids: dict[tuple[str, ...], tuple[int, ...]] = {}
    placed = []
    for document in documents:
        if (string := document.string) is not None:
            if string.alphabet not in ids:
                ids[string.alphabet] = _ids(model, string.alphabet)
            own = ids[string.alphabet]
            placed.append(replace(document, input_ids=tuple(own[i] for i in string.indices)))
        else:
            placed.append(document)
    return placed


def _ids(model: LoadedModel, alphabet: Sequence[str]) -> tuple[int, ...]:
    title = model.source.title
    if model.vocabulary is not None:
        known = {symbol: i for i, symbol in enumerate(model.vocabulary)}
        for symbol in alphabet:
            if symbol not in known:
                shown = ", ".join(map(repr, model.vocabulary[:20])) + (" and more" if len(known) > 20 else "")
                raise RequestError(
                    f"The symbol {symbol!r} is not in the vocabulary of {title}, which is {shown}. Take a task with "
                    "the symbols of the one that the model was trained on."
                )
        return tuple(known[symbol] for symbol in alphabet)
    if model.tokenizer is not None:
        return symbol_ids(model.tokenizer, alphabet)
    if model.vocab_size is not None and model.vocab_size < len(alphabet):
        raise RequestError(
            f"The symbol {alphabet[model.vocab_size]!r} has the id {model.vocab_size}, and the embedding table of "
            f"{title} has {model.vocab_size} rows. Take a task with so many symbols or fewer, or another model."
        )
    return tuple(range(len(alphabet)))
