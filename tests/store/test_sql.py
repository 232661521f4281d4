"""SQL reads the lake and nothing else: hostile statements change no byte, and time and memory are bounded."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from lakes import make_run
from layerlake.errors import LayerlakeError, RequestError, SqlRefusedError, UnknownNameError, WorldError
from layerlake.store.catalog_session import CatalogSession
from layerlake.store.cli import app
from layerlake.store.lake import Lake
from layerlake.store.sql import run_sql
from layerlake.store.tokens import table_hash
from typer.testing import CliRunner

LENGTHS = (5, 9, 3, 16, 7, 12, 1)
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a lake and files of other people beside it."""
    folder = tmp_path_factory.mktemp("place")
    make_run(folder / "lake")
    (folder / "secret.csv").write_text("name,word\nsomebody,swordfish\n")
    (folder / "other.json").write_text('{"word": "swordfish"}')
    pa.parquet.write_table(pa.table({"word": ["swordfish"]}), folder / "other.parquet")
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
        for p in sorted(folder.rglob("*"))
    }


REFUSED = """
DELETE FROM tokens
DROP TABLE tokens
DROP VIEW runs
TRUNCATE tokens
UPDATE tokens SET row = 0
INSERT INTO tokens SELECT * FROM tokens
MERGE INTO tokens USING tokens AS t ON false WHEN NOT MATCHED THEN INSERT
COPY tokens TO '{dir}/out.parquet'
COPY tokens TO '{dir}/lake/catalog.json'
COPY (SELECT 1) TO '{dir}/out.csv'
COPY tokens FROM '{dir}/secret.csv'
COPY FROM DATABASE lake TO memory
EXPORT DATABASE '{dir}/out'
IMPORT DATABASE '{dir}/out'
ATTACH '{dir}/out.duckdb'
ATTACH '{dir}/out.duckdb' AS x (TYPE sqlite)
DETACH lake
INSTALL httpfs
LOAD json
FORCE INSTALL httpfs
SET memory_limit = '64GB'
SET enable_external_access = true
SET VARIABLE x = 1
RESET memory_limit
PRAGMA database_list
PRAGMA enable_profiling
CALL pragma_version()
CALL enable_logging(storage = 'file', storage_path = '{dir}/out')
CREATE TABLE x AS SELECT 1
CREATE TABLE memory.main.x AS SELECT 1
CREATE TEMP TABLE x AS SELECT 1
CREATE OR REPLACE TABLE tokens AS SELECT 1
CREATE VIEW x AS SELECT 1
CREATE MACRO f(a) AS a
CREATE SECRET (TYPE s3, KEY_ID 'a', SECRET 'b')
CREATE PERSISTENT SECRET (TYPE s3, KEY_ID 'a', SECRET 'b')
CREATE SCHEMA x
CREATE SEQUENCE x
CREATE TYPE x AS ENUM ('a')
CREATE INDEX x ON tokens (row)
ALTER TABLE tokens RENAME TO x
COMMENT ON TABLE tokens IS 'x'
USE memory
CHECKPOINT
FORCE CHECKPOINT lake
VACUUM
ANALYZE
BEGIN
COMMIT
ROLLBACK
PREPARE p AS SELECT 1
EXECUTE p
DEALLOCATE p
SELECT 1; DROP TABLE tokens
select 1; select 2
SELECT 1 /* harmless */; /* quite */ DELETE FROM tokens
SELECT 1 -- harmless\\n; DROP TABLE tokens
WITH x AS (DELETE FROM tokens RETURNING *) SELECT * FROM x
EXPLAIN ANALYZE DELETE FROM tokens
EXPLAIN ANALYZE UPDATE tokens SET row = 0
EXPLAIN ANALYZE INSERT INTO tokens SELECT * FROM tokens
EXPLAIN ANALYZE DROP TABLE tokens
EXPLAIN ANALYZE COPY tokens TO '{dir}/out.parquet'
EXPLAIN COPY tokens TO '{dir}/out.parquet'
EXPLAIN ANALYZE COPY tokens FROM '{dir}/secret.csv'
EXPLAIN ANALYZE EXPORT DATABASE '{dir}/out'
EXPLAIN ANALYZE ATTACH '{dir}/out.duckdb'
EXPLAIN ANALYZE INSTALL httpfs
EXPLAIN ANALYZE SET threads = 1
EXPLAIN ANALYZE CALL enable_logging(storage = 'file', storage_path = '{dir}/out')
EXPLAIN ANALYZE CREATE TABLE lake.main.x AS SELECT 1
EXPLAIN ANALYZE CREATE TABLE memory.main.x AS SELECT 1
EXPLAIN ANALYZE SELECT * FROM read_csv('{dir}/secret.csv')
PIVOT tokens ON split USING count(*)
SELECT * FROM '{dir}/secret.csv'
SELECT * FROM '{dir}/other.parquet'
SELECT * FROM "{dir}/other.json"
SELECT * FROM read_text('{dir}/secret.csv')
SELECT * FROM read_blob('{dir}/secret.csv')
SELECT * FROM read_csv('{dir}/secret.csv')
SELECT * FROM read_csv_auto('{dir}/*.csv')
SELECT * FROM read_json('{dir}/other.json')
SELECT * FROM read_ndjson_objects('{dir}/other.json')
SELECT * FROM read_parquet('{dir}/other.parquet')
SELECT * FROM parquet_scan(['{dir}/other.parquet'])
SELECT * FROM parquet_metadata('{dir}/other.parquet')
SELECT * FROM parquet_schema('{dir}/other.parquet')
SELECT * FROM read_duckdb('{dir}/lake/catalog/*.duckdb')
SELECT * FROM glob('{dir}/*')
SELECT * FROM sniff_csv('{dir}/secret.csv')
SELECT * FROM read_csv('https://example.org/x.csv')
SELECT * FROM duckdb_secrets()
SELECT * FROM which_secret('s3://x', 's3')
SELECT * FROM swordfish
SELECT * FROM query('DROP TABLE tokens')
SELECT * FROM query('SELECT 1; DROP TABLE tokens')
SELECT * FROM query('SELECT * FROM read_text(''{dir}/secret.csv'')')
SELECT * FROM query_table('{dir}/secret.csv')
SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT * FROM read_text(''{dir}/secret.csv'')'))
SELECT * FROM json_execute_serialized_sql(json_serialize_sql('DROP TABLE tokens'))
SELECT * FROM enable_logging(storage = 'file', storage_path = '{dir}/out')
SELECT * FROM enable_profiling(save_location = '{dir}/out.json')
SELECT * FROM disable_logging()
SELECT * FROM force_checkpoint('lake')
SELECT * FROM python_map_function(1)
SELECT * FROM pandas_scan(1)
SELECT * FROM arrow_scan(1, 1, 1)
SELECT getenv('HOME')
SELECT nextval('x')
SELECT error('mine')
SELECT nothing FROM tokens
SELEC 1
;
-- only a comment
/* only a comment */
""".strip().splitlines()

