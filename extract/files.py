"""Which files the name of some data stands for, and their text as it stands in them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError

_SUFFIXES = """
    .py .pyi .txt .md .rst .tex .c .h .cc .cpp .cxx .hpp .cu .cuh .js .jsx .mjs .ts .tsx .java .kt .scala .go
    .rs .rb .php .swift .cs .lua .jl .r .hs .ml .sql .sh .pl .html .css
"""
SOURCE_SUFFIXES = frozenset(_SUFFIXES.split())
"""The endings of the files that a folder stands for; a glob takes whatever it matches."""

ROW_SUFFIXES = frozenset({".jsonl", ".csv", ".parquet"})
"""The endings of the files that hold a document a row."""

_BOM = b"\xef\xbb\xbf"


def find_files(spec: str) -> tuple[list[tuple[Path, str]], bool]:
    """List (path, name) of all files that `spec` stands for, sorted by name, and whether it is one single file."""
    if not spec.strip():
        raise DataError("The data have an empty name. Name a file, a folder, a glob or hf:NAME.")
    path = Path(spec)
    try:
        if path.is_dir():
            found = sorted((name, path / name) for name in _walk(path))
            if not found:
                raise DataError(
                    f"The folder {spec} holds no source or text file ({' '.join(sorted(SOURCE_SUFFIXES))})."
                    f" Name a file or a glob, such as '{path.as_posix()}/**/*.jsonl'."
                )
            return [(file, name) for name, file in found], False
        if path.exists():
            if not path.is_file():
                raise DataError(f"{spec} is not a regular file. Copy the data into a file first.")
            if path.suffix.lower() not in SOURCE_SUFFIXES | ROW_SUFFIXES:
                raise DataError(
                    f"{spec}: a file that ends in {path.suffix or 'nothing'!r} is not read. Give .txt,"
                    f" .jsonl, .csv or .parquet, a source file, a folder, or a glob (which takes every ending)."
                )
            return [(path, path.name)], True
    except OSError as error:
        raise DataError(f"{spec} cannot be read: {error.strerror or error}.") from error
    if not glob.has_magic(spec):
        raise DataError(f"There is no file or folder {spec}. Give a file, a folder, a glob or hf:NAME.")
    parts = path.parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    # Not Path.glob, which gives hidden files too.
    matches = glob.glob(  # noqa: PTH207
        str(Path(*parts[fixed:])), root_dir=root, recursive=True
    )
    names = {Path(m).as_posix() for m in matches if (root / m).is_file() and "__pycache__" not in Path(m).parts}
    if not names:
        raise DataError(f"No file matches {spec}. Give a glob that matches files, such as 'src/**/*.py'.")
    return [(root / name, name) for name in sorted(names)], False


def _walk(folder: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise error

    for here, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in files:
            file = Path(here, name)
            if not name.startswith(".") and file.suffix.lower() in SOURCE_SUFFIXES and file.is_file():
                yield file.relative_to(folder).as_posix()


def read_text(path: Path) -> str:
    """Read a file of UTF-8 without its byte order mark; `DataError` names the line that is not UTF-8."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    skipped = len(_BOM) if raw.startswith(_BOM) else 0
    try:
        return raw[skipped:].decode()  # no newline is translated: offsets are those of the file
    except UnicodeDecodeError as error:
        offset = error.start + skipped
        line = raw.count(b"\n", 0, offset) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 at byte {offset} (0x{raw[offset]:02x}). Convert the file to"
            f" UTF-8, or leave it out."
        ) from None
