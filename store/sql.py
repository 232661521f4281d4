"""SQL over a lake, confined to reading: one SELECT or EXPLAIN, no files, no network, bounded in memory and time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from ..errors import RequestError, SqlRefusedError, WorldError
from .catalog import connect_catalog

_ALLOWED = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}
_CONFINE = (
    "SET enable_external_access = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET lock_configuration = true",
)


def run_sql(
    root: Path,
    query: str,
    *,
    tables: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    memory_limit: str = "2GB",
) -> pa.Table:
    """Run one SELECT or EXPLAIN over the newest catalog generation and return an Arrow table.

    `tables` are the caller's own Arrow tables or pandas frames, by name. `timeout` is in seconds. Raises
    `SqlRefusedError` (exit code 2) for any other statement and for SQL that DuckDB rejects, and `WorldError` when
    time or memory run out.
    """
    with connect_catalog(root) as connection:
        connection.execute("SET python_enable_replacements = false")  # no reading of the caller's variables by name
        for name, table in (tables or {}).items():
            _register(connection, name, table)
        connection.execute("SET memory_limit = ?", [memory_limit])
        for setting in _CONFINE:
            connection.execute(setting)
        _check(connection, query)
        timer = threading.Timer(timeout, connection.interrupt)
        timer.start()
        try:
            return _one_statement(connection, query)
        except duckdb.InterruptException:
            raise WorldError(f"The query took longer than {timeout:g} s and was stopped.") from None
        except duckdb.OutOfMemoryException as error:
            raise WorldError(f"The query needs more than the memory limit of {memory_limit}: {error}") from error
        except duckdb.Error as error:
            raise SqlRefusedError(_first_lines(error)) from error
        finally:
            timer.cancel()


def _one_statement(connection: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    # EXPLAIN has no relation form; its plan comes back as rows of (kind, text).
    statement = connection.extract_statements(query)[0]
    if statement.type == duckdb.StatementType.EXPLAIN:
        rows = connection.execute(statement).fetchall()
        return pa.table({"explain_key": [r[0] for r in rows], "explain_value": [r[1] for r in rows]})
    return connection.sql(query).to_arrow_table()


def _check(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise SqlRefusedError(_first_lines(error)) from error
    kinds = [s.type for s in statements]
    if len(kinds) != 1 or kinds[0] not in _ALLOWED:
        shown = ", ".join(k.name for k in kinds) or "nothing"
        raise SqlRefusedError(f"A lake runs exactly one SELECT or EXPLAIN at a time; this is {shown}.")


def _register(connection: duckdb.DuckDBPyConnection, name: str, table: Any) -> None:
    if not name.isidentifier():
        raise RequestError(f"{name!r} cannot name a table: use a plain identifier.")
    try:
        connection.register(name, table)
    except duckdb.Error as error:
        raise RequestError(f"Table {name!r} cannot be used in SQL: {_first_lines(error)}") from error


def _first_lines(error: Exception) -> str:
    return str(error).strip()
