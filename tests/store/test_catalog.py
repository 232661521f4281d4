"""The catalog is an index: always whole, never ahead of what is committed, and the same however it came about."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from labelling import contents
from lakes import commit_unit, make_run
from layerlake.errors import CorruptLakeError, LakeWarning
from layerlake.store.catalog import catalog_file, connect_catalog, publish_catalog
from layerlake.store.cli import app
from layerlake.store.lake import Lake
from processes import environment, wait_until
from typer.testing import CliRunner

LENGTHS = (5, 9, 3, 16, 7, 12, 1)
TOKENS = sum(LENGTHS)


def check_same_as_rebuilt(root: Path) -> None:
    publish_catalog(root)
    grown = contents(root)
    assert {"runs", "arrays", "units", "sequences", "tokens", "stats", "probes", "results"} <= grown.keys()
    publish_catalog(root, rebuild=True)
    assert grown == contents(root)


def write_results(root: Path, name: str, value: float, rows: int = 1) -> Path:
    path = root / "results" / f"{name}.parquet"
    row = {"result": name, "kind": "probe", "run": "a", "label": "x", "site": "resid_post", "layer": 1}
    row |= {"metric": "accuracy", "value": value, "artifact": f"probe-{name}", "created": "2026-01-01"}
    pq.write_table(pa.Table.from_pylist([row] * rows), path)
    return path


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def finish(process: subprocess.Popen[str], seconds: float = 60) -> str:
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return out


def litter(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*.tmp*"))


def test_generations_are_never_reused_and_the_last_two_are_kept(tmp_path):
    seen: list[str] = []
    for i in range(4):
        make_run(tmp_path, name=f"r{i}", layers=0)
        seen.append(catalog_file(tmp_path).name)
        assert len(list((tmp_path / "catalog").glob("*.duckdb"))) == min(2, i + 1)
    (tmp_path / "catalog.json").unlink()
    for path in (tmp_path / "catalog").glob("*.duckdb"):
        path.unlink()
    seen.append(catalog_file(tmp_path).name)
    seen.append(publish_catalog(tmp_path, rebuild=True).name)
    assert len(set(seen)) == len(seen)
    assert sorted(p.name for p in (tmp_path / "catalog").glob("*.duckdb")) == seen[-2:]


def test_publishing_nothing_new_moves_nothing(tmp_path):
    make_run(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert publish_catalog(tmp_path) == catalog_file(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_unit_shows_in_sql_after_the_next_publishing_only(tmp_path):
    run, tables, bits = make_run(tmp_path, commit=False)
    lake = Lake.open(tmp_path)
    publish_catalog(tmp_path)
    for unit, table in enumerate(tables):
        before = lake.sql("SELECT unit FROM units").num_rows, lake.sql("FROM tokens").num_rows
        commit_unit(run, unit, table, bits)
        assert (lake.sql("SELECT unit FROM units").num_rows, lake.sql("FROM tokens").num_rows) == before
        publish_catalog(tmp_path)
        assert lake.sql("SELECT unit FROM units").num_rows == unit + 1
        assert lake.sql("FROM tokens").num_rows == before[1] + table.num_rows
    check_same_as_rebuilt(tmp_path)


FEW = (4, 4)
KINDS = {
    "int": [2**60 + i for i in range(8)],
    "float": [i / 8 for i in range(8)],
    "string": [f"s{i}" for i in range(8)],
    "bool": [i % 2 == 0 for i in range(8)],
    "null": [None] * 8,
}


TELLING = [("int", "float"), ("float", "string"), ("null", "bool"), ("bool", "string"), ("int", "bool")]
PAIRS = [*TELLING, ("float", "int"), ("null", "null")]
REST = [(a, b) for a in KINDS for b in KINDS if (a, b) not in PAIRS]


@pytest.mark.parametrize("first, second", [*PAIRS, *(pytest.param(*r, marks=pytest.mark.slow) for r in REST)])
def test_labels_of_two_types_give_one_column_whichever_run_came_first(tmp_path, first, second):
    make_run(tmp_path, name="b", lengths=FEW, layers=1, labels={"x": KINDS[first]})
    make_run(tmp_path, name="a", lengths=FEW, layers=0, labels={"x": KINDS[second]})
    check_same_as_rebuilt(tmp_path)
    kinds = {first, second} - {"null"}
    expected = {"int": "BIGINT", "float": "DOUBLE", "string": "VARCHAR", "bool": "BOOLEAN"}
    described = Lake.open(tmp_path).sql("DESCRIBE tokens").to_pylist()
    kind = next(c["column_type"] for c in described if c["column_name"] == "x")
    if len(kinds) == 1:
        assert kind == expected[kinds.pop()]
    else:
        assert kind == ("INTEGER" if not kinds else "DOUBLE" if kinds == {"int", "float"} else "VARCHAR")
    nulls = Lake.open(tmp_path).sql("SELECT run, count(*) FILTER (x IS NULL) AS n FROM tokens GROUP BY run")
    counted = {r["run"]: r["n"] for r in nulls.to_pylist()}
    assert counted == {"b": 8 * (first == "null"), "a": 8 * (second == "null")}


def test_three_types_of_a_label_keep_each_run_s_own_spelling(tmp_path):
    make_run(tmp_path, name="z", labels={"x": [7] * TOKENS})
    make_run(tmp_path, name="m", labels={"x": [0.5] * TOKENS})
    make_run(tmp_path, name="a", labels={"x": ["q"] * TOKENS})
    check_same_as_rebuilt(tmp_path)
    rows = Lake.open(tmp_path).sql("SELECT DISTINCT run, x FROM tokens ORDER BY run").to_pylist()
    assert rows == [{"run": "a", "x": "q"}, {"run": "m", "x": "0.5"}, {"run": "z", "x": "7"}]


def test_labels_differing_in_case_share_a_column(tmp_path):
    make_run(tmp_path, name="b", labels={"Depth": [1] * TOKENS, "Other": [True] * TOKENS})
    make_run(tmp_path, name="a", labels={"depth": [2] * TOKENS, "mine": [None] * TOKENS})
    check_same_as_rebuilt(tmp_path)
    rows = Lake.open(tmp_path).sql("SELECT DISTINCT run, DEPTH FROM tokens ORDER BY run")
    assert rows.to_pylist() == [{"run": "a", "depth": 2}, {"run": "b", "depth": 1}]


def test_a_run_removed_takes_its_rows_and_columns_along(tmp_path):
    make_run(tmp_path, name="a", labels={"x": ["text"] * TOKENS, "only": [1] * TOKENS})
    make_run(tmp_path, name="b", labels={"x": [3] * TOKENS})
    shutil.rmtree(tmp_path / "runs" / "a")
    check_same_as_rebuilt(tmp_path)
    lake = Lake.open(tmp_path)
    assert lake.sql("SELECT run, units FROM runs").to_pylist() == [{"run": "b", "units": 3}]
    assert lake.sql("SELECT DISTINCT run, x FROM tokens").to_pylist() == [{"run": "b", "x": 3}]
    assert "only" not in lake.sql("FROM tokens LIMIT 0").column_names


def test_a_run_made_again_under_its_name_replaces_what_was_indexed(tmp_path):
    make_run(tmp_path, name="a", seed=1)
    make_run(tmp_path, name="b")
    shutil.rmtree(tmp_path / "runs" / "a")
    make_run(tmp_path, name="a", seed=2, lengths=(4, 4), labels={"y": [1.5] * 8})
    check_same_as_rebuilt(tmp_path)
    counted = Lake.open(tmp_path).sql("SELECT run, count(*) AS n FROM tokens GROUP BY run ORDER BY run").to_pylist()
    assert counted == [{"run": "a", "n": 8}, {"run": "b", "n": TOKENS}]


def test_a_unit_that_lost_its_record_is_no_longer_indexed(tmp_path):
    run, tables, _ = make_run(tmp_path)
    run.unit_path(1).unlink()
    check_same_as_rebuilt(tmp_path)
    assert Lake.open(tmp_path).sql("FROM tokens").num_rows == TOKENS - tables[1].num_rows


def test_results_come_and_go_with_their_files(tmp_path):
    make_run(tmp_path, name="a")
    write_results(tmp_path, "p1", 0.5)
    gone = write_results(tmp_path, "p2", 0.75)
    check_same_as_rebuilt(tmp_path)
    lake = Lake.open(tmp_path)
    query = "SELECT result, value, accuracy FROM results JOIN probes USING (result) ORDER BY result"
    assert [tuple(r.values()) for r in lake.sql(query).to_pylist()] == [("p1", 0.5, 0.5), ("p2", 0.75, 0.75)]
    gone.unlink()
    write_results(tmp_path, "p1", 0.625, rows=400)
    check_same_as_rebuilt(tmp_path)
    assert lake.sql("SELECT DISTINCT result, value FROM results").to_pylist() == [{"result": "p1", "value": 0.625}]


def test_results_that_are_none_are_named(tmp_path):
    make_run(tmp_path)
    pq.write_table(pa.table({"result": ["x"], "stranger": [1]}), tmp_path / "results" / "odd.parquet")
    with pytest.raises(CorruptLakeError, match=r"odd\.parquet does not hold results"):
        publish_catalog(tmp_path)
    (tmp_path / "results" / "odd.parquet").write_bytes(b"no parquet")
    with pytest.raises(CorruptLakeError, match=r"odd\.parquet cannot be read"):
        publish_catalog(tmp_path)
    assert Lake.open(tmp_path).sql("FROM tokens").num_rows == TOKENS


@pytest.mark.parametrize("loss", ["pointer", "generations", "both", "folder"])
def test_a_lost_catalog_is_rebuilt_by_the_next_query(tmp_path, loss):
    make_run(tmp_path, labels={"x": [1] * TOKENS})
    before = contents(tmp_path)
    if loss in ("pointer", "both", "folder"):
        (tmp_path / "catalog.json").unlink()
    if loss in ("generations", "both"):
        for path in (tmp_path / "catalog").glob("*.duckdb"):
            path.unlink()
    if loss == "folder":
        shutil.rmtree(tmp_path / "catalog")
    assert contents(tmp_path) == before
    assert Lake.open(tmp_path).verify() == []


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b'{"file":"x","version":2}', b"\xff", b"[" * 100_000])
def test_a_damaged_pointer_says_how_to_rebuild_and_publishing_does(tmp_path, content):
    run, tables, bits = make_run(tmp_path, commit=False)
    commit_unit(run, 0, tables[0], bits)
    publish_catalog(tmp_path)
    (tmp_path / "catalog.json").write_bytes(content)
    with pytest.raises(CorruptLakeError, match="`layerlake index` rebuilds it"):
        Lake.open(tmp_path).sql("FROM tokens")
    commit_unit(run, 1, tables[1], bits)
    publish_catalog(tmp_path)  # a driver goes on: the index is no reason to lose a run
    assert Lake.open(tmp_path).sql("FROM units").num_rows == 2


def test_a_damaged_generation_is_not_built_upon(tmp_path):
    run, tables, bits = make_run(tmp_path, commit=False)
    commit_unit(run, 0, tables[0], bits)
    path = publish_catalog(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    commit_unit(run, 1, tables[1], bits)
    publish_catalog(tmp_path)
    assert Lake.open(tmp_path).sql("FROM units").num_rows == 2
    assert Lake.open(tmp_path).verify() == []


def test_a_damaged_token_table_never_enters_the_catalog(tmp_path):
    run, tables, bits = make_run(tmp_path)
    run.tokens_path(1).write_bytes(run.tokens_path(0).read_bytes())
    Lake.open(tmp_path).index()
    with pytest.warns(LakeWarning, match=r"'toy' is damaged.* 00000001\.parquet|00000001\.parquet holds other bytes"):
        assert Lake.open(tmp_path).sql("FROM tokens").num_rows == 0


@pytest.mark.parametrize("name", ["sequences", "tokens-00000"])
def test_a_damaged_plan_never_enters_the_catalog(tmp_path, name):
    run = make_run(tmp_path)[0]
    other = "tokens-00000" if name == "sequences" else "sequences"
    (run.folder / f"plan/{name}.parquet").write_bytes((run.folder / f"plan/{other}.parquet").read_bytes())
    Lake.open(tmp_path).index()
    with pytest.warns(LakeWarning, match=f"{name}.parquet holds other bytes than were written"):
        assert Lake.open(tmp_path).sql("FROM runs").num_rows == 0


@pytest.mark.parametrize("damage", ["run.json", "units/00000001.json", "tokens/00000000.parquet"])
def test_one_damaged_run_does_not_keep_the_others_from_being_read(tmp_path, damage):
    bad, good = make_run(tmp_path, name="bad", seed=1)[0], make_run(tmp_path, name="good", seed=2)
    whole = (bad.folder / damage).read_bytes()
    (bad.folder / damage).write_bytes(b"")
    for rebuild in (False, True):
        publish_catalog(tmp_path, rebuild=rebuild)
        if not rebuild and damage != "run.json":
            continue  # what is indexed already is not read again
        with pytest.warns(LakeWarning, match=f"Run 'bad' is damaged and left out: .*{Path(damage).name}"):
            seen = Lake.open(tmp_path).sql("SELECT run, count(*) AS n FROM tokens GROUP BY run").to_pylist()
        assert seen == [{"run": "good", "n": TOKENS}]
    result = CliRunner().invoke(app, ["index", "--lake", str(tmp_path)])
    assert result.exit_code == 1 or isinstance(result.exception, LakeWarning)
    assert [p.run for p in Lake.open(tmp_path).verify() if damage in p.path] == ["bad"]
    (bad.folder / damage).write_bytes(whole)
    publish_catalog(tmp_path, rebuild=True)
    assert Lake.open(tmp_path).sql("FROM tokens").num_rows == 2 * TOKENS
    assert good[0].name == "good"


READER = """
    import sys, time
    from pathlib import Path
    from layerlake.store.lake import Lake
    root, stop = Path(sys.argv[1]), Path(sys.argv[2])
    lake, queries, seen = Lake.open(root), 0, set()
    while not stop.exists():
        rows = lake.sql("SELECT (SELECT count(*) FROM tokens), (SELECT sum(rows) FROM units), "
                        "(SELECT sum(length) FROM sequences), (SELECT count(*) FROM units)")
        tokens, counted, lengths, units = [rows[i].to_pylist()[0] for i in range(4)]
        assert tokens == int(counted or 0) == int(lengths or 0), (tokens, counted, lengths)
        assert units >= max(seen, default=0), "went back in time"
        seen.add(units)
        queries += 1
        Path(sys.argv[3]).touch()
    print(queries, len(seen))
