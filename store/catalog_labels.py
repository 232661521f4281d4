"""Labels in a catalog: which columns the tables need for them, and their values for the rows of a run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa

from ..errors import CorruptLakeError
from .durable import canonical_json
from .label_sets import LabelSet, label_versions, read_label_set, read_label_values
from .plan import label_columns
from .run import Run
from .tokens import SEQUENCE_FIELDS, SPAN_FIELDS, TOKEN_FIELDS


class StaleIndexError(Exception):
    """What is indexed cannot be brought up to date by adding to it: index everything anew."""


@dataclass
class RunLabels:
    """The label sets of a run as their records say: every version, and for each damaged one what is wrong.

    A set whose newest version is damaged is left out whole: an older version's values would be taken for the new ones.
    """

    run: Run
    versions: list[LabelSet] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    damaged: bool = False
    """A table was found to be damaged, which the records do not show."""

    @classmethod
    def of(cls, run: Run) -> RunLabels:
        """Read the records of all label sets of a run."""
        found = cls(run)
        for name, versions in label_versions(run).items():
            for version in versions:
                try:
                    found.versions.append(read_label_set(run, name, version))
                except CorruptLakeError as error:
                    found.faults[name] = str(error)
        return found

    @property
    def newest(self) -> list[LabelSet]:
        """The newest version of each set that is not damaged, by name."""
        last = {s.name: s for s in self.versions}
        return [s for name, s in last.items() if name not in self.faults]

    @property
    def stamp(self) -> str:
        """What tells these labels from others; empty without any. It tells damage that was found from none."""
        if not self.versions and not self.faults:
            return ""
        content = [[s.to_json() for s in self.versions], self.faults, self.damaged]
        return hashlib.sha256(canonical_json(content)).hexdigest()

    def check(self, own: list[pa.Field]) -> None:
        """Move sets into `faults` whose table is damaged or whose columns are taken, by `own` or by another set."""
        taken = {f.name.lower() for f in own}
        for labels in self.newest:
            names = {c.name.lower() for c in labels.columns}
            try:
                if names & taken:
                    raise CorruptLakeError(f"Labels {labels.title} have a column that the run has already.")
                read_label_values(self.run, labels)
                taken |= names
            except CorruptLakeError as error:
                self.faults[labels.name] = str(error)
                self.damaged = True

    def values(self) -> list[pa.Table]:
        """Read the tables of the newest versions; `CorruptLakeError` when one became damaged since it was checked."""
        return [read_label_values(self.run, labels) for labels in self.newest]


def add_label_columns(connection: duckdb.DuckDBPyConnection, labels: RunLabels) -> None:
    """Note the label columns of a run, extracted and added later, and list the versions of its label sets."""
    run = labels.run
    found = label_columns(run.folder / "plan")
    labels.check(found["tokens"])
    found["tokens"] += [c.field for s in labels.newest for c in s.columns]
    for table, fields in found.items():
        for place, one in enumerate(fields):
            kind = "NULL" if pa.types.is_null(one.type) else sql_type(one.type)
            row = [run.name, table, place, one.name, kind]
            connection.execute("INSERT INTO label_columns VALUES (?, ?, ?, ?, ?)", row)
    last = {s.name: s.version for s in labels.versions}
    for one in labels.versions:
        path = f"runs/{run.name}/labels/{one.title}.parquet"
        row = [run.name, one.name, one.version, [c.name for c in one.columns], one.rows, one.created]
        row += [one.source["file"], path, one.version == last[one.name]]
        connection.execute("INSERT INTO labels VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def with_labels(tokens: pa.Table, values: list[pa.Table]) -> pa.Table:
    """Append the labels of some tokens, found by `row`; tokens without one get NULL."""
    rows = tokens["row"].to_numpy()
    for table in values:
        labelled = table["row"].to_numpy()
        place = np.searchsorted(labelled, rows)
        there = np.minimum(place, max(len(labelled) - 1, 0))
        missing = labelled[there] != rows if len(labelled) else np.ones(len(rows), bool)
        low, high = (int(place.min()), int(place.max()) + 1) if len(place) else (0, 0)
        part = table.slice(low, high - low)  # a long text column is not to be taken from as a whole
        chosen = part.take(pa.array(there - low, pa.int64(), mask=missing))
        for name in table.column_names[1:]:
            tokens = tokens.append_column(table.schema.field(name), chosen[name])
    return tokens


def fit_label_columns(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    """Give a table the label columns that its runs need, in an order and with types that depend on the runs alone.

    Runs come by name. Whole and real numbers of one label become real; a label whose kinds differ otherwise becomes
    text. A column of another type than it has is built anew, with everything.
    """
    fields = {"tokens": TOKEN_FIELDS, "sequences": SEQUENCE_FIELDS, "spans": SPAN_FIELDS}[table]
    own = [n for n, _ in (("run", None), *fields)]
    query = "SELECT name, type FROM label_columns WHERE tab = ? ORDER BY run, place"
    names: dict[str, str] = {}
    kinds: dict[str, set[str]] = {}
    for name, kind in connection.execute(query, [table]).fetchall():
        names.setdefault(name.lower(), name)  # SQL names ignore case
        kinds.setdefault(name.lower(), set()).add(kind)
    wanted = [(name, _common(kinds[key])) for key, name in names.items()]
    held = [(name, kind) for name, kind, *_ in connection.execute(f"DESCRIBE {table}").fetchall()][len(own) :]
    if held == wanted[: len(held)]:
        for name, kind in wanted[len(held) :]:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {_quoted(name)} {kind}")
        return
    of = {name.lower(): kind for name, kind in held}
    if any(of.get(name.lower(), kind) != kind for name, kind in wanted):
        raise StaleIndexError
    there = [(f"{_quoted(n)}" if n.lower() in of else f"NULL::{kind}") + f" AS {_quoted(n)}" for n, kind in wanted]
    connection.execute(f"CREATE TABLE fitted AS SELECT {', '.join([*own, *there])} FROM {table}")
    connection.execute(f"DROP TABLE {table}")
    connection.execute(f"ALTER TABLE fitted RENAME TO {table}")


def sql_type(kind: pa.DataType) -> str:
    """Give the SQL type in which values of an Arrow type are kept."""
    if pa.types.is_boolean(kind):
        return "BOOLEAN"
    if pa.types.is_int32(kind):
        return "INTEGER"
    if pa.types.is_integer(kind):
        return "BIGINT"
    if pa.types.is_floating(kind):
        return "DOUBLE"
    return "VARCHAR"


def _common(kinds: set[str]) -> str:
    """Choose the type of a column that holds labels of several types."""
    kinds = kinds - {"NULL"} or {"INTEGER"}
    if len(kinds) == 1:
        return next(iter(kinds))
    if kinds <= {"INTEGER", "BIGINT", "DOUBLE"}:
        return "DOUBLE" if "DOUBLE" in kinds else "BIGINT"
    return "VARCHAR"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
