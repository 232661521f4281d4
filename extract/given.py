"""Texts or ids as a caller hands them over, made into the sequences that a model reads."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..errors import DataError, LakeWarning, RequestError
from ..store.tokens import TOKEN_FIELDS
from .encoding import encode
from .loaded_model import LoadedModel


@dataclass(frozen=True)
class GivenSequence:
    """One sequence of n tokens, and the text that it was made from."""

    ids: np.ndarray
    """int32 (n,)"""
    special: np.ndarray
    """bool (n,): added by the tokenizer."""
    start: np.ndarray
    """int32 (n,): first character of the token in the text; -1 for special tokens and for ids."""
    end: np.ndarray
    """int32 (n,): one past its last character; -1 likewise."""
    pieces: list[str] | None = None
    """The tokenizer's own names of the tokens; None for ids."""
    text: str | None = None


def read_given(texts: Any, model: LoadedModel, *, special_tokens: bool = True) -> list[GivenSequence]:
    """Read a text, texts, or ids without padding; what the model cannot read is refused by its index.

    Ids of texts, their special flags and spans are those that an extraction of the same texts stores.
    """
    items = _items(texts, model.device)
    if not items:
        raise DataError("There are no texts: give at least one.")
    if all(isinstance(item, str) for item in items):
        given = _encoded(items, model, special_tokens)
    else:
        given = [_of_ids(index, item) for index, item in enumerate(items)]
    for index, one in enumerate(given):
        _check(index, one, model)
    return given


def token_table(given: Sequence[GivenSequence]) -> pa.Table:
    """Build the table of all tokens, one a row: seq, pos, token_id, token, char_start, char_end, special."""
    lengths = [len(g.ids) for g in given]

    def spans(name: str) -> pa.Array:
        values = np.concatenate([getattr(g, name) for g in given])
        return pa.array(values, pa.int32(), mask=values < 0)

    columns = {
        "seq": np.repeat(np.arange(len(given)), lengths),
        "pos": np.concatenate([np.arange(n) for n in lengths]),
        "token_id": np.concatenate([g.ids for g in given]),
        "token": [piece for g in given for piece in (g.pieces or [None] * len(g.ids))],
        "char_start": spans("start"),
        "char_end": spans("end"),
        "special": np.concatenate([g.special for g in given]),
    }
    return pa.table({name: pa.array(columns[name], kind) for name, kind in TOKEN_FIELDS if name in columns})


def _items(texts: Any, device: str) -> list[Any]:
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, Mapping) or hasattr(texts, "input_ids"):
        raise RequestError(
            "The texts are what a tokenizer made of them. Hand over the texts, or lists of ids without padding: "
            "sequences are padded here, where it is known which side leaves the model unmoved."
        )
    if isinstance(texts, torch.Tensor):
        if texts.device.type != "cpu" and texts.device != torch.device(device):
            raise RequestError(f"The ids are on {texts.device} and the model is on {device}. Put both on one device.")
        texts = texts.cpu().numpy()
    for listed in ("to_pylist", "tolist"):  # a column of Arrow or pandas, an array of texts
        numbers = isinstance(texts, np.ndarray) and texts.dtype.kind not in "OUT"
        if not numbers and hasattr(texts, listed):
            texts = getattr(texts, listed)()
    if isinstance(texts, np.ndarray):
        if texts.ndim not in (1, 2):
            raise RequestError(f"Ids are (time,) or (sequences, time), not {texts.shape}.")
        return [texts] if texts.ndim == 1 else list(texts)
    if not isinstance(texts, Sequence):
        raise RequestError(f"Texts are a text, a list of texts, or ids, not {type(texts).__name__}.")
    if texts and all(_is_whole(item) for item in texts):
        return [texts]
    if any(isinstance(item, str) for item in texts) and not all(isinstance(item, str) for item in texts):
        raise RequestError("The list mixes texts and ids. Give one of the two.")
    return list(texts)


def _encoded(texts: Sequence[str], model: LoadedModel, special_tokens: bool) -> list[GivenSequence]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise DataError(f"{model.source.title} comes without a tokenizer. Say tokenizer=, or give ids.")
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"texts[{index}] has {text[error.start]!r} at {error.start}, half of a character. Take it out."
            ) from error
    given, twice = [], []
    for index, (text, one) in enumerate(
        zip(texts, encode(tokenizer, texts, special_tokens=special_tokens), strict=True)
    ):
        if not one.real:
            raise DataError(f"texts[{index}] gives no token: {'it is empty' if not text else 'all is dropped'}.")
        if len(one.ids) > 1 and one.ids[0] == one.ids[1] and one.special[0] and not one.special[1]:
            twice.append(index)
        pieces = tokenizer.convert_ids_to_tokens(one.ids.tolist())
        given.append(GivenSequence(one.ids, one.special, one.start, one.end, pieces, text))
    if twice:
        warnings.warn(
            f"The tokenizer puts {given[twice[0]].pieces[0]!r} in front of every text, and {len(twice)} already begin "
            f"with it (the first is texts[{twice[0]}]), so it stands twice there. Take it out of the text if one is "
            "meant.",
            LakeWarning,
            stacklevel=4,
        )
    return given


def _of_ids(index: int, item: Any) -> GivenSequence:
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().numpy()
    try:
        ids = np.asarray(item)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty((0, 0))
    if ids.ndim == 1 and not len(ids):
        raise DataError(f"texts[{index}] has no ids: leave it out.")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(f"texts[{index}] is neither a text nor a list of ids (whole numbers).")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        position = int(np.argmax((ids < 0) | (ids > np.iinfo(np.int32).max)))
        raise DataError(f"texts[{index}]: token {position} has the id {ids[position]}, which no model has.")
    none = np.full(len(ids), -1, np.int32)
    return GivenSequence(ids.astype(np.int32), np.zeros(len(ids), bool), none, none)


def _check(index: int, given: GivenSequence, model: LoadedModel) -> None:
    ids = given.ids
    if model.max_length is not None and len(ids) > model.max_length:
        raise DataError(f"texts[{index}] has {len(ids)} tokens and the model reads at most {model.max_length}. Cut it.")
    if model.vocab_size is not None and int(ids.max()) >= model.vocab_size:
        position = int(np.argmax(ids >= model.vocab_size))
        raise DataError(
            f"texts[{index}]: token {position} has the id {ids[position]}, and the model's embedding table has "
            f"{model.vocab_size} rows. Use the tokenizer that the model was made with, or mend the ids."
        )


def _is_whole(item: object) -> bool:
    try:
        operator.index(item)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return False
    return not isinstance(item, (bool, torch.Tensor, np.ndarray))
