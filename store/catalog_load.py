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

from ..errors import CorruptLakeError, UnknownNameError
from .catalog_labels import (
    RunLabels,
    StaleIndexError,
    add_label_columns,
    fit_label_columns,
    sql_type,
    with_labels,
)
from .durable import file_sha256
from .parquet import read_table
from .plan import SPANS_FILE, read_sequences, read_spans
from .row_kinds import SEQUENCES, SPANS, TOKENS
from .run import Run, run_names
from .tokens import SEQUENCE_FIELDS, SPAN_FIELDS, TOKEN_FIELDS
from .unit_record import REPLAY_ERRORS

_UNITS_A_LOAD = 256
UNIT_ROWS = {TOKENS: "rows", SEQUENCES: "sequence_rows", SPANS: "span_rows"}
"""The columns of the table of units that say how many rows of a kind a unit has."""
_UNIT_COLUMNS = pa.schema(
    [
        ("run", pa.string()),
        *((n, pa.int64()) for n in ("unit", "first_row", "rows", "sequences", "sequence_rows", "span_rows")),
        ("seconds", pa.float64()),
        ("replayed", pa.int64()),
        *((f"replay_{k}", pa.float64()) for k in REPLAY_ERRORS),
    ]
)

_SCHEMA = """
CREATE TABLE run_table (run VARCHAR, model VARCHAR, revision VARCHAR, fingerprint VARCHAR, data VARCHAR,
    dtype VARCHAR, units_planned BIGINT, tokens_planned BIGINT, sequences_planned BIGINT, unit_rows BIGINT,
    identity VARCHAR, plan_hash VARCHAR, kinds VARCHAR, created VARCHAR, created_by VARCHAR, settings JSON,
    labels VARCHAR);
CREATE TABLE arrays (run VARCHAR, layer INTEGER, site VARCHAR, dtype VARCHAR, width BIGINT, codec VARCHAR,
    rows VARCHAR, path VARCHAR);
CREATE TABLE units (run VARCHAR, unit BIGINT, first_row BIGINT, rows BIGINT, sequences BIGINT,
    sequence_rows BIGINT, span_rows BIGINT, seconds DOUBLE, replayed BIGINT, replay_values DOUBLE,
    replay_head DOUBLE, replay_patch DOUBLE);
CREATE TABLE unit_stats (run VARCHAR, unit BIGINT, layer INTEGER, site VARCHAR, kind VARCHAR, count BIGINT,
    nonfinite BIGINT, mean DOUBLE, variance DOUBLE, min DOUBLE, max DOUBLE, norm DOUBLE, rows BIGINT);
CREATE TABLE sequences ({sequences});
CREATE TABLE tokens ({tokens});
CREATE TABLE spans ({spans});
CREATE TABLE label_columns (run VARCHAR, tab VARCHAR, place INTEGER, name VARCHAR, type VARCHAR);
CREATE TABLE labels (run VARCHAR, name VARCHAR, version INTEGER, columns VARCHAR[], rows BIGINT, created VARCHAR,
    source VARCHAR, path VARCHAR, newest BOOLEAN);
CREATE TABLE problems (run VARCHAR, labels VARCHAR, what VARCHAR);
CREATE TABLE result_files (name VARCHAR, bytes BIGINT, sha256 VARCHAR);
CREATE TABLE results (result VARCHAR, kind VARCHAR, run VARCHAR, label VARCHAR, site VARCHAR, layer INTEGER,
    seed INTEGER, metric VARCHAR, value DOUBLE, condition VARCHAR, artifact VARCHAR, created VARCHAR);
CREATE VIEW runs AS SELECT run_table.run, model, revision, data, dtype, coalesce(u.units, 0) AS units,
    units_planned, coalesce(u.tokens, 0) AS tokens, tokens_planned, coalesce(u.sequences, 0) AS sequences,
    coalesce(u.units, 0) = units_planned AS complete, kinds AS rows, fingerprint, identity, plan_hash,
    unit_rows, created, created_by, settings
    FROM run_table LEFT JOIN (SELECT run, count(*) AS units, sum(rows)::BIGINT AS tokens,
        sum(sequences)::BIGINT AS sequences FROM units GROUP BY run) AS u USING (run);
CREATE VIEW stats AS SELECT run, layer, site, kind AS rows, sum(count)::BIGINT AS count,
    sum(nonfinite)::BIGINT AS nonfinite, any_value(merged_mean) AS mean,
    sum(count * (variance + (mean - merged_mean) ** 2)) / nullif(sum(count), 0) AS variance,
    min(min) AS min, max(max) AS max, sum(norm * normed) / nullif(sum(normed), 0) AS norm
    FROM (SELECT * RENAME (rows AS normed),
              sum(count * mean) OVER same / nullif(sum(count) OVER same, 0) AS merged_mean FROM unit_stats
          WINDOW same AS (PARTITION BY run, layer, site, kind)) GROUP BY run, layer, site, kind;
CREATE VIEW probes AS PIVOT (SELECT artifact, result, run, label, site, layer, condition, metric, value, created
    FROM results WHERE kind = 'probe' AND seed IS NULL) ON metric IN ('accuracy', 'accuracy_std',
    'balanced_accuracy', 'majority', 'random_label', 'auroc', 'n_rows', 'n_dropped', 'converged')
    USING any_value(value);
"""


