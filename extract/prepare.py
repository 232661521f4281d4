"""Everything of an extraction before the first forward of its data: documents, model, plan and record."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import __version__
from ..store.archive import check_codec
from ..store.dtypes import stored_dtype
from ..store.layout import check_lake, check_run_name, lake_path
from ..store.row_kinds import TOKENS, RowKinds
from ..store.run import RunRecord
from .chat import ROLE, render_chats
from .data import data_digest, read_documents
from .engine import Engine, make_engine
from .hooks import SitePoint
from .keep import Keep
from .labels import load_labeler
from .loaded_model import LoadedModel, ModelSource
from .loading import load_model
from .plan import ExtractionPlan, make_plan
from .request import ExtractRequest
from .run_units import import_from_here
from .settings import (
    array_points,
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
from .symbols import place_symbols
from .windows import make_sequences

_WASTE_WARNING = 0.10


@dataclass
class Prepared:
    """An extraction that could begin: nothing is written yet, and no forward of the data was run."""

    root: Path
    engine: Engine
    source: ModelSource
    loaded: LoadedModel
    plan: ExtractionPlan
    record: RunRecord
    documents: int
    warnings: list[str]

    @property
    def points(self) -> list[SitePoint]:
        """The points of the run's arrays, settled, each once."""
        return list({p.name: p for _, p in array_points(self.loaded, self.record.arrays)}.values())


def prepare(asked: ExtractRequest) -> Prepared:
    """Read the data, load the model and plan the run; what is asked wrongly is refused here."""
    sites, label_columns, labels, data_splits = (
        (v,) if isinstance(v, str) else v for v in (asked.sites, asked.label_columns, asked.labels, asked.data_splits)
    )
    sites, layers = site_names(sites), layer_numbers(asked.layers)
    root = lake_path(asked.lake)
    if (root / "lake.json").exists():
        check_lake(root)
    if asked.run is not None:
        check_run_name(asked.run)
    kinds = RowKinds.parse(asked.rows)
    if asked.dtype is not None:
        stored_dtype(asked.dtype)
    check_codec(asked.codec)
    add_special_tokens = check_special_tokens(asked.special_tokens)
    import_from_here()  # a model or a labeler of the user's own
    chosen = make_engine(
        asked.engine, workers=asked.workers, threads=asked.threads, device=asked.device, ray_address=asked.ray_address
    )
    labelers = {column: load_labeler(name) for column, name in map(label_column, labels)}
    documents = read_documents(
        asked.data,
        text_column=asked.text_column,
        messages_column=asked.messages_column,
        label_columns=tuple(label_columns),
        split_column=asked.split_column,
        config=asked.data_config,
        splits=tuple(data_splits),
    )
    with_roles = [ROLE] if asked.roles and any(d.chat is not None for d in documents) else []
    rule = Keep(asked.keep, [*documents[0].labels, *labelers, *with_roles]) if asked.keep is not None else None
    source = ModelSource(asked.model, asked.revision, asked.model_dtype, asked.trust_remote_code, asked.attention)
    with torch_threads(asked.threads):
        loaded = load_model(source, device=asked.device)
    documents = place_symbols(documents, loaded)
    documents, chat, warnings = render_chats(
        documents,
        loaded.tokenizer,
        generation_prompt=asked.generation_prompt,
        roles=asked.roles,
        options=asked.chat_options,
    )
    sequences, more = make_sequences(
        documents,
        loaded.tokenizer,
        window=asked.window,
        max_length=loaded.max_length,
        vocab_size=loaded.vocab_size,
        overlap=asked.overlap,
        labelers=labelers,
        special_tokens=add_special_tokens,
    )
    warnings += more
    arrays = choose_arrays(
        loaded,
        sites,
        layers,
        asked.dtype,
        asked.codec,
        longest=max((len(s.input_ids) for s in sequences), default=0),
        kinds=kinds,
    )
    plan = make_plan(documents, sequences, asked.unit_rows, rule, kinds)
    if TOKENS in kinds.kinds and len(plan.units) > 1 and plan.waste > _WASTE_WARNING:
        warnings.append(
            f"{plan.waste:.0%} of the planned rows stay unused: units of {plan.unit_rows} rows do not suit these data. "
            "Another --unit-rows, or shorter windows, waste less."
        )
    side = choose_padding(loaded, asked.padding)
    record = RunRecord(
        name=asked.run or default_name(source, asked.data),
        settings={
            "model": loaded.identity,
            "data": data_digest(documents),
            "window": asked.window,
            "special_tokens": asked.special_tokens,
            **({"chat": chat} if chat else {}),
            **({"overlap": asked.overlap} if asked.overlap else {}),
            **({"keep": rule.text} if rule else {}),
            **({"rows": str(kinds)} if kinds != RowKinds() else {}),
            "padding": side,
            "batch_tokens": asked.batch_tokens,
            "compute": compute_settings(asked.threads, asked.device, loaded.identity["kind"], asked.codec),
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
            "data": data_title(asked.data),
            "data_path": os.fspath(asked.data),
            "load": loadable(source),
        },
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        created_by=__version__,
        rows=plan.rows,
    )
    return Prepared(root, chosen, source, loaded, plan, record, len(documents), warnings)


@contextlib.contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Have torch compute with as many threads in the driver as in its workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
