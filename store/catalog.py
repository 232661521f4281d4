"""The catalog: a DuckDB index over a lake that can be deleted and rebuilt.

Each generation is a file of its own, closed and complete before the pointer `catalog.json` moves to it, and never
written again. Readers therefore never meet a lock, a half-written index or another process's transaction.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb

from ..errors import CorruptLakeError, LayerlakeError, WorldError
from .catalog_labels import StaleIndexError
from .catalog_load import UNIT_ROWS, create_schema, load_results, load_runs
from .durable import exclusive_lock, file_sha256, fsync_folder, read_sealed, replace_file, sealed_json
from .row_kinds import TOKENS
from .run import Run

CATALOG_VERSION = 10
_KEPT_GENERATIONS = 2
_ATTEMPTS = 20
_GENERATION = re.compile(r"[0-9]{8,}-[0-9a-f]{8}\.duckdb")


@dataclass(frozen=True)
class Generation:
    """A generation that the pointer named: its file, and the hash of the bytes it was published with."""

    path: Path
    sha256: str


def publish_catalog(root: Path, *, rebuild: bool = False) -> Path:
    """Bring the catalog up to date and move the pointer to it; returns the generation's file.

    Units committed since the last generation are added to a copy of it; with `rebuild`, or where that generation is
    damaged, everything is read anew. Does nothing when nothing changed. Writers take turns; readers are not affected.
    """
    folder = root / "catalog"
    try:
        folder.mkdir(exist_ok=True)
        with exclusive_lock(folder / "lock", "", wait=True):
            _sweep(root)
            start = None
            if not rebuild:
                with contextlib.suppress(CorruptLakeError):
                    start = named_generation(root)
            return _publish(root, start)
    except duckdb.Error as error:
        raise WorldError(f"The catalog of {root} could not be built: {error}. Mend that and ask again.") from error
    except OSError as error:
        raise WorldError(
            f"The catalog of {root} could not be written ({error.strerror}: {error.filename}). Mend that, or have "
            "somebody who may write there run `layerlake index`."
        ) from error


def refresh_catalog(root: Path) -> None:
    """Bring the catalog up to date where this process may write; elsewhere the published one has to do."""
    try:
        publish_catalog(root)
    except WorldError as error:
        unwritable = isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EROFS, errno.EACCES)
        if not unwritable or named_generation(root) is None:
            raise


def named_generation(root: Path) -> Generation | None:
    """Read the pointer; None when there is none yet or another version of this program wrote it."""
    pointer = root / "catalog.json"
    if not pointer.exists():
        return None
    try:
        content = read_sealed(pointer)
        if content["version"] != CATALOG_VERSION:
            return None
        if not _GENERATION.fullmatch(content["file"]):
            raise CorruptLakeError(f"{content['file']!r} names no generation")
        return Generation(root / "catalog" / content["file"], content["sha256"])
    except (CorruptLakeError, KeyError, TypeError) as error:
        if not pointer.exists():
            return None
        raise CorruptLakeError(
            f"The catalog's pointer {pointer} is damaged ({error}). It is only an index: `layerlake index` rebuilds it."
        ) from error


def published_units(root: Path) -> dict[str, set[int]] | None:
    """Give the units that the published catalog has, by run; None where there is none that can be read."""
    with contextlib.suppress(CorruptLakeError):
        generation = named_generation(root)
        if generation is None or not generation.path.is_file() or file_sha256(generation.path) != generation.sha256:
            return None
        found: dict[str, set[int]] = {}
        with connect_catalog(root) as connection:
            for run, unit in connection.execute("SELECT run, unit FROM units").fetchall():
                found.setdefault(run, set()).add(unit)
        return found
    return None


def catalog_file(root: Path) -> Path:
    """Give the current generation, building the first one when there is none."""
    generation = named_generation(root)
    for _ in range(_ATTEMPTS):
        if generation is None:
            break
        if generation.path.is_file():
            return generation.path
        before, generation = generation, named_generation(root)
        if generation == before:
            break  # the file is gone, and not because the pointer moved on
    return publish_catalog(root)


def open_generation(root: Path) -> tuple[duckdb.DuckDBPyConnection, Path]:
    """Open the current generation, read-only, as database ``lake`` of an in-memory connection; gives its file too."""
    for _ in range(_ATTEMPTS):
        path = catalog_file(root)
        connection = duckdb.connect(":memory:", config={"temp_directory": ""})
        try:
            quoted = str(path).replace("'", "''")
            connection.execute(f"ATTACH '{quoted}' AS lake (READ_ONLY)")
            connection.execute("USE lake")
        except duckdb.Error as error:
            connection.close()
            if not path.exists():
                continue  # two generations were published since the pointer was read
            raise damaged(path, error) from error
        return connection, path
    raise WorldError(f"The catalog of {root} is published faster than it can be opened. Ask again.")


@contextlib.contextmanager
def connect_catalog(root: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the current generation for the time of a ``with`` block."""
    with contextlib.closing(open_generation(root)[0]) as connection:
        yield connection


