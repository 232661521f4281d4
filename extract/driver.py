"""The driver of an extraction: from a model and data to a complete run."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .. import __version__
from ..errors import RequestError
from ..store.archive import check_codec
from ..store.catalog import publish_catalog
from ..store.create import create_run
from ..store.dtypes import stored_dtype
from ..store.layout import check_lake, check_run_name, lake_path
from ..store.run import RunRecord, find_run
from .batch_check import check_batches
from .chat import ROLE, render_chats
from .data import data_digest, read_documents
from .engine import make_engine
from .keep import Keep
from .labels import load_labeler
from .loaded_model import ModelSource
from .models import load_model
from .plan import make_plan
from .run_units import import_from_here, run_units
from .settings import (
    check_special_tokens,
    choose_arrays,
    choose_padding,
    compute_settings,
    data_title,
    default_name,
    label_column,
    layer_numbers,
    loadable,
    site_names,
)
from .windows import make_sequences

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
    tokens_read: int
    """What the model reads; more than `tokens`, which are stored, with `keep` or `overlap`."""
    left_out: int
    """Sequences that are not run, as nothing of them is stored."""
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
    layers: Sequence[int | str] | int | str | None = None,
    dtype: str | None = None,
    codec: str = "none",
    window: int | None = None,
    overlap: int = 0,
    keep: str | None = None,
    text_column: str = "text",
    messages_column: str | None = None,
    generation_prompt: bool = False,
    chat_options: Mapping[str, Any] | None = None,
    roles: bool = True,
    special_tokens: str = "auto",
    label_columns: Sequence[str] = (),
    split_column: str | None = None,
    data_config: str | None = None,
    data_splits: Sequence[str] = (),
    labels: Sequence[str] = (),
    revision: str | None = None,
    model_dtype: str = "auto",
    trust_remote_code: bool = False,
    attention: str = "auto",
    padding: str | None = None,
    batch_tokens: int = 4096,
    unit_rows: int | None = None,
    engine: str = "inline",
    workers: int = 1,
    threads: int = 1,
    device: str = "cpu",
    ray_address: str | None = None,
) -> ExtractReport:
    """Run `model` over `data` and store the activations of every token, or of those to keep, as a run of `lake`.

    The same call again does only what is missing: a finished run is left as it is, a broken one is completed to the
    same bytes. A run of that name made with other settings is refused. Nothing is written before the data are read,
    the model is loaded, the plan is made, and a planned batch has given what its sequences give alone.

    `model` is a local Hugging Face folder, a hub name, or ``package.module:function``. `data` is a file,
    a folder, a glob, or ``hf:NAME``: `read_documents` says what of each is a document, with `text_column`,
    `messages_column`, `label_columns`, `split_column`, `data_config` and `data_splits`. Messages are rendered by the
    tokenizer's chat template, with `generation_prompt` up to the next answer and with `chat_options`; with `roles` each
    token gets the label ``role``. `special_tokens` is ``auto``, the tokenizer's own in every window, or ``none``.
    `sites` and `layers` choose arrays (layers: all; ``0,3,5-8`` as text). `dtype` is the stored dtype (default: each
    site's own, which loses nothing). `codec` is ``none``, raw rows, or ``archive``, compressed without loss, which
    tensorstore reads. `window` splits documents at lines into sequences of at most so many tokens, each beginning with
    `overlap` tokens of the text before it that are read and not stored. `keep` is a condition in SQL over the columns
    of `tokens` and `sequences`, such as ``pos = length - 1``: only tokens that meet it are stored, and sequences
    without one are not run (see `extract.keep`). `labels` name labelers, as ``code-depth`` or
    ``column=package.module:function``. `attention` is the implementation that transformers shall take (sdpa, eager,
    ...). `padding` is ``right``, ``left`` or ``none`` (default: the first that the model is known to be unmoved by).
    `threads` are compute threads a worker.
    """
    started = time.perf_counter()
    if not isinstance(model, str) or not isinstance(data, (str, os.PathLike)):
        raise RequestError(
            "The model is named by text, a folder, a hub name or 'package.module:function', so that every worker can "
            "load it; the data by a path."
        )
    sites, label_columns, labels, data_splits = (
        (v,) if isinstance(v, str) else v for v in (sites, label_columns, labels, data_splits)
    )
    sites, layers = site_names(sites), layer_numbers(layers)
    root = lake_path(lake)
    if (root / "lake.json").exists():
        check_lake(root)
    if run is not None:
        check_run_name(run)
    if batch_tokens < 1:
        raise RequestError(f"A batch needs at least one token, not {batch_tokens}.")
    if dtype is not None:
        stored_dtype(dtype)
    check_codec(codec)
    add_special_tokens = check_special_tokens(special_tokens)
    import_from_here()  # a model or a labeler of the user's own
    chosen = make_engine(engine, workers=workers, threads=threads, device=device, ray_address=ray_address)
    labelers = {column: load_labeler(name) for column, name in map(label_column, labels)}
    documents = read_documents(
        data,
        text_column=text_column,
        messages_column=messages_column,
        label_columns=tuple(label_columns),
        split_column=split_column,
        config=data_config,
        splits=tuple(data_splits),
    )
    with_roles = [ROLE] if roles and any(d.chat is not None for d in documents) else []
    rule = Keep(keep, [*label_columns, *labelers, *with_roles]) if keep is not None else None
    source = ModelSource(model, revision, model_dtype, trust_remote_code, attention)
    with _torch_threads(threads):
        loaded = load_model(source, device=device)
    documents, chat, warnings = render_chats(
        documents, loaded.tokenizer, generation_prompt=generation_prompt, roles=roles, options=chat_options
    )
    sequences, more = make_sequences(
        documents,
        loaded.tokenizer,
        window=window,
        max_length=loaded.max_length,
        vocab_size=loaded.vocab_size,
        overlap=overlap,
        labelers=labelers,
        special_tokens=add_special_tokens,
    )
    warnings += more
    arrays = choose_arrays(
        loaded, sites, layers, dtype, codec, longest=max((len(s.input_ids) for s in sequences), default=0)
    )
    plan = make_plan(documents, sequences, unit_rows, rule)
    if len(plan.units) > 1 and plan.waste > _WASTE_WARNING:
        warnings.append(
            f"{plan.waste:.0%} of the planned rows stay unused: units of {plan.unit_rows} rows do not suit these data. "
            "Another --unit-rows, or shorter windows, waste less."
        )
    side = choose_padding(loaded, padding)
    record = RunRecord(
        name=run or default_name(source, data),
        settings={
            "model": loaded.identity,
            "data": data_digest(documents),
            "window": window,
            "special_tokens": special_tokens,
            **({"chat": chat} if chat else {}),
            **({"overlap": overlap} if overlap else {}),
            **({"keep": rule.text} if rule else {}),
            "padding": side,
            "batch_tokens": batch_tokens,
            "compute": compute_settings(threads, device, loaded.identity["kind"], codec),
        },
        arrays=arrays,
        unit_rows=plan.unit_rows,
        units=len(plan.units),
        sequences=plan.sequences.num_rows,
        tokens=plan.tokens,
        plan_hash=plan.plan_hash,
        tokens_hash=plan.tokens_hash,
        source={
            "model": source.title,
            "data": data_title(data),
            "data_path": os.fspath(data),
            "load": loadable(source),
        },
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        created_by=__version__,
    )
    target = find_run(root, record.name)
    if target:
        target.record.check_same(record)
    if target is None or len(target.committed()) < record.units:
        with _torch_threads(threads):
            check_batches(
                loaded, loaded.settled([loaded.place(a.site, a.layer) for a in arrays]), plan.units, batch_tokens, side
            )
    del loaded
    with contextlib.ExitStack() as stack:
        stack.enter_context(chosen)
        if target is None:
            chosen.open()  # nothing is written when the engine cannot start
            target = create_run(root, record, plan.sequences, plan.units)
            target.record.check_same(record)  # another process may have made it meanwhile
        stack.enter_context(target.driver_lock())
        committed = target.committed()
        missing = {u: table.num_rows for u, table in enumerate(plan.units) if u not in committed}
        outcome = run_units(target, missing, source, device, chosen)
        publish_catalog(root)
    return ExtractReport(
        run=target.name,
        lake=str(root),
        units=record.units,
        tokens=record.tokens,
        sequences=record.sequences,
        documents=len(documents),
        tokens_read=plan.read,
        left_out=plan.left_out,
        arrays=[a.name for a in arrays],
        seconds=round(time.perf_counter() - started, 2),
        units_done=outcome.done,
        retried=outcome.retried,
        lost_workers=outcome.lost_workers,
        warnings=warnings + outcome.warnings,
    )


@contextlib.contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    """Have torch compute with as many threads in the driver as in its workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
