"""The commit record of a unit: what it must hold to vouch for a unit's rows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ..errors import CorruptLakeError
from .durable import canonical_json
from .record import RunRecord
from .row_kinds import TOKENS
from .stats import STATISTICS

REPLAY_ERRORS = ("values", "head", "patch")
"""What the replay of a unit measured. Which units are sampled depends on the workers: it is no part of the digest."""
_VARYING = ("sha256", "made", "seal")
_LARGEST = 1 << 62


def rows_of_kind(record: dict[str, Any], kind: str) -> int:
    """Give how many rows of a kind a unit has, by its record."""
    return record["rows"] if kind == TOKENS else record["pooled"][kind]


def record_digest(body: dict[str, Any]) -> str:
    """Hash the part of a unit record that two makings of the same unit share."""
    return hashlib.sha256(canonical_json({k: v for k, v in body.items() if k not in _VARYING})).hexdigest()


def check_unit_record(value: dict[str, Any], unit: int, run: RunRecord, path: Path) -> dict[str, Any]:
    """Return `value` if it is the record of this unit of this run; `CorruptLakeError` says why it is not."""
    try:
        fault = _fault(value, unit, run)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        fault = f"is not a unit record ({type(error).__name__}: {error})"
    if fault:
        raise CorruptLakeError(f"{path} {fault}. Run `layerlake verify` to see what else is damaged.")
    return value


def _fault(value: dict[str, Any], unit: int, run: RunRecord) -> str | None:
    if value["sha256"] != record_digest(value):
        return "was changed after it was written"
    if value["identity"] != run.identity or value["unit"] != unit or value["first_row"] != unit * run.unit_rows:
        return "belongs to another run or unit"
    if unit >= run.units:
        return f"is beyond the run's {run.units} units"
    if not _whole(value["rows"], run.unit_rows) or not _whole(value["sequences"], run.unit_rows):
        return f"counts {value['rows']!r} rows and {value['sequences']!r} sequences"
    pooled = value.get("pooled", {})
    if pooled.keys() != run.rows.keys() or not all(_whole(n, run.rows[kind]) for kind, n in pooled.items()):
        return f"counts {pooled!r} pooled rows"
    for array in run.arrays:
        held = value["arrays"][array.name]
        sums, statistics = held["crc32c"], held["statistics"]
        if len(sums) != array.layout(run.unit_size(array.rows)).chunks or not all(
            _whole(s, (1 << 32) - 1) for s in sums
        ):
            return f"has no checksums of the chunks of {array.name}"
        if array.codec != "none" and not (
            _whole(held["bytes"], _LARGEST) and _whole(held["file_crc32c"], (1 << 32) - 1)
        ):
            return f"does not say how large the compressed shard of {array.name} is, or has no checksum of it"
        if statistics.keys() != STATISTICS.keys() or not all(_number(statistics[k], t) for k, t in STATISTICS.items()):
            return f"has no statistics of {array.name}"
    if not isinstance(value["tokens"]["sha256"], str):
        return "has no checksum of its token table"
    if not _number(value["made"].get("seconds"), float):
        return "does not say how long the unit took"
    replay = value["made"].get("replay")
    if replay is not None and not (
        _whole(replay["sequences"], run.unit_rows) and all(_number(replay[k], float) for k in REPLAY_ERRORS)
    ):
        return "does not say how far its replay was off"
    return None


def _whole(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _number(value: object, kind: type) -> bool:
    if kind is int:
        return _whole(value, _LARGEST)
    return value is None or type(value) is float or (type(value) is int and abs(value) < _LARGEST)
