"""Filling a catalog from the files of a lake, in bulk and only with committed units."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from ..errors import CorruptLakeError
from .durable import file_sha256
from .parquet import read_table
from .plan import label_columns, read_sequences
from .run import Run, run_names
from .tokens import SEQUENCE_FIELDS, TOKEN_FIELDS

_UNITS_A_LOAD = 256

_SCHEMA = """
CREATE TABLE run_table (run VARCHAR, model VARCHAR, revision VARCHAR, fingerprint VARCHAR, data VARCHAR,
    dtype VARCHAR, units_planned BIGINT, tokens_planned BIGINT, sequences_planned BIGINT, unit_rows BIGINT,
    identity VARCHAR, plan_hash VARCHAR, created VARCHAR, created_by VARCHAR, settings JSON);
CREATE TABLE arrays (run VARCHAR, layer INTEGER, site VARCHAR, dtype VARCHAR, width BIGINT, codec VARCHAR,
    path VARCHAR);
CREATE TABLE units (run VARCHAR, unit BIGINT, first_row BIGINT, rows BIGINT, sequences BIGINT, seconds DOUBLE);
CREATE TABLE unit_stats (run VARCHAR, unit BIGINT, layer INTEGER, site VARCHAR, count BIGINT, nonfinite BIGINT,
    mean DOUBLE, variance DOUBLE, min DOUBLE, max DOUBLE, norm DOUBLE, rows BIGINT);
CREATE TABLE sequences ({sequences});
CREATE TABLE tokens ({tokens});
CREATE TABLE label_columns (run VARCHAR, tab VARCHAR, place INTEGER, name VARCHAR, type VARCHAR);
CREATE TABLE problems (run VARCHAR, what VARCHAR);
CREATE TABLE result_files (name VARCHAR, bytes BIGINT, sha256 VARCHAR);
CREATE TABLE results (result VARCHAR, kind VARCHAR, run VARCHAR, label VARCHAR, site VARCHAR, layer INTEGER,
    seed INTEGER, metric VARCHAR, value DOUBLE, condition VARCHAR, artifact VARCHAR, created VARCHAR);
CREATE VIEW runs AS SELECT run_table.run, model, revision, data, dtype, coalesce(u.units, 0) AS units,
    units_planned, coalesce(u.tokens, 0) AS tokens, tokens_planned, coalesce(u.sequences, 0) AS sequences,
    coalesce(u.units, 0) = units_planned AS complete, fingerprint, identity, plan_hash, unit_rows, created,
    created_by, settings
    FROM run_table LEFT JOIN (SELECT run, count(*) AS units, sum(rows)::BIGINT AS tokens,
        sum(sequences)::BIGINT AS sequences FROM units GROUP BY run) AS u USING (run);
CREATE VIEW stats AS SELECT run, layer, site, sum(count)::BIGINT AS count, sum(nonfinite)::BIGINT AS nonfinite,
    any_value(merged_mean) AS mean,
    sum(count * (variance + (mean - merged_mean) ** 2)) / nullif(sum(count), 0) AS variance,
    min(min) AS min, max(max) AS max, sum(norm * rows) / nullif(sum(rows), 0) AS norm
    FROM (SELECT *, sum(count * mean) OVER same / nullif(sum(count) OVER same, 0) AS merged_mean FROM unit_stats
          WINDOW same AS (PARTITION BY run, layer, site)) GROUP BY run, layer, site;
CREATE VIEW probes AS PIVOT (SELECT artifact, result, run, label, site, layer, condition, metric, value, created
    FROM results WHERE kind = 'probe' AND seed IS NULL) ON metric IN ('accuracy', 'accuracy_std',
    'balanced_accuracy', 'majority', 'random_label', 'auroc', 'n_rows', 'n_dropped', 'converged')
    USING any_value(value);
"""


class StaleIndexError(Exception):
    """What is indexed cannot be brought up to date by adding to it: index everything anew."""


def create_schema(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the tables and views of an empty catalog."""

    def columns(fields: tuple[tuple[str, pa.DataType], ...]) -> str:
        return ", ".join(["run VARCHAR", *(f"{name} {_sql_type(kind)}" for name, kind in fields)])

    connection.execute(_SCHEMA.format(sequences=columns(SEQUENCE_FIELDS), tokens=columns(TOKEN_FIELDS)))