HARMLESS = """
SELECT count(*) FROM tokens
SELECT 1;
SELECT 1;;
SELECT 1 -- ; DROP TABLE tokens
SELECT 1 /* ; DROP TABLE tokens */
SELECT 'x; DROP TABLE tokens'
FROM tokens
TABLE runs
VALUES (1)
SHOW TABLES
DESCRIBE tokens
SUMMARIZE units
EXPLAIN SELECT * FROM tokens
EXPLAIN ANALYZE SELECT count(*) FROM tokens
EXPLAIN ANALYZE CREATE TEMP TABLE x AS SELECT 1
PIVOT (SELECT run, split FROM tokens) ON split IN ('test', 'train') USING count(*)
SELECT getvariable('x')
SELECT current_setting('memory_limit')
SELECT write_log('x')
SELECT * FROM checkpoint('lake')
SELECT * FROM truncate_duckdb_logs()
SELECT * FROM duckdb_settings()
SELECT * FROM query('SELECT 1')
SELECT * FROM query_table('tokens')
SELECT * FROM test_all_types()
WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 100) SELECT sum(n) FROM t
""".strip().splitlines()


def test_Q08_hostile_statements_are_refused_and_change_nothing(place, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    swordfish = pa.table({"x": [1]})  # a variable of the caller, within reach of DuckDB's replacement scans
    lake, before = Lake.open(place / "lake"), hashes(place)
    for statement in REFUSED:
        query = statement.replace("{dir}", str(place)).replace("\\n", "\n")
        with pytest.raises(SqlRefusedError) as refusal:
            lake.sql(query)
            pytest.fail(f"ran: {query}")
        assert refusal.value.exit_code == 2 and str(refusal.value), query
        assert hashes(place) == before, query
    with pytest.raises(SqlRefusedError):
        lake.sql("")
    assert list(tmp_path.iterdir()) == []
    assert swordfish.num_rows == 1


def test_harmless_statements_run_and_change_nothing(place, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    lake, before = Lake.open(place / "lake"), hashes(place)
    for query in HARMLESS:
        assert isinstance(lake.sql(query), pa.Table), query
        assert hashes(place) == before, query
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused_says_what_it_was_and_what_to_do(place):
    lake = Lake.open(place / "lake")
    with pytest.raises(SqlRefusedError, match="exactly one SELECT or EXPLAIN at a time; this is SELECT, DROP"):
        lake.sql("SELECT 1; DROP TABLE tokens")
    with pytest.raises(SqlRefusedError, match=r"List them: PIVOT .* IN \('a', 'b'\)"):
        lake.sql("PIVOT tokens ON split USING count(*)")


def test_the_commands_exit_code_is_that_of_a_wrong_request(place):
    result = CliRunner().invoke(app, ["sql", "DROP TABLE tokens", "--lake", str(place / "lake")])
    assert isinstance(result.exception, SqlRefusedError) and result.exception.exit_code == 2


@pytest.mark.parametrize(
    "query", ["SELECT '\ud800'", "(" * 100_000, f"SELECT {'(' * 5000}1{')' * 5000}", "SELECT 1" + " + 1" * 20_000]
)
def test_queries_that_are_not_text_or_too_deep_are_refused(place, query):
    with pytest.raises(SqlRefusedError):
        Lake.open(place / "lake").sql(query)


ENDLESS = {
    "cross join": "SELECT sum(a.range * b.range) FROM range(100_000_000) a, range(100_000_000) b",
    "recursion": "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT (n + 1) % 7 FROM t) SELECT count(*) FROM t",
    "explain": "EXPLAIN ANALYZE SELECT sum(a.range * b.range) FROM range(100_000_000) a, range(100_000_000) b",
    "result": "SELECT md5(range::VARCHAR) FROM range(100_000_000_000)",
}


@pytest.mark.parametrize("query", ENDLESS)
@pytest.mark.parametrize("timeout", [1e-6, 0.2])
def test_endless_queries_are_stopped(place, query, timeout):
    start = time.perf_counter()
    with pytest.raises(WorldError, match=f"took longer than {timeout:g} s and was stopped") as error:
        Lake.open(place / "lake").sql(ENDLESS[query], timeout=timeout)
    assert time.perf_counter() - start < timeout + 2
    assert error.value.exit_code == 1
    assert Lake.open(place / "lake").sql("SELECT count(*) AS n FROM tokens")["n"].to_pylist() == [TOKENS]


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, math.inf])
def test_a_timeout_that_is_none_is_refused(place, timeout):
    with pytest.raises(RequestError, match="more than 0 seconds"):
        Lake.open(place / "lake").sql("SELECT 1", timeout=timeout)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT list(a.range) FROM range(30_000_000) a",
        "SELECT range % 20_000_000 AS k, list(range) FROM range(20_000_000) GROUP BY k ORDER BY k",
        "SELECT * FROM range(30_000_000) a ORDER BY hash(range) LIMIT 1 OFFSET 20_000_000",
    ],
)
def test_memory_is_limited_and_nothing_is_spilled(place, tmp_path, monkeypatch, query):
    monkeypatch.chdir(tmp_path)
    before = hashes(place)
    with pytest.raises(WorldError, match="memory limit of 50MB"):
        run_sql(CatalogSession(place / "lake", "50MB"), query)
    assert hashes(place) == before
    assert list(tmp_path.iterdir()) == []