"""


@pytest.mark.parametrize("units, queries", [(6, 200), pytest.param(80, 2000, marks=pytest.mark.slow)])
def test_Q03_readers_never_fail_nor_see_part_of_a_unit_while_generations_come_and_go(tmp_path, units, queries):
    lengths = (4, 9, 3) * units
    run, tables, bits = make_run(tmp_path / "lake", lengths=lengths, unit_rows=16, commit=False)
    publish_catalog(tmp_path / "lake")
    old = contextlib.ExitStack()
    held = old.enter_context(connect_catalog(tmp_path / "lake"))
    stop, faults, counts = tmp_path / "stop", [], []
    lake = Lake.open(tmp_path / "lake")

    def read() -> None:
        done = 0
        try:
            while not stop.exists():
                rows = lake.sql(
                    "SELECT unit, rows, (SELECT count(*) FROM tokens WHERE row // 16 = unit) AS n FROM units"
                )
                assert rows["rows"].to_pylist() == rows["n"].to_pylist()
                sel = lake.select("SELECT run, row FROM tokens")
                if len(sel):
                    assert np.array_equal(sel.bits(1), bits["resid_post-1"][sel.rows])
                done += 2
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
            faults.append(error)
        counts.append(done)

    process = child(READER, tmp_path / "lake", stop, tmp_path / "reads")
    assert wait_until((tmp_path / "reads").exists, 30)
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for unit, table in enumerate(tables):
        commit_unit(run, unit, table, bits)
        publish_catalog(tmp_path / "lake")
    publish_catalog(tmp_path / "lake", rebuild=True)
    time.sleep(0.3)
    stop.touch()
    for thread in threads:
        thread.join(30)
    asked, states = map(int, finish(process).split())
    assert faults == []
    assert sum(counts) + asked > queries
    assert states >= 2
    assert held.execute("SELECT count(*) FROM units").fetchone() == (0,)  # what it opened it keeps
    old.close()


PUBLISHER = """
    import sys
    from pathlib import Path
    sys.path.insert(0, "tests")
    from lakes import make_run
    from layerlake.store.catalog import publish_catalog
    for i in range(2):
        make_run(Path(sys.argv[1]), name=f"{sys.argv[2]}-{i}", labels={f"l{sys.argv[2]}": [1] * 53})
