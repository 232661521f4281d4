"""Rows of a data set of the `datasets` library: from the hub, from a local folder, or saved by `save_to_disk`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import DataError, MissingExtraError, RequestError, UnknownNameError, WorldError
from .arrow_rows import arrow_rows
from .failure import one_line
from .rows import Columns, Row, RowTable

HUB_PREFIX = "hf:"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_SPLIT = re.compile(r"(?P<name>\w+(\.\w+)*)(\[(?P<begin>\d*):(?P<end>\d*)\])?")
_ROWS_A_BATCH = 4096


def hub_rows(spec: str, columns: Columns, *, config: str | None, splits: Sequence[str]) -> list[RowTable]:
    """Read the splits of a data set, all of them or those that are named.

    `spec` is ``hf:NAME`` or ``hf:NAME@REVISION`` for a data set of the hub, or ``hf:FOLDER``: a folder of data files as
    `datasets.load_dataset` takes it, or one that `save_to_disk` wrote. What is there as a folder is that folder.
    `config` names a configuration. A split is named as ``train``, or as ``train[:1000]`` or ``train[500:1000]`` for
    some of its rows, counted from 0 as in Python; rows keep the numbers that they have in the whole split.

    Row 12 of a split is the document ``NAME/train:12``, where NAME is the last part of a folder's path. Where more
    than one split is read, they are the split of the documents. Values have the types that `datasets` gives them (a
    class label is its number), and are taken as `arrow_rows` takes them. No code of a data set is run, as `datasets`
    no longer does. `MissingExtraError` where the library is not installed, `WorldError` where the hub is not reached.
    """
    name, revision = _name(spec)
    wanted = [_Part.of(split) for split in splits]
    folder = Path(name).expanduser()
    local = folder if folder.is_dir() else None
    found = _load(spec, local, name, revision, config)
    for part in wanted:
        if part.split not in found:
            raise UnknownNameError.of("split", part.split, [k for k in found if k], f" in {spec}")
    parts = wanted or [_Part(split, 0, None) for split in found]
    _refuse_twice(parts)
    title = local.resolve().name if local else name
    several = len({part.split for part in parts}) > 1
    return [_read_part(found[part.split], part, title, columns, several=several) for part in parts]


def _read_part(rows: Any, part: _Part, title: str, columns: Columns, *, several: bool) -> RowTable:
    """Read some rows of a split, a `datasets.Dataset`; of its columns only those that are asked for."""
    called = f"{title}/{part.split}" if part.split else title
    names = tuple(rows.column_names)
    asked = {*columns.content, *columns.others}
    kept = [n for n in names if n in asked] or list(names[:1])
    end = len(rows) if part.end is None else min(part.end, len(rows))
    listed: list[Row] = []
    if part.begin < end:
        tables = rows.select(range(part.begin, end)).select_columns(kept).with_format("arrow").iter(_ROWS_A_BATCH)
        try:
            listed = list(arrow_rows(tables, columns, f"{HUB_PREFIX}{called}", part.begin + 1))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{HUB_PREFIX}{called} cannot be read: {one_line(error)}. Load it anew.") from error
    return RowTable(called, names, listed, part.split if several else None)


def _refuse_twice(parts: Sequence[_Part]) -> None:
    for at, one in enumerate(parts):
        for other in parts[:at]:
            begin = max(one.begin, other.begin)
            end = min(part.end if part.end is not None else begin + 1 for part in (one, other))
            if one.split == other.split and begin < end:
                raise RequestError(f"Row {begin} of the split {one.split!r} is asked for twice. Name each row once.")


@dataclass(frozen=True)
class _Part:
    """Some rows of a split; a data set that was saved without splits has one whose name is None."""

    split: str | None
    begin: int
    end: int | None

    @classmethod
    def of(cls, text: str) -> _Part:
        match = _SPLIT.fullmatch(text)
        if match is None:
            raise RequestError(f"{text!r} names no split. Write it as train, train[:1000] or train[500:1000].")
        begin, end = match["begin"], match["end"]
        return cls(match["name"], int(begin or 0), int(end) if end else None)


def _name(spec: str) -> tuple[str, str | None]:
    """Take a spec apart into the name of a folder or of a data set, and the revision."""
    name = spec.removeprefix(HUB_PREFIX)
    path = Path(name).expanduser()
    if name.strip() and path.is_dir():
        return name, None
    if name.strip() and path.exists():
        raise DataError(f"{spec}: {name} is a file and no data set. Give a file without {HUB_PREFIX}.")
    hub, at, revision = name.partition("@")
    if not _NAME.fullmatch(hub) or (at and not revision):
        raise DataError(
            f"{spec} names no data set: there is no folder {name or '(nothing)'}, and one of the hub is called "
            f"{HUB_PREFIX}NAME, {HUB_PREFIX}OWNER/NAME or {HUB_PREFIX}OWNER/NAME@REVISION."
        )
    return hub, revision or None


def _load(
    spec: str, folder: Path | None, name: str, revision: str | None, config: str | None
) -> Mapping[str | None, Any]:
    """Load all splits of a data set, by name."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError.of("data", f"Reading {spec}") from error
    saved = folder is not None and any((folder / f).is_file() for f in ("dataset_dict.json", "state.json"))
    if saved and config is not None:
        raise RequestError(f"{spec} was saved by save_to_disk and has no configurations: leave --data-config out.")
    with _quiet(datasets):
        try:
            if saved:
                loaded = datasets.load_from_disk(str(folder))
            else:
                loaded = datasets.load_dataset(str(folder or name), config, revision=revision)
        except Exception as error:  # the library raises errors of many kinds, for files of many kinds
            reason = one_line(error)
            if isinstance(error, (ConnectionError, TimeoutError)):
                raise WorldError(f"The data set {spec} cannot be fetched: {reason}. Is there a network?") from error
            hint = " Name one with --data-config." if config is None and "onfig" in reason else ""
            raise DataError(f"{spec} cannot be loaded as a data set: {reason.rstrip('.')}.{hint}") from error
    if isinstance(loaded, datasets.Dataset):
        return {str(loaded.split) if loaded.split is not None else None: loaded}
    return {str(split): rows for split, rows in loaded.items()}


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Keep the library's progress bars and reports off the user's terminal; what matters becomes an error."""
    verbosity, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()
