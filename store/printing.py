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
    columns = [shown.column(i).to_pylist() for i in range(shown.num_columns)]
    print_rows(table.column_names, list(zip(*columns, strict=True)), numbers=numbers)
    if shown.num_rows < table.num_rows:
        print(f"{shown.num_rows} of {table.num_rows} rows shown; --all shows all of them.")


def print_json(value: Any) -> None:
    """Print JSON for a program: NaN and infinities are the strings NaN, Infinity and -Infinity, never null."""
    json.dump(plain(value), sys.stdout, ensure_ascii=False, indent=None, allow_nan=False)
    print()


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
    if isinstance(value, decimal.Decimal):  # what SQL makes of 1.5
        return plain(float(value))
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (float, decimal.Decimal)):
        return f"{value:.6g}"
    return str(value).replace("\n", "\\n").replace("\r", "\\r")


def count(number: int, noun: str) -> str:
    """Say how many there are of something whose plural ends in s: ``1 unit``, ``2 units``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
