"""Documents: what a user's data hold, checked before anything is computed.

    notes.txt          one document a line
    pairs.jsonl        one document a row: a text, messages or a list of token ids, with labels and a split
    pairs.csv          likewise
    pairs.parquet      likewise
    hf:NAME            a data set of the `datasets` library, from the hub or a local folder: likewise
    task:dyck?k=2      one document a string of a task, labelled at every position
    src/               a folder: every source or text file in it is one document
    "src/**/*.py"      a glob: every file it matches is one document (one with rows gives one a row)

Text is kept as it stands in the file: newlines are not translated, so character offsets are those of the
file. A UTF-8 byte order mark is not text: it is dropped, and offsets count from the character after it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import DataError, RequestError, UnknownNameError
from .arrow_rows import csv_rows, parquet_rows
from .document import Chat, Document
from .files import ROW_SUFFIXES, find_files, read_text
from .hub_rows import HUB_PREFIX, hub_rows
from .jsonl import read_rows
from .rows import Columns, RowTable, check_label_kinds, label_of, read_content, read_split
from .task_strings import TASK_PREFIX, TaskStrings

_TEST_SHARE = 0.2


def read_documents(
    data: str | os.PathLike[str],
    *,
    text_column: str = "text",
    messages_column: str | None = None,
    label_columns: Sequence[str] = (),
    split_column: str | None = None,
    config: str | None = None,
    splits: Sequence[str] = (),
) -> list[Document]:
    """Read all documents of `data`, or raise a DataError that names the file, the row and what to do.

    - A ``.txt`` file gives one document a line; lines with nothing but white space are skipped, and a name
      keeps the number of its line. Lines end at ``\\n`` or ``\\r\\n``.
    - A ``.jsonl``, ``.csv`` or ``.parquet`` file gives one document a row: the string in `text_column`, or, where
      the row has no such text, the list of messages in ``messages``, or the list of ints in ``input_ids``.
      ``text_column="input_ids"`` asks for the ids, and `messages_column` for the messages of a column. Blank lines
      are skipped. An empty text is refused: it has no token to store. `csv_rows` and `arrow_rows` say how values
      are read.
    - ``hf:NAME`` gives one document a row likewise; `hub_rows` says what NAME, `config` and `splits` can be.
    - ``task:NAME?OPTIONS`` gives one document a string of a task; `TaskStrings` says which, and with what labels.
    - Another file with one of SOURCE_SUFFIXES is one document.
    - A folder stands for all its files with one of SOURCE_SUFFIXES, in all its subfolders, without hidden
      ones and ``__pycache__``; each file is one document, a ``.txt`` too. Files with nothing but white space
      are skipped.
    - A glob (``**`` crosses folders) stands for the files that it matches, whatever their ending; hidden
      files must be written out. A file with rows that it matches gives one document a row.

    Documents of a folder or a glob are sorted by relative path, so that their order never depends on the file
    system. A label column that some rows lack is None there; one that no row has is an UnknownNameError. A
    column of labels is of one kind: booleans, numbers or strings, one a document or one a token. The split is
    a string in every row.
    """
    spec = os.fspath(data)
    if spec.startswith(TASK_PREFIX):
        if config is not None or splits or split_column or messages_column or text_column != "text":
            raise RequestError(
                f"{spec} is a task: its strings have no columns, and each has its side as its split. Write split=test "
                "into the task for those of one side."
            )
        return TaskStrings.parse(spec).documents(label_columns)
    columns = Columns(text_column, messages_column, tuple(label_columns), split_column)
    if spec.startswith(HUB_PREFIX):
        found: list[RowTable | tuple[str, str]] = [*hub_rows(spec, columns, config=config, splits=splits)]
    elif config is not None or splits:
        raise RequestError(f"{spec} is no hf: data set, so it has no configuration and no splits to choose from.")
    else:
        files, single = find_files(spec)
        found = [one for path, name in files for one in _read_file(path, name, columns, single=single)]
    if not any(one.rows if isinstance(one, RowTable) else True for one in found):
        raise DataError(f"{spec} holds no text: every line or file is empty. Give data with at least one document.")
    tables = [one for one in found if isinstance(one, RowTable)]
    _check_columns(spec, tables, columns)
    documents: list[Document] = []
    for one in found:
        if isinstance(one, RowTable):
            documents += _documents(one, columns)
            continue
        if split_column:
            raise DataError(f"{one[0]} is a text file and has no split {split_column!r}. Give all data as .jsonl.")
        documents.append(Document(*one, None, dict.fromkeys(label_columns), None))
    for column in label_columns:
        check_label_kinds(column, [(row.where, row.values.get(column)) for table in tables for row in table.rows])
    return documents


def _check_columns(spec: str, tables: Sequence[RowTable], columns: Columns) -> None:
    known = dict.fromkeys(column for table in tables for column in table.columns)
    for kind, wanted in (("label", columns.labels), ("split", [columns.split] if columns.split else [])):
        for column in wanted:
            if column not in known:
                hint = "" if tables else " (only rows of .jsonl, .csv, .parquet or hf: data have columns)"
                raise UnknownNameError.of(f"{kind} column", column, known, f" in {spec}{hint}")
    if (tables or columns.messages is not None) and not any(column in known for column in columns.content):
        first, *more = columns.content
        kind = "messages" if columns.messages is not None else "text"
        rest = f", nor a column {' or '.join(map(repr, more))}" if more else ""
        raise UnknownNameError.of(f"{kind} column", first, known, f" in {spec}{rest}")


def _documents(table: RowTable, columns: Columns) -> list[Document]:
    documents = []
    for row in table.rows:
        content = read_content(row, columns)
        labels = {column: label_of(row, column) for column in columns.labels}
        split = read_split(row, columns.split) if columns.split else table.split
        chat = Chat(content.messages) if content.messages is not None else None
        name = f"{table.name}:{row.number}"
        documents.append(Document(name, content.text, content.input_ids, labels, split, chat))
    return documents


def _read_file(path: Path, name: str, columns: Columns, *, single: bool) -> list[RowTable | tuple[str, str]]:
    """Give the rows of a file, or the (name, text) of each document of a text file."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"The name of the file {name!r} is not UTF-8. Rename the file.") from None
    suffix = path.suffix.lower()
    text = "" if suffix == ".parquet" else read_text(path)
    if suffix in ROW_SUFFIXES:
        if suffix == ".parquet":
            table = parquet_rows(path, name, columns)
        elif not text.strip():
            table = RowTable(name, (), [])
        elif suffix == ".csv":
            table = csv_rows(text.encode(), name, str(path), columns)
        else:
            rows = read_rows(text, str(path))
            table = RowTable(name, tuple(dict.fromkeys(column for row in rows for column in row.values)), rows)
        if single and not table.rows:
            raise DataError(f"{path} is empty. Give data with at least one document.")
        return [table]
    if single and not text.strip():
        raise DataError(f"{path} is empty. Give data with at least one document.")
    if single and suffix == ".txt":
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        return [(f"{name}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    return [(name, text)] if text.strip() else []


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
