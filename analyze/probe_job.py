"""Probing a label at many layers of a run, a job for each, with the exact rows and the results kept in the lake."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import RequestError, UnknownNameError
from ..extract.engine import Item, Job, make_engine
from ..extract.progress import Progress
from ..store.catalog import publish_catalog
from ..store.durable import canonical_json, publish, temporary_name
from ..store.lake import Lake
from ..store.run import ArraySpec, Run
from ..store.tokens import table_hash
from .probe_rows import incomplete, rows_to_probe
from .probe_worker import load_entry
from .profile import Profile

GROUPS = ("document", "seq")
_RESULT_FIELDS = (
    ("result", pa.string()),
    ("kind", pa.string()),
    ("run", pa.string()),
    ("label", pa.string()),
    ("site", pa.string()),
    ("layer", pa.int32()),
    ("seed", pa.int32()),
    ("metric", pa.string()),
    ("value", pa.float64()),
    ("artifact", pa.string()),
    ("created", pa.string()),
)


def probe_layers(
    lake: Lake,
    run: str,
    label: str,
    *,
    sites: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    where: str | None = None,
    by: str = "document",
    seeds: Sequence[int] = (0, 1, 2),
    test_share: float = 0.2,
    C: float = 1.0,
    max_iter: int = 1000,
    engine: str = "inline",
    workers: int = 1,
    threads: int = 1,
    ray_address: str | None = None,
) -> Profile:
    """Fit a logistic-regression probe for `label` at every chosen array of a run and return the profile.

    Rows are the run's tokens with a label, narrowed by `where`, a SQL condition over the columns of `tokens` and
    `document`. Splits are by `by`, ``document`` or ``seq``, never by token. Each probe is stored as an artifact with
    the exact rows it was fitted on; the same request again reads the stored ones. Facts go into the view `results`.
    Copies of a text are never on both sides. A run that is incomplete is probed as far as it is, with a warning.
    """
    if by not in GROUPS:
        raise UnknownNameError.of("grouping", by, GROUPS)
    chosen = make_engine(engine, workers=workers, threads=threads, ray_address=ray_address)
    target = lake.run(run)
    arrays = _choose(target, sites, layers)
    query, rows = rows_to_probe(lake, target, label, where, by)
    warnings = incomplete(lake, target)
    selection = _keep_rows(lake.root, rows)
    settings = {
        "label": label,
        "by": by,
        "seeds": list(seeds),
        "test_share": test_share,
        "C": C,
        "max_iter": max_iter,
        "threads": threads,
    }
    lineage = {"run": run, "identity": target.record.identity, "query": query, "selection": selection}
    spec = {"lake": str(lake.root), "settings": settings, "lineage": lineage}
    ids = {a.name: _artifact_id(spec, a) for a in arrays}
    items = [
        Item(a.name, {"site": a.site, "layer": a.layer, "artifact": ids[a.name]})
        for a in arrays
        if not (lake.root / "artifacts" / ids[a.name]).is_dir()
    ]
    _sweep(lake.root)
    if items:
        with chosen, Progress(len(items), "probes") as progress:
            job = Job("layerlake.analyze.probe_worker:ProbeWorker", spec, items)
            chosen.run(job, lambda key, record: progress.advance())
    entries = [load_entry(lake.root, ids[a.name], a) for a in arrays]
    profile = Profile(label=label, run=run, entries=entries, warnings=warnings)
    _keep_results(lake.root, profile, ids, arrays)
    publish_catalog(lake.root)
    return profile


def _choose(run: Run, sites: Sequence[str] | None, layers: Sequence[int] | None) -> list[ArraySpec]:
    known = run.record.arrays
    chosen: list[ArraySpec] = []
    for site in sites or dict.fromkeys(a.site for a in known):
        of_site = [a for a in known if a.site == site]
        if not of_site or (layers is not None and of_site[0].layer is not None):
            chosen += [run.array(site, layer) for layer in (layers or [None])]
        else:
            chosen += of_site
    flat = [a for a in chosen if len(a.shape) != 1]
    if flat:
        raise RequestError(f"{flat[0].name} has rows of shape {flat[0].shape}; a probe takes vectors.")
    return chosen


def _keep_rows(root: Path, rows: pa.Table) -> str:
    """Store the rows of a selection under the hash of their content, once."""
    name = f"selection-{table_hash([rows])[:16]}"
    path = root / "artifacts" / f"{name}.parquet"
    if not path.exists():
        temporary = temporary_name(path.parent, name)
        pq.write_table(rows, temporary, compression="zstd")
        publish(temporary, path)
    return name


def _artifact_id(spec: dict[str, Any], array: ArraySpec) -> str:
    lineage = {k: v for k, v in spec["lineage"].items() if k != "query"}
    parts = {"settings": spec["settings"], "lineage": lineage, "site": array.site, "layer": array.layer}
    return f"probe-{hashlib.sha256(canonical_json(parts)).hexdigest()[:16]}"


def _keep_results(root: Path, profile: Profile, ids: dict[str, str], arrays: list[ArraySpec]) -> None:
    request = hashlib.sha256(canonical_json(sorted(ids.values()))).hexdigest()[:16]
    path = root / "results" / f"probe-{request}.parquet"
    if path.exists():
        return
    by_place = {(a.site, a.layer): ids[a.name] for a in arrays}
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows = [
        {
            "result": path.stem,
            "kind": "probe",
            "created": created,
            "artifact": by_place[r["site"], r["layer"]],
        }
        | {k: r[k] for k in ("run", "label", "site", "layer", "seed", "metric", "value")}
        for r in profile.rows()
    ]
    temporary = temporary_name(path.parent, path.stem)
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(_RESULT_FIELDS))), temporary)
    publish(temporary, path)


def _sweep(root: Path) -> None:
    """Remove temporary files and folders of processes that are no more."""
    for left in (root / "artifacts").glob("*.tmp"):
        match = re.search(r"\.(\d+)\.[0-9a-f]{12}\.tmp$", left.name)
        if match and not _alive(int(match[1])):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