def test_a_memory_limit_that_is_none_is_refused(place):
    with pytest.raises(RequestError, match="'much' is not an amount of memory"):
        run_sql(CatalogSession(place / "lake", "much"), "SELECT 1")


class Frame:
    """Something that is no Arrow table but speaks its language, as pandas and polars frames do."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def test_the_callers_tables_are_joined(place):
    lake = Lake.open(place / "lake")
    mine = pa.table({"row": [3, 1, 2], "mark": ["c", "a", "b"]})
    for frame in (mine, mine.to_batches()[0], Frame(mine), mine.to_reader()):
        got = lake.sql("SELECT mark, token FROM tokens JOIN Mine USING (row) ORDER BY row", tables={"mine": frame})
        assert got.to_pylist() == [{"mark": m, "token": f"t{i}"} for i, m in enumerate("abc", 1)]


def test_the_callers_tables_cannot_stand_for_the_lake_s(place):
    mine = pa.table({"row": [1]})
    for name in ("tokens", "Tokens", "runs", "stats", "probes"):
        with pytest.raises(RequestError, match="is a table of the lake already"):
            Lake.open(place / "lake").sql(f"FROM {name}", tables={name: mine})
    for name in ("a b", 'x"; DROP TABLE tokens; --', "", "1x", "main.x"):
        with pytest.raises(RequestError, match="cannot name a table"):
            Lake.open(place / "lake").sql("SELECT 1", tables={name: mine})


@pytest.mark.parametrize("thing", [None, 5, [1, 2], {"a": [1]}, "text", object()])
def test_things_that_are_no_tables_are_refused(place, thing):
    with pytest.raises(RequestError, match="Table 'mine' cannot be used in SQL"):
        Lake.open(place / "lake").sql("FROM mine", tables={"mine": thing})


def test_Q07_nan_stays_nan_and_missing_is_null(tmp_path):
    values = [0.5, math.nan, None, math.inf, -math.inf, math.nan, None, None, *[1.0] * (TOKENS - 8)]
    make_run(tmp_path, labels={"x": values})
    got = Lake.open(tmp_path).sql(
        "SELECT count(*) AS n, count(x) AS present, count(*) FILTER (x IS NULL) AS missing, "
        "count(*) FILTER (isnan(x)) AS nan, count(*) FILTER (isinf(x)) AS inf, "
        "avg(x) FILTER (isfinite(x)) AS mean FROM tokens"
    )
    expected = {"n": TOKENS, "present": TOKENS - 3, "missing": 3, "nan": 2, "inf": 2}
    assert got.to_pylist() == [expected | {"mean": (0.5 + TOKENS - 8) / (TOKENS - 7)}]


ODD = [
    "x" * 300 + "end", "汉字とかな漢字", "👩‍👩‍👧‍👦🏳️‍🌈", "e\u0301\u200d\u202e", "tab\tnew\nreturn\r", "nul\0inside",
    "\0", "", " ", "'", '"', "''; DROP TABLE tokens; --", "%s {} \\n \\x00", "NULL", "nan", "\x7f\x1b[31m",
    "\ufeffbom", "\U0010ffff",
]  # fmt: skip


def test_S08_U06_long_and_odd_text_comes_back_as_it_was(tmp_path):
    values = [ODD[i] if i < len(ODD) else "short" for i in range(TOKENS)]
    run, tables, _ = make_run(tmp_path, labels={"word": values})
    lake = Lake.open(tmp_path)
    got = lake.sql("SELECT word FROM tokens ORDER BY row")["word"].to_pylist()
    assert got == values
    for value in ODD:
        asked = pa.table({"asked": [value]})
        assert lake.sql("FROM tokens JOIN mine ON word = asked", tables={"mine": asked}).num_rows == 1
    assert lake.verify() == []


def test_names_with_quotes_inject_nothing(tmp_path):
    name = 'x" VARCHAR); DROP TABLE tokens; --'
    other = "it's; DELETE FROM runs"
    make_run(tmp_path / "it's a lake", labels={name: [1] * TOKENS, other: ["v"] * TOKENS, "数": [True] * TOKENS})
    lake = Lake.open(tmp_path / "it's a lake")
    quoted = '"' + name.replace('"', '""') + '"'
    got = lake.sql(f'SELECT {quoted} AS a, "{other}" AS b, 数 AS c FROM tokens').to_pylist()
    assert got == [{"a": 1, "b": "v", "c": True}] * TOKENS
    assert lake.sql("SELECT run FROM runs").to_pylist() == [{"run": "toy"}]
    for run in ("x'; DROP TABLE tokens; --", "../toy", "..", "", "toy/", "/etc", "toy\0", "x" * 300, "toy.tmp"):
        with pytest.raises(UnknownNameError, match="There is no run"):
            lake.run(run)
        with pytest.raises(LayerlakeError):
            lake.select("SELECT run, row FROM mine", tables={"mine": pa.table({"run": [run], "row": [0]})})


def test_a_run_of_another_lake_is_out_of_reach(tmp_path):
    make_run(tmp_path / "lake")
    make_run(tmp_path / "other", name="theirs")
    for name in ("../../other/runs/theirs", str(tmp_path / "other/runs/theirs")):
        with pytest.raises(UnknownNameError):
            Lake.open(tmp_path / "lake").select(f"SELECT '{name}' AS run, 0 AS row")


@pytest.mark.parametrize(
    "query, why",
    [
        ("SELECT 1 AS run, 0 AS row", "run of the selection is int32, not text"),
        ("SELECT ['toy'] AS run, 0 AS row", "run of the selection is list"),
        ("SELECT '\\xAA'::BLOB AS run, 0 AS row", "run of the selection is binary"),
        ("SELECT 'toy' AS run, 0.5 AS row", "not an integer"),
        ("SELECT 'toy' AS run, '0' AS row", "not an integer"),
        ("SELECT 'toy' AS run, NULL::BIGINT AS row", "holds 1 NULLs"),
        ("SELECT 'toy' AS run, 0 AS row, 1 AS row", "two columns row"),
        ("SELECT run, run, row FROM tokens", "two columns run"),
        ("SELECT 'toy' AS run, 18446744073709551615::UBIGINT AS row", "cannot be read"),
        ("SELECT 'toy' AS run, -9223372036854775808 AS row", "cannot be read"),
        ("EXPLAIN SELECT run, row FROM tokens", "must return the columns run and row"),
    ],
)
def test_selections_of_odd_columns_are_refused(place, query, why):
    with pytest.raises(RequestError, match=why):
        Lake.open(place / "lake").select(query)


def test_run_may_be_an_enum_or_a_dictionary(place):
    lake = Lake.open(place / "lake")
    assert len(lake.select("SELECT run::ENUM ('toy') AS run, row FROM tokens")) == TOKENS
    coded = pa.table({"run": pa.array(["toy"] * 2).dictionary_encode(), "row": [0, 1]})
    assert len(lake.select("FROM mine", tables={"mine": coded})) == 2


def test_Q02_a_selection_keeps_the_rows_it_was_made_of(tmp_path):
    make_run(tmp_path)
    lake = Lake.open(tmp_path)
    sel = lake.select(
        "SELECT run, row FROM tokens JOIN (SELECT seq, count(*) AS n FROM tokens GROUP BY seq) USING (seq) LIMIT 20"
    )
    rows, values, name = sel.table["row"].to_pylist(), sel.array(1), table_hash([sel.table])
    make_run(tmp_path, name="another")
    make_run(tmp_path, name="earlier")
    lake.index()
    assert sel.table["row"].to_pylist() == rows and table_hash([sel.table]) == name
    assert np.array_equal(sel.array(1).view(np.uint32), values.view(np.uint32))
    again = lake.select("FROM kept", tables={"kept": sel.table})
    assert np.array_equal(again.array(1).view(np.uint32), values.view(np.uint32))


def test_what_confines_a_query_is_set_and_locked(place):
    settings = Lake.open(place / "lake").sql("SELECT name, value FROM duckdb_settings()").to_pylist()
    value = {s["name"]: s["value"] for s in settings}
    expected = {"temp_directory": "", "enable_external_access": "false", "lock_configuration": "true"}
    expected |= {"python_enable_replacements": "false", "autoload_known_extensions": "false"}
    assert {name: value[name] for name in expected} == expected


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_python_has_no_date_for_is_a_sentence(place, options):
    asked = ["sql", "SELECT DATE '290000-01-01' AS d", "--lake", str(place / "lake"), *options]
    error = CliRunner().invoke(app, asked).exception
    assert isinstance(error, RequestError) and "Write d::VARCHAR" in str(error)


def test_json_says_whole_numbers_whole_and_leaves_no_column_out(place):
    def shown(query: str, *options: str):
        return CliRunner().invoke(app, ["sql", query, "--lake", str(place / "lake"), *options])

    big = (1 << 53) + 1
    query = f"SELECT sum({big} + 0 * row) // count(*) AS a, sum(row) * 0 + {big} AS b, 1.5 AS c FROM tokens"
    assert shown(query, "--json").output == f'[{{"a": {big}, "b": {big}, "c": 1.5}}]\n'
    assert str(big) in shown(f"SELECT sum({big}) AS s FROM range(1)").output
    twice = shown("SELECT 1 AS a, 2 AS a", "--json").exception
    assert isinstance(twice, RequestError) and "2 columns 'a'" in str(twice)
