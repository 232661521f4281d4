"""Where things lie in a lake, and which format version this program reads and writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import CorruptLakeError, LakeFormatError, RequestError
from .durable import canonical_json, fsync_folder, publish, read_json, write_temporary

FORMAT_VERSION = 3
_LAKE_FOLDERS = ("runs", "catalog", "artifacts", "results")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def lake_path(lake: str | os.PathLike[str]) -> Path:
    """Turn what a user calls a lake into a folder; object stores are refused with a sentence."""
    text = os.fspath(lake)
    if not text.strip():
        raise RequestError("The lake has an empty name. Name a folder.")
    if "://" in text:
        raise RequestError(f"{text!r} is an object store; this version keeps lakes in local folders only.")
    return Path(text).expanduser().absolute()


def is_run_name(name: str) -> bool:
    """Say whether `name` can name a run: letters, digits, `.`, `_` and `-`, not starting with a mark."""
    return bool(_RUN_NAME.fullmatch(name)) and not name.endswith(".tmp")


def check_run_name(name: str) -> str:
    """Return `name` if it can name a run; `RequestError` says what a name looks like."""
    if not is_run_name(name):
        raise RequestError(
            f"{name!r} cannot name a run: use up to 100 letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit."
        )
    return name


def check_lake(root: Path) -> None:
    """Check that `root` is a lake that this program can read; `LakeFormatError` says what it is instead."""
    marker = root / "lake.json"
    try:
        found = marker.is_file()
    except OSError as error:
        raise LakeFormatError(f"{root} cannot be read ({error.strerror}). Ask its owner for access.") from error
    if not found:
        raise LakeFormatError(
            f"{root} is not a lake: it has no lake.json. `layerlake extract MODEL DATA --lake DIR` makes one."
        )
    try:
        content = read_json(marker)
    except CorruptLakeError as error:
        raise LakeFormatError(f"{root} is not a lake that can be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != "layerlake":
        raise LakeFormatError(f"{root} is not a lake: its lake.json is not one of layerlake.")
    version = content.get("version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise LakeFormatError(
            f"{root} is a lake of format version {str(version)[:40]}; this program reads version {FORMAT_VERSION}. "
            "The format is unstable before 1.0: use the layerlake that wrote it, or extract again."
        )


def make_lake(root: Path) -> None:
    """Make `root` a lake unless it is one; a folder with other things in it is refused.

    Several processes may do it at once, and one that is killed on the way leaves what the next one completes: the
    folders come first, lake.json, which makes it a lake, last.
    """
    if root.exists() and not root.is_dir():
        raise RequestError(f"{root} is a file; a lake is a folder.")
    root.mkdir(parents=True, exist_ok=True)
    strangers = [e.name for e in root.iterdir() if e.name not in _LAKE_FOLDERS and not e.name.endswith(".tmp")]
    if not (root / "lake.json").exists():
        if strangers and strangers != ["lake.json"]:
            raise RequestError(f"{root} holds other things and no lake.json: name an empty or a new folder.")
        for folder in _LAKE_FOLDERS:
            (root / folder).mkdir(exist_ok=True)
        fsync_folder(root)
        marker = canonical_json({"format": "layerlake", "version": FORMAT_VERSION})
        publish(write_temporary(root, "lake.json", marker), root / "lake.json")
    check_lake(root)


def runs_folder(root: Path) -> Path:
    """Give the folder of all runs."""
    return root / "runs"


def unit_name(unit: int) -> str:
    """Give the name a unit's files begin with; fixed width, so that names sort as units do."""
    return f"{unit:08d}"