def load_runs(connection: duckdb.DuckDBPyConnection, root: Path) -> bool:
    """Add what is committed and not yet indexed, drop runs that are gone; says whether anything changed.

    A damaged run is left out whole, and `problems` says why: it must not keep the others from being read.
    """
    known = dict(connection.execute("SELECT run, identity || created FROM run_table").fetchall())
    before = connection.execute("SELECT run, what FROM problems ORDER BY run").fetchall()
    present: dict[str, Run] = {}
    problems: dict[str, str] = {}
    for name in run_names(root):
        try:
            run = Run(root, name)
            _stamp(run)
            present[name] = run
        except CorruptLakeError as error:
            problems[name] = str(error)
    gone = [n for n, s in known.items() if n not in present or _stamp(present[n]) != s]
    for name in gone:
        _drop_run(connection, name)
    added = [run for name, run in present.items() if name not in known or name in gone]
    for run in added:
        with _noted(connection, run, problems):
            _add_run(connection, run)
    if gone or added:
        for table in ("sequences", "tokens"):
            _fit_label_columns(connection, table)
    changed = bool(gone or added)
    for name, run in present.items():
        if name in problems:
            continue
        done = {u for (u,) in connection.execute("SELECT unit FROM units WHERE run = ?", [name]).fetchall()}
        committed = run.committed()
        if not done <= committed:
            raise StaleIndexError
        fresh = sorted(committed - done)
        with _noted(connection, run, problems):
            for first in range(0, len(fresh), _UNITS_A_LOAD):
                _add_units(connection, run, fresh[first : first + _UNITS_A_LOAD])
                changed = True
    connection.execute("DELETE FROM problems")
    for name, what in problems.items():
        connection.execute("INSERT INTO problems VALUES (?, ?)", [name, what])
    return changed or before != sorted(problems.items())


@contextlib.contextmanager
def _noted(connection: duckdb.DuckDBPyConnection, run: Run, problems: dict[str, str]) -> Iterator[None]:
    """Note a run that turns out to be damaged, and leave nothing of it in the index."""
    try:
        yield
    except CorruptLakeError as error:
        problems[run.name] = str(error)
        _drop_run(connection, run.name)


