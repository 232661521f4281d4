"""The text around a row: its own sequence only, as the document had it, and the token is the one of the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lakes import make_run
from layerlake.errors import CorruptLakeError, RequestError
from layerlake.store.context import Context
from layerlake.store.lake import Lake
from layerlake.store.selection import Selection

LENGTHS = (5, 9, 3, 16, 7, 12, 1)


def with_tokens(pieces: list[str | None], spans: list[tuple[int, int]], special: list[bool] | None = None) -> Any:
    """Give an edit that puts tokens of one's own into the table of a run with one sequence."""
    columns = {
        "token": pa.array(pieces, pa.string()),
        "char_start": pa.array([s for s, _ in spans], pa.int32()),
        "char_end": pa.array([e for _, e in spans], pa.int32()),
        "special": pa.array(special or [False] * len(pieces)),
    }

    def edit(table: pa.Table) -> pa.Table:
        for name, values in columns.items():
            table = table.set_column(table.schema.get_field_index(name), name, values)
        return table

    return edit


def selection_of(root: Path, pieces: list[Any], spans: list[tuple[int, int]], **options: Any) -> Selection:
    unit = 1 << max(3, len(pieces).bit_length())
    make_run(root, lengths=(len(pieces),), unit_rows=unit, edit=with_tokens(pieces, spans), **options)
    return Lake.open(root).select("SELECT run, row FROM tokens")


def found_spans(text: str, shown: list[str]) -> list[tuple[int, int]]:
    spans, at = [], 0
    for piece in shown:
        start = text.index(piece, at)
        at = start + len(piece)
        spans.append((start, at))
    return spans


def test_the_token_is_marked_in_the_text_of_its_sequence(tmp_path):
    text = "def main ( self ) :"
    pieces = text.split()
    sel = selection_of(tmp_path, pieces, found_spans(text, pieces))
    got = sel.context(3)
    assert isinstance(got, Context)
    assert (got.before, got.token, got.after) == (["def", "main", "("], "self", [")", ":"])
    assert str(got) == got.text == "def main ( >>self<< ) :"
    assert str(sel.context(3, n=1)) == "( >>self<< )"
    assert sel.context(3, n=0) == ([], "self", [], ">>self<<")
    assert str(sel.context(0, n=2)) == ">>def<< main ("


def test_it_never_crosses_into_another_sequence(tmp_path):
    make_run(tmp_path, lengths=LENGTHS)
    lake = Lake.open(tmp_path)
    sel = lake.select("SELECT run, row FROM tokens")
    table = lake.sql("SELECT row, seq, pos, token FROM tokens ORDER BY row").to_pylist()
    for own in table:
        same = {t["pos"]: t["token"] for t in table if t["seq"] == own["seq"]}
        for n in (0, 2, 100):
            got = sel.context(own["row"], n=n)
            assert got.token == own["token"]
            assert got.before == [same[p] for p in range(max(0, own["pos"] - n), own["pos"])]
            assert got.after == [same[p] for p in range(own["pos"] + 1, own["pos"] + 1 + n) if p in same]


@pytest.mark.parametrize(
    ("pieces", "shown", "text", "marked"),
    [
        (
            ["has", "##att", "##r", "(", "module"],
            ["has", "att", "r", "(", "module"],
            "hasattr( module",
            "has>>att<<r( module",
        ),
        (
            ["def", "Ġmain", "():", "Ċ", "ĠĠĠ", "Ġpass"],
            ["def", "main", "():", "\n", "   ", "pass"],
            "def main():\n    pass",
            "def >>main<<():\\n    pass",
        ),
        (["ca", "fÃ©", "Ġna", "Ã¯", "ve"], ["ca", "fé", "na", "ï", "ve"], "café naïve", "ca>>fé<< naïve"),
        (["▁the", "▁cat", "s"], ["the", "cat", "s"], "the cats", "the >>cat<<s"),
        (["###", "##", "Title"], ["###", "##", "Title"], "### ##Title", "### >>##<<Title"),
        (["###", "##Ã©"], ["###", "##é"], "### ##é", "### >>##é<<"),
        (["ｃ", "_", "é"], ["ｃ", "_", "é"], "ｃ_é", "ｃ>>_<<é"),
    ],
)
def test_pieces_stand_for_their_characters_and_white_space_is_where_it_was(tmp_path, pieces, shown, text, marked):
    sel = selection_of(tmp_path, pieces, found_spans(text, shown))
    got = sel.context(1)
    assert [*got.before, got.token, *got.after] == pieces  # what the tokenizer calls them, as in SQL
    assert str(got) == marked