def create_schema(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the tables and views of an empty catalog."""

    def columns(fields: tuple[tuple[str, pa.DataType], ...]) -> str:
        return ", ".join(["run VARCHAR", *(f"{name} {sql_type(kind)}" for name, kind in fields)])

    tables = {"sequences": SEQUENCE_FIELDS, "tokens": TOKEN_FIELDS, "spans": SPAN_FIELDS}
    connection.execute(_SCHEMA.format(**{name: columns(fields) for name, fields in tables.items()}))


def load_runs(connection: duckdb.DuckDBPyConnection, root: Path) -> bool:
    """Add what is committed and not yet indexed, drop runs that are gone; says whether anything changed.

    A damaged run is left out whole, and `problems` says why: it must not keep the others from being read.
    """
    known = dict(connection.execute("SELECT run, identity || created || labels FROM run_table").fetchall())
    before = set(connection.execute("SELECT run, labels, what FROM problems").fetchall())
    present: dict[str, RunLabels] = {}
    problems: dict[str, str] = {}
    for name in run_names(root):
        try:
            labels = RunLabels.of(Run(root, name))
            _stamp(labels)
            present[name] = labels
        except CorruptLakeError as error:
            problems[name] = str(error)
        except UnknownNameError:
            continue  # it was removed a moment ago
    # A run with other labels than before is indexed anew. What is known to be damaged is looked at each time.
    gone = [n for n, s in known.items() if n not in present or _stamp(present[n]) != s]
    for name in gone:
        _drop_run(connection, name)
    added = {name: labels for name, labels in present.items() if name not in known or name in gone}
    for labels in added.values():
        with _noted(connection, labels.run, problems):
            _add_run(connection, labels)
    if gone or added:
        for table in ("sequences", "tokens", "spans"):
            fit_label_columns(connection, table)
    changed = bool(gone or added)
    for name, labels in present.items():
        if name in problems:
            continue
        done = {u for (u,) in connection.execute("SELECT unit FROM units WHERE run = ?", [name]).fetchall()}
        committed = labels.run.committed()
        if not done <= committed:
            raise StaleIndexError
        fresh = sorted(committed - done)
        if fresh:
            changed = True
            with _noted(connection, labels.run, problems):
                _add_fresh(connection, labels, fresh, indexed=name not in added)
    connection.execute("DELETE FROM problems")
    found: set[tuple[str, str | None, str]] = {(name, None, what) for name, what in problems.items()}
    for name, labels in present.items():
        found |= {(name, which, what) for which, what in labels.faults.items() if name not in problems}
    for problem in sorted(found, key=lambda p: (p[0], p[1] or "")):
        connection.execute("INSERT INTO problems VALUES (?, ?, ?)", problem)
    return changed or before != found


@contextlib.contextmanager
def _noted(connection: duckdb.DuckDBPyConnection, run: Run, problems: dict[str, str]) -> Iterator[None]:
    """Note a run that turns out to be damaged, and leave nothing of it in the index."""
    try:
        yield
    except CorruptLakeError as error:
        problems[run.name] = str(error)
        _drop_run(connection, run.name)


def _drop_run(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    own = ("run_table", "arrays", "units", "unit_stats", "label_columns", "labels", "sequences", "tokens", "spans")
    for table in own:
        connection.execute(f"DELETE FROM {table} WHERE run = ?", [name])


def _stamp(labels: RunLabels) -> str:
    record = labels.run.record
    return record.identity + record.created + labels.stamp


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


def _add_run(connection: duckdb.DuckDBPyConnection, labels: RunLabels) -> None:
    run, record = labels.run, labels.run.record
    for name in ("plan/sequences.parquet", "plan/tokens-00000.parquet"):
        run.intact(name)
    if SPANS in record.rows:
        run.intact(f"plan/{SPANS_FILE}")
    add_label_columns(connection, labels)
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
        str(record.row_kinds),
    ]
    row += [record.created, record.created_by, json.dumps(settings, sort_keys=True), labels.stamp]
    connection.execute(f"INSERT INTO run_table VALUES ({', '.join('?' * len(row))})", row)
    arrays = pa.table(
        {
            "run": pa.array([run.name] * len(record.arrays), pa.string()),
            "layer": pa.array([a.layer for a in record.arrays], pa.int32()),
            "site": [a.site for a in record.arrays],
            "dtype": [a.dtype for a in record.arrays],
            "width": pa.array([a.shape[-1] if a.shape else 1 for a in record.arrays], pa.int64()),
            "codec": [a.codec for a in record.arrays],
            "rows": [a.rows for a in record.arrays],
            "path": [f"runs/{run.name}/activations.zarr/{a.name}" for a in record.arrays],
        }
    )
    _insert(connection, "arrays", arrays)


def _add_fresh(connection: duckdb.DuckDBPyConnection, labels: RunLabels, units: list[int], *, indexed: bool) -> None:
    try:
        values = labels.values()
    except CorruptLakeError as error:
        if indexed:  # the labels of the units before are in the index, and are no longer what they were
            raise StaleIndexError from error
        raise
    for first in range(0, len(units), _UNITS_A_LOAD):
        _add_units(connection, labels.run, units[first : first + _UNITS_A_LOAD], values)
    run = labels.run
    tables = {"sequences": read_sequences(run.intact("plan/sequences.parquet").parent)}
    if TOKENS not in run.record.row_kinds.kinds:  # what the plan numbers has no array
        tables["sequences"] = _without(tables["sequences"], first_row=None, rows=0)
    if SPANS in run.record.rows:
        tables["spans"] = read_spans(run.intact(f"plan/{SPANS_FILE}").parent)
    for name, planned in tables.items():
        chosen = np.isin(planned["unit"].to_numpy(), units)
        _insert_rows(connection, name, run, planned.filter(pa.array(chosen)))


def _add_units(connection: duckdb.DuckDBPyConnection, run: Run, units: list[int], labels: list[pa.Table]) -> None:
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
                **{UNIT_ROWS[kind]: n for kind, n in r.get("pooled", {}).items()},
                "seconds": r["made"].get("seconds"),
                "replayed": (r["made"].get("replay") or {}).get("sequences"),  # NULL, not 0, where none was sampled
                **{f"replay_{k}": (r["made"].get("replay") or {}).get(k) for k in REPLAY_ERRORS},
            }
        )
        for array in run.record.arrays:
            values = r["arrays"][array.name]["statistics"]
            where = {"run": run.name, "unit": r["unit"], "layer": array.layer, "site": array.site}
            where["kind"] = array.rows
            stats.append(where | values)
    _insert(connection, "units", pa.Table.from_pylist(rows, _UNIT_COLUMNS))
    _insert(connection, "unit_stats", pa.Table.from_pylist(stats))
    # One insert for many units: row by row would take longer than the model.
    tables = [run.unit_tokens(r["unit"], r) for r in records]
    tokens = with_labels(pa.concat_tables(tables, promote_options="permissive"), labels)
    if TOKENS not in run.record.row_kinds.kinds:
        tokens = _without(tokens, row=None)
    _insert_rows(connection, "tokens", run, tokens)


def _without(table: pa.Table, **values: int | None) -> pa.Table:
    """Put one value in the place of all that columns have."""
    for name, value in values.items():
        place = table.column_names.index(name)
        column = pa.array([value] * table.num_rows, table.schema.field(name).type)
        table = table.set_column(place, name, column)
    return table


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> None:
    connection.register("incoming", rows)
    connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM incoming")
    connection.unregister("incoming")


def _insert_rows(connection: duckdb.DuckDBPyConnection, table: str, run: Run, rows: pa.Table) -> None:
    connection.register("incoming", rows)
    try:
        query = f"INSERT INTO {table} BY NAME SELECT ?::VARCHAR AS run, * FROM incoming"
        connection.execute(query, [run.name])
    except duckdb.Error as error:
        raise CorruptLakeError(f"The {table} of {run.folder} cannot be indexed ({error}).") from error
    finally:
        connection.unregister("incoming")
