"""Checking that a lake holds what was written: counts, checksums, nothing missing, nothing foreign."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import LayerlakeError, UnknownNameError
from .archive_shard import archive_checksums
from .artifacts import verify_artifacts
from .catalog import connect_catalog, named_generation
from .durable import file_sha256
from .label_sets import label_file, label_versions, read_label_set, verify_labels
from .layout import is_run_name, runs_folder
from .parquet import read_table
from .plan import read_sequences, read_unit_tokens, stored_tokens
from .printing import count
from .run import Run, find_run, run_names
from .shard import chunk_checksums, open_shard
from .tokens import ROW_FIELDS, table_hash


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
    if run is not None:
        return verify_run(Run(root, run)) + verify_around(root, run)
    for name in run_names(root):
        with contextlib.suppress(UnknownNameError):  # it was removed a moment ago
            found = verify_run(Run(root, name))
            problems += found if (runs_folder(root) / name).is_dir() else []
    return problems + verify_around(root)


def verify_around(root: Path, run: str | None = None) -> list[Problem]:
    """List what is wrong outside of the runs: folders that are none, artifacts, the catalog; with `run`, its index."""
    problems: list[Problem] = []
    if run is None and runs_folder(root).is_dir():
        for folder in sorted(runs_folder(root).iterdir()):
            if not folder.name.endswith(".tmp") and not (is_run_name(folder.name) and (folder / "run.json").is_file()):
                problems.append(Problem(None, f"runs/{folder.name}/run.json", "is missing, so this is no run"))
        problems += [Problem(None, str(path.relative_to(root)), what) for path, what in verify_artifacts(root)]
    return problems + [Problem(name, path, what) for name, path, what in _verify_catalog(root, run)]


def verify_run(run: Run) -> list[Problem]:
    """Check one run: record, plan, arrays' metadata, and every committed unit's shards and tokens."""

    def problem(path: Path, what: str) -> Problem:
        return Problem(run.name, str(path.relative_to(run.root)), what)

    try:
        found = [problem(path, what) for path, what in _verify_files(run)]
    except LayerlakeError as error:
        return [problem(run.folder / "run.json", str(error))]
    if not found:
        found += [problem(run.folder / "plan", what) for what in _verify_plan(run)]
    plan_is_whole = not found
    committed = run.committed()
    for unit in sorted(committed):
        found += [problem(path, what) for path, what in _verify_unit(run, unit, plan_is_whole)]
    found += [problem(path, what) for path, what in _strangers(run, committed)]
    found += [problem(path, what) for path, what in verify_labels(run)]
    return found


def _verify_files(run: Run) -> Iterator[tuple[Path, str]]:
    """Compare the plan and the arrays' metadata, written with the run, with the hashes in its record."""
    for name, expected in sorted(run.record.files.items()):
        path = run.folder / name
        try:
            if file_sha256(path) != expected:
                yield path, "holds other bytes than were written"
        except LayerlakeError as error:
            yield path, str(error)


def _verify_plan(run: Run) -> Iterator[str]:
    """Compare what the plan says with the hashes that were asked for."""
    folder, record = run.folder / "plan", run.record
    try:
        planned = read_sequences(folder)
        counts = (planned.num_rows, sum(planned["rows"].to_pylist()))
        for columns, expected in ((ROW_FIELDS, record.plan_hash), (None, record.tokens_hash)):
            if table_hash((read_unit_tokens(folder, u) for u in range(record.units)), columns) != expected:
                yield "does not give the tokens that the run was made of"
                break
    except (LayerlakeError, KeyError, TypeError) as error:
        yield f"cannot be read: {error}"
        return
    if counts != (record.sequences, record.tokens):
        yield f"plans {counts}, the run {record.sequences, record.tokens}"


def _verify_unit(run: Run, unit: int, plan_is_whole: bool) -> Iterator[tuple[Path, str]]:
    try:
        record = run.unit_record(unit)
    except LayerlakeError as error:
        yield run.unit_path(unit), str(error)
        return
    for array in run.record.arrays:
        shard = run.shard_path(array, unit)
        layout = run.layout(array)
        held = record["arrays"][array.name]
        try:
            if array.codec == "archive":
                checksums = archive_checksums(shard, layout, held)
            else:
                checksums = chunk_checksums(open_shard(shard, layout), layout)
        except LayerlakeError as error:
            yield shard, str(error)
            continue
        pairs = zip(checksums, held["crc32c"], strict=True)
        wrong = [i for i, (seen, expected) in enumerate(pairs) if seen != expected]
        if wrong:
            first = unit * layout.rows + wrong[0] * layout.chunk_rows
            yield shard, f"holds other values than were written, from row {first} on ({count(len(wrong), 'chunk')})"
    path = run.tokens_path(unit)
    try:
        if file_sha256(path) != record["tokens"]["sha256"]:
            yield path, "holds other bytes than were written"
            return
        table = read_table(path)
        planned = stored_tokens(read_unit_tokens(run.folder / "plan", unit)) if plan_is_whole else table
        if table.num_rows != record["rows"] or table_hash([table]) != table_hash([planned]):
            yield path, "holds other tokens than the plan gives its unit"
    except LayerlakeError as error:
        yield path, str(error)


