"""Artifacts: what analysis keeps in a lake, and checking that it is as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..errors import LayerlakeError
from .durable import file_sha256, read_sealed
from .parquet import read_table
from .tokens import table_hash


def selection_name(rows_hash: str) -> str:
    """Name a kept selection by the hash of its rows."""
    return f"selection-{rows_hash[:16]}"


def verify_artifacts(root: Path) -> Iterator[tuple[Path, str]]:
    """Check every artifact: its record is sealed and names its files' hashes; a selection is named by its rows'."""
    folder = root / "artifacts"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.endswith(".tmp"):
            continue
        try:
            if path.name.startswith("selection-"):
                if selection_name(table_hash([read_table(path)])) != path.stem:
                    yield path, "holds other rows than were written"
                continue
            for name, expected in read_sealed(path / "artifact.json")["files"].items():
                if file_sha256(path / Path(name).name) != expected:
                    yield path / name, "holds other bytes than were written"
        except (LayerlakeError, KeyError, AttributeError) as error:
            yield path, f"cannot be read: {error}"