"""


def test_concurrent_publishers_lose_nothing(tmp_path):
    assert TOKENS == 53
    for process in [child(PUBLISHER, tmp_path, name) for name in "abc"]:
        finish(process)
    rows = Lake.open(tmp_path).sql("SELECT run, units, tokens FROM runs ORDER BY run").to_pylist()
    assert rows == [{"run": f"{n}-{i}", "units": 3, "tokens": TOKENS} for n in "abc" for i in range(2)]
    check_same_as_rebuilt(tmp_path)
    assert litter(tmp_path) == []


KILLED = """
    import os, shutil, sys
    from pathlib import Path
    from dying import die_at_each_step
    from layerlake.store import catalog

    steps = [(os, "fsync"), (os, "open"), (catalog.shutil, "copyfile"), (catalog, "load_runs"),
             (catalog, "load_results"), (catalog, "file_sha256"), (Path, "rename"), (Path, "replace"),
             (Path, "unlink")]
    start = Path(sys.argv[1])

    def prepare(moment):
        root = shutil.copytree(start, start.with_name(f"lake{moment}"))
        return lambda: catalog.publish_catalog(root)

    print(die_at_each_step(steps, prepare, int(sys.argv[2])))
"""


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_publisher_killed_anywhere_leaves_the_old_state_or_the_new_and_no_litter(tmp_path, stride):
    run, tables, bits = make_run(tmp_path / "start", commit=False)
    commit_unit(run, 0, tables[0], bits)
    publish_catalog(tmp_path / "start")
    commit_unit(run, 1, tables[1], bits)
    expected = {1: tables[0].num_rows, 2: tables[0].num_rows + tables[1].num_rows}
    moments = int(finish(child(KILLED, tmp_path / "start", stride)))
    seen, littered = [], 0
    for moment in range(moments):
        root = tmp_path / f"lake{moment * stride}"
        littered += bool(litter(root))
        counted = Lake.open(root).sql("SELECT (SELECT count(*) FROM units) AS u, (SELECT count(*) FROM tokens) AS t")
        units, tokens = counted.to_pylist()[0].values()
        assert tokens == expected[units]
        seen.append(units)
        publish_catalog(root)
        assert litter(root) == []
        assert Lake.open(root).sql("FROM tokens").num_rows == expected[2]
    assert Lake.open(root).verify() == []
    assert seen == sorted(seen) and set(seen) == {1, 2}
    assert moments > 10 // stride and littered > 2 // stride


NOBODY = """
    import os, sys
    from typer.testing import CliRunner
    from layerlake.errors import LayerlakeError
    from layerlake.store.cli import app
    from layerlake.store.lake import Lake

    def session(root):
        lake = Lake.open(root)
        try:
            sel = lake.select("SELECT run, row FROM tokens")
            yield len(sel), sel.array(1).shape[0], len(lake.verify())
            for command in (["ls"], ["show", "toy"]):
                result = CliRunner().invoke(app, [*command, "--lake", root])
                yield command[0], result.exit_code, "toy" in result.output
        except LayerlakeError as error:
            yield type(error).__name__, error

    list(session(sys.argv[1]))  # everything is imported before the rights go
    os.setgid(65534), os.setuid(65534)
    for root in sys.argv[2:]:
        for line in session(root):
            print(*line)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="changes to another user, which only root can")
