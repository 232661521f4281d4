"""SQL over a lake, confined to reading: one SELECT or EXPLAIN, no files, no network, bounded in memory and time."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from ..errors import LakeWarning, RequestError, SqlRefusedError, WorldError
from .catalog import damaged
from .catalog_session import CatalogSession

_ALLOWED = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}


class Answer(NamedTuple):
    """What a query gave, and of which runs: the identity of each run that the catalog has."""

    table: pa.Table
    runs: dict[str, str]


def run_sql(
    session: CatalogSession, query: str, *, tables: Mapping[str, Any] | None = None, timeout: float = 60.0
) -> Answer:
    """Run one SELECT or EXPLAIN over the newest catalog generation and return an Arrow table, and the runs in it.

    `tables` are the caller's own Arrow tables or pandas frames, by name. `timeout` is in seconds. Raises
    `SqlRefusedError` (exit code 2) for any other statement and for SQL that DuckDB rejects, and `WorldError` when
    time or memory run out.
    """
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        raise RequestError(f"A query can be given more than 0 seconds, not {timeout}.")
    with session.connection() as connection:
        for name, table in (tables or {}).items():
            _register(connection, name, table)
        statement = _one_statement(connection, query)
        try:
            _warn(connection)
            with _stopped_after(timeout, connection):
                table = _result(connection, statement, query)
                runs = connection.execute("SELECT run, identity FROM lake.run_table").fetchall()
                return Answer(table, dict(runs))
        except duckdb.InterruptException:
            raise WorldError(
                f"The query took longer than {timeout:g} s and was stopped. Ask for less, or give it more time."
            ) from None
        except duckdb.OutOfMemoryException as error:
            raise WorldError(
                f"The query needs more than the memory limit of {session.memory_limit}; ask for less ({error})."
            ) from error
        except duckdb.Error as error:
            if _is_damage(error):
                session.close()
                raise damaged(session.root / "catalog", error) from error
            raise SqlRefusedError(str(error).strip()) from error


def _is_damage(error: duckdb.Error) -> bool:
    """Say whether DuckDB failed to read a file; a query reaches none, so it is the catalog's own."""
    kinds = (duckdb.IOException, duckdb.SerializationException, duckdb.FatalException)
    # A block with another checksum than it had has no class of its own.
    return isinstance(error, kinds) or (type(error) is duckdb.Error and "Corrupt database" in str(error))


def _one_statement(connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.Statement:
    try:
        query.encode()
        statements = connection.extract_statements(query)
    except UnicodeEncodeError as error:
        raise SqlRefusedError(f"The query is not Unicode text: {error}.") from None
    except duckdb.Error as error:
        raise SqlRefusedError(str(error).strip()) from error
    kinds = [s.type for s in statements]
    if kinds == [duckdb.StatementType.MULTI]:
        raise SqlRefusedError(
            "This PIVOT finds its columns with a second statement, and a lake runs one. List them: "
            "PIVOT ... ON column IN ('a', 'b')."
        )
    if len(kinds) != 1 or kinds[0] not in _ALLOWED:
        shown = ", ".join(k.name for k in kinds) or "nothing"
        raise SqlRefusedError(f"A lake runs exactly one SELECT or EXPLAIN at a time; this is {shown}.")
    return statements[0]


def _result(connection: duckdb.DuckDBPyConnection, statement: duckdb.Statement, query: str) -> pa.Table:
    # EXPLAIN has no relation form; its plan comes back as rows of (kind, text).
    if statement.type == duckdb.StatementType.EXPLAIN:
        rows = connection.execute(statement).fetchall()
        return pa.table({"explain_key": [r[0] for r in rows], "explain_value": [r[1] for r in rows]})
    return connection.sql(query).to_arrow_table()


@contextlib.contextmanager
def _stopped_after(seconds: float, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Interrupt what the connection does inside, once `seconds` have passed."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds):
            while not done.wait(0.02):
                connection.interrupt()  # again and again: one that comes before the query has begun is lost

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _warn(connection: duckdb.DuckDBPyConnection) -> None:
    """Say which runs and labels are left out of every answer."""
    query = "SELECT run, labels, what FROM lake.problems ORDER BY run, labels"
    for name, labels, what in connection.execute(query).fetchall():
        left_out = f"Run {name!r} is" if labels is None else f"Labels {labels!r} of run {name!r} are"
        warnings.warn(f"{left_out} damaged and left out: {what}", LakeWarning, stacklevel=4)


def _register(connection: duckdb.DuckDBPyConnection, name: str, table: Any) -> None:
    if not name.isidentifier():
        raise RequestError(f"{name!r} cannot name a table: use a plain identifier.")
    taken = connection.execute("SELECT table_name FROM duckdb_tables() UNION SELECT view_name FROM duckdb_views()")
    if name.lower() in {known.lower() for (known,) in taken.fetchall()}:
        raise RequestError(f"{name!r} is a table of the lake already: give yours another name.")
    try:
        connection.register(name, table)
    except (duckdb.Error, TypeError) as error:
        raise RequestError(f"Table {name!r} cannot be used in SQL, being a {type(table).__name__}: {error}") from error
