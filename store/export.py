"""Writing a selection into one file of a common format, in blocks: memory does not grow with the selection."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .. import __version__
from ..errors import RequestError, WorldError
from .dtypes import StoredDtype
from .durable import fsync_folder, publish, temporary_name
from .row_kinds import TOKENS
from .tokens import table_hash

if TYPE_CHECKING:
    from .selection import Selection

_BLOCK_BYTES = 8 << 20
_SAFETENSORS_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def write_file(
    selection: Selection,
    write: Callable[[Export, BinaryIO], None],
    path: str | os.PathLike[str],
    layer: int | None,
    site: str,
    rows: str | None,
    *,
    overwrite: bool,
) -> Path:
    """Write a selection with one of the writers below, whole or not at all, and return the file's path."""
    export = Export.of(selection, layer, site, rows)
    final = Path(path).expanduser().absolute()
    with new_file(final, selection.lake.root, overwrite=overwrite) as file:
        write(export, file)
    return final


@dataclass(frozen=True)
class Export:
    """What is to be written: the rows of a selection at one layer and site."""

    selection: Selection
    layer: int | None
    site: str
    dtype: StoredDtype
    shape: tuple[int, ...]
    """The trailing shape of a row."""
    rows: str
    """The kind of rows."""

    @classmethod
    def of(cls, selection: Selection, layer: int | None, site: str, rows: str | None) -> Export:
        """Look the array up; `RequestError` when the selection is empty or has no such array."""
        source = selection._source(layer, site, rows)
        array = source.runs[0].array
        return cls(selection, array.layer, site, source.dtype, source.shape, array.rows)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Give (first position, raw bits) of block after block."""
        # Counted as float32 and a few columns, so that a block of one-number rows is not millions of table rows.
        step = max(1, _BLOCK_BYTES // (4 * math.prod(self.shape) + 64))
        for first in range(0, len(self.selection), step):
            chosen = np.arange(first, min(first + step, len(self.selection)))
            yield first, self.selection._gather(chosen, self.layer, self.site, self.rows)[0]

    def metadata(self) -> dict[str, str]:
        """Say what the values are: plain text, or JSON where it is not text.

        ``rows_sha256`` hashes run and row of all rows in their order. ``runs`` names each run with its identity, and
        with the fingerprint of the weights.
        """
        records = [reader.run.record for reader in self.selection._readers]
        runs = [
            {"run": r.name, "identity": r.identity, "weights": r.settings.get("model", {}).get("fingerprint")}
            for r in records
        ]
        return {
            "layerlake": __version__,
            "runs": json.dumps(runs),
            "site": self.site,
            "layer": json.dumps(self.layer),
            **({} if self.rows == TOKENS else {"kind": self.rows}),
            "dtype": self.dtype.name,
            "shape": json.dumps(self.shape),
            "query": self.selection.query,
            "rows": str(len(self.selection)),
            "rows_sha256": rows_hash(self.selection.table),
        }


def rows_hash(table: pa.Table) -> str:
    """Hash the columns run and row, in order; a block is held at a time."""
    schema = pa.schema([("run", pa.string()), ("row", pa.int64())])
    keys = table.select(schema.names)
    step = 1 << 16
    return table_hash(keys.slice(first, step).cast(schema) for first in range(0, keys.num_rows, step))


def write_npy(export: Export, file: BinaryIO) -> None:
    """Write a ``.npy`` file of float32."""
    shape = (len(export.selection), *export.shape)
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    for _, bits in export.blocks():
        file.write(_raw(export.dtype.to_float32(bits)))


def write_safetensors(export: Export, file: BinaryIO) -> None:
    """Write a safetensors file: ``row`` int64 (n,), ``activations`` (n, *trailing) in the stored dtype.

    With several runs there is ``run`` too, int64 (n,): the place of the row's run in the metadata's ``runs``. The
    format is the header's length (8 bytes, little-endian), the header in JSON, and the tensors without gaps; the
    widest dtype comes first, so that each tensor is aligned.
    """
    selection = export.selection
    n = len(selection)
    keys = {"row": selection.rows} | ({"run": selection._run_codes} if len(selection._readers) > 1 else {})
    header: dict[str, object] = {"__metadata__": export.metadata()}
    offset = 0
    for name in keys:
        header[name] = {"dtype": "I64", "shape": [n], "data_offsets": [offset, offset := offset + 8 * n]}
    end = offset + n * math.prod(export.shape) * export.dtype.itemsize
    kind = _SAFETENSORS_NAMES[export.dtype.name]
    header["activations"] = {"dtype": kind, "shape": [n, *export.shape], "data_offsets": [offset, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for values in keys.values():
        for first in range(0, n, _BLOCK_BYTES // 8):
            file.write(_raw(values[first : first + _BLOCK_BYTES // 8].astype("<i8")))
    for _, bits in export.blocks():
        file.write(_raw(bits))


def write_parquet(export: Export, file: BinaryIO) -> None:
    """Write a Parquet file: the columns of the table, and ``activations``, a fixed-size list of float32.

    Axes after the first are flattened; the column's metadata have their ``shape``. A block is a row group.
    """
    table = export.selection.table
    _check_columns(table.column_names)
    width = math.prod(export.shape)
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False), width)
    field = pa.field("activations", kind, nullable=False, metadata={"shape": json.dumps(export.shape)})
    schema = pa.schema([*table.schema, field], metadata=dict(export.metadata()))
    try:
        with pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            use_dictionary=table.column_names,  # pyright: ignore[reportArgumentType]  # activations hardly repeat
            write_statistics=table.column_names,  # pyright: ignore[reportArgumentType]
        ) as writer:
            for first, bits in export.blocks():
                flat = pa.array(export.dtype.to_float32(bits).reshape(-1), pa.float32())
                columns = table.slice(first, len(bits)).columns
                lists = pa.FixedSizeListArray.from_arrays(flat, type=kind)
                block = pa.Table.from_arrays([*columns, lists], schema=schema)
                writer.write_table(block, row_group_size=len(bits))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise RequestError(f"The table of the selection cannot be written as Parquet: {error}") from error


@contextlib.contextmanager
def new_file(path: Path, lake: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Open a file that has its name, at once, when it is whole and durable; after an error nothing is left.

    A process that is killed leaves its temporary file, ``NAME.PROCESS.RANDOM.tmp``, and never a part under the name.
    `RequestError`: the name is taken and `overwrite` is false, its folder is not there, or it lies in the lake.
    """
    _check_target(path, lake, overwrite)
    temporary = temporary_name(path.parent, path.name)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            temporary.replace(path)
            fsync_folder(path.parent)
        elif not publish(temporary, path):
            raise _taken(path)
    except OSError as error:
        raise WorldError(
            f"{path} could not be written ({error.strerror or error}). Nothing is left of it: mend that and ask again."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _check_target(path: Path, lake: Path, overwrite: bool) -> None:
    if not path.parent.is_dir():
        raise RequestError(f"{path} cannot be written: the folder {path.parent} is not there. Make it first.")
    if path.parent.resolve().is_relative_to(lake.resolve()):
        raise RequestError(f"{path} lies in the lake {lake}, which holds nothing but its own files. Write elsewhere.")
    if path.is_dir():
        raise RequestError(f"{path} is a folder. Name a file.")
    if os.path.lexists(path) and not overwrite:
        raise _taken(path)


def _taken(path: Path) -> RequestError:
    return RequestError(f"{path} exists and is kept. Choose another name, or give overwrite=True.")


def _check_columns(names: list[str]) -> None:
    if "activations" in names:
        raise RequestError("The selection has a column 'activations' of its own: give it another name in the query.")
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise RequestError(f"The selection has two columns {twice[0]!r}: give each a name of its own in the query.")


def _raw(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
