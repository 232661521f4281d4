"""Chats are what the tokenizer's own template makes of them, and each token knows whose message it is in."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layerlake.__main__ import app
from layerlake.errors import DataError, RequestError, SettingsDifferError, UnknownNameError
from layerlake.extract.chat import mark_tokens, render_chats, special_ids
from layerlake.extract.data import default_split, read_documents
from layerlake.extract.document import Chat, Document
from layerlake.extract.driver import extract
from layerlake.extract.settings import named_values
from layerlake.extract.windows import Sequence, make_sequences
from layerlake.store.lake import Lake
from some_tokenizers import byte_level_bpe, tokenizer
from toy_models import save_model
from typer.testing import CliRunner

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n\n{{ m.content | trim }}</s>{% endfor %}"
)
LLAMA2 = (  # the system's message stands inside the first user's
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ system if loop.first else '' }}"
    "{{ m.content.strip() }} [/INST]{% else %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
)
SYSTEM_LAST = (  # the system's message stands in front of the last one
    "{% set system = messages[0].content %}{% for m in messages[1:] %}"
    "{% if loop.last %}{{ system }}\n\n{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
THINKING = (  # the tags of the last reasoning are written anew, and earlier reasoning is left out
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set content = m.content %}{% set why = '' %}"
    "{% if '</think>' in content %}{% set why = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}"
    "{% set why = why.lstrip('\n') %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last and m.role == 'assistant' %}<think>\n{{ why }}\n</think>\n\n{% endif %}"
    "{{ content }}<|im_end|>\n{% endfor %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML


def chat_tokenizer(template: str | None, *, bos: bool = True) -> Any:
    tokens = byte_level_bpe(bos=bos, bos_token="<s>", eos_token="</s>")
    tokens.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokens.chat_template = template
    return tokens


def chat(*turns: tuple[str, str], name: str = "d") -> Document:
    return Document(name, None, None, {}, None, Chat(tuple({"role": r, "content": c} for r, c in turns)))


def messages(document: Document) -> list[dict[str, Any]]:
    assert document.chat is not None
    return list(document.chat.messages)


def made(documents: list[Document], tokens: Any, *, window: int | None = None, **more: Any) -> list[Sequence]:
    rendered, record, _ = render_chats(documents, tokens, **more)
    assert record is not None
    sequences, _ = make_sequences(rendered, tokens, window=window, max_length=None, vocab_size=None)
    return sequences


TURNS = [("system", "Be the cat"), ("user", "user"), ("assistant", "sat on\nthe mat"), ("user", "assistant\nuser")]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("template", [CHATML, LLAMA3, LLAMA2, SYSTEM_LAST, THINKING])
def test_E11_U03_ids_are_those_of_the_template_with_one_bos_at_most(template: str, prompt: bool) -> None:
    tokens = chat_tokenizer(template)
    document = chat(*TURNS)
    (one,) = made([document], tokens, generation_prompt=prompt)
    expected = tokens.apply_chat_template(
        messages(document), tokenize=True, return_dict=False, add_generation_prompt=prompt
    )
    assert one.input_ids.tolist() == expected
    doubled = [a == b == tokens.bos_token_id for a, b in itertools.pairwise(expected)]
    assert not any(doubled)
    assert tokens("the cat")["input_ids"][0] == tokens.bos_token_id  # which is what a plain text gets


def test_a_token_has_the_role_of_the_message_whose_characters_it_holds() -> None:
    tokens = chat_tokenizer(CHATML)
    document = chat(("user", "user"), ("assistant", "the <|im_end|> cat"))
    (rendered,), *_ = render_chats([document], tokens)
    text = "<|im_start|>user\nuser<|im_end|>\n<|im_start|>assistant\nthe <|im_end|> cat<|im_end|>\n"
    assert rendered.text == text
    assert rendered.chat is not None
    assert rendered.chat.spans == ((17, 21, "user"), (54, 72, "assistant"))  # not the 'user' of the template
    (one,) = made([document], tokens)
    seen = [
        (text[a:b], role, bool(special))
        for a, b, role, special in zip(one.start, one.end, one.labels["role"], one.special, strict=True)
        if text[a:b].startswith("<|") or text[a:b] in ("the", "cat")
    ]
    assert seen == [
        *[("<|im_start|>", None, True), ("<|im_end|>", None, True), ("<|im_start|>", None, True)],
        *[("the", "assistant", False), ("<|im_end|>", "assistant", False), ("cat", "assistant", False)],
        ("<|im_end|>", None, True),
    ]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, LLAMA2, SYSTEM_LAST])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_contents_are_found_where_the_template_wrote_them(template: str, data: st.DataObject) -> None:
    content = st.text(st.sampled_from(list("aqzuser0x\n </s>é😀:[]")), min_size=1, max_size=12).filter(
        lambda c: template == CHATML or c.strip() != ""
    )
    turns = [("system", data.draw(content)), ("user", data.draw(content)), ("assistant", data.draw(content))]
    tokens = chat_tokenizer(template)
    (rendered,), *_ = render_chats([chat(*turns)], tokens)
    text = rendered.text
    assert text is not None and rendered.chat is not None and rendered.chat.spans is not None
    by_role = {role: text[a:b] for a, b, role in rendered.chat.spans}
    trimmed = template in (LLAMA3, LLAMA2)
    for role, said in turns:
        whole = not trimmed or (template == LLAMA2 and role == "system")
        assert by_role[role] == (said if whole else said.strip())
    # what is left is the same whatever was said
    other = [(role, "#") for role, _ in turns]
    (again,), *_ = render_chats([chat(*other)], tokens)
    assert _glue(rendered) == _glue(again)


def test_reasoning_is_found_where_a_template_writes_its_tags_anew_or_leaves_it_out() -> None:
    thought = "<think>\nthe cat\n</think>\n\nsat"
    turns = [("user", "hello"), ("assistant", thought), ("user", "why"), ("assistant", thought + " on")]
    (rendered,), *_ = render_chats([chat(*turns)], chat_tokenizer(THINKING))
    assert rendered.text is not None and rendered.chat is not None and rendered.chat.spans is not None
    assert [(role, rendered.text[a:b]) for a, b, role in rendered.chat.spans] == [
        *[("user", "hello"), ("assistant", "sat"), ("user", "why"), ("assistant", "the cat"), ("assistant", "sat on")]
    ]
    # a template that leaves contents as they are has them whole
    (plain,), *_ = render_chats([chat(*turns)], chat_tokenizer(CHATML))
    assert plain.text is not None and plain.chat is not None and plain.chat.spans is not None
    assert [(role, plain.text[a:b]) for a, b, role in plain.chat.spans] == turns


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_roles_and_flags_are_those_of_a_loop_over_tokens_and_characters(data: st.DataObject) -> None:
    edges = sorted(data.draw(st.lists(st.integers(0, 40), min_size=2, max_size=12)))
    contents = [(a, b, f"r{k}") for k, (a, b) in enumerate(zip(edges[::2], edges[1::2], strict=False))]
    starts = sorted(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=20)))
    spans = [(start, start + data.draw(st.integers(0, 4))) for start in starts]
    ids = data.draw(st.lists(st.integers(0, 3), min_size=len(spans), max_size=len(spans)))
    begin, end = np.array([a for a, _ in spans], np.int32), np.array([b for _, b in spans], np.int32)
    special, roles = mark_tokens(Chat((), tuple(contents)), np.array(ids), begin, end, np.array([2, 3]))
    for k, (start, stop) in enumerate(spans):
        held = [r for a, b, r in contents if any(a <= c < b for c in range(start, max(stop, start + 1)))]
        assert roles[k] == (held[0] if held else None)
        assert special[k] == (ids[k] in (2, 3) and not held)


def _glue(document: Document) -> list[str]:
    assert document.text is not None and document.chat is not None and document.chat.spans is not None
    edges = [0, *(edge for a, b, _ in document.chat.spans for edge in (a, b)), len(document.text)]
    return [document.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_contents_that_the_template_changes_are_an_error_and_can_be_stored_without_roles() -> None:
    tokens = chat_tokenizer(CHATML.replace("m.content", "m.content | replace('cat', 'mat')"))
    document = chat(("user", "the"), ("assistant", "the cat sat"), name="f.jsonl:3")
    with pytest.raises(DataError, match=r"f\.jsonl:3 .*cannot be said exactly.*message 2 \(assistant\).*--no-roles"):
        render_chats([document], tokens)
    (one,) = made([document], tokens, roles=False)
    assert "role" not in one.labels
    expected = tokens.apply_chat_template(messages(document), tokenize=True, return_dict=False)
    assert one.input_ids.tolist() == expected
    pieces = [p for p, special in zip(one.pieces or [], one.special, strict=True) if special]
    assert pieces == ["<|im_start|>", "<|im_end|>"] * 2


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[0].content }}", r"does not write the content of message 2 \(assistant\)"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "writes 2 times"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not write the content of message 1"),
        ("{% for m in messages %}{{ m.content }}{{ m.content | length }}{% endfor %}", "changes message 1"),
        (STRICT.replace("system", "user"), "System role not supported"),
        ("{% if false %}x{% endif %}", "makes nothing of the document d"),
    ],
)
def test_a_template_whose_contents_cannot_be_found_or_that_fails_names_the_document(template: str, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        render_chats([chat(("user", "hello"), ("assistant", "world"))], chat_tokenizer(template))
    assert "document d" in str(caught.value)


def test_windows_of_a_chat_hold_no_special_token_that_the_template_did_not_write() -> None:
    tokens = chat_tokenizer(CHATML)
    document = chat(*[("user", f"the cat {k}\nsat on the mat") for k in range(9)])
    (rendered,), *_ = render_chats([document], tokens)
    assert rendered.text is not None
    sequences = made([document], tokens, window=32)
    assert len(sequences) > 3
    for one in sequences:
        part = rendered.text[one.offset : one.offset + one.length]
        assert one.input_ids.tolist() == tokens(part, add_special_tokens=False)["input_ids"]
        assert len(one.input_ids) <= 32
    assert "".join(rendered.text[o.offset : o.offset + o.length] for o in sequences) == rendered.text
    (whole,) = made([document], tokens)
    assert [r for o in sequences for r in o.labels["role"]] == whole.labels["role"]
    assert [s for o in sequences for s in o.special.tolist()] == whole.special.tolist()


def test_chats_texts_and_ids_go_together_and_only_texts_get_the_tokenizers_special_tokens() -> None:
    tokens = chat_tokenizer(CHATML)
    documents = [
        Document("a", "the cat", None, {}, None),
        chat(("user", "the cat"), name="b"),
        Document("c", None, (1, 2), {}, None),
        Document("d", "sat", None, {}, None),
    ]
    one, two, three, four = made(documents, tokens)
    assert one.input_ids.tolist() == tokens("the cat")["input_ids"]
    assert one.special.tolist() == [True, False, False]
    assert two.input_ids[0] != tokens.bos_token_id
    assert (three.input_ids.tolist(), four.input_ids.tolist()) == ([1, 2], tokens("sat")["input_ids"])
    assert "role" in two.labels and "role" not in one.labels


def test_E11_a_bos_in_the_first_message_is_warned_of() -> None:
    tokens = chat_tokenizer("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    rendered, *_ = render_chats([chat(("user", "<s>the cat"), name="twice")], tokens)
    _, warnings = make_sequences(rendered, tokens, window=None, max_length=None, vocab_size=None)
    assert len(warnings) == 1 and "chat template, puts '<s>'" in warnings[0] and "twice" in warnings[0]


def test_no_tokenizer_no_template_and_several_templates_are_one_sentence() -> None:
    for tokens, says in (
        (None, "document d is messages and the model has no tokenizer"),
        (chat_tokenizer(None), "has no chat template. Give text"),
        (tokenizer("wordpiece"), "has no chat template"),
        (chat_tokenizer({"a": CHATML, "b": CHATML}), "several chat templates and no default one"),
    ):
        with pytest.raises(DataError, match=says):
            render_chats([chat(("user", "hello"))], tokens)
    assert render_chats([Document("a", "t", None, {}, None)], None)[1] is None


def test_options_go_to_the_template_and_those_that_it_does_not_read_are_refused() -> None:
    dated = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}" + CHATML
    tokens, document = chat_tokenizer(dated), chat(("user", "hello"))
    (today,), record, warnings = render_chats([document], tokens)
    assert record is not None and record["options"] == {}
    assert len(warnings) == 1 and "other tokens tomorrow" in warnings[0]
    (fixed,), record, warnings = render_chats([document], tokens, options={"date_string": "1 Jan 2026"})
    assert fixed.text == "1 Jan 2026<|im_start|>user\nhello<|im_end|>\n" != today.text
    assert record is not None and record["options"] == {"date_string": "1 Jan 2026"} and warnings == []
    for name in ("date", "tokenize", "chat_template", "messages"):
        with pytest.raises(RequestError, match=rf"reads no option '{name}'"):
            render_chats([document], tokens, options={name: "x"})
    with pytest.raises(RequestError, match="hold no messages"):
        render_chats([Document("a", "t", None, {}, None)], tokens, options={"date_string": "x"})
    with pytest.raises(RequestError, match="--generation-prompt and --chat-option are for chats only"):
        render_chats([Document("a", "t", None, {}, None)], tokens, generation_prompt=True)
    with pytest.raises(RequestError, match="cannot be recorded"):
        render_chats([document], tokens, options={"date_string": {1, 2}})
    given = ["g=NaN", "a=true", "b=3", "c=26 Jul 2024", "d=", 'e="5"', "f=[1]"]
    expected = {
        "g": "NaN",
        "a": True,
        "b": 3,
        "c": "26 Jul 2024",
        "d": "",
        "e": "5",
        "f": "[1]",
    }
    assert named_values(given, "the chat template") == expected
    for wrong, says in ((["a"], "write it as NAME=VALUE"), (["=1"], "NAME=VALUE"), (["a=1", "a=2"], "given twice")):
        with pytest.raises(RequestError, match=says):
            named_values(wrong, "the chat template")


def test_a_chat_is_on_the_same_side_of_the_split_for_every_template() -> None:
    document = chat(*TURNS)
    digests = {render_chats([document], chat_tokenizer(t))[0][0].digest for t in (CHATML, LLAMA3, LLAMA2)}
    assert digests == {document.digest}
    assert document.digest != chat(*TURNS[:-1]).digest
    assert default_split(document.digest) in ("train", "test")
    text = json.dumps(messages(document), sort_keys=True, separators=(",", ":"))
    assert document.digest == hashlib.sha256(b"\xfe" + text.encode()).hexdigest()


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_messages_come_from_a_column_of_jsonl_and_parquet_alike(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]},
        {"messages": [{"role": "user", "content": "c"}]},
    ]
    one = read_documents(jsonl(tmp_path / "d.jsonl", *rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")  # fills fields that are left out with nulls
    other = read_documents(tmp_path / "d.parquet")
    assert [d.chat for d in one] == [d.chat for d in other] == [Chat(tuple(row["messages"])) for row in rows]
    assert all(d.text is None and d.input_ids is None for d in one)
    both = jsonl(tmp_path / "e.jsonl", {"text": "t", "messages": rows[0]["messages"], "talk": rows[1]["messages"]})
    assert read_documents(both)[0].text == "t"
    assert read_documents(both, messages_column="messages")[0].chat == one[0].chat
    assert read_documents(both, messages_column="talk")[0].chat == one[1].chat
    assert read_documents(both, text_column="text", messages_column="talk")[0].text is None
    with pytest.raises(UnknownNameError, match=r"no messages column 'chat' .*Known: text, messages, talk"):
        read_documents(both, messages_column="chat")
    (tmp_path / "n.txt").write_text("a\n")
    with pytest.raises(UnknownNameError, match=r"no messages column 'messages' in .*Known: none"):
        read_documents(tmp_path / "n.txt", messages_column="messages")


MESSAGES = [
    ('"hello"', "'messages' is a string, not a list of messages"),
    ("[]", "'messages' is an empty list, not a list of messages"),
    ('["hello"]', "message 1 of 'messages' is a string, not an object"),
    ('[{"role": "user", "content": "a"}, {"role": "user"}]', "message 2 of 'messages': its 'content' is missing"),
    ('[{"role": "user", "content": null}]', "message 1 of 'messages': its 'content' is null"),
    ('[{"content": "a"}]', "message 1 of 'messages': its 'role' is missing"),
    ('[{"from": "human", "value": "a"}]', "message 1 of 'messages': its 'role' is missing"),
    ('[{"role": "", "content": "a"}]', "message 1 of 'messages': its 'role' is missing or empty"),
    ('[{"role": 1, "content": "a"}]', "message 1 of 'messages': its 'role' is an integer"),
    ('[{"role": "user", "content": [{"type": "image"}]}]', "has a list of parts as its content"),
    ('[{"role": "user", "content": "a\\ud800"}]', "holds a lone surrogate"),
    ('[{"role": "user", "content": "a", "extra": NaN}]', "holds what JSON cannot say"),
]


@pytest.mark.parametrize(("value", "says"), MESSAGES, ids=[says for _, says in MESSAGES])
def test_U06_messages_that_are_none_are_refused_with_file_and_row(tmp_path: Path, value: str, says: str) -> None:
    good = {"messages": [{"role": "user", "content": "a"}]}
    path = jsonl(tmp_path / "d.jsonl", good, f'{{"messages": {value}}}')
    with pytest.raises(DataError) as caught:
        read_documents(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert says in str(caught.value)


def save_chat_model(folder: Path, template: str) -> Path:
    import transformers

    save_model(folder, "gpt2")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder, vocab_size=400)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    chat_tokenizer(template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("m") / "chatty", LLAMA3)


def test_a_run_of_chats_can_be_asked_for_roles_and_knows_its_template(tmp_path: Path, model: Path) -> None:
    row = {"messages": [{"role": r, "content": c} for r, c in TURNS[:3]], "harmful": False}
    data, lake = jsonl(tmp_path / "d.jsonl", row), tmp_path / "lake"
    extract(str(model), data, lake, run="r", label_columns=["harmful"])
    opened = Lake.open(lake)
    table = opened.sql("SELECT token, role, special, harmful, char_start, token_id FROM tokens ORDER BY pos")
    rows = table.to_pylist()
    assert [r["token_id"] for r in rows] == chat_tokenizer(LLAMA3).apply_chat_template(
        row["messages"], return_dict=False
    )
    assert {r["role"] for r in rows} == {None, "system", "user", "assistant"}
    assert {r["token"] for r in rows if r["special"]} == {"<s>", "</s>", "<|im_start|>", "<|im_end|>"}
    assert all(r["harmful"] is False and r["char_start"] is not None for r in rows)
    mine = opened.select("SELECT run, row FROM tokens WHERE role = 'assistant' ORDER BY row")
    assert mine.array(layer=1, site="resid_post").shape == (sum(r["role"] == "assistant" for r in rows), 32)
    template = hashlib.sha256(LLAMA3.encode()).hexdigest()
    expected = {"template": template, "generation_prompt": False, "roles": True, "options": {}}
    assert opened.run("r").record.settings["chat"] == expected
    assert extract(str(model), data, lake, run="r", label_columns=["harmful"]).units_done == 0
    with pytest.raises(SettingsDifferError, match=r"chat\.generation_prompt: the run has False, asked was True"):
        extract(str(model), data, lake, run="r", label_columns=["harmful"], generation_prompt=True)
    kept = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(kept + "{# other #}")  # writes the same text
    try:
        with pytest.raises(SettingsDifferError, match=r"\(chat\.template is another\)"):
            extract(str(model), data, lake, run="r", label_columns=["harmful"])
        text = jsonl(tmp_path / "t.jsonl", {"text": "the cat"})
        extract(str(model), text, lake, run="text")
        assert "chat" not in opened.run("text").record.settings
        (model / "chat_template.jinja").write_text(kept)
        assert extract(str(model), text, lake, run="text").units_done == 0  # its template is no part of it
    finally:
        (model / "chat_template.jinja").write_text(kept)


def test_a_label_of_the_name_role_is_refused(tmp_path: Path, model: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"messages": [{"role": "user", "content": "hello"}], "role": "x"})
    with pytest.raises(RequestError, match="Chats have a label 'role' of their own"):
        extract(str(model), data, tmp_path / "lake", label_columns=["role"])
    assert not (tmp_path / "lake").exists()
    extract(str(model), data, tmp_path / "lake", label_columns=["role"], roles=False)


def test_the_command_line_hands_every_option_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model = save_chat_model(tmp_path / "m", "{{ greeting }}" + CHATML)
    folder = tmp_path / "talks"
    folder.mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files: train.jsonl\n- config_name: b\n  data_files: train.jsonl\n---\n"
    )
    talks = [[{"role": "user", "content": f"the cat {k}"}] for k in range(4)]
    jsonl(folder / "train.jsonl", *({"talk": talk, "text": "x", "part": "dev"} for talk in talks))
    command = ["extract", str(model), f"hf:{folder}", "--lake", str(tmp_path / "lake"), "--run", "r", "--no-roles"]
    command += [
        "--data-config",
        "b",
        "--data-split",
        "train[1:3]",
        "--messages-column",
        "talk",
        "--split-column",
        "part",
    ]
    command += ["--generation-prompt", "--chat-option", "greeting=hello", "--special-tokens", "none", "--layer", "0"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    lake = Lake.open(tmp_path / "lake")
    seen = lake.sql("SELECT document, split FROM sequences ORDER BY seq").to_pylist()
    assert seen == [{"document": f"talks/train:{k}", "split": "dev"} for k in (2, 3)]
    record = lake.run("r").record
    assert record.settings["special_tokens"] == "none"
    assert record.settings["chat"] | {"template": ""} == {
        "template": "",
        "generation_prompt": True,
        "roles": False,
        "options": {"greeting": "hello"},
    }
    assert record.source["data"] == "hf:" + "/".join(folder.parts[-2:])
    assert "role" not in lake.sql("SELECT * FROM tokens LIMIT 1").column_names
    ids = lake.sql("SELECT list(token_id ORDER BY pos) AS ids FROM tokens GROUP BY seq ORDER BY seq")["ids"].to_pylist()
    tokens = chat_tokenizer("{{ greeting }}" + CHATML)
    assert ids == [
        tokens.apply_chat_template(talk, return_dict=False, add_generation_prompt=True, greeting="hello")
        for talk in talks[1:3]
    ]
    wrong = CliRunner().invoke(app, [*command[:-1], "0", "--chat-option", "greting=x"])
    assert wrong.exit_code != 0 and "greting" in str(wrong.exception)


def test_roles_of_overlapping_windows_stand_beside_the_tokens_that_are_stored() -> None:
    tokens = chat_tokenizer(CHATML)
    (document,), _, _ = render_chats([chat(*TURNS)], tokens)
    assert document.chat is not None
    sequences, _ = make_sequences([document], tokens, window=16, overlap=6, max_length=None, vocab_size=None)
    assert len(sequences) > 2
    assert any(not s.stored.all() for s in sequences)
    for one in sequences:
        special, names = mark_tokens(document.chat, one.input_ids, one.start, one.end, special_ids(tokens))
        expected = [n if s and not x else None for n, s, x in zip(names, one.stored, special, strict=True)]
        assert one.labels["role"] == expected


def test_tokens_of_one_role_can_be_kept(tmp_path) -> None:
    """Only what the assistant says is stored; the model reads the whole chat."""
    name = save_model(tmp_path / "m", "llama", vocab_size=600)
    chat_tokenizer(CHATML).save_pretrained(name)
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"messages": messages(chat(*TURNS[:3]))}) + "\n")
    report = extract(str(name), data, tmp_path / "lake", run="r", keep="role = 'assistant'")
    found = Lake.open(tmp_path / "lake").sql("SELECT token, role, row FROM tokens ORDER BY row").to_pylist()
    assert {r["role"] for r in found} == {"assistant"}
    assert [r["row"] for r in found] == list(range(len(found)))
    assert 0 < report.tokens == len(found) < report.tokens_read
