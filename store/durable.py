"""Files that are either there whole or not there, also after a power cut."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CorruptLakeError, RunLockedError

ABANDONED_AFTER_S = 3600.0


def canonical_json(value: Any) -> bytes:
    """Encode `value` as JSON with one possible result: sorted keys, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode()


def sealed_json(value: dict[str, Any]) -> bytes:
    """Encode `value` with a hash of itself under the key ``seal``, for `read_sealed`."""
    return canonical_json(value | {"seal": hashlib.sha256(canonical_json(value)).hexdigest()})


def read_bytes(path: Path) -> bytes:
    """Read a file of the lake whole; `CorruptLakeError` names one that is not there or cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CorruptLakeError(f"{path} is missing. Run `layerlake verify` to see what else is.") from None
    except OSError as error:
        raise CorruptLakeError(f"{path} cannot be read ({error.strerror}). Run `layerlake verify`.") from error


def read_json(path: Path) -> Any:
    """Read a JSON file of the lake; `CorruptLakeError` names a file that is not JSON."""
    return _parse(read_bytes(path), path)


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a JSON file that `sealed_json` encoded; `CorruptLakeError` when a single byte of it is another."""
    data = read_bytes(path)
    value = _parse(data, path)
    content = {k: v for k, v in value.items() if k != "seal"} if isinstance(value, dict) else {}
    try:
        intact = sealed_json(content) == data
    except (ValueError, RecursionError):  # NaN, or text that is not Unicode
        intact = False
    if not intact:
        raise CorruptLakeError(f"{path} was changed after it was written. Run `layerlake verify`.")
    return content


def _parse(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptLakeError(
            f"{path} is not readable JSON ({error}). Run `layerlake verify` to see what else is damaged."
        ) from error


def file_sha256(path: Path) -> str:
    """Hash the bytes of a file; `CorruptLakeError` names one that is not there or cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorruptLakeError(f"{path} cannot be read ({error.strerror}). Run `layerlake verify`.") from error


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable, or the content of a file."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Make everything in a folder durable: contents and names."""
    for path in folder.rglob("*"):
        fsync_folder(path)
    fsync_folder(folder)


def temporary_name(folder: Path, stem: str) -> Path:
    """Give a name in `folder` that no other process has or will have."""
    return folder / f"{stem}.{os.getpid()}.{uuid.uuid4().hex[:12]}.tmp"


def write_temporary(folder: Path, stem: str, data: bytes) -> Path:
    """Write and fsync `data` under a fresh temporary name in `folder`, and return it."""
    path = temporary_name(folder, stem)
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk: nothing may be left that fills it further
        path.unlink(missing_ok=True)
        raise
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
    finally:
        temporary.unlink(missing_ok=True)
    if created:
        fsync_folder(final.parent)
    return created


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file at once: a reader sees the old bytes or the new ones."""
    temporary = write_temporary(path.parent, path.name, data)
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Fill a folder under a temporary name; at the end it is made durable and gets its final name, at once.

    When that name is taken by then, what has it is kept. After an error nothing is left.
    """
    temporary = temporary_name(final.parent, final.name)
    temporary.mkdir()
    try:
        yield temporary
        fsync_tree(temporary)
        try:
            temporary.rename(final)
        except OSError:
            if not final.is_dir():
                raise
        fsync_folder(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def abandoned(folder: Path) -> list[Path]:
    """List what killed processes left in a folder: temporary names that nobody has touched for an hour.

    Process numbers would not do to tell the living from the dead, as a lake may be shared by several machines.
    """
    limit = time.time() - ABANDONED_AFTER_S
    found = []
    for left in sorted(folder.glob("*.tmp")):
        with contextlib.suppress(FileNotFoundError):
            inside = () if left.is_symlink() else left.rglob("*")
            if max(p.lstat().st_mtime for p in (left, *inside)) <= limit:
                found.append(left)
    return found


def sweep(folder: Path) -> None:
    """Remove what killed processes left in a folder, as `abandoned` finds it."""
    for left in abandoned(folder):
        with contextlib.suppress(FileNotFoundError):
            is_folder = left.is_dir() and not left.is_symlink()
            shutil.rmtree(left, ignore_errors=True) if is_folder else left.unlink()


@contextlib.contextmanager
def exclusive_lock(path: Path, busy: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the advisory lock of a file; the kernel drops it with the process, so a crash leaves none behind.

    Raises `RunLockedError` with the text `busy`, where ``{holder}`` becomes the holder's process id, when another
    process has it and `wait` is false.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise RunLockedError(busy.replace("{holder}", holder)) from None
            if not _is_open(fd, path):
                continue  # it was removed, with its folder, before it was locked
            with contextlib.suppress(OSError):  # a full disk, which `rm` is to help with: the number is for a sentence
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
            yield
            return
        finally:
            os.close(fd)


def is_locked(path: Path) -> bool:
    """Tell whether a living process holds the lock of a file; changes nothing, and a file that is not there is free."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_open(fd: int, path: Path) -> bool:
    """Tell whether `path` still is the file that `fd` has open."""
    try:
        here, there = os.fstat(fd), path.lstat()
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
