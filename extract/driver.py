"""The driver of an extraction: from a model and data to a complete run."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import RequestError
from ..store.catalog import publish_catalog
from ..store.create import create_run
from ..store.dtypes import stored_dtype
from ..store.layout import check_lake, check_run_name, lake_path
from ..store.run import ArraySpec, Run, RunRecord, find_run
from .data import data_digest, read_documents
from .engine import Engine, Item, Job, make_engine
from .labels import load_labeler
from .models import LoadedModel, ModelSource, load_model, short_path
from .plan import ExtractionPlan, make_plan
from .progress import Progress
from .windows import make_sequences

PUBLISH_EVERY_S = 30.0
_WASTE_WARNING = 0.10


@dataclass(frozen=True)
class ExtractReport:
    """What an extraction did: `units_done` of `units` were committed now, the rest was there already."""

    run: str
    lake: str
    units: int
    units_done: int
    tokens: int
    sequences: int
    documents: int
    arrays: list[str]
    seconds: float
    retried: dict[str, int] = field(default_factory=dict)
    lost_workers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Give the report as plain data."""
        return asdict(self)


def extract(
    model: str,
    data: str | os.PathLike[str],
    lake: str | os.PathLike[str],
    *,
    run: str | None = None,
    sites: Sequence[str] = ("embed", "resid_post"),
    layers: Sequence[int] | None = None,
    dtype: str | None = None,
    window: int | None = None,
    text_column: str = "text",
    label_columns: Sequence[str] = (),
    split_column: str | None = None,
    labels: Sequence[str] = (),
    revision: str | None = None,
    model_dtype: str = "auto",
    trust_remote_code: bool = False,
    padding: str | None = None,
    batch_tokens: int = 4096,
    unit_rows: int | None = None,
    engine: str | Engine = "inline",
    workers: int = 1,
    threads: int = 1,
    device: str = "cpu",
    ray_address: str | None = None,
) -> ExtractReport:
    """Run `model` over `data` and store the activations of every token as a run of `lake`.

    The same call again does only what is missing: a finished run is left as it is, a broken one is completed to the
    same bytes. A run of that name made with other settings is refused. Nothing is written before the data are read,
    the model is loaded and the plan is made.

    `model` is a local Hugging Face folder, a hub name, or ``package.module:function``. `data` is a .txt or .jsonl
    file, or a folder or glob of source files. `sites` and `layers` choose arrays (layers: all). `dtype` is the stored
    dtype (default: each site's own, which loses nothing). `window` splits documents at lines into sequences of at
    most so many tokens. `labels` name labelers, as ``code-depth``
    or ``column=package.module:function``. `padding` is ``right``, ``left`` or ``none``
    (default: the first that the model is known to be unmoved by). `threads` are compute threads a worker.
    """
    started = time.perf_counter()
    root = lake_path(lake)
    if (root / "lake.json").exists():
        check_lake(root)
    if run is not None:
        check_run_name(run)
    if batch_tokens < 1:
        raise RequestError(f"A batch needs at least one token, not {batch_tokens}.")
    if dtype is not None:
        stored_dtype(dtype)
    labelers = {column: load_labeler(name) for column, name in map(_label_column, labels)}
    documents = read_documents(
        data, text_column=text_column, label_columns=tuple(label_columns), split_column=split_column
    )
    source = ModelSource(model, revision, model_dtype, trust_remote_code)
    import_path = (str(Path.cwd()),)
    limit = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        loaded = load_model(source, device=device, import_path=import_path)
    finally:
        torch.set_num_threads(limit)
    sequences, warnings = make_sequences(
        documents,
        loaded.tokenizer,
        window=window,
        max_length=loaded.max_length,
        vocab_size=loaded.vocab_size,
        labelers=labelers,
    )
    arrays = _choose_arrays(loaded, sites, layers, dtype)
    plan = make_plan(documents, sequences, unit_rows)
    if plan.waste > _WASTE_WARNING:
        warnings.append(f"{plan.waste:.0%} of the planned rows stay unused; shorter windows (--window) waste less.")
    record = RunRecord(
        name=run or _default_name(source, data),
        settings={
            "model": loaded.identity,
            "data": data_digest(documents),
            "window": window,
            "labels": sorted(labels),
            "padding": _choose_padding(loaded, padding),
            "batch_tokens": batch_tokens,
            "compute": _compute(threads, device),
        },
        arrays=arrays,
        unit_rows=plan.unit_rows,
        units=len(plan.units),
        sequences=plan.sequences.num_rows,
        tokens=plan.tokens,
        plan_hash=plan.plan_hash,
        tokens_hash=plan.tokens_hash,
        source={"model": source.title, "data": short_path(data), "data_path": os.fspath(data), "load": _loadable(source)},
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        created_by=__version__,
    )
    target = find_run(root, record.name) or create_run(root, record, plan.sequences, plan.units)
    target.record.check_same(record)
    del loaded
    owned = isinstance(engine, str)
    chosen: Engine = (
        make_engine(engine, workers=workers, threads=threads, device=device, ray_address=ray_address)  # pyright: ignore[reportArgumentType]
        if isinstance(engine, str)
        else engine
    )
    try:
        with target.driver_lock():
            spec = {"lake": str(root), "run": target.name, "model": _loadable(source), "device": device}
            spec["import_path"] = list(import_path)
            outcome = _run_units(target, plan, spec, chosen, import_path)
    finally:
        if owned:
            chosen.close()
    return ExtractReport(
        run=target.name,
        lake=str(root),
        units=record.units,
        tokens=record.tokens,
        sequences=record.sequences,
        documents=len(documents),
        arrays=[a.name for a in arrays],
        seconds=round(time.perf_counter() - started, 2),
        warnings=warnings + outcome.pop("warnings"),
        **outcome,
    )


