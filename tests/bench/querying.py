"""How fast SQL answers over many tokens, how fast a catalog is built, and how fast a lake of many runs opens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from layerlake.store.catalog import publish_catalog
from layerlake.store.lake import Lake
from layerlake.store.record import ArraySpec
from layerlake.store.unit import UnitWriter
from making import SEQUENCE, make_empty, no_fsync, token_table
from timing import Row, interleaved, row

UNIT_ROWS = 16_384
FILTER = "SELECT run, row FROM tokens WHERE depth = 7"


def make_tokens(root: Path, units: int) -> None:
    """Make a lake with token tables and next to nothing else: one array of one number a token."""
    if (root / "runs").exists():
        return
    with no_fsync():
        array = ArraySpec("resid_post", 0, "float32", (1,))
        run = make_empty(root, "bench", units * UNIT_ROWS, units, (array,))
        values = np.zeros((UNIT_ROWS, 1), np.uint32)
        for unit in range(units):
            tokens = run.planned_tokens(unit)
            with UnitWriter(run, unit) as writer:
                writer.write(array.name, 0, values)
                writer.commit(tokens, tokens.num_rows // SEQUENCE, {"seconds": 0.0})


def plain(path: Path, units: int) -> duckdb.DuckDBPyConnection:
    """Open the same tokens as a native table of plain DuckDB."""
    connection = duckdb.connect(str(path))
    with contextlib.suppress(duckdb.CatalogException):
        ingest(connection, tables(units))
    return connection


def tables(units: int) -> list[pa.Table]:
    """Give the token tables as Arrow tables in memory, as an ingest by hand would have them."""
    made = [token_table(u * UNIT_ROWS, UNIT_ROWS) for u in range(units)]
    return [t.append_column("run", pa.repeat("bench", t.num_rows)) for t in made]


def ingest(connection: duckdb.DuckDBPyConnection, given: list[pa.Table]) -> None:
    """Load Arrow tables into DuckDB, in one go."""
    incoming = pa.concat_tables(given)
    connection.register("incoming", incoming)
    connection.execute("CREATE TABLE tokens AS SELECT * FROM incoming")
    connection.unregister("incoming")
    connection.execute("CHECKPOINT")


def measure(folder: Path, units: int, repeats: int) -> Iterator[Row]:
    """Measure a filter that keeps one token in a hundred, and building the catalog anew."""
    root = folder / f"tokens-{units}"
    make_tokens(root, units)
    on = f"{units * UNIT_ROWS / 1e6:,.1f} million tokens, {units:,} units"
    numbers = iter(range(10**6))
    arrow = tables(units)

    def by_hand() -> None:
        path = folder / f"ingest-{next(numbers)}.duckdb"
        with contextlib.closing(duckdb.connect(str(path))) as connection:
            ingest(connection, arrow)
        path.unlink()

    cases = {"layerlake": lambda: publish_catalog(root, rebuild=True), "plain Arrow ingest": by_hand}
    times = interleaved(cases, max(3, repeats // 3))
    yield row("catalog rebuilt", on, times, "layerlake", ["plain Arrow ingest"], 1 / 2)
    arrow.clear()
    lake = Lake.open(root)
    with contextlib.closing(plain(folder / f"plain-{units}.duckdb", units)) as connection:
        cases = {
            "layerlake": lambda: lake.select(FILTER).rows,
            "plain DuckDB": lambda: connection.sql(FILTER).to_arrow_table()["row"].to_numpy(),
            "layerlake sql": lambda: lake.sql(FILTER),
        }
        assert sorted(cases["layerlake"]()) == sorted(cases["plain DuckDB"]())
        times = interleaved(cases, repeats)
        target = 1 / 1.5 if units > 1000 else None  # with fewer tokens, what a query costs in itself counts
        yield row("1 % filter to row ids", on, times, "layerlake", ["plain DuckDB"], target)
        yield row("1 % filter to a table", on, times, "layerlake sql", ["plain DuckDB"])


def measure_opening(folder: Path, runs: int, layers: int, repeats: int) -> Iterator[Row]:
    """Measure opening a lake of many runs and arrays, and asking it what it holds."""
    root = folder / f"runs-{runs}-{layers}"
    if not root.exists():
        arrays = tuple(ArraySpec("resid_post", i, "bfloat16", (64,)) for i in range(layers))
        with no_fsync():
            for i in range(runs):
                run = make_empty(root, f"run{i:03}", 1024, 1, arrays)
                tokens = run.planned_tokens(0)
                with UnitWriter(run, 0) as writer:
                    for array in arrays:
                        bits = run.layout(array).dtype.bits
                        writer.write(
                            array.name, 0, pa.array(range(1024 * 64)).to_numpy().astype(bits).reshape(1024, 64)
                        )
                    writer.commit(tokens, tokens.num_rows // SEQUENCE, {"seconds": 0.0})
            publish_catalog(root)

    def opening() -> None:
        table = Lake.open(root).sql("SELECT run, site, layer, path FROM runs JOIN arrays USING (run)")
        assert table.num_rows == runs * layers

    def reading() -> None:
        lake = Lake.open(root)
        assert lake.select("SELECT run, row FROM tokens WHERE run = 'run001' AND row < 10").bits(3).shape == (10, 64)

    cases = {"layerlake": opening, "and ten rows of one": reading, "100 ms": lambda: None}
    times = interleaved(cases, repeats)
    times["100 ms"] = [0.1] * repeats
    on = f"{runs} runs x {layers} arrays"
    yield row("a lake opened, all arrays listed", on, times, "layerlake", ["100 ms"], 1.0)
    yield row("a lake opened, ten rows read", on, times, "and ten rows of one", ["100 ms"], 1.0)
