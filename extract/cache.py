"""Activations in memory, each row with its token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..errors import RequestError, UnknownNameError
from ..store.printing import count
from ..store.record import ArraySpec, find_array
from .site_list import layers_text
from .sites import parse_site

_WHERE = " in this capture"


class Cache:
    """What `capture` gives: the values at every site that was asked for, the rows of all sequences after one another.

        cache[3, "resid_post"]        (rows, width) tensor of layer 3; row k belongs to row k of cache.tokens
        cache["embed"]                a site without a layer; cache["resid_post-3"] names both at once
        cache.sequence(0)             the same of one sequence, (time, ...): views, nothing is copied
        cache.array(3, "resid_post")  float32 NumPy, as a selection of a lake gives it, for what was written for one

    `tokens` is an Arrow table, one row a token: seq, pos, token_id, token, char_start, char_end, special. `texts` are
    the texts as given, None for ids. `arrays` say site, layer, dtype and shape of a row; ``len`` is the rows.
    """

    def __init__(
        self,
        model: str,
        arrays: Sequence[ArraySpec],
        values: Mapping[str, torch.Tensor],
        tokens: pa.Table,
        first: Sequence[int],
        texts: Sequence[str | None],
    ) -> None:
        self.model = model
        self.arrays = tuple(arrays)
        self.tokens = tokens
        self.texts = tuple(texts)
        self._values = dict(values)
        self._first = tuple(first)
        """The first row of each sequence, and at the end the number of rows."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of all arrays, in the order in which the model computes them."""
        return tuple(a.name for a in self.arrays)

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return len(self._first) - 1

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, key: str | tuple[Any, Any]) -> torch.Tensor:
        """Give the values at a site, (rows, ...): the tensor itself, not a copy.

        `UnknownNameError` lists the sites or layers there are.
        """
        return self._values[self._find(key).name]

    __iter__ = None  # rows, sequences or sites: which of them is meant would be a guess

    def __contains__(self, key: object) -> bool:
        try:
            return bool(self._find(key))
        except RequestError:
            return False

    def array(self, layer: int | Sequence[int] | None = None, site: str = "resid_post") -> np.ndarray:
        """Give the values as float32 numbers, (rows, ...), a copy; with a list of layers (layers, rows, ...)."""
        if isinstance(layer, (Sequence, np.ndarray)):
            if not len(layer):
                raise RequestError("The list of layers is empty: name at least one.")
            chosen = [self[each, site] for each in layer]
            if len({c.shape for c in chosen}) > 1:
                raise RequestError(f"The layers {list(layer)} of {site} differ in shape: ask for each alone.")
            return np.stack([c.float().numpy() for c in chosen])
        return self[layer, site].to(torch.float32, copy=True).numpy()

    def sequence(self, index: int) -> Cache:
        """Give one sequence as a cache of its own, whose values and tokens are views of this one's."""
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.sequences:
            raise UnknownNameError.of("sequence", index, range(self.sequences), _WHERE)
        first, end = self._first[index], self._first[index + 1]
        values = {name: value[first:end] for name, value in self._values.items()}
        tokens = self.tokens.slice(first, end - first)
        return Cache(self.model, self.arrays, values, tokens, (0, end - first), self.texts[index : index + 1])

    def __repr__(self) -> str:
        layers: dict[str, list[int]] = {}
        for array in self.arrays:
            layers.setdefault(array.site, []).extend([] if array.layer is None else [array.layer])
        sites = ", ".join(f"{site} {layers_text(own)}".rstrip() for site, own in layers.items())
        return f"<Cache of {self.model}: {count(self.sequences, 'sequence')}, {count(len(self), 'token')}; {sites}>"

    def _find(self, key: object) -> ArraySpec:
        if isinstance(key, str):
            named = next((a for a in self.arrays if a.name == key), None)
            return named or find_array(self.arrays, *parse_site(key), _WHERE)
        if isinstance(key, tuple) and len(key) == 2:
            site, layer = key if isinstance(key[0], str) else key[::-1]
            whole = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
            if isinstance(site, str) and (layer is None or whole):
                known = any(a.site == site for a in self.arrays)
                number = None if layer is None else int(layer)
                return find_array(self.arrays, site if known else parse_site(site).site, number, _WHERE)
        raise RequestError(f"{key!r} names no values: ask by layer and site. There are {', '.join(self.sites)}.")