def _run_units(
    run: Run, plan: ExtractionPlan, spec: dict[str, Any], engine: Engine, import_path: tuple[str, ...]
) -> dict[str, Any]:
    """Do the units that are not committed, publishing the catalog now and then and at the end."""
    for left in run.scratch.glob("*"):
        left.unlink()  # this driver holds the lock: whatever lies here belongs to a worker that is no more
    missing = sorted(set(range(run.record.units)) - run.committed())
    nonfinite: dict[str, int] = {}
    published = time.monotonic()
    if not missing:
        publish_catalog(run.root)
        return {"units_done": 0, "warnings": []}
    rows = [t.num_rows for t in plan.units]
    total = sum(rows[u] for u in missing)
    items = (Item(str(u), {"unit": u}) for u in missing)
    job = Job("layerlake.extract.worker:ExtractWorker", spec, items, import_path)
    with Progress(len(missing), "units", "tokens", total_amount=total) as progress:

        def on_record(key: str, record: dict[str, Any]) -> None:
            nonlocal published
            progress.advance(record["tokens"])
            for name, count in record["nonfinite"].items():
                nonfinite[name] = nonfinite.get(name, 0) + count
            if time.monotonic() - published >= PUBLISH_EVERY_S:
                publish_catalog(run.root)
                published = time.monotonic()

        try:
            report = engine.run(job, on_record)
        finally:
            publish_catalog(run.root)
    warnings = []
    for array in run.record.arrays:
        if array.name in nonfinite:
            warnings.append(
                f"{array.name} is the first site with values that are NaN or infinite ({nonfinite[array.name]} of "
                "them, stored as they are); see the view stats."
            )
            break
    return {
        "units_done": report.done,
        "retried": report.retried,
        "lost_workers": report.lost_workers,
        "warnings": warnings,
    }


def _label_column(label: str) -> tuple[str, str]:
    """Split ``column=labeler``; without a column, code-depth is called depth and a function by its own name."""
    column, equals, name = label.rpartition("=")
    if not equals:
        column = {"code-depth": "depth"}.get(name, name.rpartition(":")[2].replace("-", "_"))
    return column, name


def _choose_arrays(
    model: LoadedModel, sites: Sequence[str], layers: Sequence[int] | None, dtype: str | None
) -> tuple[ArraySpec, ...]:
    points = []
    for site in dict.fromkeys(sites):
        of_site = [p for p in model.points if p.site == site]
        if of_site and of_site[0].layer is None:
            points.append(of_site[0])
        elif layers is None and of_site:
            points += of_site
        else:
            points += [model.point(site, layer) for layer in dict.fromkeys(layers or (None,))]
    if not points:
        raise RequestError("Name at least one site to extract.")
    return tuple(
        ArraySpec(p.site, p.layer, stored_dtype(dtype or model.dtypes[p.name]).name, model.shapes[p.name])
        for p in points
    )


def _choose_padding(model: LoadedModel, asked: str | None) -> str:
    known = (*model.padding, "none")
    if asked is None:
        return known[0]
    if asked not in ("right", "left", "none"):
        raise RequestError(f"{asked!r} is not a padding; use right, left or none.")
    if asked not in known:
        raise RequestError(
            f"Padding on the {asked} is not known to leave this model's activations unchanged; use {' or '.join(known)}."
        )
    return asked


def _compute(threads: int, device: str) -> dict[str, Any]:
    """Record what moves the last bits of a value: the same command elsewhere is another run, and is told so."""
    import importlib.metadata

    try:
        transformers = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        transformers = None
    return {
        "device": device,
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _loadable(source: ModelSource) -> dict[str, Any]:
    spec = asdict(source)
    folder = Path(source.name).expanduser()
    if not source.is_function and folder.is_dir():
        spec["name"] = str(folder.resolve())
    return spec


def _default_name(source: ModelSource, data: str | os.PathLike[str]) -> str:
    stem = Path(os.fspath(data).rstrip("/*")).stem or "data"
    raw = f"{source.title.split('/')[-1].replace(':', '.')}-{stem}"
    return "".join(c if c.isalnum() and c.isascii() or c in "._-" else "-" for c in raw).strip("-._")[:100] or "run"


