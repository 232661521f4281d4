"""A selection: the rows that a query names, and the activations that belong to them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..errors import RequestError, UnknownNameError, WorldError
from .context import Context, token_context
from .dtypes import StoredDtype
from .export import write_file, write_npy, write_parquet, write_safetensors
from .order import check_whole, count_batches, row_order
from .reader import RunReader
from .row_keys import check_keys, run_codes
from .row_kinds import ROW_KINDS, TOKENS
from .source import Source

if TYPE_CHECKING:
    import torch

    from .lake import Lake
    from .torch_dataset import SelectionDataset

Layers = int | Sequence[int] | None


class Batch(NamedTuple):
    """A part of a selection: `array` is (n, *trailing) float32, row k belonging to row k of `table`.

    With a list of layers it is (layers, n, *trailing).
    """

    array: np.ndarray
    table: pa.Table


_NOTHING = np.empty(0, np.int64)


class Selection:
    """Rows of one or more runs in the order of a query's result, with their activations.

    `table` is the query's result as an Arrow table. Row k of every array belongs to row k of it. Reading does not
    check checksums unless `verify` was asked for; `layerlake verify` checks everything.

    Row numbers are of one kind of rows: ``rows="tokens"``, ``"sequences"`` or ``"spans"``, which each way of reading
    takes. It need not be said where the runs store one kind only. A row that does not exist of that kind is refused.

    It can be pickled, and is opened anew where it arrives: the lake must be there under the same path.

    `runs` are the identities of the runs that the table speaks of: `WorldError` when the lake has another run of that
    name.
    """

    def __init__(
        self,
        lake: Lake,
        query: str,
        table: pa.Table,
        *,
        verify: bool = False,
        runs: Mapping[str, str] | None = None,
    ) -> None:
        self.lake = lake
        self.query = query
        self.table = table
        self.verify = verify
        check_keys(table)
        self._open()
        for reader in self._readers:
            name, now = reader.run.name, reader.run.record.identity
            if runs and runs.get(name, now) != now:
                raise WorldError(
                    f"The rows are of run {name!r} of {lake.root} as it was before it was made anew. Ask again when "
                    "the new one is published, or run `layerlake index`."
                )
        kinds = {kind for reader in self._readers for kind in reader.run.record.row_kinds.kinds}
        if len(kinds) == 1:  # of several, whoever reads says which
            self._check_rows(*kinds)

    def _check_rows(self, kind: str) -> None:
        if kind in self._checked:
            return
        for code, reader in enumerate(self._readers):
            reader.check_rows(self.rows if len(self._readers) == 1 else self.rows[self._run_codes == code], kind)
        self._checked.add(kind)

    def _open(self) -> None:
        table = self.table
        self.rows: np.ndarray = table["row"].to_numpy().astype(np.int64, copy=False)
        self._run_names, self._run_codes = run_codes(table["run"])
        self._sources: dict[tuple[int | None, str, str | None], Source] = {}
        self._checked: set[str] = set()
        self._readers: list[RunReader] = [self.lake.reader(name) for name in self._run_names]
        self._verifiers = [self.lake.verifier(name) for name in self._run_names] if self.verify else []

    def __getstate__(self) -> dict[str, Any]:
        # The copy of the lake is opened anew: a copy of this shares no reader with it, in a forked process either.
        state = {"lake": copy.copy(self.lake), "query": self.query, "table": self.table, "verify": self.verify}
        state["checked"] = self._checked
        return state | {"runs": [_stamp(reader) for reader in self._readers]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        runs, checked = state.pop("runs"), state.pop("checked")
        self.__dict__.update(state)
        self._open()
        self._checked |= checked  # what is committed stays
        for stamp, reader in zip(runs, self._readers, strict=True):
            if stamp != _stamp(reader):
                raise WorldError(
                    f"Run {reader.run.name!r} of {self.lake.root} is not the one that the selection was made of: it "
                    "was made anew since. Select again."
                )

    def __len__(self) -> int:
        return len(self.rows)

    def bits(self, layer: Layers = None, site: str = "resid_post", *, rows: str | None = None) -> np.ndarray:
        """Gather the stored bits, (n, *trailing) uint16 or uint32, exactly as the file has them.

        A list of layers gives them all, (layers, n, *trailing), in the list's order.
        """
        return self._gather(None, layer, site, rows)[0]

    def array(self, layer: Layers = None, site: str = "resid_post", *, rows: str | None = None) -> np.ndarray:
        """Gather the values as float32 numbers, (n, *trailing); exact for every stored dtype.

        A list of layers gives them all, (layers, n, *trailing), in the list's order.
        """
        bits, dtype = self._gather(None, layer, site, rows)
        return dtype.to_float32(bits)

    def tensor(self, layer: Layers = None, site: str = "resid_post", *, rows: str | None = None) -> torch.Tensor:
        """Gather the values as a torch tensor of the stored dtype, (n, *trailing), bit for bit.

        A list of layers gives them all, (layers, n, *trailing), in the list's order.
        """
        import torch

        bits, dtype = self._gather(None, layer, site, rows)
        return torch.from_numpy(bits).view(getattr(torch, dtype.name))

    def batches(
        self,
        layer: Layers = None,
        site: str = "resid_post",
        *,
        rows: str | None = None,
        size: int = 4096,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Iterate over the selection in batches of `size` rows, each row once.

        With `shuffle` the order is a permutation that depends on `seed` and the number of rows alone. The order takes
        8 bytes a row of memory.
        """
        size = check_whole("The size of a batch", size, 1)
        self._gather(_NOTHING, layer, site, rows)  # an unknown site is an error now, not at the first batch
        order = row_order(len(self), shuffle=shuffle, seed=check_whole("The seed", seed))
        end = size * count_batches(len(self), size, drop_last=drop_last)
        return self._batches(layer, site, rows, size, order[:end])

    def _batches(self, layer: Layers, site: str, rows: str | None, size: int, order: np.ndarray) -> Iterator[Batch]:
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            bits, dtype = self._gather(chosen, layer, site, rows)
            yield Batch(dtype.to_float32(bits), self.table.take(pa.array(chosen)))

    def torch_dataset(
        self,
        layer: int | None = None,
        site: str = "resid_post",
        *,
        rows: str | None = None,
        size: int | None = 4096,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        columns: Sequence[str] = (),
        rank: int = 0,
        world_size: int = 1,
    ) -> SelectionDataset:
        """Give a torch dataset of batches for ``DataLoader(dataset, batch_size=None)``; see `SelectionDataset`.

        A batch is a dict of ``activations`` (size, *trailing) in the stored dtype, ``index``, the rows' positions in
        `table`, and `columns`. It is the same for any number of workers; single rows with ``size=None``.
        """
        from .torch_dataset import SelectionDataset

        return SelectionDataset(
            self,
            layer,
            site,
            rows=rows,
            size=size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            columns=columns,
            rank=rank,
            world_size=world_size,
        )

    def context(self, row: int, n: int = 10, run: str | None = None, *, rows: str | None = None) -> Context:
        """Give the text around a row of the selection: up to `n` tokens on each side, in the same sequence.

        `row` is a stored row number of tokens, as in ``table["row"]``, not a position. `run` is needed where the
        selection has several runs. `RequestError` when the selection does not hold that row.
        """
        if not self._run_names:
            raise RequestError("The selection is empty: the query returned no rows, so none has a context.")
        if run is None and len(self._run_names) > 1:
            raise RequestError(f"The selection has several runs: say run= one of {', '.join(sorted(self._run_names))}.")
        if run is not None and run not in self._run_names:
            raise UnknownNameError.of("run", run, sorted(self._run_names), " in the selection")
        code = 0 if run is None else self._run_names.index(run)
        if self._readers[code].run.kind_of_rows(rows) != TOKENS:
            raise RequestError(
                f"Row {row} of run {self._run_names[code]!r} is a mean, which has no context: the tokens that it is of "
                "are in the table tokens, by seq and pos."
            )
        self._check_rows(TOKENS)
        row, n = check_whole("The row", row), check_whole("The number of tokens", n)
        if not ((self.rows == row) & (self._run_codes == code)).any():
            raise RequestError(
                f"Row {row} of run {self._run_names[code]!r} is not in this selection. Give a stored row number, as in "
                'sel.table["row"]; lake.rows(run, [row]) selects any row.'
            )
        return token_context(self._readers[code].run, row, n)

    def to_npy(
        self,
        path: str | os.PathLike[str],
        layer: int | None = None,
        site: str = "resid_post",
        *,
        rows: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write the values as a ``.npy`` file of float32, (n, *trailing), and return its path.

        Like the other two it is written in blocks and appears when it is whole; a file that exists is refused unless
        `overwrite`. This format has no place for what the numbers are of; the others say it.
        """
        return write_file(self, write_npy, path, layer, site, rows, overwrite=overwrite)

    def to_safetensors(
        self,
        path: str | os.PathLike[str],
        layer: int | None = None,
        site: str = "resid_post",
        *,
        rows: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write a safetensors file and return its path: ``activations`` in the stored dtype, ``row`` int64 (n,).

        With several runs, ``run`` int64 (n,) is the place of each row's run in the metadata's ``runs``. The metadata
        say runs, weights, site, layer, dtype, query and the hash of the rows.
        """
        return write_file(self, write_safetensors, path, layer, site, rows, overwrite=overwrite)

    def to_parquet(
        self,
        path: str | os.PathLike[str],
        layer: int | None = None,
        site: str = "resid_post",
        *,
        rows: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write `table` with a column ``activations``, a fixed-size list of float32, as Parquet and return its path.

        Trailing axes are flattened; the column's metadata have their shape. The schema's metadata are those of
        `to_safetensors`.
        """
        return write_file(self, write_parquet, path, layer, site, rows, overwrite=overwrite)

    def _source(self, layer: int | None, site: str, kind: str | None) -> Source:
        """Find an array in each run of the selection; they must be alike, and have its rows."""
        key = (layer, site, kind)
        if key not in self._sources:
            if kind is not None and kind not in ROW_KINDS:
                raise UnknownNameError.of("kind of rows", kind, ROW_KINDS)
            arrays = [r.run.array(site, layer, kind) for r in self._readers]
            if len(of := {a.rows for a in arrays}) > 1:
                raise RequestError(f"The runs of this selection store rows of {' and '.join(sorted(of))}. Say rows=.")
            kinds = {(a.dtype, a.shape) for a in arrays}
            if not kinds:
                raise RequestError("The selection is empty: its query gave no rows, so there is nothing to gather.")
            if len(kinds) > 1:
                pairs = zip(self._readers, arrays, strict=True)
                shown = "; ".join(f"{r.run.name}: {a.dtype} {a.shape}" for r, a in pairs)
                raise RequestError(f"The runs of this selection differ at {site} {layer} ({shown}). Select one a time.")
            self._check_rows(arrays[0].rows)
            rows = [reader.rows(array) for reader, array in zip(self._readers, arrays, strict=True)]
            self._sources[key] = Source(rows[0].layout.dtype, arrays[0].shape, rows)
        return self._sources[key]

    def _gather(
        self, chosen: np.ndarray | None, layer: Layers, site: str, kind: str | None
    ) -> tuple[np.ndarray, StoredDtype]:
        """Gather the bits of the selection's rows at the positions `chosen`; None: of all."""
        rows, codes = self.rows, self._run_codes
        if chosen is not None:
            rows, codes = rows[chosen], codes[chosen]
        if not isinstance(layer, Iterable):
            source = self._source(layer, site, kind)
            out = np.empty((len(rows), *source.shape), source.dtype.bits)
            source.gather(rows, codes, out, self._verifiers)
            return out, source.dtype
        sources = [self._source(each, site, kind) for each in layer]
        if not sources:
            raise RequestError("The list of layers is empty: name at least one.")
        if len({(s.dtype, s.shape) for s in sources}) > 1:
            raise RequestError(f"The layers {list(layer)} of {site} differ in dtype or shape: ask for each alone.")
        out = np.empty((len(sources), len(rows), *sources[0].shape), sources[0].dtype.bits)
        for part, source in zip(out, sources, strict=True):
            source.gather(rows, codes, part, self._verifiers)
        return out, sources[0].dtype


def _stamp(reader: RunReader) -> tuple[str, str, str]:
    record = reader.run.record
    return record.name, record.identity, record.created
