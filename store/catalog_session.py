"""The newest catalog, kept open and confined between the queries of a process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import duckdb

from ..errors import RequestError
from .catalog import catalog_file, open_generation
from .locks import new_lock

CONFINE = (
    "SET GLOBAL python_enable_replacements = false",  # no reading of the caller's variables by name, on any connection
    "SET enable_external_access = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET lock_configuration = true",
)
"""What keeps a connection from files, the network and the variables of its caller, for good."""


class CatalogSession:
    """Gives a connection of its own to each query, all to one open generation: the newest one at that moment.

    Opening a generation takes longer than most queries, and what was read of it stays in memory (within
    `memory_limit`). The pointer is looked at for each query, so that nobody is shown old data; threads may share this.
    """

    def __init__(self, root: Path, memory_limit: str = "2GB") -> None:
        self.root = root
        self.memory_limit = memory_limit
        self._open: _OpenGeneration | None = None
        self._lock = new_lock()
        self._inherited: list[_OpenGeneration] = []

    def __reduce__(self) -> tuple[type[CatalogSession], tuple[Path, str]]:
        return CatalogSession, (self.root, self.memory_limit)

    @contextlib.contextmanager
    def connection(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give a confined connection to the newest generation, for one query.

        What is registered with it is seen by this query alone. It stays open until the query ends, whatever other
        threads do meanwhile.
        """
        with self._lock:
            generation = self._newest()
            cursor = generation.connection.cursor()
            generation.queries += 1
        try:
            cursor.execute("USE lake")
            # EXPLAIN ANALYZE carries any statement out, and what it made in memory would be there for later queries.
            cursor.execute("BEGIN TRANSACTION READ ONLY")
            yield cursor
        finally:
            cursor.close()
            with self._lock:
                generation.queries -= 1
                generation.close_if_done()

    def close(self) -> None:
        """Let go of the open generation; the next query opens the newest."""
        with self._lock:
            self._retire()

    def _newest(self) -> _OpenGeneration:
        path = catalog_file(self.root)
        with contextlib.suppress(OSError):
            if self._open and self._open.is_of(path):
                return self._open
        self._retire()
        connection, path = open_generation(self.root)
        try:
            connection.execute("SET memory_limit = ?", [self.memory_limit])
        except duckdb.Error as error:
            connection.close()
            raise RequestError(f"{self.memory_limit!r} is not an amount of memory ({error}); write 2GB.") from error
        for setting in CONFINE:
            connection.execute(setting)
        self._open = _OpenGeneration(connection, path)
        return self._open

    def _retire(self) -> None:
        """Have nobody use the open generation any more; it is closed when the last query of it has ended."""
        if self._open and self._open.process != os.getpid():
            # Its threads were left behind in the process that this one was forked from: closing would wait for them.
            self._inherited.append(self._open)
        elif self._open:
            self._open.retired = True
            self._open.close_if_done()
        self._open = None


class _OpenGeneration:
    """An open generation and how many queries use it; closing it would end them, as DuckDB closes the cursors too."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, path: Path) -> None:
        self.connection = connection
        self.path = path
        self.process = os.getpid()
        self.queries = 0
        self.retired = False
        self._inode = 0
        with contextlib.suppress(OSError):
            self._inode = path.stat().st_ino

    def is_of(self, path: Path) -> bool:
        return (self.process, self.path, self._inode) == (os.getpid(), path, path.stat().st_ino)

    def close_if_done(self) -> None:
        if self.retired and not self.queries:
            self.connection.close()