def _strangers(run: Run, committed: set[int]) -> Iterator[tuple[Path, str]]:
    """Find files that no committed unit accounts for; those of planned units are remnants, the rest foreign."""
    folders = [run.folder / "activations.zarr"]
    folders += [run.folder / "activations.zarr" / a.name for a in run.record.arrays]
    folders += [run.folder / "tokens", run.folder / "units"]
    for path in sorted(p for f in folders if f.is_dir() for p in f.iterdir()):
        if path in folders or str(path.relative_to(run.folder)) in run.record.files:
            continue
        unit = planned_unit(run, path)
        if unit is None:
            yield path, "does not belong to this run"
        elif unit not in committed:
            yield path, f"is a remnant: unit {unit} is not committed (extracting again completes it)"


def planned_unit(run: Run, path: Path) -> int | None:
    """Give the planned unit whose shard, token table or record lies at `path`; None when it is nobody's place."""
    digits = re.search(r"\d+", path.name)
    unit = int(digits[0]) if digits else -1
    array = {a.name: a for a in run.record.arrays}.get(path.parent.name)
    owned = run.shard_path(array, unit) if array else run.tokens_path(unit)
    if path.parent.name == "units":
        owned = run.unit_path(unit)
    return unit if path == owned and 0 <= unit < run.record.units else None


def _verify_catalog(root: Path, only: str | None) -> Iterator[tuple[str | None, str, str]]:
    """Compare the catalog with its hash, with what is committed and with the results; a lake may have none."""
    try:
        generation = named_generation(root)
        if generation is None:
            return
    except LayerlakeError as error:
        yield None, "catalog.json", str(error)
        return
    name = str(generation.path.relative_to(root))
    try:
        if file_sha256(generation.path) != generation.sha256:
            yield None, name, "holds other bytes than were written: `layerlake index` rebuilds it"
            return
        with connect_catalog(root) as connection:
            indexed: dict[str, set[int]] = {}
            for run, unit in connection.execute("SELECT run, unit FROM units").fetchall():
                indexed.setdefault(run, set()).add(unit)
            results = connection.execute("SELECT name, sha256 FROM result_files ORDER BY name").fetchall()
            labels = connection.execute("SELECT run, name, version FROM labels ORDER BY ALL").fetchall()
    except LayerlakeError as error:
        if generation.path.exists():
            yield None, name, str(error)
        return
    for run in [only] if only else sorted({*indexed, *run_names(root)}):
        present = find_run(root, run)
        committed = present.committed() if present else set()
        held = indexed.get(run, set())
        if present:
            for unit in sorted(held - committed):
                path = present.unit_path(unit).relative_to(root)
                yield run, str(path), "is missing, although the catalog has its unit"
        if held != committed:
            what = f"indexes {count(len(held), 'unit')} of run {run}, {len(committed)} are committed: `layerlake index`"
            yield run, "catalog.json", what
    for run in [only] if only else run_names(root):
        shown = {(name, version) for of, name, version in labels if of == run}
        if present := find_run(root, run):
            yield from ((run, path, what) for path, what in _compare_labels(present, shown))
    for stem, expected in results if only is None else ():
        path = root / "results" / f"{stem}.parquet"
        try:
            if file_sha256(path) != expected:
                yield None, str(path.relative_to(root)), "holds other bytes than were indexed"
        except LayerlakeError as error:
            yield None, str(path.relative_to(root)), str(error)


def _compare_labels(run: Run, indexed: set[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Compare the label sets of a run that the catalog has with those that are there."""
    present = {(name, version) for name, versions in label_versions(run).items() for version in versions}
    for name, version in sorted(indexed - present):
        path = label_file(run, name, version, "json").relative_to(run.root)
        yield str(path), "is missing, although the catalog has its labels"
    for name, version in sorted(present - indexed):
        with contextlib.suppress(LayerlakeError):  # a damaged one is named, and no catalog has it
            title = read_label_set(run, name, version).title
            yield "catalog.json", f"does not show labels {title} of run {run.name}: `layerlake index`"
