"""Filling a catalog from the files of a lake, in bulk and only with committed units."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import CorruptLakeError
from .plan import read_sequences
from .run import Run, run_names
from .tokens import SEQUENCE_FIELDS, TOKEN_FIELDS

_UNITS_A_LOAD = 256
_NUMBERS = ("DOUBLE", "BIGINT", "INTEGER")  # widest first

_SCHEMA = """
CREATE TABLE run_table (run VARCHAR, model VARCHAR, revision VARCHAR, fingerprint VARCHAR, data VARCHAR,
    dtype VARCHAR, units_planned BIGINT, tokens_planned BIGINT, sequences_planned BIGINT, unit_rows BIGINT,
    identity VARCHAR, plan_hash VARCHAR, created VARCHAR, created_by VARCHAR, settings JSON);
CREATE TABLE arrays (run VARCHAR, layer INTEGER, site VARCHAR, dtype VARCHAR, width BIGINT, path VARCHAR);
CREATE TABLE units (run VARCHAR, unit BIGINT, first_row BIGINT, rows BIGINT, sequences BIGINT, seconds DOUBLE);
CREATE TABLE unit_stats (run VARCHAR, unit BIGINT, layer INTEGER, site VARCHAR, count BIGINT, nonfinite BIGINT,
    mean DOUBLE, variance DOUBLE, min DOUBLE, max DOUBLE, norm DOUBLE, rows BIGINT);
CREATE TABLE sequences ({sequences});
CREATE TABLE tokens ({tokens});
CREATE TABLE result_files (name VARCHAR, bytes BIGINT);
CREATE TABLE results (result VARCHAR, kind VARCHAR, run VARCHAR, label VARCHAR, site VARCHAR, layer INTEGER,
    seed INTEGER, metric VARCHAR, value DOUBLE, artifact VARCHAR, created VARCHAR);
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
CREATE VIEW probes AS PIVOT (SELECT artifact, result, run, label, site, layer, metric, value, created FROM results
    WHERE kind = 'probe' AND seed IS NULL) ON metric IN ('accuracy', 'accuracy_std', 'balanced_accuracy', 'majority',
    'random_label', 'auroc', 'n_rows', 'n_dropped', 'converged') USING any_value(value);
"""


def create_schema(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the tables and views of an empty catalog."""

    def columns(fields: tuple[tuple[str, pa.DataType], ...]) -> str:
        return ", ".join(["run VARCHAR", *(f"{name} {_sql_type(kind)}" for name, kind in fields)])

    connection.execute(_SCHEMA.format(sequences=columns(SEQUENCE_FIELDS), tokens=columns(TOKEN_FIELDS)))


def load_runs(connection: duckdb.DuckDBPyConnection, root: Path) -> bool:
    """Add what is committed and not yet indexed, drop runs that are gone; says whether anything changed."""
    known = dict(connection.execute("SELECT run, identity || created FROM run_table").fetchall())
    present = {name: Run(root, name) for name in run_names(root)}
    changed = False
    for name, stamp in known.items():
        run = present.get(name)
        if run is None or run.record.identity + run.record.created != stamp:
            for table in ("run_table", "arrays", "units", "unit_stats", "sequences", "tokens"):
                connection.execute(f"DELETE FROM {table} WHERE run = ?", [name])
            changed = True
    indexed = {name for (name,) in connection.execute("SELECT run FROM run_table").fetchall()}
    for name, run in present.items():
        if name not in indexed:
            _add_run(connection, run)
            changed = True
        done = {u for (u,) in connection.execute("SELECT unit FROM units WHERE run = ?", [name]).fetchall()}
        fresh = sorted(run.committed() - done)
        for first in range(0, len(fresh), _UNITS_A_LOAD):
            _add_units(connection, run, fresh[first : first + _UNITS_A_LOAD])
            changed = True
    return changed


