"""Finding the rows of labels in a run's plan, file by file, and comparing what the labels say of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..errors import DataError, RequestError
from .label_files import LabelSource
from .parquet import read_table
from .plan import UNITS_A_FILE, stored_tokens, tokens_file
from .row_kinds import TOKENS
from .run import Run
from .tokens import TOKEN_FIELDS

pc: Any = pyarrow.compute  # type checkers see none of its functions
_SHOWN = 3
_NOWHERE = -1
_POSITIONS = 1 << 31
_EXACT = 1 << 53


def match_rows(run: Run, source: LabelSource) -> tuple[np.ndarray, tuple[str, ...]]:
    """Give each label's row in the run, (n,) int64, and the columns that were the key.

    The key is `row`, or else `seq` and `pos`; it must be whole, there, unique and planned. Every other column of the
    token table must equal the plan's. `DataError` names the first rows where that is not so.
    """
    table = source.table
    names = table.column_names
    if not table.num_rows:
        raise DataError("There are no rows, so there is nothing to label.")
    if "row" in names:
        if TOKENS not in run.record.row_kinds.kinds:
            raise RequestError(
                f"Run {run.name!r} stores no tokens, so its tokens have no rows to find them by. Give seq and pos, and "
                "leave row out."
            )
        key: tuple[str, ...] = ("row",)
    elif {"seq", "pos"} <= set(names):
        key = ("seq", "pos")
    else:
        raise RequestError(f"Labels need the column row, or seq and pos, to find their tokens by; there are {names}.")
    values = [_whole(table[name], name) for name in key]
    shown = _shown(key, values)
    codes, files = _codes(run, values)
    _refuse_twice(values, key)
    order = np.lexsort((codes, files))
    ends = np.searchsorted(files[order], np.arange(-1, _files(run)), side="right")
    checks = [name for name, _ in TOKEN_FIELDS if name in names and name not in key]
    rows = np.full(len(codes), _NOWHERE)
    differing = _Differences(source, checks, shown)
    for file in range(_files(run)):
        chosen = order[ends[file] : ends[file + 1]]
        if len(chosen):
            path = tokens_file(run.folder / "plan", file * UNITS_A_FILE)
            run.intact(f"plan/{path.name}")
            planned = stored_tokens(read_table(path, columns=list(dict.fromkeys(["row", *key, *checks]))))
            own, _ = _codes(run, [planned[name].to_numpy().astype(np.int64) for name in key])
            place = _find(own, codes[chosen])
            found, chosen = place[place >= 0], chosen[place >= 0]
            rows[chosen] = planned["row"].to_numpy()[found]
            differing.compare(chosen, planned, found)
    _refuse(
        np.flatnonzero(rows == _NOWHERE),
        shown,
        f"Labels for tokens that run {run.name!r} does not have",
        "Give rows of this run only.",
    )
    differing.refuse()
    return rows, key


def _whole(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Read a key: integers, or real numbers that are whole, which is what frames with a gap make of integers."""
    kind = column.type
    bad = column.is_null().to_numpy()
    if pa.types.is_floating(kind):
        bad |= np.isnan(column.to_numpy())
    _refuse(np.flatnonzero(bad), _data_row, f"Labels without {name}", "Every label needs its key.")
    if pa.types.is_integer(kind):
        return column.to_numpy()
    values = column.to_numpy() if pa.types.is_floating(kind) else np.full(len(column), np.nan)
    odd = ~((np.abs(values) < _EXACT) & (np.floor(values) == values))

    def shown(i: int) -> str:
        return f"{column[i].as_py()!r} in {_data_row(i)}"

    _refuse(np.flatnonzero(odd), shown, f"Labels whose {name} is no integer", "Mend the column.")
    return values.astype(np.int64)


