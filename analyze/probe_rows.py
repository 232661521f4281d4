"""Which rows a probe is fitted on: the tokens of one run that carry the label and meet the condition."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from ..errors import CorruptLakeError, RequestError, UnknownNameError
from ..store.label_sets import newest_label_sets
from ..store.lake import Lake
from ..store.plan import read_unit_tokens
from ..store.run import Run

_COPIES = '"copies of"'
_SQL_TYPES = {pa.bool_(): "BOOLEAN", pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.string(): "VARCHAR"}


def rows_to_probe(lake: Lake, run: Run, label: str, where: str | None, by: str) -> tuple[str, pa.Table]:
    """Give the query and its rows: run, row, label, and grouping, which no split may tear apart.

    `where` is a condition over the columns of `tokens` and `document`; labels have the types that the run gave them.
    Copies of a text are in one group. `RequestError`: there are no rows, or `where` is more than a condition.
    """
    query = _query(lake, run, label, where, by)
    rows = lake.select(query).table
    if not rows.num_rows:
        raise RequestError(f"No rows to probe: run {run.name!r} holds no committed tokens that meet {where!r}.")
    _check_rows(rows, run.name, where)
    return query, rows


def _query(lake: Lake, run: Run, label: str, where: str | None, by: str) -> str:
    own = {f.name.lower(): f for f in read_unit_tokens(run.folder / "plan", 0).schema}
    added, faults = newest_label_sets(run)
    own |= {c.name.lower(): c.field for labels in added for c in labels.columns}
    if label.lower() not in own:
        if faults:
            raise CorruptLakeError(
                f"Label {label!r} may be one of those that are damaged: {'; '.join(faults.values())}"
            )
        raise UnknownNameError.of("label", label, sorted(own), f" in run {run.name!r}")
    name = run.name.replace("'", "''")
    # A label of that name and another type in another run widens the column for all; here it is what this run wrote.
    # TRY_CAST, because DuckDB may look at the other run's values before it leaves them out.
    widened = [f for f in lake.sql("SELECT * FROM tokens LIMIT 0").schema if _own_type(own, f) not in (None, f.type)]
    casts = [
        f"TRY_CAST(tokens.{_quoted(f.name)} AS {_SQL_TYPES[_own_type(own, f)]}) AS {_quoted(f.name)}" for f in widened
    ]
    columns = f"tokens.* REPLACE ({', '.join(casts)})" if casts else "tokens.*"
    # Copies of a text are one group: on both sides of a split they would be recognised, not read. Windows that overlap
    # have text in common.
    apart = by != "document" and not run.record.settings.get("overlap")
    copies = "document_sha256, char_offset" if apart else "document_sha256"
    inner = (
        f"SELECT {columns}, document, {_COPIES} FROM tokens JOIN (SELECT seq, document, min({by}) OVER (PARTITION BY "
        f"{copies}) AS {_COPIES} FROM sequences WHERE run = '{name}') USING (seq) WHERE tokens.run = '{name}'"
    )
    condition = f" WHERE (\n{where}\n)" if where else ""  # on a line of its own, so that a comment ends with it
    # ORDER BY makes the rows, and with them the probe, the same each time
    return (
        f"SELECT run, row, {_quoted(label)} AS label, {_COPIES} AS grouping FROM ({inner}) AS tokens{condition} "
        "ORDER BY row"
    )


def incomplete(lake: Lake, run: Run) -> tuple[str, ...]:
    """Say so when the probes rest on a part of the run only."""
    name = run.name.replace("'", "''")
    (part,) = lake.sql(f"SELECT units, units_planned FROM runs WHERE run = '{name}'").to_pylist()
    if part["units"] == part["units_planned"]:
        return ()
    return (
        f"Run {run.name} is incomplete: the probes rest on {part['units']} of its {part['units_planned']} units. "
        "The same extraction again goes on with the rest.",
    )


def _own_type(own: Mapping[str, pa.Field], field: pa.Field) -> pa.DataType | None:
    """Give the type of a label in the run itself, where it can be told from its values."""
    kind = own[field.name.lower()].type if field.name.lower() in own else None
    return kind if kind in _SQL_TYPES else None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _check_rows(rows: pa.Table, run: str, where: str | None) -> None:
    """Refuse rows that a condition cannot have chosen: of another run, or twice."""
    numbers = rows["row"].to_numpy()
    if rows["run"].unique().to_pylist() != [run] or (np.diff(numbers) <= 0).any():
        raise RequestError(f"{where!r} is not one condition: it adds rows to those of run {run!r}.")
