"""The driver of an extraction: from a model and data to a complete run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..store.catalog import publish_catalog
from ..store.create import create_run
from ..store.row_kinds import TOKENS
from ..store.run import find_run
from .batch_check import check_batches
from .prepare import prepare, torch_threads
from .request import ExtractRequest
from .run_units import run_units
from .space import check_space
from .weights import other_weights


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
    pooled: dict[str, int] = field(default_factory=dict)
    """Rows that are means, by kind."""
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
    rows: str | Sequence[str] = TOKENS,
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
    ignore_free_space: bool = False,
) -> ExtractReport:
    """Run `model` over `data` and store the activations of every token, or of those to keep, as a run of `lake`.

    The same call again does only what is missing: a finished run is left as it is, a broken one is completed to the
    same bytes. A run of that name made with other settings is refused. Nothing is written before the data are read,
    the model is loaded, the plan is made, and a planned batch has given what its sequences give alone.

    `model` is a local Hugging Face folder, a hub name, or ``package.module:function``. `data` is a file, a folder, a
    glob, ``hf:NAME``, or ``task:NAME?OPTIONS``: `read_documents` says what of each is a document, with `text_column`,
    `messages_column`, `label_columns`, `split_column`, `data_config` and `data_splits`. Messages are rendered by the
    tokenizer's chat template, with `generation_prompt` up to the next answer and with `chat_options`; with `roles` each
    token gets the label ``role``. `special_tokens` is ``auto``, the tokenizer's own in every window, or ``none``.
    `sites` and `layers` choose arrays (layers: all; ``0,3,5-8`` as text). `dtype` is the stored dtype (default: each
    site's own, which loses nothing). `codec` is ``none``, raw rows, or ``archive``, compressed without loss, which
    tensorstore reads. `window` splits documents at lines into sequences of at most so many tokens, each beginning with
    `overlap` tokens of the text before it that are read and not stored. `keep` is a condition in SQL over the columns
    of `tokens` and `sequences`, such as ``pos = length - 1``: only tokens that meet it are stored, and sequences
    without one are not run (see `extract.keep`). `rows` are the kinds of rows, as ``tokens,sequences,spans:LABEL``:
    tokens, and means over those of them that are not special, of a sequence or of a run of tokens with the same value
    of a label. `labels` name labelers, as ``code-depth`` or
    ``column=package.module:function``. `attention` is the implementation that transformers shall take (sdpa, eager,
    ...). `padding` is ``right``, ``left`` or ``none`` (default: the first that the model is known to be unmoved by).
    `threads` are compute threads a worker. An extraction that
    the disk cannot hold is refused, unless `ignore_free_space` is set.
    """
    started = time.perf_counter()
    ready = prepare(
        ExtractRequest(
            model,
            data,
            lake,
            run=run,
            sites=sites,
            layers=layers,
            dtype=dtype,
            codec=codec,
            window=window,
            overlap=overlap,
            keep=keep,
            rows=rows,
            text_column=text_column,
            messages_column=messages_column,
            generation_prompt=generation_prompt,
            chat_options=chat_options,
            roles=roles,
            special_tokens=special_tokens,
            label_columns=label_columns,
            split_column=split_column,
            data_config=data_config,
            data_splits=data_splits,
            labels=labels,
            revision=revision,
            model_dtype=model_dtype,
            trust_remote_code=trust_remote_code,
            attention=attention,
            padding=padding,
            batch_tokens=batch_tokens,
            unit_rows=unit_rows,
            engine=engine,
            workers=workers,
            threads=threads,
            device=device,
            ray_address=ray_address,
        )
    )
    root, record, plan = ready.root, ready.record, ready.plan
    target = find_run(root, record.name)
    weights = ready.loaded.weights
    if target:
        target.record.check_same(record, other_weights(target, weights))
    if target is None or len(target.committed()) < record.units:
        check_space(root, record, () if target is None else target.committed(), ignore=ignore_free_space)
        with torch_threads(threads):
            check_batches(ready.loaded, ready.points, plan.units, batch_tokens, record.settings["padding"])
    del ready.loaded
    with contextlib.ExitStack() as stack:
        stack.enter_context(ready.engine)
        if target is None:
            ready.engine.open()  # nothing is written when the engine cannot start
            target = create_run(root, record, plan.sequences, plan.units, weights, plan.spans)
            target.record.check_same(record, other_weights(target, weights))  # of another process, meanwhile
        stack.enter_context(target.driver_lock())
        committed = target.committed()
        missing = {u: table.num_rows for u, table in enumerate(plan.units) if u not in committed}
        outcome = run_units(target, missing, ready.source, device, ready.engine)
        publish_catalog(root)
    return ExtractReport(
        run=target.name,
        lake=str(root),
        units=record.units,
        tokens=record.tokens,
        sequences=record.sequences,
        documents=ready.documents,
        tokens_read=plan.read,
        left_out=plan.left_out,
        pooled=plan.pooled,
        arrays=[a.name for a in record.arrays],
        seconds=round(time.perf_counter() - started, 2),
        units_done=outcome.done,
        retried=outcome.retried,
        lost_workers=outcome.lost_workers,
        warnings=ready.warnings + outcome.warnings,
    )
