"""The lake: what was extracted, asked for in SQL and read as arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .array_rows import ShardMaps
from .catalog import publish_catalog
from .layout import check_lake, lake_path
from .reader import RunReader
from .run import Run, run_names
from .selection import Selection
from .sql import run_sql
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
        return run_sql(self.root, query, tables=tables, timeout=timeout)

    def select(self, query: str, *, tables: Mapping[str, Any] | None = None, timeout: float = 60.0) -> Selection:
        """Select rows with a query that returns at least the columns `run` and `row`.

        A query with LIMIT but without ORDER BY may name other rows each time; the selection's `table` holds the rows
        that were used.
        """
        return Selection(self, query, self.sql(query, tables=tables, timeout=timeout))

    def rows(self, run: str, rows: Any) -> Selection:
        """Select rows of a run by their numbers, without SQL."""
        numbers = pa.array(rows, pa.int64())
        name = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(numbers), np.int32)), pa.array([run]))
        return Selection(self, "", pa.table({"run": name, "row": numbers}))

    def reader(self, run: str) -> RunReader:
        """Give the reader of a run, kept while the run is the same one."""
        known = self._readers.get(run)
        if known is None or not known.run.is_there():
            known = self._readers[run] = RunReader(Run(self.root, run), self._maps)
        return known

    def index(self) -> Path:
        """Rebuild the catalog from the lake's files and return the new generation's path."""
        return publish_catalog(self.root, rebuild=True)

    def verify(self, run: str | None = None) -> list[Problem]:
        """Check counts and checksums of one run or all, and return what is wrong; empty when all is well."""
        return verify_lake(self.root, run)