def _drop_run(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    for table in ("run_table", "arrays", "units", "unit_stats", "label_columns", "sequences", "tokens"):
        connection.execute(f"DELETE FROM {table} WHERE run = ?", [name])


def _stamp(run: Run) -> str:
    return run.record.identity + run.record.created


def load_results(connection: duckdb.DuckDBPyConnection, root: Path) -> bool:
    """Add analysis results that are not yet indexed, and drop those whose file is gone or another."""
    known = dict(connection.execute("SELECT name, bytes FROM result_files").fetchall())
    present = {p.stem: p for p in sorted((root / "results").glob("*.parquet"))}
    sizes = {n: p.stat().st_size for n, p in present.items()}
    gone = [n for n in known if sizes.get(n) != known[n]]
    for name in gone:
        connection.execute("DELETE FROM results WHERE result = ?", [name])
        connection.execute("DELETE FROM result_files WHERE name = ?", [name])
    fresh = [n for n in present if n not in known or n in gone]
    for name in fresh:
        rows = read_table(present[name]).drop_columns(["result"])
        rows = rows.append_column("result", pa.array([name] * rows.num_rows, pa.string()))
        try:
            _insert(connection, "results", rows)
        except duckdb.Error as error:
            raise CorruptLakeError(
                f"{present[name]} does not hold results ({error}). Run `layerlake verify`."
            ) from error
        facts = [name, sizes[name], file_sha256(present[name])]
        connection.execute("INSERT INTO result_files VALUES (?, ?, ?)", facts)
    return bool(gone or fresh)


def _add_run(connection: duckdb.DuckDBPyConnection, run: Run) -> None:
    record = run.record
    settings: dict[str, Any] = record.settings
    model = settings.get("model", {})
    dtypes = ", ".join(dict.fromkeys(a.dtype for a in record.arrays))
    found = (record.source.get("model"), model.get("revision"), model.get("fingerprint"), record.source.get("data"))
    row: list[Any] = [run.name, *(None if v is None else str(v) for v in found), dtypes]
    row += [
        record.units,
        record.tokens,
        record.sequences,
        record.unit_rows,
        record.identity,
        record.plan_hash,
    ]
    row += [record.created, record.created_by, json.dumps(settings, sort_keys=True)]
    connection.execute(f"INSERT INTO run_table VALUES ({', '.join('?' * len(row))})", row)
    arrays = pa.table(
        {
            "run": pa.array([run.name] * len(record.arrays), pa.string()),
            "layer": pa.array([a.layer for a in record.arrays], pa.int32()),
            "site": [a.site for a in record.arrays],
            "dtype": [a.dtype for a in record.arrays],
            "width": pa.array([a.shape[-1] if a.shape else 1 for a in record.arrays], pa.int64()),
            "codec": [a.codec for a in record.arrays],
            "path": [f"runs/{run.name}/activations.zarr/{a.name}" for a in record.arrays],
        }
    )
    _insert(connection, "arrays", arrays)
    for name in ("plan/sequences.parquet", "plan/tokens-00000.parquet"):
        run.intact(name)
    for table, fields in label_columns(run.folder / "plan").items():
        for place, field in enumerate(fields):
            kind = "NULL" if pa.types.is_null(field.type) else _sql_type(field.type)
            connection.execute(
                "INSERT INTO label_columns VALUES (?, ?, ?, ?, ?)", [run.name, table, place, field.name, kind]
            )


def _add_units(connection: duckdb.DuckDBPyConnection, run: Run, units: list[int]) -> None:
    records = [run.unit_record(u) for u in units]
    rows, stats = [], []
    for r in records:
        rows.append(
            {
                "run": run.name,
                "unit": r["unit"],
                "first_row": r["first_row"],
                "rows": r["rows"],
                "sequences": r["sequences"],
                "seconds": r["made"].get("seconds"),
            }
        )
        for array in run.record.arrays:
            values = r["arrays"][array.name]["statistics"]
            where = {"run": run.name, "unit": r["unit"], "layer": array.layer, "site": array.site}
            stats.append(where | values)
    _insert(connection, "units", pa.Table.from_pylist(rows))
    _insert(connection, "unit_stats", pa.Table.from_pylist(stats))
    # One insert for many units: row by row would take longer than the model.
    tables = [_unit_tokens(run, r) for r in records]
    _insert_rows(connection, "tokens", run, pa.concat_tables(tables, promote_options="permissive"))
    planned = read_sequences(run.intact("plan/sequences.parquet").parent)
    chosen = np.isin(planned["unit"].to_numpy(), units)
    _insert_rows(connection, "sequences", run, planned.filter(pa.array(chosen)))


def _unit_tokens(run: Run, record: dict[str, Any]) -> pa.Table:
    path = run.tokens_path(record["unit"])
    if file_sha256(path) != record["tokens"]["sha256"]:
        raise CorruptLakeError(f"{path} holds other bytes than were written. Run `layerlake verify`.")
    return read_table(path)


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> None:
    connection.register("incoming", rows)
    connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM incoming")
    connection.unregister("incoming")


def _insert_rows(connection: duckdb.DuckDBPyConnection, table: str, run: Run, rows: pa.Table) -> None:
    try:
        _insert(connection, table, rows.append_column("run", pa.array([run.name] * rows.num_rows, pa.string())))
    except duckdb.Error as error:
        raise CorruptLakeError(f"The {table} of {run.folder} cannot be indexed ({error}).") from error


def _fit_label_columns(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    """Give a table the label columns that its runs need, in an order and with types that depend on the runs alone.

    Runs come by name. Whole and real numbers of one label become real; a label whose kinds differ otherwise becomes
    text. Columns that are there already stay as they are or, when they do not fit, are built anew with everything.
    """
    own = 1 + len(TOKEN_FIELDS if table == "tokens" else SEQUENCE_FIELDS)
    query = "SELECT name, type FROM label_columns WHERE tab = ? ORDER BY run, place"
    names: dict[str, str] = {}
    kinds: dict[str, set[str]] = {}
    for name, kind in connection.execute(query, [table]).fetchall():
        names.setdefault(name.lower(), name)  # SQL names ignore case
        kinds.setdefault(name.lower(), set()).add(kind)
    wanted = [(name, _common(kinds[key])) for key, name in names.items()]
    held = [(name, kind) for name, kind, *_ in connection.execute(f"DESCRIBE {table}").fetchall()][own:]
    if held != wanted[: len(held)]:
        raise StaleIndexError
    for name, kind in wanted[len(held) :]:
        quoted = '"' + name.replace('"', '""') + '"'
        connection.execute(f"ALTER TABLE {table} ADD COLUMN {quoted} {kind}")


def _common(kinds: set[str]) -> str:
    """Choose the type of a column that holds labels of several types."""
    kinds = kinds - {"NULL"} or {"INTEGER"}
    if len(kinds) == 1:
        return next(iter(kinds))
    if kinds <= {"INTEGER", "BIGINT", "DOUBLE"}:
        return "DOUBLE" if "DOUBLE" in kinds else "BIGINT"
    return "VARCHAR"


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "BOOLEAN"
    if pa.types.is_int32(kind):
        return "INTEGER"
    if pa.types.is_integer(kind):
        return "BIGINT"
    if pa.types.is_floating(kind):
        return "DOUBLE"
    return "VARCHAR"
