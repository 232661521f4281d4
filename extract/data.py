"""Documents: what a user's files hold, checked before anything is computed.

    notes.txt          one document a line
    pairs.jsonl        one document a line: a text or a list of token ids, with labels and a split
    src/               a folder: every source or text file in it is one document
    "src/**/*.py"      a glob: every file it matches is one document (a .jsonl still gives one a line)

Text is kept as it stands in the file: newlines are not translated, so character offsets are those of the
file. A UTF-8 byte order mark is not text: it is dropped, and offsets count from the character after it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, UnknownNameError
from .jsonl import Row, check_label_kinds, label_of, read_content, read_rows, read_split

_SUFFIXES = """
    .py .pyi .txt .md .rst .tex .c .h .cc .cpp .cxx .hpp .cu .cuh .js .jsx .mjs .ts .tsx .java .kt .scala .go
    .rs .rb .php .swift .cs .lua .jl .r .hs .ml .sql .sh .pl .html .css
"""
SOURCE_SUFFIXES = frozenset(_SUFFIXES.split())
"""The endings of the files that a folder stands for; a glob takes whatever it matches."""

_BOM = b"\xef\xbb\xbf"
_TEST_SHARE = 0.2


@dataclass(frozen=True)
class Document:
    """One document of the data: a text or a sequence of token ids, with its labels.

    A label that is missing is None; a label that the data gives as NaN stays the float NaN.
    """

    name: str
    """Unique within the data: a relative posix path, or ``file.jsonl:12`` with the line counted from 1."""
    text: str | None
    input_ids: tuple[int, ...] | None
    labels: dict[str, Any]
    """Column -> a scalar (a label of the whole document) or a list (a label a token)."""
    split: str | None

    @cached_property
    def digest(self) -> str:
        """The content's identity, a SHA-256: of the text in UTF-8, or of the ids.

        Ids are hashed as a byte 0xff and little-endian int64; no UTF-8 text holds that byte, so ids never
        share a digest with a text.
        """
        if self.text is not None:
            return hashlib.sha256(self.text.encode()).hexdigest()
        return hashlib.sha256(b"\xff" + np.asarray(self.input_ids, "<i8").tobytes()).hexdigest()


def read_documents(
    data: str | os.PathLike[str],
    *,
    text_column: str = "text",
    label_columns: Sequence[str] = (),
    split_column: str | None = None,
) -> list[Document]:
    """Read all documents of `data`, or raise a DataError that names the file, the line and what to do.

    - A ``.txt`` file gives one document a line; lines with nothing but white space are skipped, and a name
      keeps the number of its line. Lines end at ``\\n`` or ``\\r\\n``.
    - A ``.jsonl`` file gives one document a line: the string in `text_column`, or, where the row has no such
      text, the list of ints in ``input_ids``. Where a row has both, the text wins;
      ``text_column="input_ids"`` asks for the ids. Blank lines are skipped. An empty text is refused: it has
      no token to store.
    - Another file with one of SOURCE_SUFFIXES is one document.
    - A folder stands for all its files with one of SOURCE_SUFFIXES, in all its subfolders, without hidden
      ones and ``__pycache__``; each file is one document, a ``.txt`` too. Files with nothing but white space
      are skipped.
    - A glob (``**`` crosses folders) stands for the files that it matches, whatever their ending; hidden
      files must be written out. A ``.jsonl`` that it matches gives one document a line.

    Documents of a folder or a glob are sorted by relative path, so that their order never depends on the file
    system. A label column that some rows lack is None there; one that no row has is an UnknownNameError. A
    column of labels is of one kind: booleans, numbers or strings, one a document or one a token. The split is
    a string in every row.
    """
    spec = os.fspath(data)
    files, single = _files(spec)
    entries: list[tuple[str, Row | str]] = []
    for path, name in files:
        entries.extend(_entries(path, name, single=single))
    if not entries:
        raise DataError(f"{spec} holds no text: every line or file is empty. Give data with at least one document.")
    rows = [content for _, content in entries if isinstance(content, Row)]
    columns = dict.fromkeys(column for row in rows for column in row.values)
    for kind, wanted in (("label", label_columns), ("split", [split_column] if split_column else [])):
        for column in wanted:
            if column not in columns:
                hint = "" if rows else " (only .jsonl data has columns)"
                raise UnknownNameError.of(f"{kind} column", column, columns, f" in {spec}{hint}")
    if rows and text_column not in columns and "input_ids" not in columns:
        raise UnknownNameError.of("text column", text_column, columns, f" in {spec}, nor a column 'input_ids'")
    documents: list[Document] = []
    for name, content in entries:
        if isinstance(content, str):
            if split_column:
                raise DataError(f"{name} is a text file and has no split {split_column!r}. Give all data as .jsonl.")
            documents.append(Document(name, content, None, dict.fromkeys(label_columns), None))
            continue
        text, ids = read_content(content, text_column)
        labels = {column: label_of(content, column) for column in label_columns}
        split = read_split(content, split_column) if split_column else None
        documents.append(Document(name, text, ids, labels, split))
    for column in label_columns:
        check_label_kinds(column, [(row.where, row.values.get(column)) for row in rows])
    return documents


def data_digest(documents: Iterable[Document]) -> str:
    """Give the SHA-256 over names, contents, labels and splits of `documents`, in their order."""
    whole = hashlib.sha256()
    for document in documents:
        fact = [document.name, document.digest, document.labels, document.split]
        whole.update(json.dumps(fact, sort_keys=True).encode() + b"\n")
    return whole.hexdigest()


def default_split(digest: str) -> str:
    """Give the side, "train" or "test", of a document that the data gives no split: about 20 % are "test".

    It depends on the content's digest alone, so the same text is on the same side in every run, model and
    data set, and copies of a text never sit on both sides.
    """
    return "test" if int(digest[:12], 16) < _TEST_SHARE * 16**12 else "train"


def _files(spec: str) -> tuple[list[tuple[Path, str]], bool]:
    """List (path, name) of all files that `spec` stands for, sorted by name, and whether it is one single file."""
    if not spec.strip():
        raise DataError("The data have an empty name. Name a .txt, a .jsonl, a folder or a glob.")
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
            if path.suffix.lower() not in SOURCE_SUFFIXES | {".jsonl"}:
                raise DataError(
                    f"{spec}: a file that ends in {path.suffix or 'nothing'!r} is not read. Give .txt or"
                    f" .jsonl, a source file, a folder, or a glob (which takes every ending)."
                )
            return [(path, path.name)], True
    except OSError as error:
        raise DataError(f"{spec} cannot be read: {error.strerror or error}.") from error
    if not glob.has_magic(spec):
        raise DataError(f"There is no file or folder {spec}. Give a .txt, a .jsonl, a folder or a glob.")
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


def _entries(path: Path, name: str, *, single: bool) -> list[tuple[str, Row | str]]:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"The name of the file {name!r} is not UTF-8. Rename the file.") from None
    text = _read_text(path)
    suffix = path.suffix.lower()
    if single and not text.strip():
        raise DataError(f"{path} is empty. Give data with at least one document.")
    if suffix == ".jsonl":
        return [(f"{name}:{row.line}", row) for row in read_rows(text, str(path))]
    if single and suffix == ".txt":
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        return [(f"{name}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    return [(name, text)] if text.strip() else []


def _read_text(path: Path) -> str:
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
