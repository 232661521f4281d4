"""What a real model gets of real texts: which ids, whose spans, and that documents never see each other."""

from __future__ import annotations

import csv
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from layerlake.errors import DataError, RequestError, SettingsDifferError
from layerlake.extract.batch import plan_batches
from layerlake.extract.driver import extract
from layerlake.store.lake import Lake
from safetensors.torch import load_file
from some_tokenizers import byte_level_bpe
from tokenizers import normalizers
from toy_models import VOCABULARY, save_model

SIZE = 400


def saved_model(folder: Path, tokens: Any, family: str = "gpt2") -> Path:
    """A model with a row of the embedding for every token of `tokens`, and some more."""
    import transformers

    save_model(folder, family)
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(folder, vocab_size=SIZE)
    (folder / "model.safetensors").unlink()
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def stored_ids(lake: Path, run: str) -> list[list[int]]:
    query = f"SELECT list(token_id ORDER BY pos) AS ids FROM tokens WHERE run = '{run}' GROUP BY seq ORDER BY seq"
    return Lake.open(lake).sql(query)["ids"].to_pylist()


def reference(folder: Path, ids: list[int]) -> np.ndarray:
    """The last block's output for one unpadded sequence, (n, width), by a hook of its own."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    seen: list[torch.Tensor] = []
    blocks = model.h if hasattr(model, "h") else model.encoder.layer
    blocks[-1].register_forward_hook(lambda m, i, o: seen.append(o[0] if isinstance(o, tuple) else o))
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]))
    return seen[0].reshape(len(ids), -1).numpy()


def last_layer(lake: Path, run: str) -> np.ndarray:
    opened = Lake.open(lake)
    return opened.select(f"SELECT run, row FROM tokens WHERE run = '{run}' ORDER BY row").array(2, "resid_post")


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_E07_E14_pad_as_eos_and_no_pad_at_all_store_the_tokens_of_the_text(tmp_path: Path, family: str) -> None:
    texts = ["the cat</s> sat on the mat", "hi"]
    data = jsonl(tmp_path / "d.jsonl", *({"text": text} for text in texts))
    runs = {"pad_is_eos": {"eos_token": "</s>", "pad_token": "</s>"}, "no_pad": {"eos_token": "</s>"}}
    for run, kinds in runs.items():
        tokens = byte_level_bpe(**kinds)
        folder = saved_model(tmp_path / run, tokens, family)
        before = (folder / "model.safetensors").read_bytes()
        extract(str(folder), data, tmp_path / "lake", run=run)
        expected = [tokens(text)["input_ids"] for text in texts]
        assert stored_ids(tmp_path / "lake", run) == expected
        assert expected[0].count(tokens.eos_token_id) == 1
        alone = np.concatenate([reference(folder, ids) for ids in expected])
        assert np.abs(last_layer(tmp_path / "lake", run) - alone).max() <= 1e-5
        assert (folder / "model.safetensors").read_bytes() == before
        embedding = "wte.weight" if family == "gpt2" else "embeddings.word_embeddings.weight"
        assert load_file(folder / "model.safetensors")[embedding].shape == (SIZE, 32)


def test_E11_U03_the_rule_for_special_tokens_is_kept_and_recorded(tmp_path: Path, monkeypatch: Any) -> None:
    tokens = byte_level_bpe(bos=True, bos_token="<s>", eos_token="</s>")
    folder = saved_model(tmp_path / "m", tokens)
    texts = ["the cat sat", "<s>the cat", "hello world\n" * 20]
    data = jsonl(tmp_path / "d.jsonl", *({"text": text} for text in texts))
    seen: list[tuple[int, ...]] = []
    embed = torch.nn.Embedding.forward

    def spy(module: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if module.num_embeddings == SIZE:
            seen.extend(tuple(row) for row in ids.tolist())
        return embed(module, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", spy)
    for rule in ("auto", "none"):
        seen.clear()
        # batches of one sequence, so that no padding stands in the input
        report = extract(str(folder), data, tmp_path / "lake", run=rule, special_tokens=rule, window=16, batch_tokens=1)
        ids = stored_ids(tmp_path / "lake", rule)
        parts = Lake.open(tmp_path / "lake").sql(
            f"SELECT document, char_offset FROM sequences WHERE run = '{rule}' ORDER BY seq"
        )
        assert len(ids) == len(parts["document"]) > len(texts)
        assert {tuple(i) for i in ids} <= set(seen)
        own = [i.count(tokens.bos_token_id) for i in ids]
        at = parts["document"].to_pylist().index("d.jsonl:2")
        assert own == [1 + (rule == "auto") if k == at else int(rule == "auto") for k in range(len(ids))]
        assert ids[0] == tokens(texts[0], add_special_tokens=rule == "auto")["input_ids"]
        assert [w for w in report.warnings if "twice" in w] == report.warnings[: 1 if rule == "auto" else 0]
        assert Lake.open(tmp_path / "lake").run(rule).record.settings["special_tokens"] == rule
    special = Lake.open(tmp_path / "lake").sql("SELECT run, sum(special::int)::int AS n FROM tokens GROUP BY run")
    assert dict(zip(special["run"].to_pylist(), special["n"].to_pylist(), strict=True)) == {
        "auto": len(stored_ids(tmp_path / "lake", "auto")),
        "none": 0,
    }
    with pytest.raises(SettingsDifferError, match="special_tokens: the run has auto, asked was none"):
        extract(str(folder), data, tmp_path / "lake", run="auto", special_tokens="none", window=16, batch_tokens=1)
    with pytest.raises(RequestError, match="'bos' is not a rule for special tokens; use auto"):
        extract(str(folder), data, tmp_path / "other", special_tokens="bos")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("normal", [None, "NFC", "NFD"])
def test_E13_spans_in_sql_cut_the_characters_of_each_token_out_of_the_text(tmp_path: Path, normal: str | None) -> None:
    tokens = byte_level_bpe()
    if normal:
        tokens.backend_tokenizer.normalizer = getattr(normalizers, normal)()
    folder = saved_model(tmp_path / "m", tokens)
    text = "cafe\u0301 na\u00efve the 😀 cat 漢字 a\u0323\u0301 e\u0301"
    extract(str(folder), jsonl(tmp_path / "d.jsonl", {"text": text}), tmp_path / "lake", run="r")
    rows = (
        Lake.open(tmp_path / "lake").sql("SELECT token_id, char_start, char_end FROM tokens ORDER BY pos").to_pylist()
    )
    assert [r["token_id"] for r in rows] == tokens(text)["input_ids"]
    spans = [(r["char_start"], r["char_end"]) for r in rows]
    assert spans == sorted(spans) and all(0 <= a < b <= len(text) for a, b in spans)
    assert {c for a, b in spans for c in range(a, b)} >= {k for k, c in enumerate(text) if c != " "}
    pieces = [tokens.decode([r["token_id"]]).strip() for r in rows]
    for (a, b), piece in zip(spans, pieces, strict=True):
        if "\N{REPLACEMENT CHARACTER}" not in piece:
            assert piece in (unicodedata.normalize(normal, text[a:b]) if normal else text[a:b])
    emoji = text.index("😀")
    assert spans.count((emoji, emoji + 1)) == 4


def test_U06_odd_texts_are_stored_and_half_a_character_leaves_no_lake(tmp_path: Path) -> None:
    tokens = byte_level_bpe()
    folder = saved_model(tmp_path / "m", tokens)
    texts = ["a\0b", "\t\tthe\x07 cat\r", "valueother0" * 91_000]
    good = [json.dumps({"text": text, "note": text[:3]}) for text in texts]
    bad = jsonl(tmp_path / "bad.jsonl", *good, '{"text": "half \\ud83d", "note": "x"}')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 4: 'text' holds a lone surrogate"):
        extract(str(folder), bad, tmp_path / "lake", window=64)
    with pytest.raises(DataError, match=r"d\.jsonl:3 has \d+ tokens and the model reads at most 64"):
        extract(str(folder), jsonl(tmp_path / "d.jsonl", *good), tmp_path / "lake")
    assert not (tmp_path / "lake").exists()
    few = jsonl(tmp_path / "few.jsonl", *good[:2], json.dumps({"text": texts[2][:5000], "note": "val"}))
    extract(str(folder), few, tmp_path / "lake", run="r", window=64, label_columns=["note"])
    lake = Lake.open(tmp_path / "lake")
    query = "SELECT document, char_start, char_end, note FROM tokens JOIN sequences USING (run, seq, note)"
    rows = lake.sql(query).to_pylist()
    for number, text in enumerate([*texts[:2], texts[2][:5000]], 1):
        own = [r for r in rows if r["document"] == f"few.jsonl:{number}"]
        covered = {c for r in own for c in range(r["char_start"], r["char_end"])}
        assert covered == {k for k, c in enumerate(text) if c != " "}  # a space goes with the word behind it
        assert {r["note"] for r in own} == {text[:3]}


def in_format(folder: Path, form: str, texts: list[str]) -> str:
    """Write `texts` as data of one form, and give what names them."""
    folder.mkdir(exist_ok=True)
    if form == "txt":
        (folder / "d.txt").write_text("".join(text + "\n" for text in texts))
    elif form == "csv":
        with (folder / "d.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["text"], *([text] for text in texts)])
    elif form == "hf":
        pq.write_table(pa.table({"text": texts}), folder / "train.parquet")
        return f"hf:{folder}"
    elif form == "parquet":
        pq.write_table(pa.table({"text": texts}), folder / "d.parquet")
    elif form == "folder":
        for number, text in enumerate(texts):
            (folder / f"{number}.py").write_text(text)
        return str(folder)
    else:
        rows = [{"text": t} if form == "jsonl" else {"messages": [{"role": "user", "content": t}]} for t in texts]
        jsonl(folder / "d.jsonl", *rows)
        form = "jsonl"
    return str(folder / f"d.{form}")


FORMS = ["txt", "jsonl", "csv", "parquet", "messages", "folder", "hf"]


@pytest.mark.parametrize("form", FORMS)
def test_long_documents_are_refused_or_cut_into_windows_and_one_token_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    if form == "hf":
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokens = byte_level_bpe()
    tokens.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = saved_model(tmp_path / "m", tokens)
    texts = ["the", "the cat sat on " * 30]
    data = in_format(tmp_path / "data", form, texts)
    with pytest.raises(DataError, match=r"has \d+ tokens and the model reads at most 64. Cut documents into windows"):
        extract(str(folder), data, tmp_path / "lake")
    assert not (tmp_path / "lake").exists()
    extract(str(folder), data, tmp_path / "lake", run="r", window=64)
    ids = stored_ids(tmp_path / "lake", "r")
    assert ids[0] == tokens("the")["input_ids"] and len(ids[0]) == 1
    assert [i for one in ids[1:] for i in one] == tokens(texts[1])["input_ids"]
    assert max(map(len, ids)) <= 64


@pytest.mark.parametrize("form", [f for f in FORMS if f not in ("txt", "folder", "messages")])
def test_an_empty_text_is_refused_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    if form == "hf":
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = in_format(tmp_path / "data", form, ["the", "", "cat"])
    with pytest.raises(DataError, match=r"(line|row) 2: ('text' is empty|no text in column 'text')"):
        extract("toy_models:lstm", data, tmp_path / "lake")
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_document_never_sees_another_one(tmp_path: Path, family: str) -> None:
    """Every value of a document stays, bit for bit, whatever the others of its batches say at the same lengths."""
    folder = save_model(tmp_path / "m", family)
    rng = np.random.default_rng(0)
    lengths = [4, 4, 4, 4, 9, 3, 17, 1, 9, 16]  # a square batch, one token, and padding
    rows = [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]
    kept = [1, 4, 7]
    for run in ("a", "b"):
        data = jsonl(tmp_path / f"{run}.jsonl", *({"input_ids": row} for row in rows))
        extract(str(folder), data, tmp_path / "lake", run=run, batch_tokens=40)
        rows = [row if k in kept else [(i + 1 + k) % VOCABULARY for i in row] for k, row in enumerate(rows)]
    batches = plan_batches(lengths, 40, "right")
    assert all(any(k in batch and len(batch) > 1 for batch in batches) for k in kept)  # they do share batches
    lake = Lake.open(tmp_path / "lake")
    for layer, site in ((None, "embed"), (0, "resid_post"), (2, "resid_post")):
        a, b = (lake.select(f"SELECT run, row, seq FROM tokens WHERE run = '{run}' ORDER BY row") for run in ("a", "b"))
        same = [
            np.array_equal(
                a.bits(layer, site)[a.table["seq"].to_numpy() == k], b.bits(layer, site)[b.table["seq"].to_numpy() == k]
            )
            for k in range(len(lengths))
        ]
        assert same == [k in kept for k in range(len(lengths))]
