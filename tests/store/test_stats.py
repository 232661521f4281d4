"""Statistics of stored values equal NumPy's in float64, for one unit and merged over all."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import commit_unit, make_run
from layerlake.store import stats
from layerlake.store.dtypes import stored_dtype
from layerlake.store.lake import Lake
from layerlake.store.stats import STATISTICS, value_statistics

SPECIAL = [0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800001]
"""float32 bits of a NaN, the infinities and a signalling NaN."""


def reference(rows: np.ndarray) -> dict[str, float | int | None]:
    """What NumPy says about rows of float64 values, (n, width)."""
    finite, whole = rows[np.isfinite(rows)], rows[np.isfinite(rows).all(axis=1)]
    some = finite.size > 0
    return {
        "count": finite.size,
        "nonfinite": rows.size - finite.size,
        "mean": finite.mean() if some else None,
        "variance": finite.var() if some else None,
        "min": finite.min() if some else None,
        "max": finite.max() if some else None,
        "norm": np.linalg.norm(whole, axis=1).mean() if len(whole) else None,
        "rows": len(whole),
    }


def check(got: dict[str, float | int | None], expected: dict[str, float | int | None]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        exact = name in ("count", "nonfinite", "rows", "min", "max") or value is None
        scale = abs(value or 0.0)
        if name == "mean" and expected["variance"] is not None:  # a mean near zero is as good as its values are large
            scale = max(scale, math.sqrt(expected["variance"]))
        if exact:
            assert got[name] == value, name
        else:
            assert abs(got[name] - value) <= 1e-9 * scale, (name, got[name], value)


def numbers(bits: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return stored_dtype(dtype).to_float32(bits).astype(np.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 7), (1000, 33), (50, 3, 4)])
def test_any_bit_pattern(dtype, shape):
    kind = stored_dtype(dtype)
    bits = np.random.default_rng(1).integers(0, np.iinfo(kind.bits).max, shape, dtype=kind.bits, endpoint=True)
    got = value_statistics(bits, kind)
    assert got.keys() == STATISTICS.keys()
    check(got, reference(numbers(bits, dtype).reshape(len(bits), -1)))


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_blocks_change_nothing(monkeypatch, block):
    rng = np.random.default_rng(2)
    values = (rng.standard_normal((501, 5)) * 3 + 1000).astype(np.float32)
    values[::50, 2] = np.nan
    values[7] = np.inf
    monkeypatch.setattr(stats, "_BLOCK_VALUES", block)
    check(value_statistics(values.view(np.uint32), stored_dtype("float32")), reference(values.astype(np.float64)))


@pytest.mark.parametrize("bits", SPECIAL)
def test_no_finite_value_at_all(bits):
    got = value_statistics(np.full((4, 3), bits, np.uint32), stored_dtype("float32"))
    nothing = dict.fromkeys(("mean", "variance", "min", "max", "norm"))
    assert got == {"count": 0, "nonfinite": 12, "rows": 0} | nothing


def test_a_large_offset_keeps_its_variance():
    values = (1e4 + np.arange(10_000) % 2).astype(np.float32).reshape(-1, 4)
    got = value_statistics(values.view(np.uint32), stored_dtype("float32"))
    assert (got["mean"], got["variance"]) == (10000.5, 0.25)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=12))
def test_whatever_the_values(values):
    rows = np.array(values, np.float32)
    check(value_statistics(rows.view(np.uint32), stored_dtype("float32")), reference(rows.astype(np.float64)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_view_merges_units_as_numpy_would(tmp_path, dtype):
    _, tables, bits = make_run(tmp_path / "random", dtype=dtype)
    run, _, _ = make_run(tmp_path / "made", dtype=dtype, commit=False)
    kind = stored_dtype(dtype)
    rows = np.concatenate([t["row"].to_numpy() for t in tables])
    bits["resid_post-0"][rows[0] : rows[0] + 32] = kind.nan  # the first unit: not one finite value
    bits["resid_post-1"][rows, 0] = kind.nan  # every row: no norm anywhere
    for unit, table in enumerate(tables):
        commit_unit(run, unit, table, bits)
    lake = Lake.open(tmp_path / "made")
    lake.index()
    columns = "count, nonfinite, mean, variance, min, max, norm"
    for array in run.record.arrays:
        got = lake.sql(
            f"SELECT {columns} FROM stats WHERE site = '{array.site}' AND "
            f"layer IS NOT DISTINCT FROM {'NULL' if array.layer is None else array.layer}"
        )
        expected = reference(numbers(bits[array.name][rows], dtype))
        del expected["rows"]
        check(got.to_pylist()[0], expected)
    counted = lake.sql("SELECT run, site, layer, count(*) AS n FROM stats GROUP BY ALL")["n"].to_pylist()
    assert counted == [1] * len(run.record.arrays)


def test_a_run_without_units_has_no_statistics(tmp_path):
    make_run(tmp_path, commit=False)
    assert Lake.open(tmp_path).sql("FROM stats").num_rows == 0