def test_a_lake_of_somebody_else_can_be_read(tmp_path):
    with tempfile.TemporaryDirectory(prefix="layerlake-") as folder:  # tmp_path is closed to others
        _read_as_nobody(Path(folder), tmp_path / "warm")


def _read_as_nobody(folder: Path, warm: Path) -> None:
    folder.chmod(0o755)
    root = folder / "lake"
    make_run(warm)
    make_run(root)
    other = shutil.copytree(root, folder / "other")
    (other / "catalog.json").unlink()
    *lines, last = finish(child(NOBODY, warm, root, other)).splitlines()
    assert lines == [f"{TOKENS} {TOKENS} 0", "ls 0 True", "show 0 True"]
    assert last.startswith("WorldError The catalog of ") and "Permission denied" in last and "layerlake index" in last


def test_Q05_indexing_fifty_thousand_tokens_takes_seconds_and_grows_in_proportion(tmp_path):
    def seconds(root: Path, tokens: int) -> float:
        run, tables, bits = make_run(
            root, lengths=(100,) * (tokens // 100), unit_rows=1024, width=2, layers=1, labels={"x": [0.5] * tokens}
        )
        times = []
        for _ in range(3):
            start = time.perf_counter()
            publish_catalog(root, rebuild=True)
            times.append(time.perf_counter() - start)
        assert Lake.open(root).sql("FROM tokens").num_rows == tokens
        return min(times)

    small, large = seconds(tmp_path / "small", 5_000), seconds(tmp_path / "large", 50_000)
    assert large < 5.0
    assert large <= 15 * small


def test_the_commands_ls_and_index_say_what_there_is(tmp_path):
    make_run(tmp_path, name="one")
    (tmp_path / "catalog.json").unlink()
    runner = CliRunner()
    listed = runner.invoke(app, ["ls", "--lake", str(tmp_path)])
    assert listed.exit_code == 0 and "one" in listed.output and "3/3" in listed.output
    indexed = runner.invoke(app, ["index", "--lake", str(tmp_path)])
    assert indexed.output == f"Indexed 1 run, 3 units, {TOKENS} tokens.\n"