def load_results(connection: duckdb.DuckDBPyConnection, root: Path) -> bool:
    """Add analysis results that are not yet indexed, and drop those whose file is gone."""
    known = dict(connection.execute("SELECT name, bytes FROM result_files").fetchall())
    present = {p.stem: p for p in sorted((root / "results").glob("*.parquet"))}
    gone = [n for n in known if n not in present or present[n].stat().st_size != known[n]]
    for name in gone:
        connection.execute("DELETE FROM results WHERE result = ?", [name])
        connection.execute("DELETE FROM result_files WHERE name = ?", [name])
    fresh = [n for n in present if n not in known or n in gone]
    for name in fresh:
        _insert(connection, "results", read_table(present[name]))
        connection.execute("INSERT INTO result_files VALUES (?, ?)", [name, present[name].stat().st_size])
    return bool(gone or fresh)


def read_table(path: Path) -> pa.Table:
    """Read a Parquet file of the lake; `CorruptLakeError` names one that cannot be read."""
    try:
        with pq.ParquetFile(path) as file:  # not pq.read_table: it takes `a=b` in a path for a partition
            return file.read()
    except (OSError, pa.ArrowException) as error:
        raise CorruptLakeError(f"{path} cannot be read ({error}). Run `layerlake verify`.") from error


def _add_run(connection: duckdb.DuckDBPyConnection, run: Run) -> None:
    record = run.record
    settings: dict[str, Any] = record.settings
    model = settings.get("model", {})
    dtypes = ", ".join(dict.fromkeys(a.dtype for a in record.arrays))
    row = [run.name, record.source.get("model"), model.get("revision"), model.get("fingerprint")]
    row += [record.source.get("data"), dtypes]
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
            "width": pa.array([a.shape[-1] for a in record.arrays], pa.int64()),
            "path": [f"runs/{run.name}/activations.zarr/{a.name}" for a in record.arrays],
        }
    )
    _insert(connection, "arrays", arrays)


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
    # One read and one insert for many units: row by row would take longer than the model.
    tokens = pa.concat_tables([read_table(run.tokens_path(u)) for u in units], promote_options="permissive")
    _insert_labelled(connection, "tokens", run.name, tokens)
    planned = read_sequences(run.folder / "plan")
    chosen = planned.filter(pc.field("unit").isin(units))
    _insert_labelled(connection, "sequences", run.name, chosen)


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> None:
    connection.register("incoming", rows)
    connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM incoming")
    connection.unregister("incoming")


def _insert_labelled(connection: duckdb.DuckDBPyConnection, table: str, run: str, rows: pa.Table) -> None:
    """Insert rows that may bring label columns of their own, adding or widening columns as they need.

    A label that is a number in one run and text in another becomes text; whole and real numbers become real.
    """
    described = connection.execute(f"DESCRIBE {table}").fetchall()
    existing = {name.lower(): kind for name, kind, *_ in described}  # SQL names ignore case
    for field in rows.schema:
        quoted = '"' + field.name.replace('"', '""') + '"'
        wanted = _sql_type(field.type)
        held = existing.get(field.name.lower())
        if held is None:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {quoted} {wanted}")
        elif held != wanted and not pa.types.is_null(field.type):
            common = next((c for c in _NUMBERS if c in (held, wanted)), None)
            if common is None or not {held, wanted} <= set(_NUMBERS):
                common = "VARCHAR"
            if held != common:
                connection.execute(f"ALTER TABLE {table} ALTER COLUMN {quoted} TYPE {common}")
    _insert(connection, table, rows.append_column("run", pa.array([run] * rows.num_rows, pa.string())))


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "BOOLEAN"
    if pa.types.is_int32(kind):
        return "INTEGER"
    if pa.types.is_integer(kind):
        return "BIGINT"
    if pa.types.is_floating(kind):
        return "DOUBLE"
    if pa.types.is_null(kind):
        return "INTEGER"
    return "VARCHAR"
