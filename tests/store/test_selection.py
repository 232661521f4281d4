"""Any SELECT that gives run and row is a selection; rows by number; checked reading; copies in other processes."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lakes import make_run
from layerlake.errors import CorruptLakeError, RequestError, UnknownNameError, WorldError
from layerlake.store import zarr_bfloat16  # noqa: F401  (zarr opens bfloat16 with it)
from layerlake.store.lake import Lake
from layerlake.store.record import ArraySpec

LENGTHS = (5, 9, 3, 16, 7, 12, 1)


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Lake:
    """Two runs that share their rows, with different values."""
    root = tmp_path_factory.mktemp("lake")
    n = sum(LENGTHS)
    for name, seed in (("a", 1), ("b", 2)):
        make_run(root, name=name, seed=seed, labels={"depth": [k % 4 for k in range(n)]})
    return Lake.open(root)


def read_by_zarr(lake: Lake, table: pa.Table, array: str) -> np.ndarray:
    """What zarr-python gives for the rows of a table, one row at a time."""
    stored = {
        run: np.asarray(zarr.open_group(lake.root / "runs" / run / "activations.zarr", mode="r")[array][:])  # pyright: ignore
        for run in lake.runs()
    }
    pairs = zip(table["run"].to_pylist(), table["row"].to_pylist(), strict=True)
    return np.stack([stored[run][row].view(np.uint16) for run, row in pairs])


QUERIES = {
    "a join": "SELECT run, row, document FROM tokens JOIN sequences USING (run, seq) WHERE document <> 'doc1'",
    "the last token of each sequence": "SELECT run, row FROM tokens QUALIFY row_number() OVER (PARTITION BY run, seq "
    "ORDER BY pos DESC) = 1 ORDER BY random()",
    "a sample by reservoir": "SELECT run, row FROM tokens USING SAMPLE reservoir(20 ROWS) REPEATABLE (3)",
    "a sample of a table": "SELECT run, row FROM tokens TABLESAMPLE bernoulli(40%) REPEATABLE (5)",
    "a CTE with the token before": "WITH before AS (SELECT run, seq, pos + 1 AS pos, depth AS last FROM tokens) SELECT "
    "run, row, last FROM tokens JOIN before USING (run, seq, pos) WHERE last = 2 ORDER BY last, row DESC",
    "a union with duplicates": "SELECT run, row FROM tokens WHERE depth = 1 UNION ALL SELECT run, row FROM tokens",
    "runs side by side": "SELECT b.run, a.row FROM tokens a JOIN tokens b ON a.row = b.row AND a.run < b.run",
    "grouped": "SELECT any_value(run) AS run, max(row) AS row, count(*) AS n FROM tokens GROUP BY seq, run ORDER BY n",
    "unnested": "SELECT run, unnest(list(row ORDER BY row DESC)) AS row FROM tokens GROUP BY run",
    "small integers": "SELECT run, row::UTINYINT AS row FROM tokens ORDER BY hash(row)",
    "an enum": "SELECT run::ENUM ('b', 'a') AS run, row FROM tokens ORDER BY row",
    "my Arrow table": "SELECT run, row, mine.why FROM tokens JOIN mine USING (run, row) ORDER BY mine.why",
    "one row": "SELECT 'b' AS run, 3 AS row",
}


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize(("site", "layer", "array"), [("embed", None, "embed"), ("resid_post", 1, "resid_post-1")])
def test_bits_of_any_select_are_those_of_zarr(lake, name, site, layer, array):
    mine = pa.table({"run": ["b", "a", "b", "b"], "row": [9, 2, 9, 40], "why": [3, 1, 2, 0]})
    sel = lake.select(QUERIES[name], tables={"mine": mine})
    assert len(sel) == sel.table.num_rows > 0
    assert np.array_equal(sel.bits(layer, site), read_by_zarr(lake, sel.table, array))


def test_a_pandas_frame_selects_its_rows_in_its_order(lake):
    pandas = pytest.importorskip("pandas")
    mine = pandas.DataFrame({"run": ["b", "a", "b"], "row": [40, 0, 40], "why": ["x", "y", "z"]})
    sel = lake.select("SELECT run, row, why FROM mine", tables={"mine": mine})
    assert sel.table["why"].to_pylist() == ["x", "y", "z"]
    assert np.array_equal(sel.bits(0), read_by_zarr(lake, sel.table, "resid_post-0"))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_rows_in_any_order_with_duplicates(lake, data):
    stored = lake.sql("SELECT DISTINCT row FROM tokens ORDER BY row")["row"].to_pylist()
    pairs = data.draw(
        st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(stored)), min_size=1, max_size=90)
    )
    frame = pa.table({"run": [p[0] for p in pairs], "row": [p[1] for p in pairs], "place": list(range(len(pairs)))})
    sel = lake.select("SELECT * FROM mine ORDER BY place", tables={"mine": frame}, verify=data.draw(st.booleans()))
    assert sel.table.select(["run", "row"]).equals(frame.select(["run", "row"]))
    assert np.array_equal(sel.bits(1), read_by_zarr(lake, frame, "resid_post-1"))
    run = data.draw(st.sampled_from(["a", "b"]))
    by_number = lake.rows(run, frame["row"])
    assert np.array_equal(by_number.bits(1), read_by_zarr(lake, by_number.table, "resid_post-1"))


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, pa.array, lambda r: np.array(r, np.uint8), lambda r: range(5, 9)]
)
def test_rows_by_number(lake, kind):
    rows = kind([5, 6, 7, 8])
    sel = lake.rows("b", rows)
    assert sel.table.to_pydict() == {"run": ["b"] * 4, "row": [5, 6, 7, 8]}
    assert np.array_equal(
        sel.bits(0),
        lake.select("SELECT run, row FROM tokens WHERE run = 'b' AND row BETWEEN 5 AND 8 ORDER BY row").bits(0),
    )


@pytest.mark.parametrize(
    "rows", [[1.0], ["1"], [True], [None], [[1]], 3, [2**63], [[1], [2, 3]], np.zeros((0, 2)), {1}]
)
def test_rows_that_are_no_row_numbers_are_refused(lake, rows):
    if isinstance(rows, np.ndarray):
        rows = np.zeros((2, 2), int)
    with pytest.raises(RequestError, match="one-dimensional sequence of whole numbers"):
        lake.rows("a", rows)


def test_a_table_in_pieces_of_different_runs(lake):
    from layerlake.store.selection import Selection

    pieces = [("a", [3]), ("b", [4, 5]), ("a", []), ("b", [0]), ("a", [9, 3])]
    kinds = [lambda runs: pa.array(runs, pa.string()), lambda runs: pa.array(runs, pa.string()).dictionary_encode()]
    for kind in kinds:
        table = pa.concat_tables(
            pa.table({"run": kind([run] * len(rows)), "row": pa.array(rows, pa.int64())}) for run, rows in pieces
        )
        assert table["run"].num_chunks == 5
        assert np.array_equal(Selection(lake, "", table).bits(0), read_by_zarr(lake, table, "resid_post-0"))


def test_rows_are_validated_as_those_of_a_query(lake):
    for row, why in [(-1, "no such row"), (10**9, "no such row"), (20, "no token")]:
        with pytest.raises(RequestError, match=why):
            lake.rows("a", [0, row])
    with pytest.raises(UnknownNameError, match="no run 'c'"):
        lake.rows("c", [])
    with pytest.raises(RequestError, match="selection is empty"):
        lake.rows("a", []).array(0)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def wide(tmp_path) -> tuple[Lake, ArraySpec, Path, int]:
    """A run with four inner chunks a shard, of which each has 256 rows; the file of unit 0."""
    run, _, _ = make_run(tmp_path, lengths=(1000, 1000), width=1024, dtype="float32", unit_rows=1024, layers=1)
    array = run.array("resid_post", 0)
    assert run.layout(array).chunk_rows == 256
    return Lake.open(tmp_path), array, run.shard_path(array, 0), run.layout(array).chunk_bytes


def test_a_flipped_byte_in_a_touched_chunk_is_an_error_and_elsewhere_not(wide):
    lake, _, shard, chunk_bytes = wide
    before = lake.rows("toy", [300, 1100]).bits(0)
    flip(shard, 2 * chunk_bytes + 17)  # in rows 512 to 767
    assert np.array_equal(lake.rows("toy", [300, 1100], verify=True).bits(0), before)
    sel = lake.select("SELECT run, row FROM tokens WHERE row IN (300, 600)", verify=True)
    with pytest.raises(CorruptLakeError, match=r"c\.0\.0 holds other bytes .* rows 512 to 767 of run 'toy'"):
        sel.bits(0)
    for read in (
        sel.array,
        sel.tensor,
        lambda layer: list(sel.batches(layer)),
        lambda layer: list(sel.torch_dataset(layer)),
    ):
        with pytest.raises(CorruptLakeError, match="rows 512 to 767"):
            read(0)
    assert len(sel.bits(site="embed")) == 2  # another array
    assert len(lake.select("SELECT run, row FROM tokens").bits(0)) == 2000  # as documented, unless it is asked for


def test_a_chunk_is_checked_once_a_lake(wide, monkeypatch):
    import google_crc32c

    lake, _, shard, chunk_bytes = wide
    checked = []
    real = google_crc32c.value
    monkeypatch.setattr("layerlake.store.verified.google_crc32c.value", lambda data: checked.append(1) or real(data))
    opened = Lake.open(lake.root)
    sel = opened.select("SELECT run, row FROM tokens", verify=True)
    checked.clear()

    def sums() -> int:  # a shard's index has a checksum of its own
        count = checked.count(1)
        checked.clear()
        return count

    sel.bits(0)
    first = sums()
    assert first >= 8
    sel.bits(0)
    opened.rows("toy", [0, 5, 1999], verify=True).bits(0)
    assert sums() < 4


def test_verify_notices_a_record_of_other_checksums(wide):
    lake = wide[0]
    record = lake.run("toy").unit_path(0)
    record.write_bytes(record.read_bytes().replace(b'"crc32c":[', b'"crc32c":[1', 1))
    with pytest.raises(CorruptLakeError, match="was changed after it was written"):
        Lake.open(lake.root).rows("toy", [3], verify=True).bits(0)


def test_a_selection_travels_as_its_rows_and_is_opened_anew(lake):
    sel = lake.select("SELECT run, row, depth FROM tokens ORDER BY hash(row)", verify=True)
    expected = sel.bits(1)  # maps are open now
    data = pickle.dumps(sel)
    assert len(data) < 20_000
    again = pickle.loads(data)  # noqa: S301  (bytes made here)
    assert again.table.equals(sel.table)
    assert again.lake is not sel.lake
    assert again.verify
    assert again.query == sel.query
    assert np.array_equal(again.bits(1), expected)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert np.array_equal(pool.apply(sel.bits, (1,)), expected)


def test_a_selection_of_a_run_that_was_made_anew_is_refused_where_it_arrives(tmp_path):
    make_run(tmp_path, seed=1)
    data = pickle.dumps(Lake.open(tmp_path).select("SELECT run, row FROM tokens"))
    shutil.rmtree(tmp_path / "runs" / "toy")
    make_run(tmp_path, seed=2)
    with pytest.raises(WorldError, match="made anew since"):
        pickle.loads(data)  # noqa: S301  (bytes made here)


@pytest.mark.parametrize("bad", [{"size": 0}, {"size": 2.5}, {"size": True}, {"seed": -1}, {"seed": "x"}])
def test_batches_asked_wrongly_are_refused_at_once(lake, bad):
    with pytest.raises(RequestError, match="whole number"):
        lake.select("SELECT run, row FROM tokens").batches(0, shuffle=True, **bad)
