"""The newest catalog, kept open and confined between the queries of a process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb

from ..errors import RequestError
from .catalog import catalog_file, open_generation

_CONFINE = (
    "SET GLOBAL python_enable_replacements = false",  # no reading of the caller's variables by name, on any connection
    "SET enable_external_access = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET lock_configuration = true",
)


class CatalogSession:
    """Gives a connection of its own to each query, all to one open generation: the newest one at that moment.

    Opening a generation takes longer than most queries, and what was read of it stays in memory (within
    `memory_limit`). The pointer is looked at for each query, so that nobody is shown old data; threads may share this.
    """

    def __init__(self, root: Path, memory_limit: str = "2GB") -> None:
        self.root = root
        self.memory_limit = memory_limit
        self._open: tuple[int, Path, int] | None = None
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._lock = threading.Lock()
        self._inherited: list[object] = []

    def __reduce__(self) -> tuple[type[CatalogSession], tuple[Path, str]]:
        return CatalogSession, (self.root, self.memory_limit)

    @contextlib.contextmanager
    def connection(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give a confined connection to the newest generation, for one query.

        What is registered with it is seen by this query alone.
        """
        with contextlib.closing(self._newest().cursor()) as cursor:
            cursor.execute("USE lake")
            yield cursor

    def close(self) -> None:
        """Let go of the open generation; the next query opens the newest."""
        with self._lock:
            self._drop()

    def _newest(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            path = catalog_file(self.root)
            with contextlib.suppress(OSError):
                if self._connection and self._open == (os.getpid(), path, path.stat().st_ino):
                    return self._connection
            self._drop()
            connection, path = open_generation(self.root)
            try:
                connection.execute("SET memory_limit = ?", [self.memory_limit])
            except duckdb.Error as error:
                connection.close()
                raise RequestError(f"{self.memory_limit!r} is not an amount of memory ({error}); write 2GB.") from error
            for setting in _CONFINE:
                connection.execute(setting)
            with contextlib.suppress(OSError):
                self._open = (os.getpid(), path, path.stat().st_ino)
            self._connection = connection
            return connection

    def _drop(self) -> None:
        if self._connection and self._open and self._open[0] != os.getpid():
            # Its threads were left behind in the process that this one was forked from: closing would wait for them.
            self._inherited.append(self._connection)
        elif self._connection:
            self._connection.close()
        self._connection = self._open = None