def _codes(run: Run, values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Turn keys into one number each, and say in which of the plan's files each is looked up; -1 for none."""
    record = run.record
    if len(values) == 1:
        units, codes = values[0] // record.unit_rows, values[0]
        known = (units >= 0) & (units < record.units)
    else:
        seq, pos = values
        planned = read_table(run.intact("plan/sequences.parquet"), columns=["seq", "unit"])
        order = np.argsort(planned["seq"].to_numpy(), kind="stable")
        numbers, of_unit = planned["seq"].to_numpy()[order], planned["unit"].to_numpy()[order]
        place = np.minimum(np.searchsorted(numbers, seq), len(numbers) - 1)
        known = (numbers[place] == seq) & (pos >= 0) & (pos < _POSITIONS)
        units, codes = of_unit[place], place * _POSITIONS + np.where(known, pos, 0)
    return codes, np.where(known, units // UNITS_A_FILE, _NOWHERE)


def _files(run: Run) -> int:
    return -(-run.record.units // UNITS_A_FILE)


def _find(own: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Give the place in `own` of each wanted number, -1 where it is not there."""
    order = np.argsort(own, kind="stable")
    place = np.minimum(np.searchsorted(own[order], wanted), max(len(own) - 1, 0))
    return np.where(own[order][place] == wanted, order[place], _NOWHERE) if len(own) else np.full(len(wanted), _NOWHERE)


def _refuse_twice(values: Sequence[np.ndarray], key: Sequence[str]) -> None:
    order = np.lexsort(values[::-1])
    same = np.ones(max(len(order) - 1, 0), bool)
    for column in values:
        same &= column[order][1:] == column[order][:-1]
    _refuse(
        np.sort(order[1:][same]),
        lambda i: f"{_shown(key, values)(i)} again in {_data_row(i)}",
        "Labels for a token that has one already",
        "Give one label a token.",
    )


def _shown(key: Sequence[str], values: Sequence[np.ndarray]) -> Callable[[int], str]:
    return lambda i: ", ".join(f"{name} {column[i]}" for name, column in zip(key, values, strict=True))


def _data_row(i: int) -> str:
    return f"data row {i + 1}"


def _refuse(which: np.ndarray, shown: Callable[[int], str], what: str, advice: str) -> None:
    """Raise `DataError` unless `which`, positions in the order of the source, is empty."""
    if len(which):
        rows = ", ".join(shown(int(i)) for i in which[:_SHOWN])
        more = f" and {len(which) - _SHOWN:,} more" if len(which) > _SHOWN else ""
        raise DataError(f"{what} ({len(which):,}): {rows}{more}. {advice}")


class _Differences:
    """Compares the columns of labels that the token table has too, and keeps the first few differences."""

    def __init__(self, source: LabelSource, names: list[str], shown: Callable[[int], str]) -> None:
        self._empty_is_missing = source.empty_is_missing
        self._columns = {
            name: _as_stored(source.table[name], name, kind) for name, kind in TOKEN_FIELDS if name in names
        }
        self._shown = shown
        self._count = 0
        self._first: list[tuple[int, str]] = []

    def compare(self, chosen: np.ndarray, planned: pa.Table, found: np.ndarray) -> None:
        """Compare the labels at positions `chosen` with the plan's rows `found`."""
        for name, column in self._columns.items():
            mine = column.take(pa.array(chosen))
            stored = planned[name].take(pa.array(found))
            if self._empty_is_missing and pa.types.is_string(stored.type):
                stored = pc.if_else(pc.equal(stored, ""), pa.scalar(None, stored.type), stored)
            same = pc.or_(pc.fill_null(pc.equal(mine, stored), False), pc.and_(mine.is_null(), stored.is_null()))
            wrong = np.flatnonzero(~same.to_numpy())
            self._count += len(wrong)
            for k in wrong[np.argsort(chosen[wrong])][:_SHOWN].tolist():
                i, values = int(chosen[k]), (mine[k].as_py(), stored[k].as_py())
                said = f"{self._shown(i)} has {name} {_short(values[0])}, the run has {_short(values[1])}"
                self._first.append((i, said))
        self._first = sorted(self._first)[:_SHOWN]

    def refuse(self) -> None:
        """Raise `DataError`, naming the first differences, if there was any."""
        if self._count:
            shown = "; ".join(said for _, said in self._first)
            raise DataError(
                f"Values that are not those of the run's tokens ({self._count:,}): {shown}. Labels for other tokens "
                "are not taken; a column that need not agree can be left out."
            )


def _as_stored(column: pa.ChunkedArray, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"Column {name} is {column.type} and cannot be the run's {name}, which is {kind} ({error}). Mend it, or "
            "leave it out."
        ) from None


def _short(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
