"""Tables for people and JSON for programs."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from ..errors import RequestError


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: frozenset[str] = frozenset()) -> None:
    """Print rows as aligned columns, never cut to the terminal's width; `numbers` are aligned to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    print_rich(table, width=100_000)


def print_rich(renderable: Any, *, width: int = 100) -> None:
    """Print something that rich can render as plain text of at most `width` columns, without trailing spaces."""
    from rich.console import Console

    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_table(table: pa.Table, *, limit: int | None) -> None:
    """Print an Arrow table; when more than `limit` rows are left out, the last line says so."""
    shown = table if limit is None else table.slice(0, limit)
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    numbers = frozenset(f.name for f in table.schema if any(is_kind(f.type) for is_kind in kinds))
    columns = [_values(shown, i) for i in range(shown.num_columns)]
    print_rows(table.column_names, list(zip(*columns, strict=True)), numbers=numbers)
    if shown.num_rows < table.num_rows:
        print(f"{shown.num_rows} of {table.num_rows} rows shown; --all shows all of them.")


def print_json(value: Any) -> None:
    """Print JSON for a program: NaN and infinities are the strings NaN, Infinity and -Infinity, never null."""
    json.dump(plain(value), sys.stdout, ensure_ascii=False, indent=None, allow_nan=False)
    print()


def print_json_table(table: pa.Table) -> None:
    """Print an Arrow table as JSON, an object a row; `RequestError` where two columns have one name."""
    names = table.column_names
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise RequestError(f"The result has {names.count(twice[0])} columns {twice[0]!r}: give each a name of its own.")
    columns = [_values(table, i) for i in range(table.num_columns)]
    print_json([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)])


def _values(table: pa.Table, i: int) -> list[Any]:
    try:
        return table.column(i).to_pylist()
    except (OverflowError, ValueError) as error:  # years after 9999, and intervals of millions of years
        name = table.column_names[i]
        raise RequestError(
            f"Column {name!r} holds a {table.column(i).type} that cannot be shown ({error}). Write {name}::VARCHAR."
        ) from None


def plain(value: Any) -> Any:
    """Turn a value into what JSON can hold."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
        return str(value)
    if isinstance(value, decimal.Decimal):  # what SQL makes of 1.5, and of a sum of integers
        return plain(_number(value))
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, decimal.Decimal):
        value = _number(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).replace("\n", "\\n").replace("\r", "\\r")


def _number(value: decimal.Decimal) -> int | float:
    return float(value) if value.as_tuple().exponent else int(value)


def count(number: int, noun: str) -> str:
    """Say how many there are of something whose plural ends in s: ``1 unit``, ``2 units``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
