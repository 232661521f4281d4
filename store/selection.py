"""A selection: the rows that a query names, and the activations that belong to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from ..errors import RequestError
from .array_rows import ArrayRows
from .dtypes import StoredDtype
from .reader import RunReader

if TYPE_CHECKING:
    import torch

    from .lake import Lake

Layers = int | Sequence[int] | None


class Batch(NamedTuple):
    """A part of a selection: `array` is (n, *trailing) float32, row k belonging to row k of `table`.

    With a list of layers it is (layers, n, *trailing).
    """

    array: np.ndarray
    table: pa.Table


class Selection:
    """Rows of one or more runs in the order of a query's result, with their activations.

    `table` is the query's result as an Arrow table. Row k of every array belongs to row k of it. Memory-mapped reads
    do not verify checksums; `layerlake verify` does.
    """

    def __init__(self, lake: Lake, query: str, table: pa.Table) -> None:
        self.lake = lake
        self.query = query
        self.table = table
        missing = {"run", "row"} - set(table.column_names)
        if missing:
            raise RequestError(
                f"A selection must return the columns run and row; this query returns {table.column_names}. "
                "Add them: SELECT run, row, ... FROM tokens."
            )
        for name in ("run", "row"):
            if table.column_names.count(name) > 1:
                raise RequestError(f"The selection has two columns {name}: give one of them another name.")
            if table[name].null_count:
                raise RequestError(f"Column {name} of the selection holds {table[name].null_count} NULLs.")
        if not pa.types.is_integer(table["row"].type):
            raise RequestError(f"Column row of the selection is {table['row'].type}, not an integer.")
        if table.num_rows and not _is_text(table["run"].type):
            raise RequestError(f"Column run of the selection is {table['run'].type}, not text.")
        self.rows: np.ndarray = table["row"].to_numpy().astype(np.int64, copy=False)
        coded = table["run"].combine_chunks().cast(pa.string()).dictionary_encode()
        self._run_names: list[str] = coded.dictionary.to_pylist()
        self._run_codes: np.ndarray = coded.indices.to_numpy(zero_copy_only=False)
        self._sources: dict[tuple[int | None, str], _Source] = {}
        self._readers: list[RunReader] = [lake.reader(name) for name in self._run_names]
        for code, reader in enumerate(self._readers):
            reader.check_rows(self.rows[self._run_codes == code])

    def __len__(self) -> int:
        return len(self.rows)

    def bits(self, layer: Layers = None, site: str = "resid_post") -> np.ndarray:
        """Gather the stored bits, (n, *trailing) uint16 or uint32, exactly as the file has them.

        A list of layers gives them all, (layers, n, *trailing), in the list's order.
        """
        return self._gather(self.rows, self._run_codes, layer, site)[0]

    def array(self, layer: Layers = None, site: str = "resid_post") -> np.ndarray:
        """Gather the values as float32 numbers, (n, *trailing); exact for every stored dtype.

        A list of layers gives them all, (layers, n, *trailing), in the list's order.
        """
        bits, dtype = self._gather(self.rows, self._run_codes, layer, site)
        return dtype.to_float32(bits)

    def tensor(self, layer: Layers = None, site: str = "resid_post") -> torch.Tensor:
        """Gather the values as a torch tensor of the stored dtype, (n, *trailing), bit for bit.

        A list of layers gives them all, (layers, n, *trailing), in the list's order.
        """
        import torch

        bits, dtype = self._gather(self.rows, self._run_codes, layer, site)
        return torch.from_numpy(bits).view(getattr(torch, dtype.name))

    def batches(
        self,
        layer: Layers = None,
        site: str = "resid_post",
        *,
        size: int = 4096,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Iterate over the selection in batches of `size` rows, each row once.

        With `shuffle` the order is a permutation that depends on `seed` and the number of rows alone.
        """
        if size < 1:
            raise RequestError(f"A batch needs at least one row, not {size}.")
        self._gather(
            self.rows[:0], self._run_codes[:0], layer, site
        )  # an unknown site is an error now, not at the first batch
        return self._batches(layer, site, size, shuffle, seed, drop_last)

    def _batches(
        self, layer: Layers, site: str, size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> Iterator[Batch]:
        order = np.random.default_rng(seed).permutation(len(self)) if shuffle else np.arange(len(self))
        end = len(order) - len(order) % size if drop_last else len(order)
        for first in range(0, end, size):
            chosen = order[first : first + size]
            bits, dtype = self._gather(self.rows[chosen], self._run_codes[chosen], layer, site)
            yield Batch(dtype.to_float32(bits), self.table.take(pa.array(chosen)))

    def _source(self, layer: int | None, site: str) -> _Source:
        """Find an array in each run of the selection; they must be alike."""
        key = (layer, site)
        if key not in self._sources:
            arrays = [r.run.array(site, layer) for r in self._readers]
            kinds = {(a.dtype, a.shape) for a in arrays}
            if not kinds:
                raise RequestError("The selection is empty: its query gave no rows, so there is nothing to gather.")
            if len(kinds) > 1:
                pairs = zip(self._readers, arrays, strict=True)
                shown = "; ".join(f"{r.run.name}: {a.dtype} {a.shape}" for r, a in pairs)
                raise RequestError(f"The runs of this selection differ at {site} {layer} ({shown}). Select one a time.")
            rows = [reader.rows(array) for reader, array in zip(self._readers, arrays, strict=True)]
            self._sources[key] = _Source(rows[0].layout.dtype, arrays[0].shape, rows)
        return self._sources[key]

    def _gather(self, rows: np.ndarray, codes: np.ndarray, layer: Layers, site: str) -> tuple[np.ndarray, StoredDtype]:
        """Gather the bits of some of the selection's rows, given with the runs they belong to."""
        if not isinstance(layer, Iterable):
            source = self._source(layer, site)
            out = np.empty((len(rows), *source.shape), source.dtype.bits)
            source.gather(rows, codes, out)
            return out, source.dtype
        sources = [self._source(each, site) for each in layer]
        if not sources:
            raise RequestError("The list of layers is empty: name at least one.")
        if len({(s.dtype, s.shape) for s in sources}) > 1:
            raise RequestError(f"The layers {list(layer)} of {site} differ in dtype or shape: ask for each alone.")
        out = np.empty((len(sources), len(rows), *sources[0].shape), sources[0].dtype.bits)
        for part, source in zip(out, sources, strict=True):
            source.gather(rows, codes, part)
        return out, sources[0].dtype


class _Source(NamedTuple):
    """An array of one dtype and trailing shape in each run of a selection."""

    dtype: StoredDtype
    shape: tuple[int, ...]
    runs: list[ArrayRows]

    def gather(self, rows: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
        """Copy the bits of rows, each of the run that its code says, into `out`."""
        if len(self.runs) == 1:
            self.runs[0].gather(rows, out)
            return
        for code, run in enumerate(self.runs):
            where = np.flatnonzero(codes == code)
            part = np.empty((len(where), *out.shape[1:]), out.dtype)
            run.gather(rows[where], part)
            out[where] = part


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
