"""The catalog: a DuckDB index over a lake that can be deleted and rebuilt.

Each generation is a file of its own, closed and complete before the pointer `catalog.json` moves to it, and never
written again. Readers therefore never meet a lock, a half-written index or another process's transaction.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import duckdb

from ..errors import CorruptLakeError
from .catalog_load import create_schema, load_results, load_runs
from .durable import canonical_json, exclusive_lock, fsync_folder, read_json, replace_file

CATALOG_VERSION = 1
_KEPT_GENERATIONS = 2


def publish_catalog(root: Path, *, rebuild: bool = False) -> Path:
    """Bring the catalog up to date and move the pointer to it; returns the generation's file.

    Units committed since the last generation are added to a copy of it; with `rebuild` everything is read anew.
    Does nothing when nothing changed. Writers take turns; readers are not affected.
    """
    folder = root / "catalog"
    folder.mkdir(exist_ok=True)
    with exclusive_lock(folder / "lock", "", wait=True):
        current = None if rebuild else _current(root)
        temporary = folder / f"{uuid.uuid4().hex[:12]}.tmp"
        try:
            if current is not None:
                shutil.copyfile(current, temporary)
            with contextlib.closing(duckdb.connect(str(temporary))) as connection:
                if current is None:
                    create_schema(connection)
                changed = load_runs(connection, root)
                changed = load_results(connection, root) or changed
                if current is not None and not changed:
                    return current
                connection.execute("CHECKPOINT")
            return _move_pointer(root, temporary)
        finally:
            for left in (temporary, temporary.with_name(temporary.name + ".wal")):
                left.unlink(missing_ok=True)


def catalog_file(root: Path) -> Path:
    """Give the current generation, building the first one when there is none."""
    return _current(root) or publish_catalog(root)


@contextlib.contextmanager
def connect_catalog(root: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the current generation, read-only, as the database ``lake`` of an in-memory connection."""
    for _ in range(20):
        path = catalog_file(root)
        connection = duckdb.connect(":memory:", config={"temp_directory": ""})
        try:
            quoted = str(path).replace("'", "''")
            connection.execute(f"ATTACH '{quoted}' AS lake (READ_ONLY)")
        except duckdb.Error as error:
            connection.close()
            if not path.exists():
                continue  # two generations were published since the pointer was read
            raise CorruptLakeError(
                f"The catalog {path} cannot be opened ({error}). It is only an index: `layerlake index` rebuilds it."
            ) from error
        try:
            connection.execute("USE lake")
            yield connection
        finally:
            connection.close()
        return
    raise CorruptLakeError(f"The catalog pointer of {root} names a file that is not there: run `layerlake index`.")


def _current(root: Path) -> Path | None:
    pointer = root / "catalog.json"
    if not pointer.is_file():
        return None
    content = read_json(pointer)
    if content.get("version") != CATALOG_VERSION:
        return None
    path = root / "catalog" / Path(str(content.get("file"))).name
    return path if path.is_file() else None


def _move_pointer(root: Path, temporary: Path) -> Path:
    folder = root / "catalog"
    last = max((int(p.name[:8]) for p in folder.glob("*.duckdb") if p.name[:8].isdecimal()), default=0)
    # The random part keeps a number that was lost with a deleted pointer from ever naming two contents.
    final = folder / f"{last + 1:08d}-{uuid.uuid4().hex[:8]}.duckdb"
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.rename(final)
    fsync_folder(folder)
    replace_file(root / "catalog.json", canonical_json({"file": final.name, "version": CATALOG_VERSION}))
    for old in sorted(folder.glob("*.duckdb"))[:-_KEPT_GENERATIONS]:
        old.unlink(missing_ok=True)  # whoever has it open keeps reading it
    return final
