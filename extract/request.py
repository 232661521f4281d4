"""What one extraction is asked for: the arguments of `extract`, of `plan` and of their commands."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..store.row_kinds import TOKENS


@dataclass(frozen=True)
class ExtractRequest:
    """The arguments of `extract`, under their names there."""

    model: str
    data: str | os.PathLike[str]
    lake: str | os.PathLike[str]
    run: str | None = None
    sites: Sequence[str] = ("embed", "resid_post")
    layers: Sequence[int | str] | int | str | None = None
    dtype: str | None = None
    codec: str = "none"
    window: int | None = None
    overlap: int = 0
    keep: str | None = None
    rows: str | Sequence[str] = TOKENS
    text_column: str = "text"
    messages_column: str | None = None
    generation_prompt: bool = False
    chat_options: Mapping[str, Any] | None = None
    roles: bool = True
    special_tokens: str = "auto"
    label_columns: Sequence[str] = ()
    split_column: str | None = None
    data_config: str | None = None
    data_splits: Sequence[str] = ()
    labels: Sequence[str] = ()
    revision: str | None = None
    model_dtype: str = "auto"
    trust_remote_code: bool = False
    attention: str = "auto"
    padding: str | None = None
    batch_tokens: int = 4096
    unit_rows: int | None = None
    engine: str = "inline"
    workers: int = 1
    threads: int = 1
    device: str = "cpu"
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not isinstance(self.data, (str, os.PathLike)):
            raise RequestError(
                "The model is named by text, a folder, a hub name or 'package.module:function', so that every worker "
                "can load it; the data by a path."
            )
        if self.batch_tokens < 1:
            raise RequestError(f"A batch needs at least one token, not {self.batch_tokens}.")
