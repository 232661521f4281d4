"""Probing a label at many layers of a run, a job for each, with the exact rows and the results kept in the lake."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import __version__
from ..errors import RequestError, UnknownNameError
from ..extract.engine import Item, Job, make_engine
from ..extract.progress import Progress
from ..store.artifacts import selection_name
from ..store.catalog import publish_catalog, refresh_catalog
from ..store.durable import canonical_json, publish, sweep, write_temporary
from ..store.lake import Lake
from ..store.parquet import table_bytes
from ..store.row_kinds import TOKENS
from ..store.run import ArraySpec, Run
from ..store.tokens import table_hash
from .labels import Labels
from .probe import Probe
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
    ("condition", pa.string()),
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
    probe = Probe(C=C, max_iter=max_iter, seeds=tuple(seeds), test_share=test_share, label_name=label)
    probe.check_parameters()
    chosen = make_engine(engine, workers=workers, threads=threads, ray_address=ray_address)
    target = lake.run(run)
    arrays = _choose(target, sites, layers)
    refresh_catalog(lake.root)  # a driver that was killed may have committed more than it had published
    query, rows = rows_to_probe(lake, target, label, where, by)
    warnings = incomplete(lake, target)
    Labels.read(np.array(rows["label"].to_pylist(), object), label)  # a label that cannot be probed is named now
    for folder in ("artifacts", "results"):
        sweep(lake.root / folder)
    lineage = {
        "run": run,
        "identity": target.record.identity,
        "query": query,
        "selection": _keep_rows(lake.root, rows),
    }
    settings = {"by": by, "threads": threads, "probe": probe.get_params(), "versions": _versions()}
    spec = {"lake": str(lake.root), "settings": settings, "lineage": lineage}
    ids = {a.name: _artifact_id(spec, a) for a in arrays}
    items = [
        Item(a.name, {"site": a.site, "layer": a.layer, "artifact": ids[a.name]})
        for a in arrays
        if not (lake.root / "artifacts" / ids[a.name]).is_dir()
    ]
    if items:
        with chosen, Progress(len(items), "probes") as progress:
            job = Job("layerlake.analyze.probe_worker:ProbeWorker", spec, items)
            chosen.run(job, lambda key, record: progress.advance())
    entries = [load_entry(lake.root, ids[a.name], a) for a in arrays]
    profile = Profile(label=label, run=run, entries=entries, condition=where, warnings=warnings)
    for entry in profile.entries:
        _keep_results(lake.root, replace(profile, entries=[entry]))
    publish_catalog(lake.root)
    return profile


def _versions() -> dict[str, str]:
    """Name what could change a fitted number: a stored probe is taken for the same only where these are."""
    names = ("numpy", "scipy", "scikit-learn")
    return {"layerlake": __version__} | {n: importlib.metadata.version(n) for n in names}


def _choose(run: Run, sites: Sequence[str] | None, layers: Sequence[int] | None) -> list[ArraySpec]:
    kinds = run.record.row_kinds.kinds
    if TOKENS not in kinds:
        raise RequestError(
            f"Run {run.name!r} stores no tokens, which probes are fitted on here, but rows of {' and '.join(kinds)}. "
            "Fit a layerlake.Probe on sel.array(...) of a selection of them."
        )
    known = [a for a in run.record.arrays if a.rows == TOKENS]
    chosen: list[ArraySpec] = []
    # A layer that is asked for without a site means the sites that have layers.
    default = (a.site for a in known if layers is None or a.layer is not None)
    for site in dict.fromkeys(sites or default):
        of_site = [a for a in known if a.site == site]
        if not of_site or (layers is not None and of_site[0].layer is not None):
            chosen += [run.array(site, layer, TOKENS) for layer in dict.fromkeys(layers or [None])]
        else:
            chosen += of_site
    flat = [a for a in chosen if len(a.shape) != 1]
    if flat:
        raise RequestError(f"{flat[0].name} has rows of shape {flat[0].shape}; a probe takes vectors.")
    return chosen


def _keep_rows(root: Path, rows: pa.Table) -> str:
    """Store the rows of a selection under the hash of their content, once."""
    name = selection_name(table_hash([rows]))
    path = root / "artifacts" / f"{name}.parquet"
    if not path.exists():
        publish(write_temporary(path.parent, path.name, table_bytes(rows)), path)
    return name


def _artifact_id(spec: dict[str, Any], array: ArraySpec) -> str:
    lineage = {k: v for k, v in spec["lineage"].items() if k != "query"}
    parts = {"settings": spec["settings"], "lineage": lineage, "site": array.site, "layer": array.layer}
    return f"probe-{hashlib.sha256(canonical_json(parts)).hexdigest()[:16]}"


def _keep_results(root: Path, profile: Profile) -> None:
    """Write the facts of one probe into the lake's results, once."""
    artifact = profile.entries[0].artifact
    path = root / "results" / f"{artifact}.parquet"
    if path.exists():
        return
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    same = {"result": artifact, "kind": "probe", "created": created, "artifact": artifact}
    same["condition"] = profile.condition
    columns = ("run", "label", "site", "layer", "seed", "metric", "value")
    rows = [same | {k: r[k] for k in columns} for r in profile.rows()]
    table = pa.Table.from_pylist(rows, pa.schema(list(_RESULT_FIELDS)))
    publish(write_temporary(path.parent, path.name, table_bytes(table)), path)
