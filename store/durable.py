"""Files that are either there whole or not there, also after a power cut."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CorruptLakeError, RunLockedError


def canonical_json(value: Any) -> bytes:
    """Encode `value` as JSON with one possible result: sorted keys, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode()


def read_json(path: Path) -> Any:
    """Read a JSON file of the lake; `CorruptLakeError` names a file that is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptLakeError(
            f"{path} is not readable JSON ({error}). Run `layerlake verify` to see what else is damaged."
        ) from error


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_name(folder: Path, stem: str) -> Path:
    """Give a name in `folder` that no other process has or will have."""
    return folder / f"{stem}.{os.getpid()}.{uuid.uuid4().hex[:12]}.tmp"


def write_temporary(folder: Path, stem: str, data: bytes) -> Path:
    """Write and fsync `data` under a fresh temporary name in `folder`, and return it."""
    path = temporary_name(folder, stem)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


def publish(temporary: Path, final: Path) -> bool:
    """Give a finished, fsynced file its final name, unless that name is taken.

    A link, not a rename: a rename would silently replace what another process has published. Returns False, and
    keeps the existing file, when the name is taken. The temporary name is gone in either case.
    """
    try:
        os.link(temporary, final)
        created = True
    except FileExistsError:
        created = False
    temporary.unlink()
    if created:
        fsync_folder(final.parent)
    return created


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file at once: a reader sees the old bytes or the new ones."""
    temporary = write_temporary(path.parent, path.name, data)
    temporary.replace(path)
    fsync_folder(path.parent)


@contextlib.contextmanager
def exclusive_lock(path: Path, busy: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the advisory lock of a file; the kernel drops it with the process, so a crash leaves none behind.

    Raises `RunLockedError` with the text `busy`, where ``{holder}`` becomes the holder's process id, when another
    process has it and `wait` is false.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise RunLockedError(busy.format(holder=holder)) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)