def test_special_tokens_are_there_with_spaces_as_their_place_is_unknown(tmp_path):
    sel = selection_of(tmp_path, ["[CLS]", "un", "##do", "[SEP]"], [(-1, -1), (0, 2), (2, 4), (-1, -1)])
    assert str(sel.context(1)) == "[CLS] >>un<<do [SEP]"
    assert str(sel.context(0)) == ">>[CLS]<< undo [SEP]"
    assert sel.context(3).token == "[SEP]"


def test_a_character_of_several_pieces_is_shown_whole_unless_one_of_them_is_marked(tmp_path):
    pieces = ["a", "ðŁ", "ĺ", "Ģ", "naÃ", "¯ve", "Ġb"]
    sel = selection_of(tmp_path, pieces, [(0, 1), (1, 2), (1, 2), (1, 2), (2, 5), (4, 7), (8, 9)])
    assert str(sel.context(0)) == ">>a<<😀naïve b"
    assert str(sel.context(6)) == "a😀naïve >>b<<"
    assert str(sel.context(2)) == "aðŁ>>ĺ<<Ģnaïve b"
    assert str(sel.context(4)) == "a😀>>naÃ<<¯ve b"
    assert sel.context(2).before == ["a", "ðŁ"]


def test_a_run_of_ids_shows_ids(tmp_path):
    sel = selection_of(tmp_path, [None] * 4, [(-1, -1)] * 4)
    got = sel.context(2)
    assert (got.before, got.token, got.after, str(got)) == (["0", "1"], "2", ["3"], "0 1 >>2<< 3")


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "bytes, bos", "bytes, prefix space", "metaspace"])
def test_real_tokenizers_give_back_the_text(tmp_path, kind):
    pytest.importorskip("transformers")
    from layerlake.extract.encoding import encode
    from some_tokenizers import tokenizer

    text = "def value(self, other):\n    return self.value + other.value  the cat hello world\n    naïve"
    text += "" if kind == "metaspace" else "\n\t#### ## x unhappily"  # what its small vocabulary lacks
    own = tokenizer(kind)
    (encoding,) = encode(own, [text])
    pieces = own.convert_ids_to_tokens(encoding.ids.tolist())
    if kind == "wordpiece":
        text = text.replace("ï", "i")  # MiniLM's takes accents away
    else:
        assert "<unk>" not in pieces
    spans = list(zip(encoding.start.tolist(), encoding.end.tolist(), strict=True))
    sel = selection_of(tmp_path, pieces, spans)
    for row, (start, end) in enumerate(spans):
        got = sel.context(row, n=len(pieces))
        assert got.token == pieces[row]
        assert "\n" not in str(got)
        shown = str(got).replace(">>", "").replace("<<", "").replace("\\n", "\n").replace("\\t", "\t")
        for special in own.all_special_tokens:
            shown = shown.replace(special, "")
        assert shown.split() == text.split()
        if start >= 0 and not text[start:end].isspace():
            token = text[start:end].replace("\n", "\\n").replace("\t", "\\t")
            assert f">>{token}<<" in str(got)


def test_which_row_is_asked(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        make_run(tmp_path, name=name, seed=seed)
    lake = Lake.open(tmp_path)
    both = lake.select("SELECT run, row FROM tokens")
    with pytest.raises(RequestError, match="several runs: say run= one of a, b"):
        both.context(3)
    with pytest.raises(RequestError, match="no run 'c' in the selection.*Known: a, b"):
        both.context(3, run="c")
    assert both.context(3, run="b").token == "t3"
    some = lake.select("SELECT run, row FROM tokens WHERE run = 'a' AND row BETWEEN 10 AND 12")
    assert some.context(np.int64(11)).token == "t11"
    assert some.context(11, run="a", n=1).before == ["t10"]
    for row in (0, 9, 20, -1, 10**12):
        with pytest.raises(RequestError, match="is not in this selection|at least 0"):
            some.context(row)
    for bad in (1.5, "11", None, True):
        with pytest.raises(RequestError, match="whole number"):
            some.context(bad)
    with pytest.raises(RequestError, match="The number of tokens is -1"):
        some.context(11, n=-1)
    with pytest.raises(RequestError, match="The selection is empty"):
        lake.select("SELECT run, row FROM tokens WHERE false").context(3)


def test_a_damaged_token_table_is_named(tmp_path):
    run, _, _ = make_run(tmp_path)
    path = run.tokens_path(0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    sel = Lake.open(tmp_path).select("SELECT run, row FROM tokens")
    with pytest.raises(CorruptLakeError, match="00000000.parquet holds other bytes"):
        sel.context(3)
    path.unlink()
    with pytest.raises(CorruptLakeError, match="00000000.parquet"):
        sel.context(3)
