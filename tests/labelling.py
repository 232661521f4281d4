"""Helpers for tests of labels that are added later: writing files of them, and seeing what SQL shows."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from lakes import make_run
from layerlake.store.catalog import connect_catalog, publish_catalog
from layerlake.store.lake import Lake

TOKENS = 53
DEPTH = [i % 4 for i in range(TOKENS)]


def make_start(root: Path) -> Path:
    """Make a lake of two runs, one with a label."""
    make_run(root, labels={"depth": DEPTH})
    make_run(root, name="other", seed=1, layers=0)
    return root


def own(lake: Lake, columns: str = "row", run: str = "toy") -> pa.Table:
    return lake.sql(f"SELECT {columns} FROM tokens WHERE run = '{run}' ORDER BY row")


def values(lake: Lake, column: str, run: str = "toy") -> list[Any]:
    return own(lake, f'"{column}" AS x', run)["x"].to_pylist()


def write(path: Path, table: pa.Table) -> Path:
    """Write a table as the file that the name asks for, with the writers of Python and pyarrow."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in table.to_pylist()))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.column_names)
            for row in table.to_pylist():
                writer.writerow(["" if v is None else repr(v) if isinstance(v, float) else v for v in row.values()])
    return path


def tree(root: Path) -> dict[str, str]:
    files = (p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def contents(root: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Everything that a query can see: columns with types, and sorted rows, of every table and view."""
    with connect_catalog(root) as connection:
        found = {}
        for (name,) in connection.execute(
            "SELECT table_name FROM duckdb_tables() WHERE database_name = 'lake' UNION "
            "SELECT view_name FROM duckdb_views() WHERE database_name = 'lake' AND NOT internal"
        ).fetchall():
            columns = [f"{c[0]} {c[1]}" for c in connection.execute(f"DESCRIBE {name}").fetchall()]
            found[name] = (columns, sorted(map(repr, connection.execute(f"FROM {name}").fetchall())))
    return found


def check_same_as_rebuilt(root: Path) -> None:
    publish_catalog(root)
    grown = contents(root)
    assert "labels" in grown
    publish_catalog(root, rebuild=True)
    assert grown == contents(root)


def same(seen: list[Any], expected: list[Any]) -> bool:
    """Equal in type and value, where NaN is NaN, -0.0 is not 0.0 and None is neither."""
    return list(map(repr, seen)) == list(map(repr, expected))
