"""A condition names tokens the same way every time, and can do nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layerlake.errors import RequestError, SqlRefusedError, UnknownNameError
from layerlake.extract.keep import COLUMNS, Keep

SEQUENCES = (10, 1, 7)


def planned() -> list[dict[str, Any]]:
    """Give the planned tokens of three sequences, the first and the last token of each special."""
    rows: list[dict[str, Any]] = []
    for seq, length in enumerate(SEQUENCES):
        for pos in range(length):
            own = {"special": pos in (0, length - 1), "token": None if seq == 1 else f"Ġ{pos}", "depth": None}
            own |= {"depth": float("nan") if pos == 6 else pos} if pos % 3 == 0 else {}
            rows.append({"seq": seq, "pos": pos, "length": length, "split": ("train", "test")[seq % 2]} | own)
            document = {"document": f"src/{seq}.py", "document_sha256": f"{seq:064x}", "char_offset": 100 * seq}
            rows[-1] |= {"token_id": 5 * pos, "char_start": pos, "char_end": pos + 1} | document
    return rows


def table() -> pa.Table:
    types = {"pos": pa.int32(), "depth": pa.float64(), "special": pa.bool_()}
    rows = planned()
    return pa.table({n: pa.array([r[n] for r in rows], types.get(n)) for n in (*COLUMNS, "depth")})


Row = dict[str, Any]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pos = length - 1", lambda r: r["pos"] == r["length"] - 1),
        ("POS % 10 = 0", lambda r: r["pos"] % 10 == 0),
        ("pos BETWEEN 5 AND 20", lambda r: 5 <= r["pos"] <= 20),
        ("depth IS NOT NULL", lambda r: r["depth"] is not None),
        ("depth > 2", lambda r: r["depth"] is not None and not r["depth"] <= 2),  # NaN is above all numbers
        ("token LIKE 'Ġ%' AND NOT special", lambda r: r["token"] is not None and not r["special"]),
        ("split_part(document, '/', 2) = '2.py'", lambda r: r["seq"] == 2),
        ("tokens.pos = 0 AND sequences.length > 1", lambda r: r["pos"] == 0 and r["length"] > 1),
        ("pos = max(pos) FILTER (WHERE NOT special) OVER (PARTITION BY seq)", lambda r: r["pos"] == r["length"] - 2),
        ("row_number() OVER (PARTITION BY seq ORDER BY pos DESC) <= 2", lambda r: r["pos"] >= r["length"] - 2),
        ("count(*) OVER (PARTITION BY tokens.document) BETWEEN 2 AND 9", lambda r: r["length"] == 7),
        ("max(pos) OVER (PARTITION BY seq ORDER BY pos ROWS 1 PRECEDING) > 8", lambda r: r["pos"] > 8),
        ("CASE WHEN special THEN NULL ELSE pos > 3 END -- the rest", lambda r: not r["special"] and r["pos"] > 3),
        ("token = 'Ġ3' OR pos IN (0, 5)", lambda r: r["token"] == "Ġ3" or r["pos"] in (0, 5)),
    ],
)
def test_a_condition_keeps_the_tokens_it_is_true_of(text: str, expected: Callable[[Row], bool]) -> None:
    shown = [bool(expected(r)) for r in planned()]
    if "OVER" in text and "FILTER" in text:  # a sequence of one special token has none that is not
        shown[10] = False
    assert Keep(text, ["depth"]).mask(table()).tolist() == shown


@settings(max_examples=6, deadline=None)
@given(
    fraction=st.sampled_from(["0", "0.01", "0.123456789", "0.5", "1", "1e-1", "2.0 / 3", "0.3::FLOAT::DOUBLE"]),
    seed=st.integers(-5, 10**18),
)
def test_a_sample_is_the_one_that_hashlib_gives(fraction: str, seed: int) -> None:
    number = {"2.0 / 3": 2 / 3, "0.3::FLOAT::DOUBLE": float(np.float32(0.3))}.get(fraction) or float(
        fraction.split(":")[0].split("/")[0]
    )
    expected = []
    for r in planned():
        key = f"{seed}/{r['document_sha256']}/{r['char_offset']}/{r['pos']}".encode()
        expected.append(int(hashlib.sha256(key).hexdigest()[:12], 16) < number * 16**12)
    assert Keep(f"sample({fraction}, {seed})").mask(table()).tolist() == expected
    assert Keep(f"NOT (pos < 0 OR Sample({fraction}, {seed}))").mask(table()).tolist() == [not e for e in expected]


def test_a_sample_takes_its_share_of_the_tokens() -> None:
    n = 40_000
    columns = {c: table()[c].take(pa.array(np.zeros(n, int))) for c in (*COLUMNS, "depth")}
    many = pa.table(columns | {"pos": pa.array(np.arange(n, dtype=np.int32))})
    masks = [Keep(f"sample(0.1, {seed})").mask(many) for seed in (1, 2)]
    assert all(abs(m.mean() - 0.1) < 0.01 for m in masks)
    assert abs((masks[0] & masks[1]).mean() - 0.01) < 0.005
    for wrong in ("sample(2, 7)", "sample(-0.1, 7)", "sample(NULL, 7)"):
        with pytest.raises(SqlRefusedError, match="fraction from 0 to 1"):
            Keep(wrong).mask(many)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("random() < 0.5", "random need not give the same answer"),
        ("system.main.RANDOM() < 0.5", "random need not give the same answer"),
        ("pos > 3 AND uuid() IS NOT NULL", "uuid need not"),
        ("now() > TIMESTAMP '2020-01-01'", "now need not"),
        ("today() > DATE '2020-01-01'", "today need not"),
        ("age(TIMESTAMP '2020-01-01') > INTERVAL 1 DAY", "age need not"),
        ("getvariable('x') = 1", "getvariable need not"),
        ("current_setting('threads') = 1", "current_setting need not"),
        ("nextval('s') = 1", "nextval need not"),
        ("pg_sleep(1) IS NULL", "sleep_ms need not"),
        ("pos = (SELECT 1)", "holds a subquery"),
        ("pos IN (SELECT pos FROM planned)", "holds a subquery"),
        ("EXISTS (FROM read_text('/etc/passwd'))", "holds a subquery"),
        ("read_text('/etc/passwd') IS NULL", "read_text need not"),
        ("query('SELECT 1') = 1", "query need not"),
        ("COLUMNS('pos') = 1", "holds a star"),
        ("list_filter([1], lambda x: x > 0) = [1]", "holds a lambda"),
        ("pos = $1", "one condition and nothing else"),
        ("1=1); COPY (SELECT 1) TO '{out}'", "syntax error"),
        ("1=1); COPY (SELECT 1) TO '{out}' --", "syntax error"),
        ("1=1)) TO '{out}' --", "syntax error"),
        ("1=1); SELECT (1=1", "one condition and nothing else"),
        ("1=1), (2=2", "one condition and nothing else"),
        ("1=1) FROM range(3) WHERE (true", "one condition and nothing else"),
        ("1=1) UNION ALL SELECT (true", "one condition and nothing else"),
        ("1=1) ORDER BY (1", "one condition and nothing else"),
        ("pos = 1) x --", "syntax error"),
        ("pos = 1 AS x", "syntax error"),
        ("", "one condition and nothing else"),
        ("  ", "one condition and nothing else"),
        ("pos =", "syntax error"),
        ("NOT " * 900 + "special", "nested too deeply"),
        ("(" * 5000 + "special" + ")" * 5000, "Max expression depth|nested too deeply|stack"),
        ("\ud800 = 1", "not Unicode"),
        ("nothing_such(pos)", "no function nothing_such"),
        ("sum(pos) > 3", r"sum is a value of many tokens: .*sum\(...\) OVER"),
        ("row_number() OVER () = 1", "row_number depends on the order"),
        ("reservoir_quantile(pos, 0.5) OVER (PARTITION BY seq ORDER BY pos) = 1", "always gives the same answer"),
        ("list_aggregate([1, 2], 'reservoir_quantile', 0.5) = 1", "list_aggregate need not"),
        ("array_aggr([1, 2], 'sum') = 3", "array_aggr need not"),
        ("unnest([true, pos = 1])", "unnest need not"),
        ("row_number() OVER (PARTITION BY seq ORDER BY pos % 2) = 1", "row_number depends on the order"),
        ("max(pos) OVER (PARTITION BY seq ROWS 1 PRECEDING) = 1", "max depends on the order"),
        ("count(*) OVER (PARTITION BY seq GROUPS 1 PRECEDING) = 1", "GROUPS|depends on the order"),
        ("first(pos) OVER (PARTITION BY seq) = 1", "depends on the order"),
        ("sample(0.5)", "fraction from 0 to 1 and a seed"),
        ("pos", "is int32, neither true nor false"),
        ("NULL", "neither true nor false"),
        ("1, 2", "neither true nor false"),
        ("depth > 'x'", "Could not convert string 'x'"),
    ],
)
def test_what_is_not_one_condition_with_one_answer_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SqlRefusedError, match=says):
        Keep(text.format(out=tmp_path / "out.csv"), ["depth"]).mask(table())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["row", "unit", "rows", "first_row", "run", "dept", "current_date", "a.pos", "user"])
def test_a_column_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(
        UnknownNameError, match=rf"column '{name}' for --keep .*Known: seq, pos, .*, length, depth"
    ) as e:
        Keep(f"{name} = 1", ["depth"])
    assert isinstance(e.value, RequestError) and e.value.exit_code == 2


def test_a_label_may_have_any_name() -> None:
    odd = table().append_column("place", table()["pos"]).append_column("two words", table()["pos"])
    mask = Keep('place = 1 OR "Two Words" = 2', ["depth", "place", "two words"]).mask(odd)
    assert mask.tolist() == [r["pos"] in (1, 2) for r in planned()]
