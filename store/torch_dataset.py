"""A selection as a torch dataset; import it only where torch is wanted."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..errors import RequestError, UnknownNameError
from .order import check_whole, count_batches, row_order

if TYPE_CHECKING:
    from .selection import Selection

_BLOCK_BYTES = 8 << 20
_OWN = ("activations", "index")


class SelectionDataset(IterableDataset[dict[str, Any]]):
    """Batches of a selection, each row once an epoch, for ``DataLoader(dataset, batch_size=None, num_workers=k)``.

    A batch is a dict: ``activations``, (size, *trailing) in the stored dtype, bit for bit; ``index``, int64 (size,),
    the positions in the selection's table; and each of `columns`, a tensor where it is numeric (int64, bool, or its
    own floating type), else a list. The last batch may be smaller, unless `drop_last`.

    With ``size=None`` it yields single rows for a DataLoader that collates them itself. Which rows share a batch then
    depends on the number of workers, as in any iterable dataset; batches of a `size` given here do not.

    **Order.** There is one list of batches, which depends on `seed` and the epoch alone. Worker w of W takes batches w,
    w + W, ..., and a DataLoader takes from its workers in turn, so any number of workers gives the same batches in
    the same order. With `shuffle`, call `set_epoch` before each epoch, or every epoch has the order of the first. The
    order takes 8 bytes a row of memory in each process.

    **Data-parallel training.** Rank r of `world_size` takes batches r, r + world_size, ... of that list. All ranks have
    equally many, so with a `world_size` above 1 up to ``world_size - 1`` batches at the end of the list are left out;
    which rows that are changes with the epoch when `shuffle` is on.

    It can be pickled: the lake is opened anew where it arrives, and must be there under the same path.
    """

    def __init__(
        self,
        selection: Selection,
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
    ) -> None:
        self.layer = layer
        self.site = site
        self.rows = rows
        self.size = None if size is None else check_whole("The size of a batch", size, 1)
        self.shuffle = shuffle
        self.seed = check_whole("The seed", seed)
        self.drop_last = drop_last
        self.world_size = check_whole("world_size", world_size, 1)
        self.rank = check_whole("The rank", rank)
        if self.rank >= self.world_size:
            raise RequestError(f"There is no rank {rank} among {world_size}: ranks count from 0 to world_size - 1.")
        if size is None and drop_last:
            raise RequestError("Single rows have no last batch to drop: give drop_last to the DataLoader.")
        source = selection._source(layer, site, rows)  # an unknown site is an error now, not in a worker
        self._row_bytes = math.prod(source.shape) * source.dtype.itemsize
        self._columns = {name: _column(selection.table, name) for name in _names(columns)}
        self._selection = copy.copy(selection)
        self._selection.table = selection.table.select(["run", "row"])  # what else there is need not travel to workers
        self._epoch = 0
        self._shared_epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._process: int | None = os.getpid()
        if not len(self):
            count = count_batches(len(selection), self.size or 1, drop_last=drop_last)
            raise RequestError(
                f"{len(selection)} rows make {count} batches of {self.size or 1}, which gives each of {world_size} "
                "ranks none. Ask for smaller batches or more rows."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next epoch; it reaches persistent workers too."""
        self._epoch = check_whole("The epoch", epoch)
        self._shared_epoch.fill_(self._epoch)

    def __len__(self) -> int:
        """Count the batches of this rank (rows with ``size=None``)."""
        count = count_batches(len(self._selection), self.size or 1, drop_last=self.drop_last)
        return count // self.world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # Not a generator: the epoch is that of now, not that of the first batch.
        self._settle()
        order = row_order(len(self._selection), shuffle=self.shuffle, seed=self.seed, epoch=self._epoch)
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = range(self.rank + worker * self.world_size, len(self) * self.world_size, workers * self.world_size)
        return self._batches(order, mine) if self.size else self._rows(order[mine.start : mine.stop : mine.step])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process = None
        if not self._shared_epoch.is_shared():  # pickled to a file or another machine, not for a worker of this loader
            self._shared_epoch.share_memory_()

    def _settle(self) -> None:
        """Find the epoch, and, in a process that was forked or to which this was sent, open the lake anew.

        The first epoch of a worker is the one at which it was started, even when `set_epoch` was called while it was
        starting: the other workers may have begun. Later ones are read from memory that all processes share.
        """
        if self._process == os.getpid():
            self._epoch = int(self._shared_epoch)
            return
        self._process = os.getpid()
        self._selection = copy.copy(self._selection)

    def _batches(self, order: np.ndarray, mine: range) -> Iterator[dict[str, Any]]:
        assert self.size is not None
        for batch in mine:
            yield self._gather(order[batch * self.size : (batch + 1) * self.size])

    def _rows(self, order: np.ndarray) -> Iterator[dict[str, Any]]:
        step = max(1, _BLOCK_BYTES // self._row_bytes)
        for first in range(0, len(order), step):
            block = self._gather(order[first : first + step])
            for k in range(len(block["index"])):
                # cloned, as a row would keep its whole block in memory otherwise
                yield {n: v[k].clone() if isinstance(v, torch.Tensor) else v[k] for n, v in block.items()}

    def _gather(self, chosen: np.ndarray) -> dict[str, Any]:
        bits, dtype = self._selection._gather(chosen, self.layer, self.site, self.rows)
        batch: dict[str, Any] = {
            "activations": torch.from_numpy(bits).view(getattr(torch, dtype.name)),
            "index": torch.from_numpy(chosen.copy()),
        }
        for name, values in self._columns.items():
            if isinstance(values, np.ndarray):
                batch[name] = torch.from_numpy(values[chosen])
            else:
                batch[name] = values.take(pa.array(chosen)).to_pylist()
        return batch


def _names(columns: Sequence[str]) -> list[str]:
    if isinstance(columns, str):
        raise RequestError(f"columns is a list of names: write [{columns!r}].")
    for name in columns:
        if name in _OWN:
            raise RequestError(f"A batch has its own {name!r}: give that column another name in the query.")
    return list(dict.fromkeys(columns))


def _column(table: pa.Table, name: str) -> np.ndarray | pa.ChunkedArray:
    """Give a column as an array that torch takes, or as it is where it holds no numbers."""
    count = table.column_names.count(name)
    if not count:
        raise UnknownNameError.of("column", name, table.column_names, " in the selection")
    if count > 1:
        raise RequestError(f"The selection has {count} columns {name!r}: give each a name of its own.")
    column = table[name]
    kind = column.type
    try:
        if pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0):
            column = column.cast(pa.int64())
        elif pa.types.is_decimal(kind):
            column = pc.cast(column, pa.float64())
        elif not (pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            return column
    except pa.ArrowInvalid as error:
        raise RequestError(f"Column {name!r} does not fit into 64-bit integers ({error}). Cast it in SQL.") from None
    if column.null_count:
        raise RequestError(
            f"Column {name!r} holds {column.null_count} NULLs, and a tensor has no place for them. Leave them out with "
            f"WHERE {name} IS NOT NULL, or put a number in their place with coalesce."
        )
    return column.to_numpy()
