"""Checking that a lake holds what was written: counts, checksums, nothing missing, nothing foreign."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import LayerlakeError
from .catalog import connect_catalog
from .durable import read_json
from .plan import read_sequences
from .run import ArraySpec, Run, run_names
from .shard import chunk_checksums, open_shard
from .unit import record_digest


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: with which file, and what."""

    run: str | None
    path: str
    what: str

    def to_json(self) -> dict[str, str | None]:
        """Give the problem as plain data."""
        return asdict(self)


def verify_lake(root: Path, run: str | None = None) -> list[Problem]:
    """Read everything of a run, or of all runs, and list what is not as it was written."""
    problems: list[Problem] = []
    for name in [run] if run else run_names(root):
        problems += verify_run(Run(root, name))
    problems += _verify_catalog(root, run)
    return problems


def verify_run(run: Run) -> list[Problem]:
    """Check one run: record, plan, arrays' metadata, and every committed unit's shards and tokens."""

    def problem(path: Path, what: str) -> Problem:
        return Problem(run.name, str(path.relative_to(run.root)), what)

    try:
        record = run.record
    except LayerlakeError as error:
        return [problem(run.folder / "run.json", str(error))]
    found: list[Problem] = []
    try:
        planned = read_sequences(run.folder / "plan")
        counts = (planned.num_rows, sum(planned["length"].to_pylist()))
        if counts != (record.sequences, record.tokens):
            found.append(problem(run.folder / "plan", f"plans {counts}, the run {record.sequences, record.tokens}"))
    except LayerlakeError as error:
        found.append(problem(run.folder / "plan" / "sequences.parquet", str(error)))
    for array in record.arrays:
        found += [problem(path, what) for path, what in _verify_metadata(run, array)]
    committed = run.committed()
    for unit in sorted(committed):
        found += [problem(path, what) for path, what in _verify_unit(run, unit)]
    found += [problem(path, what) for path, what in _strangers(run, committed)]
    return found


def _verify_metadata(run: Run, array: ArraySpec) -> Iterator[tuple[Path, str]]:
    path = run.folder / "activations.zarr" / array.name / "zarr.json"
    layout = run.layout(array)
    try:
        meta = read_json(path)
        inner = meta["codecs"][0]["configuration"]["chunk_shape"]
        seen = (meta["shape"], meta["data_type"], meta["chunk_grid"]["configuration"]["chunk_shape"], inner)
    except FileNotFoundError:
        yield path, "is missing"
        return
    except (LayerlakeError, KeyError, IndexError, TypeError) as error:
        yield path, f"cannot be read: {error}"
        return
    tail = list(array.shape)
    rows = run.record.units * run.record.unit_rows
    expected = ([rows, *tail], array.dtype, [layout.rows, *tail], [layout.chunk_rows, *tail])
    if seen != expected:
        yield path, f"describes {seen}, the run {expected}"


def _verify_unit(run: Run, unit: int) -> Iterator[tuple[Path, str]]:
    path = run.unit_path(unit)
    try:
        record = run.unit_record(unit)
        digest_matches = record["sha256"] == record_digest(record)
        tokens, rows, arrays = record["tokens"], record["rows"], record["arrays"]
    except (LayerlakeError, KeyError, TypeError) as error:
        yield path, f"is not a unit record: {error}"
        return
    if not digest_matches:
        yield path, "was changed after it was written"
        return
    if record["identity"] != run.record.identity or record["unit"] != unit:
        yield path, "belongs to another run or unit"
    if unit >= run.record.units:
        yield path, f"is beyond the run's {run.record.units} units"
    for array in run.record.arrays:
        shard = run.shard_path(array, unit)
        layout = run.layout(array)
        try:
            checksums = chunk_checksums(open_shard(shard, layout), layout)
        except LayerlakeError as error:
            yield shard, str(error)
            continue
        expected = arrays.get(array.name, {}).get("crc32c")
        wrong = [i for i, c in enumerate(checksums) if expected is None or c != expected[i]]
        if wrong:
            first = unit * run.record.unit_rows + wrong[0] * layout.chunk_rows
            yield shard, f"holds other values than were written, from row {first} on ({len(wrong)} chunks)"
    yield from _verify_tokens(run, unit, tokens, rows)


def _verify_tokens(run: Run, unit: int, expected: dict[str, object], rows: int) -> Iterator[tuple[Path, str]]:
    path = run.tokens_path(unit)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        yield path, "is missing, although its unit is committed"
        return
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        yield path, "holds other bytes than were written"
        return
    try:
        stored = pq.read_metadata(pa.BufferReader(content)).num_rows
    except pa.ArrowException as error:
        yield path, f"cannot be read: {error}"
        return
    if stored != rows:
        yield path, f"has {stored} rows, its unit {rows}"


def _strangers(run: Run, committed: set[int]) -> Iterator[tuple[Path, str]]:
    """Find files that no committed unit accounts for; those of planned units are remnants, the rest foreign."""
    owned = {run.shard_path(a, u): u for a in run.record.arrays for u in range(run.record.units)}
    owned |= {run.tokens_path(u): u for u in range(run.record.units)}
    zarr_root = run.folder / "activations.zarr"
    for path in sorted([*zarr_root.rglob("*"), *(run.folder / "tokens").iterdir()]):
        if path.is_dir() or path.name == "zarr.json":
            continue
        unit = owned.get(path)
        if unit is None:
            yield path, "does not belong to this run"
        elif unit not in committed:
            yield path, f"is a remnant: unit {unit} is not committed (extracting again completes it)"


def _verify_catalog(root: Path, only: str | None) -> Iterator[Problem] | list[Problem]:
    pointer = root / "catalog.json"
    try:
        with connect_catalog(root) as connection:
            counted = connection.execute("SELECT run, count(*), sum(rows) FROM units GROUP BY run").fetchall()
            tokens = dict(connection.execute("SELECT run, count(*) FROM tokens GROUP BY run").fetchall())
    except LayerlakeError as error:
        return [Problem(None, "catalog.json", str(error))]
    found = []
    indexed = {name: units for name, units, _ in counted}
    for name in [only] if only else sorted({*indexed, *run_names(root)}):
        present = len(Run(root, name).committed()) if (root / "runs" / name / "run.json").is_file() else 0
        if indexed.get(name, 0) != present:
            what = f"indexes {indexed.get(name, 0)} units of run {name}, {present} are committed: `layerlake index`"
            found.append(Problem(name, str(pointer.relative_to(root)), what))
    for name, _, rows in counted:
        if tokens.get(name, 0) != rows and (only is None or name == only):
            what = f"holds {tokens.get(name, 0)} tokens of run {name}, its units {rows}: `layerlake index`"
            found.append(Problem(name, str(pointer.relative_to(root)), what))
    return found
