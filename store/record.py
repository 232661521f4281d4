"""The record of a run: what was asked of one extraction, and the numbers that follow from it."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CorruptLakeError, RequestError, SettingsDifferError, UnknownNameError
from .dtypes import stored_dtype
from .durable import canonical_json
from .layout import check_run_name
from .row_kinds import ROW_KINDS, TOKENS, RowKinds
from .shard import ShardLayout

CODECS = ("none", "archive")
"""How rows lie in a shard: raw, to be mapped into memory, or compressed."""
_CHUNK_BYTES = 1 << 20
_SITE = re.compile(r"[^./\x00][^/\x00]{0,149}")  # it names a folder


@dataclass(frozen=True)
class ArraySpec:
    """One array of a run: a site at a layer (None where the site belongs to none), in rows of one kind."""

    site: str
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    """The trailing shape of a row; (width,) for the residual stream."""
    codec: str = "none"
    """One of `CODECS`."""
    rows: str = TOKENS
    """One of `ROW_KINDS`: what a row is."""

    @property
    def name(self) -> str:
        """The array's folder in the run's Zarr group."""
        place = self.site if self.layer is None else f"{self.site}-{self.layer}"
        return place if self.rows == TOKENS else f"{place}.{self.rows}"

    def check(self) -> None:
        """Raise `ValueError`, saying why, unless this can be an array of a run."""
        if not isinstance(self.site, str) or not _SITE.fullmatch(self.site):
            raise ValueError(f"{self.site!r} cannot name a site")
        if self.layer is not None:
            _check_whole("layer", self.layer, 0, 1 << 31)
        for size in self.shape:
            _check_whole("size of an axis", size, 1, 1 << 31)
        stored_dtype(self.dtype)
        if self.codec not in CODECS:
            raise ValueError(f"{self.codec!r} is no codec")
        if self.rows not in ROW_KINDS:
            raise ValueError(f"{self.rows!r} is no kind of rows")

    def to_json(self) -> dict[str, Any]:
        """Give the array as run.json and a run's identity have it: without what is the default."""
        return {k: v for k, v in asdict(self).items() if (k, v) not in (("codec", "none"), ("rows", TOKENS))}

    def layout(self, unit_rows: int) -> ShardLayout:
        """Give the geometry of a shard's rows, decoded; inner chunks are the largest power of two within 1 MiB."""
        dtype = stored_dtype(self.dtype)
        row_bytes = math.prod(self.shape) * dtype.itemsize
        chunk = 1 << max(0, (_CHUNK_BYTES // row_bytes).bit_length() - 1)
        return ShardLayout(unit_rows, min(unit_rows, chunk), self.shape, dtype)


def find_array(arrays: Iterable[ArraySpec], site: str, layer: int | None, where: str) -> ArraySpec:
    """Find an array by site and layer; errors list the sites or layers there are, `where` says of what.

    A site with a single array needs no layer; a layer counts from 0, never from the end.
    """
    arrays = list(arrays)
    of_site = [a for a in arrays if a.site == site]
    if not of_site:
        raise UnknownNameError.of("site", site, dict.fromkeys(a.site for a in arrays), where)
    if layer is None and len(of_site) == 1:
        return of_site[0]
    if layer is None:
        raise RequestError(f"Give a layer of site {site!r}{where}: {', '.join(str(a.layer) for a in of_site)}.")
    if of_site[0].layer is None:
        raise RequestError(f"Site {site!r}{where} belongs to no layer; leave the layer out.")
    for array in of_site:
        if array.layer == layer:
            return array
    raise UnknownNameError.of("layer", layer, [a.layer for a in of_site], f" of site {site!r}{where}")


@dataclass(frozen=True)
class RunRecord:
    """What run.json says: everything that can change a stored byte, and the numbers that follow from it."""

    name: str
    settings: dict[str, Any]
    arrays: tuple[ArraySpec, ...]
    unit_rows: int
    units: int
    sequences: int
    tokens: int
    plan_hash: str
    """Hash of which tokens stand in which rows; runs that share it can be joined by row."""
    tokens_hash: str
    """Hash of the whole token table, labels and spans included."""
    source: dict[str, Any]
    """Where model and data were found, for people and for loading again; not part of the identity."""
    created: str
    created_by: str
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the files that are written with the run and never again, by their path in the run's folder."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of a unit in arrays of pooled rows, by kind; `unit_rows` are those of tokens."""

    @functools.cached_property
    def identity(self) -> str:
        """Hash of everything that can change a stored byte of this run."""
        parts = {
            "settings": self.settings,
            "arrays": [a.to_json() for a in self.arrays],
            "unit_rows": self.unit_rows,
            "tokens_hash": self.tokens_hash,
            **({"rows": self.rows} if self.rows else {}),
        }
        return hashlib.sha256(canonical_json(parts)).hexdigest()

    @functools.cached_property
    def row_kinds(self) -> RowKinds:
        """The kinds of rows that the run's arrays have."""
        return RowKinds.parse(self.settings.get("rows", TOKENS))

    def unit_size(self, kind: str) -> int:
        """Give the rows of a unit in arrays whose rows are of this kind."""
        return self.unit_rows if kind == TOKENS else self.rows[kind]

    @property
    def stores_all(self) -> bool:
        """Whether every token that the model reads is stored: `keep` and `overlap` leave tokens out."""
        return not self.settings.keys() & {"keep", "overlap"}

    def to_json(self) -> dict[str, Any]:
        """Give the content of run.json."""
        found = asdict(self) | {"arrays": [a.to_json() for a in self.arrays], "identity": self.identity}
        return {k: v for k, v in found.items() if k != "rows" or v}

    @classmethod
    def from_json(cls, value: dict[str, Any], path: Path) -> RunRecord:
        """Read the content of run.json; `CorruptLakeError` when it cannot be a run's."""
        try:
            fields = {k: v for k, v in value.items() if k != "identity"}
            arrays = tuple(ArraySpec(**(a | {"shape": tuple(a["shape"])})) for a in fields.pop("arrays"))
            record = cls(arrays=arrays, **fields)
            record.check()
            if record.identity != value["identity"]:
                raise ValueError("its identity is not that of its settings")
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise CorruptLakeError(f"{path} does not describe a run ({error}). Run `layerlake verify`.") from error
        return record

    def check(self) -> None:
        """Raise `ValueError`, saying why, unless this record can be one of a run."""
        check_run_name(self.name)
        for name in ("unit_rows", "units", "sequences", "tokens"):
            _check_whole(name, getattr(self, name), 0, 1 << 50)
        if self.unit_rows < 1 or self.unit_rows & (self.unit_rows - 1):
            raise ValueError(f"{self.unit_rows} rows a unit is not a power of two")
        if set(self.rows) != set(self.row_kinds.pooled) or {a.rows for a in self.arrays} - set(self.row_kinds.kinds):
            raise ValueError(f"its rows are {self.row_kinds}, its arrays or units have others")
        for kind, size in self.rows.items():
            _check_whole(f"rows of {kind} a unit", size, 1, 1 << 50)
            if size & (size - 1):
                raise ValueError(f"{size} rows of {kind} a unit is not a power of two")
        for name in ("plan_hash", "tokens_hash", "created", "created_by"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is not text")
        parts = (self.settings, self.settings.get("model", {}), self.source, self.files)
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError("settings, model, source or files are not objects")
        for array in self.arrays:
            array.check()
        if len({a.name for a in self.arrays}) < len(self.arrays):
            raise ValueError("two arrays have one name")

    def check_same(self, asked: RunRecord, weights: str = "") -> None:
        """Raise `SettingsDifferError`, naming what differs, unless `asked` would write the same bytes.

        `weights` says what of the weights differs, where their fingerprint does.
        """
        if asked.identity == self.identity:
            return
        mine, theirs = _flat(self), _flat(asked)
        told = {"model.fingerprint": weights} if weights else {}
        keys = dict.fromkeys([*mine, *theirs])
        lines = [told.get(k, line) for k in keys if (line := _difference(k, mine.get(k), theirs.get(k)))]
        raise SettingsDifferError(
            f"Run {self.name!r} exists and was made with other settings ({'; '.join(lines[:6])}"
            f"{'; and more' if len(lines) > 6 else ''}). Choose another name with --run."
        )


def _difference(key: str, mine: Any, theirs: Any) -> str | None:
    if mine == theirs:
        return None
    if isinstance(mine, str) and isinstance(theirs, str) and len(mine) == len(theirs) == 64:
        return f"{key} is another"  # a hash says nothing to people
    return f"{key}: the run has {mine}, asked was {theirs}"


def _flat(record: RunRecord) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "sites": ", ".join(a.name for a in record.arrays),
        "dtype": ", ".join(dict.fromkeys(a.dtype for a in record.arrays)),
        "shape": ", ".join(dict.fromkeys(str(a.shape) for a in record.arrays)),
        "codec": ", ".join(dict.fromkeys(a.codec for a in record.arrays)),
        "unit_rows": record.unit_rows,
        **{f"{kind} a unit": size for kind, size in record.rows.items()},
        "the token table (ids, spans, labels, splits)": record.tokens_hash,
    }

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    walk("", record.settings)
    return flat


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value < high:
        raise ValueError(f"{name} {value!r} is not a whole number of at least {low} and below {high}")
