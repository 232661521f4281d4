"""Chats: messages rendered by the tokenizer's own template, and whose words each token of the result stands for."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import DataError, RequestError
from ..store.durable import canonical_json
from .document import Chat, Document
from .failure import one_line
from .locate import Render, locate

ROLE = "role"
"""The label column that says whose message a token belongs to."""


def render_chats(
    documents: Sequence[Document],
    tokenizer: Any | None,
    *,
    generation_prompt: bool = False,
    roles: bool = True,
    options: Mapping[str, Any] | None = None,
) -> tuple[list[Document], dict[str, Any] | None, list[str]]:
    """Give the documents with the text that the chat template makes of messages, what to record, and warnings.

    The text is ``tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt,
    **options)``; character spans count in it. The record, None where no document is a chat, has the template's hash.

    With `roles` each content is found in the text, so that tokens can be told apart by message: `locate` says how.
    `DataError` where it cannot be, and where there is no template or it refuses the messages; `RequestError` for an
    option that the template does not read.
    """
    first = next((d for d in documents if d.chat is not None), None)
    if first is None:
        if options or generation_prompt:
            raise RequestError("The data hold no messages: --generation-prompt and --chat-option are for chats only.")
        return list(documents), None, []
    if tokenizer is None:
        raise DataError(f"The document {first.name} is messages and the model has no tokenizer. Give 'input_ids'.")
    try:
        template = tokenizer.get_chat_template()
    except (AttributeError, ValueError) as error:
        several = isinstance(getattr(tokenizer, "chat_template", None), dict)
        has = "has several chat templates and no default one" if several else "has no chat template"
        raise DataError(
            f"The document {first.name} is messages, and the tokenizer of the model {has}. Give text, or a model whose "
            "tokenizer has one."
        ) from error

    given = dict(options or {})
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in given:
        if name in own or name in ("messages", "conversations") or not re.search(rf"\b{re.escape(name)}\b", template):
            raise RequestError(f"The chat template reads no option {name!r}: leave it out, or look for its name there.")

    try:
        canonical_json(given)
    except (TypeError, ValueError, UnicodeEncodeError) as error:
        raise RequestError(
            f"The options of the chat template cannot be recorded: {error}. Give JSON values."
        ) from error

    def render(messages: Sequence[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt, **given
        )

    rendered = [d if d.chat is None else _rendered(d, d.chat, render, roles) for d in documents]
    digest = hashlib.sha256(template.encode()).hexdigest()
    warnings = []
    if "strftime_now" in template and not given:
        warnings.append(
            "The chat template can write the date of today, and then the same command makes other tokens tomorrow. "
            "Where it has an option for the date, give it, as in --chat-option date_string='1 Jan 2026'."
        )
    record = {"template": digest, "generation_prompt": generation_prompt, "roles": roles, "options": given}
    return rendered, record, warnings


def _rendered(document: Document, chat: Chat, render: Render, roles: bool) -> Document:
    try:
        text = render(chat.messages)
    except Exception as error:  # a template is a program, and raises what it likes
        raise DataError(
            f"The chat template fails on the document {document.name}: {one_line(error)}. Mend its messages."
        ) from error
    if not text:
        raise DataError(f"The chat template makes nothing of the document {document.name}. Remove it.")
    spans = locate(document.name, text, chat.messages, render) if roles else None
    return replace(document, text=text, chat=replace(chat, spans=spans))


def mark_tokens(
    chat: Chat, ids: np.ndarray, start: np.ndarray, end: np.ndarray, special_ids: np.ndarray
) -> tuple[np.ndarray, list[str | None]]:
    """Say of n tokens of a rendered chat which are special, bool (n,), and whose message each belongs to.

    A token belongs to the message of whose content it holds a character (white space in front left out, as in its
    span); of two, to the first. What the template wrote, the names of roles included, belongs to none. Special are the
    tokenizer's special tokens that the template wrote: one that is written in a content is text, as it is elsewhere.
    Where the contents were not looked for, all of them are special.
    """
    special = np.isin(ids, special_ids)
    spans = [span for span in chat.spans or () if span[0] < span[1]]
    if not spans:
        return special, [None] * len(ids)
    begins, ends = np.array([s[0] for s in spans]), np.array([s[1] for s in spans])
    first = np.searchsorted(ends, start, side="right")  # the first content that ends after the token begins
    inside = first < len(spans)
    inside[inside] = begins[first[inside]] < np.maximum(end, start + 1)[inside]
    names = [spans[k][2] if within else None for k, within in zip(first.tolist(), inside.tolist(), strict=True)]
    return special & ~inside, names


def special_ids(tokenizer: Any) -> np.ndarray:
    """List the ids of a tokenizer's special tokens, (k,), those without a name of their own included."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return np.array(sorted(added | set(tokenizer.all_special_ids)), np.int64)
