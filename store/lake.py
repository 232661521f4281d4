"""The lake: what was extracted, asked for in SQL and read as arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import UnknownNameError, WorldError
from .array_rows import ShardMaps
from .catalog import publish_catalog
from .catalog_session import CatalogSession
from .label_sets import LabelSet
from .layout import check_lake, lake_path
from .reader import RunReader
from .remove import Removal, remove_run
from .row_keys import row_numbers
from .run import Run, run_names
from .selection import Selection
from .sql import run_sql
from .verified import ChunkVerifier
from .verify import Problem, verify_lake


class Lake:
    """A folder of runs, read through SQL.

    >>> lake = Lake.open("lake")
    >>> lake.sql("SELECT run, tokens FROM runs")
    >>> sel = lake.select("SELECT run, row, depth FROM tokens WHERE depth >= 2")
    >>> sel.array(layer=3)        # (n, width) float32; row k belongs to row k of sel.table
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._readers: dict[str, RunReader] = {}
        self._maps = ShardMaps()
        self._session = CatalogSession(root)
        self._verifiers: dict[str, tuple[RunReader, ChunkVerifier]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).open, (str(self.root),)  # nothing that is open travels to another process

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Lake:
        """Open a lake; `LakeFormatError` when it is none or of another format version."""
        root = lake_path(path)
        check_lake(root)
        return cls(root)

    def __repr__(self) -> str:
        return f"Lake({str(self.root)!r})"

    def runs(self) -> list[str]:
        """List the runs by name, finished or not."""
        return run_names(self.root)

    def run(self, name: str) -> Run:
        """Give a run by name; `UnknownNameError` lists near names."""
        return Run(self.root, name)

    def sql(self, query: str, *, tables: Mapping[str, Any] | None = None, timeout: float = 60.0) -> pa.Table:
        """Run one SELECT or EXPLAIN over the views of the lake and return an Arrow table.

        `tables` are your own Arrow tables or pandas frames, usable by name. The newest published catalog is looked
        up for each query. Raises `SqlRefusedError` for other statements, `WorldError` after `timeout` seconds.
        """
        return run_sql(self._session, query, tables=tables, timeout=timeout).table

    def select(
        self,
        query: str,
        *,
        tables: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        verify: bool = False,
    ) -> Selection:
        """Select rows with a query that returns at least the columns `run` and `row`.

        A query with LIMIT but without ORDER BY may name other rows each time; the selection's `table` holds the rows
        that were used. With `verify`, the checksum of every inner chunk (about 1 MiB) is checked before values of it
        are given out, each chunk once: `CorruptLakeError` names the file and the rows.
        """
        answer = run_sql(self._session, query, tables=tables, timeout=timeout)
        try:
            return Selection(self, query, answer.table, verify=verify, runs=answer.runs)
        except (WorldError, UnknownNameError):  # a run may have been removed or made anew since the answer
            answer = run_sql(self._session, query, tables=tables, timeout=timeout)
            return Selection(self, query, answer.table, verify=verify, runs=answer.runs)

    def rows(self, run: str, rows: Any, *, verify: bool = False) -> Selection:
        """Select rows of a run by number, in the order given, duplicates kept; no SQL is needed.

        `rows` is any one-dimensional sequence or array of integers. `RequestError` when it is not, or when no token
        stands in one of them.
        """
        numbers = row_numbers(rows)
        self.reader(run)
        name = pa.DictionaryArray.from_arrays(np.zeros(len(numbers), np.int32), [run])
        table = pa.table({"run": name, "row": numbers})
        return Selection(self, f"{len(numbers)} rows of run {run!r} by number", table, verify=verify)

    def reader(self, run: str) -> RunReader:
        """Give the reader of a run, kept while the run is the same one."""
        known = self._readers.get(run)
        if known is None or not known.run.is_there():
            known = self._readers[run] = RunReader(Run(self.root, run), self._maps)
        return known

    def verifier(self, run: str) -> ChunkVerifier:
        """Give what checks the chunks of a run, kept as long as its reader: each chunk is checked once."""
        reader = self.reader(run)
        if run not in self._verifiers or self._verifiers[run][0] is not reader:
            self._verifiers[run] = (reader, ChunkVerifier(reader.run))
        return self._verifiers[run][1]

    def annotate(self, run: str, source: Any, name: str | None = None) -> LabelSet:
        """Add labels to a run, finished or not, and publish the catalog; returns the record of the new version.

        `source` is a .parquet, .csv or .jsonl file, an Arrow table or a frame, with `row`, or `seq` and `pos`, and the
        labels. Other columns of the table `tokens` are compared with the run. `name` is by default the file's. Raises
        `RequestError` where anything does not fit, and nothing is stored then.
        """
        from .annotate import annotate

        return annotate(self.root, run, source, name)

    def index(self) -> Path:
        """Rebuild the catalog from the lake's files and return the new generation's path."""
        return publish_catalog(self.root, rebuild=True)

    def remove(self, run: str, *, dry_run: bool = False) -> Removal:
        """Remove a run whole and say what went; with `dry_run` only say what would go, and what would stay."""
        return remove_run(self.root, run, dry_run=dry_run)

    def verify(self, run: str | None = None) -> list[Problem]:
        """Check counts and checksums of one run or all, and return what is wrong; empty when all is well."""
        return verify_lake(self.root, run)
