"""A catalog that is kept open between queries shows the newest state, to each query alone, in each process its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading

import pyarrow as pa
import pytest
from lakes import commit_unit, make_run
from layerlake.errors import CorruptLakeError, SqlRefusedError
from layerlake.store.catalog import named_generation, publish_catalog
from layerlake.store.lake import Lake

COUNT = "SELECT count(*) AS n FROM tokens"


def count(lake: Lake) -> int:
    return lake.sql(COUNT)["n"][0].as_py()


def opened(lake: Lake) -> object:
    assert lake._session._open is not None
    return lake._session._open.connection


def test_an_open_lake_shows_each_new_generation(tmp_path):
    run, tables, bits = make_run(tmp_path, commit=False)
    lake, expected = Lake.open(tmp_path), 0
    for unit, table in enumerate(tables):
        assert count(lake) == expected
        commit_unit(run, unit, table, bits)
        publish_catalog(tmp_path)
        expected += table.num_rows
        assert count(lake) == expected


def test_one_generation_is_opened_once_and_closed_when_the_next_is_there(tmp_path):
    run, tables, bits = make_run(tmp_path, commit=False)
    publish_catalog(tmp_path)
    lake = Lake.open(tmp_path)
    count(lake)
    first = opened(lake)
    count(lake)
    assert opened(lake) is first
    commit_unit(run, 0, tables[0], bits)
    publish_catalog(tmp_path)
    assert count(lake) == tables[0].num_rows
    assert opened(lake) is not first
    with pytest.raises(Exception, match="[Cc]losed"):
        first.execute("SELECT 1")


def test_a_table_of_the_caller_is_gone_with_its_query(tmp_path):
    make_run(tmp_path)
    lake = Lake.open(tmp_path)
    assert lake.sql("SELECT sum(x) AS s FROM mine", tables={"mine": pa.table({"x": [1, 2]})})["s"][0].as_py() == 3
    with pytest.raises(SqlRefusedError, match="mine"):
        lake.sql("SELECT * FROM mine")
    assert lake.sql("SELECT x FROM mine", tables={"mine": pa.table({"x": [9]})})["x"][0].as_py() == 9


@pytest.mark.parametrize(
    "made",
    [
        "TABLE memory.main.mine AS SELECT 666 AS x",
        "SEQUENCE memory.main.mine",
        "SCHEMA memory.mine",
        "VIEW memory.main.mine AS SELECT 1",
        "TYPE memory.main.mine AS ENUM ('a')",
        "MACRO memory.main.mine() AS 1",
        "TEMP TABLE mine AS SELECT 666 AS x",
        "TEMP VIEW tokens AS SELECT 666 AS x",
        "TEMP MACRO count(x) AS 666",
    ],
)
def test_nothing_that_explain_analyze_carries_out_is_there_for_a_later_query(tmp_path, made):
    run, _, _ = make_run(tmp_path)
    lake = Lake.open(tmp_path)
    things = "SELECT name FROM (SELECT table_name AS name FROM duckdb_tables() UNION ALL SELECT function_name FROM "
    things += "duckdb_functions() WHERE NOT internal UNION ALL SELECT sequence_name FROM duckdb_sequences() UNION ALL "
    things += "SELECT schema_name FROM duckdb_schemas() UNION ALL SELECT view_name FROM duckdb_views() UNION ALL "
    things += "SELECT type_name FROM duckdb_types()) ORDER BY ALL"
    before = lake.sql(things)
    with contextlib.suppress(SqlRefusedError):
        lake.sql(f"EXPLAIN ANALYZE CREATE {made}")
    assert lake.sql(things) == before
    assert count(lake) == run.record.tokens
    assert lake.sql("SELECT x FROM mine", tables={"mine": pa.table({"x": [1]})})["x"][0].as_py() == 1


def test_threads_ask_at_once_each_with_a_table_of_its_own(tmp_path):
    run, _, _ = make_run(tmp_path)
    lake, wrong = Lake.open(tmp_path), []

    def ask(i: int) -> None:
        for k in range(20):
            mine = pa.table({"x": [i * 100 + k]})
            if lake.sql("SELECT x FROM mine", tables={"mine": mine}).to_pylist() != [{"x": i * 100 + k}]:
                wrong.append(i)
            if count(lake) != run.record.tokens:
                wrong.append("count")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_generations_that_come_while_threads_ask_end_no_query(tmp_path):
    run, tables, bits = make_run(tmp_path, commit=False, lengths=(30,) * 12)
    publish_catalog(tmp_path)
    lake, done, failed = Lake.open(tmp_path), threading.Event(), []

    def ask() -> None:
        last = 0
        while not done.is_set():
            try:
                now = lake.sql("SELECT t.row FROM tokens t ORDER BY hash(row)").num_rows
                assert now >= last
                last = now
            except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
                failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    [t.start() for t in threads]
    for unit, table in enumerate(tables):
        commit_unit(run, unit, table, bits)
        publish_catalog(tmp_path)
    done.set()
    [t.join() for t in threads]
    assert not failed
    assert count(lake) == run.record.tokens


def test_a_lock_that_another_thread_holds_is_open_in_a_forked_process(tmp_path):
    run, _, _ = make_run(tmp_path)
    lake = Lake.open(tmp_path)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=ask_in_child, args=(lake, queue))
    with lake._session._lock:
        child.start()
        child.join(20)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0 and queue.get() == run.record.tokens


def test_a_damaged_block_is_the_catalogs_fault_and_not_the_querys(tmp_path):
    make_run(tmp_path)
    generation = named_generation(tmp_path)
    assert generation
    data, seen = generation.path.read_bytes(), set()
    for at in range(20_000, len(data), 1 << 18):  # one place a block
        generation.path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        for query in ("SELECT run, row FROM tokens", "FROM runs", "FROM stats", "FROM problems"):
            try:
                Lake.open(tmp_path).sql(query)
                seen.add("answered")
            except CorruptLakeError as error:
                assert "layerlake index" in str(error)
                seen.add("refused")
    assert seen == {"answered", "refused"}


def ask_in_child(lake: Lake, queue) -> None:
    queue.put(count(lake))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # Python 3.12 of every fork
def test_a_lake_that_was_asked_before_answers_in_a_forked_process_and_as_a_copy(tmp_path):
    run, _, _ = make_run(tmp_path)
    lake = Lake.open(tmp_path)
    assert count(lake) == run.record.tokens
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=ask_in_child, args=(lake, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and queue.get() == run.record.tokens
    assert count(lake) == run.record.tokens
    assert count(pickle.loads(pickle.dumps(lake))) == run.record.tokens  # noqa: S301 - our own bytes