def indexed_units(run: Run, kind: str = TOKENS) -> dict[int, int]:
    """Give the number of rows of a kind of each indexed unit of a run; none where no catalog of it can be read.

    Quicker than reading the record of every unit. What is committed is for the caller to know.
    """
    query = (
        f"SELECT unit, {UNIT_ROWS[kind]} FROM units JOIN run_table USING (run) "
        "WHERE run = ? AND identity = ? AND created = ?"
    )
    try:
        if named_generation(run.root) is None:
            return {}
        with connect_catalog(run.root) as connection:
            rows = connection.execute(query, [run.name, run.record.identity, run.record.created])
            return dict(rows.fetchall())
    except (LayerlakeError, duckdb.Error):
        return {}


def damaged(path: Path, error: Exception) -> CorruptLakeError:
    """Give the error for a generation that DuckDB cannot read."""
    return CorruptLakeError(
        f"The catalog {path} cannot be read ({error}). It is only an index: `layerlake index` rebuilds it."
    )


def _publish(root: Path, start: Generation | None) -> Path:
    temporary = root / "catalog" / f"{uuid.uuid4().hex[:12]}.tmp"
    try:
        if start is not None and start.path.is_file():
            shutil.copyfile(start.path, temporary)
            if file_sha256(temporary) == start.sha256:
                with contextlib.suppress(StaleIndexError):
                    return _move_pointer(root, temporary) if _load(root, temporary, fresh=False) else start.path
            temporary.unlink()
        _load(root, temporary, fresh=True)
        return _move_pointer(root, temporary)
    finally:
        for left in (temporary, temporary.with_name(temporary.name + ".wal")):
            left.unlink(missing_ok=True)


def _load(root: Path, file: Path, *, fresh: bool) -> bool:
    with contextlib.closing(duckdb.connect(str(file))) as connection:
        if fresh:
            create_schema(connection)
        changed = load_runs(connection, root)
        changed = load_results(connection, root) or changed
        if changed or fresh:
            connection.execute("CHECKPOINT")
        return changed


def _move_pointer(root: Path, temporary: Path) -> Path:
    folder = root / "catalog"
    last = max((int(p.name[:8]) for p in folder.glob("*.duckdb") if p.name[:8].isdecimal()), default=0)
    # The random part keeps a number that was lost with a deleted pointer from ever naming two contents.
    final = folder / f"{last + 1:08d}-{uuid.uuid4().hex[:8]}.duckdb"
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.rename(final)
    fsync_folder(folder)
    pointer = {"file": final.name, "sha256": file_sha256(final), "version": CATALOG_VERSION}
    replace_file(root / "catalog.json", sealed_json(pointer))
    for old in sorted(folder.glob("*.duckdb"))[:-_KEPT_GENERATIONS]:
        old.unlink(missing_ok=True)  # whoever has it open keeps reading it
    return final


def _sweep(root: Path) -> None:
    """Remove what a killed publisher left; the lock is held, so no living one has temporary files."""
    for left in [*(root / "catalog").glob("*.tmp*"), *root.glob("catalog.json.*.tmp")]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
