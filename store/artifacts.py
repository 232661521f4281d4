"""Artifacts: what analysis keeps in a lake, and checking that it is as it was written."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import LayerlakeError
from .durable import file_sha256, read_bytes, read_sealed
from .parquet import read_table, table_bytes
from .tokens import table_hash

_WRITER = re.compile(r"parquet-cpp-arrow version \d+\.\d+\.\d+")


def selection_name(rows_hash: str) -> str:
    """Name a kept selection by the hash of its rows."""
    return f"selection-{rows_hash[:16]}"


def verify_artifacts(root: Path) -> Iterator[tuple[Path, str]]:
    """Check every artifact: its record is sealed and names its files' hashes; a selection is named by its rows'."""
    folder = root / "artifacts"
    missing: dict[Path, str] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.endswith(".tmp"):
            continue
        if path.name.startswith("selection-"):
            yield from ((path, what) for what in _verify_selection(path))
        else:
            yield from _verify_artifact(path, missing)
    yield from sorted(missing.items())


def _verify_selection(path: Path) -> Iterator[str]:
    try:
        table = read_table(path)
        if selection_name(table_hash([table])) != path.stem:
            yield "holds other rows than were written"
        elif not _same_bytes(path, table):
            yield "holds other bytes than were written, though they are the same rows"
    except LayerlakeError as error:
        yield f"cannot be read: {error}"


def _same_bytes(path: Path, table: pa.Table) -> bool:
    """Tell whether a file is what its table is encoded as, where this pyarrow wrote it; True where another did."""
    data, again = read_bytes(path), table_bytes(table)
    writers = {pq.read_metadata(io.BytesIO(content)).created_by for content in (data, again)}
    return data == again or (len(writers) > 1 and all(_WRITER.fullmatch(name) for name in writers))


def _verify_artifact(path: Path, missing: dict[Path, str]) -> Iterator[tuple[Path, str]]:
    record = path / "artifact.json"
    try:
        content = read_sealed(record)
        files = {path / Path(name).name: expected for name, expected in content["files"].items()}
        kept = content.get("lineage", {}).get("selection")
    except (LayerlakeError, KeyError, TypeError, AttributeError) as error:
        yield record, f"cannot be read: {error}"
        return
    for file, expected in files.items():
        try:
            if file_sha256(file) != expected:
                yield file, "holds other bytes than were written"
        except LayerlakeError as error:
            yield file, str(error)
    if isinstance(kept, str) and not (rows := path.parent / f"{Path(kept).name}.parquet").is_file():
        missing.setdefault(rows, f"is missing: it has the rows that {path.name} was made from")
