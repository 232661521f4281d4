"""Small lakes with known values, made through the store's own writing path."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from layerlake.store.catalog import publish_catalog
from layerlake.store.create import create_run
from layerlake.store.dtypes import stored_dtype
from layerlake.store.run import ArraySpec, Run, RunRecord
from layerlake.store.tokens import SEQUENCE_FIELDS, TOKEN_FIELDS, table_hash
from layerlake.store.unit import UnitWriter


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Make raw bits of finite and, now and then, odd values: every bit pattern may come up."""
    kind = stored_dtype(dtype)
    return rng.integers(0, np.iinfo(kind.bits).max, shape, dtype=kind.bits, endpoint=True)


def plan_tables(lengths: list[int], unit_rows: int, labels: dict[str, list[Any]] | None = None) -> Any:
    """Pack sequences of the given lengths and make their tables."""
    units: list[list[dict[str, Any]]] = [[]]
    sequences = []
    token = 0
    for seq, length in enumerate(lengths):
        if len(units[-1]) + length > unit_rows:
            units.append([])
        first = (len(units) - 1) * unit_rows + len(units[-1])
        split = "test" if seq % 5 == 0 else "train"
        sequences.append(
            {
                "seq": seq,
                "unit": len(units) - 1,
                "document": f"doc{seq // 2}",
                "document_sha256": f"{seq // 2:x}",
            }
            | {"char_offset": 0, "length": length, "rows": length, "first_row": first, "split": split}
        )
        for pos in range(length):
            row = {"row": first + pos, "seq": seq, "pos": pos, "token_id": token % 97, "token": f"t{token}"}
            row |= {"char_start": pos, "char_end": pos + 1, "special": pos == 0, "split": split}
            row |= {name: values[token] for name, values in (labels or {}).items()}
            units[-1].append(row)
            token += 1
    extra = []
    if labels:
        extra = [pa.field(n, pa.array([v[0]]).type) for n, v in labels.items()]
    schema = pa.schema([*(pa.field(n, t) for n, t in TOKEN_FIELDS), *extra])
    tables = [pa.Table.from_pylist(u, schema) for u in units]
    return pa.Table.from_pylist(sequences, pa.schema(list(SEQUENCE_FIELDS))), tables


Made = tuple[Run, list[pa.Table], dict[str, np.ndarray]]
_templates = tempfile.TemporaryDirectory(prefix="layerlake-templates-")


def copied_when_made_again(make: Callable[..., Made]) -> Callable[..., Made]:
    """Copy what is made more than once as the first run of a lake: it takes a fifth of the time."""
    made: dict[str, tuple[Path, Made] | None] = {}

    @functools.wraps(make)
    def call(root: Path, *arguments: Any, **options: Any) -> Made:
        if "edit" in options or (root.exists() and any(root.iterdir())):
            return make(root, *arguments, **options)
        asked = repr((arguments, sorted(options.items())))
        if asked not in made:
            made[asked] = None
            return make(root, *arguments, **options)
        found = made[asked]
        if found is None:
            template = Path(tempfile.mkdtemp(dir=_templates.name)) / "lake"
            found = made[asked] = template, make(template, *arguments, **options)
        template, (run, tables, bits) = found
        shutil.copytree(template, root, dirs_exist_ok=True)
        return Run(root, run.name), list(tables), {name: array.copy() for name, array in bits.items()}

    return call


@copied_when_made_again
def make_run(
    root: Path,
    name: str = "toy",
    lengths: tuple[int, ...] = (5, 9, 3, 16, 7, 12, 1),
    width: int = 6,
    dtype: str = "bfloat16",
    layers: int = 2,
    unit_rows: int = 32,
    seed: int = 0,
    labels: dict[str, list[Any]] | None = None,
    commit: bool = True,
    trailing: tuple[int, ...] | None = None,
    edit: Callable[[pa.Table], pa.Table] | None = None,
    codec: str = "none",
) -> Made:
    """Make a run; returns it, its units' token tables and the bits of every array, (all rows, width).

    `trailing` is another trailing shape than (width,); `edit` changes the token table of each unit.
    """
    sequences, tables = plan_tables(list(lengths), unit_rows, labels)
    tables = [edit(t) for t in tables] if edit else tables
    shape = (width,) if trailing is None else trailing
    arrays = (
        ArraySpec("embed", None, dtype, shape, codec),
        *(ArraySpec("resid_post", i, dtype, shape, codec) for i in range(layers)),
    )
    record = RunRecord(
        name=name,
        settings={"model": {"fingerprint": f"f{seed}"}},
        arrays=arrays,
        unit_rows=unit_rows,
        units=len(tables),
        sequences=len(lengths),
        tokens=sum(lengths),
        plan_hash=table_hash(tables, ("row", "seq", "pos", "token_id")),
        tokens_hash=table_hash(tables),
        source={"model": "toy", "data": "d"},
        created="2026-01-01T00:00:00+00:00",
        created_by="test",
    )
    run = create_run(root, record, sequences, tables)
    rng = np.random.default_rng(seed)
    bits = {a.name: random_bits(rng, (len(tables) * unit_rows, *shape), dtype) for a in arrays}
    if commit:
        for unit in range(len(tables)):
            commit_unit(run, unit, tables[unit], bits)
        publish_catalog(root)
    return run, tables, bits


def commit_unit(run: Run, unit: int, tokens: pa.Table, bits: dict[str, np.ndarray]) -> dict[str, Any]:
    """Write and commit one unit from known bits, in two pieces a shard, the later one first."""
    base, used = unit * run.record.unit_rows, tokens.num_rows
    with UnitWriter(run, unit) as writer:
        for array in run.record.arrays:
            half = used // 2
            writer.write(array.name, half, bits[array.name][base + half : base + used])
            writer.write(array.name, 0, bits[array.name][base : base + half])
        return writer.commit(tokens, len(set(tokens["seq"].to_pylist())), {"seconds": 0.1})
