"""Writing one unit: its shards, then its token table, then the record that commits it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import CorruptLakeError
from .archive_shard import ArchiveShardWriter
from .durable import fsync_folder, publish, sealed_json, temporary_name, write_temporary
from .layout import unit_name
from .parquet import table_bytes
from .row_kinds import TOKENS
from .run import Run
from .shard import ShardWriter
from .stats import value_statistics
from .unit_record import record_digest

_SYNCS = 8


class UnitWriter:
    """Writes a unit of a run: nothing of it can be read before `commit`, and all of it after.

    Use it as a context manager; leaving without a commit removes the temporary files. Each row of each array is
    written exactly once: a row written twice or never is an error, not a zero.
    """

    def __init__(self, run: Run, unit: int) -> None:
        self.run = run
        self.unit = unit
        self._shards: dict[str, ShardWriter] = {}

    def __enter__(self) -> UnitWriter:
        self.run.scratch.mkdir(exist_ok=True)
        try:
            for array in self.run.record.arrays:
                path = temporary_name(self.run.scratch, f"{unit_name(self.unit)}.{array.name}")
                writer = ArchiveShardWriter if array.codec == "archive" else ShardWriter
                self._shards[array.name] = writer(path, self.run.layout(array))
        except OSError:  # a full disk, perhaps at the last of many shards
            self._abandon()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()

    def _abandon(self) -> None:
        for shard in self._shards.values():
            shard.abandon()
        self._shards.clear()

    def write(self, array: str, row: int, bits: np.ndarray) -> None:
        """Store raw `bits`, (n, *trailing), of an array by name at the unit's rows [row, row + n)."""
        self._shards[array].write(row, bits)

    def read(self, array: str, row: int, rows: int) -> np.ndarray:
        """Read back raw bits, (rows, *trailing), of an array by name that were written at the unit's rows."""
        return self._shards[array].read(row, rows)

    def commit(
        self,
        tokens: pa.Table,
        sequences: int,
        made: dict[str, Any],
        pooled: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Publish shards, token table and record, in that order, and return the record.

        `tokens` is the unit's token table; its length is the number of used rows of tokens. `pooled` are the used rows
        of the other kinds that the run stores. `made` says who made the unit
        and how long it took: the part of the record that may differ between two makings of the same bytes.
        """
        used = {TOKENS: tokens.num_rows, **(pooled or {})}
        body: dict[str, Any] = {
            "unit": self.unit,
            "identity": self.run.record.identity,
            "first_row": self.unit * self.run.record.unit_rows,
            "rows": tokens.num_rows,
            "sequences": sequences,
            "arrays": {},
            **({"pooled": dict(pooled)} if pooled else {}),
        }
        table = table_bytes(tokens)
        self.run.check_same()  # a worker presumed dead may find another run in the place of its own
        body["tokens"] = {"bytes": len(table), "sha256": hashlib.sha256(table).hexdigest()}
        with ThreadPoolExecutor(min(_SYNCS, len(self._shards) or 1)) as pool:
            synced = []
            for array in self.run.record.arrays:
                # The disk is at work on one shard while the processor is on the next.
                shard = self._shards[array.name]
                rows = shard.finish(used[array.rows])
                synced.append(pool.submit(shard.sync))
                statistics = value_statistics(rows, shard.layout.dtype)
                body["arrays"][array.name] = shard.facts() | {"statistics": statistics}
                del rows  # and with it the disk space of rows that were compressed
            for each in synced:
                each.result()
            folders = []
            for array in self.run.record.arrays:
                shard, final = self._shards[array.name], self.run.shard_path(array, self.unit)
                self._publish(shard.path, final, shard.same)
                folders.append(pool.submit(fsync_folder, final.parent))
            final = self.run.tokens_path(self.unit)
            temporary = write_temporary(self.run.scratch, final.name, table)
            self._publish(temporary, final, lambda path: path.read_bytes() == table)
            folders.append(pool.submit(fsync_folder, final.parent))
            for each in folders:
                each.result()
        return self._publish_record(body, made)

    def _publish(self, temporary: Path, final: Path, same: Callable[[Path], bool]) -> None:
        # The name is taken when an earlier attempt got this far, or a worker presumed dead is still at it. The same
        # bytes are kept. Other bytes can only be a remnant, and are replaced while no record vouches for them.
        try:
            os.link(temporary, final)
        except FileExistsError:
            if not same(final):
                if self.run.unit_path(self.unit).exists():
                    raise CorruptLakeError(
                        f"{final} is committed with other content than this attempt computed; the committed file is "
                        "kept. Run `layerlake verify`."
                    ) from None
                temporary.replace(final)
        finally:
            temporary.unlink(missing_ok=True)

    def _publish_record(self, body: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        record = body | {"sha256": record_digest(body), "made": made}
        final = self.run.unit_path(self.unit)
        self.run.check_same()
        if not publish(write_temporary(self.run.scratch, final.name, sealed_json(record)), final):
            existing = self.run.unit_record(self.unit)
            if existing.get("sha256") != record["sha256"]:
                raise CorruptLakeError(
                    f"{final} commits other values than this attempt computed; it is kept. Run `layerlake verify`."
                )
            return existing
        return record
