"""Code-Depth follows its definition: by hand, and against a scanner that shares nothing with it."""

from __future__ import annotations

import ast
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from layerlake.errors import DataError, RequestError, UnknownNameError
from layerlake.extract import code_depth as module
from layerlake.extract.code_depth import code_depth
from layerlake.extract.labels import load_labeler, token_labels

STDLIB = Path(sysconfig.get_path("stdlib"))


def at_every_character(text: str) -> list[int]:
    start = np.arange(len(text), dtype=np.int32)
    return code_depth("t.py", text, start, start + 1)


def words(text: str) -> list[tuple[str, int]]:
    """Give every run of word characters, and every other mark, with its depth."""
    spans = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
    start, end = np.asarray(spans, np.int32).reshape(-1, 2).T
    return [(text[a:b], depth) for (a, b), depth in zip(spans, code_depth("t.py", text, start, end), strict=True)]


def test_the_worked_example_of_the_docstring() -> None:
    text = 'def f(x):\n    # twice\n    return g(x[0])\ny = "(("\n'
    assert words(text) == [
        *[("def", 0), ("f", 0), ("(", 1), ("x", 1), (")", 1), (":", 0)],
        *[("#", 1), ("twice", 1)],
        *[("return", 1), ("g", 1), ("(", 2), ("x", 2), ("[", 3), ("0", 3), ("]", 3), (")", 2)],
        *[("y", 0), ("=", 0), ('"', 0), ("(", 0), ("(", 0), ('"', 0)],
    ]
    assert code_depth.__doc__ is not None
    assert '"(("=0' in code_depth.__doc__


def test_every_character_has_a_depth_and_gaps_have_that_of_the_next_token() -> None:
    #       if x : nl . . y nl z nl
    text = "if x:\n  y\nz\n"
    assert at_every_character(text) == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0]


def test_a_model_token_has_the_depth_of_its_first_character_that_is_not_white_space() -> None:
    text = "if x:\n    y\nz\n"
    spans = np.array([(5, 11), (5, 10), (6, 6), (4, 11), (11, 13), (13, 14), (14, 14)], np.int32)
    assert code_depth("t.py", text, spans[:, 0], spans[:, 1]) == [1, 1, 1, 0, 0, 0, 0]


def test_white_space_at_the_end_of_a_comment_is_of_the_comment() -> None:
    text = "if x:  # c  \n    y\n"
    start, end = np.array([[10, 12], [11, 12], [10, 13]], np.int32).T
    assert text[10:13] == "  \n"
    assert code_depth("t.py", text, start, end) == [0, 0, 0]
    assert code_depth("t.py", text, start + 2, end + 2) == [1, 1, 1]
    assert code_depth("t.py", text, start, end + 6) == [1, 1, 1]  # these reach "y"


def test_a_token_that_straddles_two_python_tokens_has_the_depth_of_the_first() -> None:
    text = "f((1))"
    start = np.array([0, 1, 3, 4], np.int32)
    assert code_depth("t.py", text, start, start + 2) == [0, 1, 2, 2]


def test_dedents_lower_from_the_first_token_of_the_dedented_line() -> None:
    text = "while a:\n if b:\n  c\n d\ne\n"
    assert words(text) == [
        *[("while", 0), ("a", 0), (":", 0), ("if", 1), ("b", 1), (":", 1)],
        *[("c", 2), ("d", 1), ("e", 0)],
    ]


def test_comments_alone_on_a_line_count_the_blocks_that_their_column_reaches() -> None:
    text = (
        "# zero\n"
        "if x:  # header\n"
        "  # shallow\n"
        "        # deep\n"
        "    y  # trailing\n"
        "    # one\n"
        "# none\n"
        "    if z:\n"
        "\t# tab\n"
        "        w = [\n"
        "# inside\n"
        "        ]\n"
        "        # two\n"
        "    # back\n"
        "    \f# feed\n"
        "q\n"
        "        # beyond\n"
    )
    comments = {word: depth for word, depth in words(text) if len(word) > 2}
    assert comments == {
        **{"zero": 0, "shallow": 0, "deep": 1, "trailing": 1, "one": 1, "none": 0, "tab": 2},
        **{"inside": 3, "two": 2, "back": 1, "beyond": 0, "header": 0, "feed": 0},
    }


def test_a_comment_on_a_continued_line_is_not_alone() -> None:
    assert words("if x:\n    y = 1 \\\n # c\n")[-2:] == [("#", 1), ("c", 1)]


def test_brackets_inside_strings_and_comments_never_count() -> None:
    text = "x = '([{'  # ([{\ny = '''\n((\n'''\nz = b\"[\", f'({x})', rf'''{x:>{y}}(('''\nend\n"
    assert set(at_every_character(text)) == {0}


def test_a_string_gives_its_depth_to_every_token_inside() -> None:
    text = "f(g['''a (\n  b''', \"c\"])\n"
    assert [depth for _, depth in words(text)] == [0, 1, 1, 2, *[2] * 14, 1]


def test_continued_lines_do_not_indent() -> None:
    text = "x = 1 + \\\n        2\ny = (1 +\n   2)\n"
    assert [depth for _, depth in words(text)] == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_do_not_change_depths(end: str) -> None:
    text = "if é:|    # café (|    x = '''a|(b''' + (1,|  2)|\f|    y = 1 + \\| 2|z"
    lines = text.split("|")
    assert words(end.join(lines)) == words("\n".join(lines))
    wanted, depths = ("if", "café", "b", "2", "y", "z"), (0, 1, 1, 2, 1, 1, 0)
    assert [d for w, d in words(end.join(lines)) if w in wanted] == [*depths]


def test_positions_are_characters_also_beyond_ascii() -> None:
    text = "x = ['é', '漢', '😀']; y = (x)\n"
    expected = [0] * 3 + [1] * 16 + [0] * 5 + [1] * 4 + [0]
    assert at_every_character(text) == expected


def test_no_final_newline_a_form_feed_and_nothing_at_all() -> None:
    assert at_every_character("if x:\n \f y") == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert at_every_character("") == []
    assert at_every_character("  \n\n") == [0, 0, 0, 0]


def test_an_indented_first_line_opens_a_block() -> None:
    assert words("    def f():\n        x\n") == [
        ("def", 1),
        ("f", 1),
        ("(", 2),
        (")", 2),
        (":", 1),
        ("x", 2),
    ]


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("x\ny = (1,\n\n\n", 2, "'\\(' is never closed"),
        ("x\ny = (1]\n", 2, "'\\]' closes no bracket"),
        ("x\n)\n", 2, "'\\)' closes no bracket"),
        ("if x:\n    y\n  z\n", 3, "unindent"),
        ("x\ny = '''abc\n\n", 2, "multi-line string|unterminated"),
        ("x\ny = 'abc\n", 2, ""),
        ("x\ny = $\n", 2, ""),
        ("x\ny = ?\n", 2, ""),
        ("x\na\0b\n", 2, ""),
        ("x\n`y`\n", 2, ""),
    ],
)
def test_source_that_python_cannot_tokenize_is_refused_with_its_line(text: str, line: int, why: str) -> None:
    with pytest.raises(DataError, match=rf"bad\.py, line {line}: Python cannot tokenize this source \(.*({why})"):
        code_depth("bad.py", text, np.zeros(1, np.int32), np.ones(1, np.int32))


def test_f_strings_in_many_tokens_give_the_labels_of_one_string(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 and later: f'a{b[0]}{f"({c}"}' comes as a row of tokens with brackets among them."""
    opens, closes, middle = 901, 902, 903
    monkeypatch.setattr(module, "_OPENS_STRING", frozenset([opens]))
    monkeypatch.setattr(module, "_CLOSES_STRING", frozenset([closes]))
    text = "g(f'a{b[0]}{f\"({c}\"}')[1]"
    op, name, number = tokenize.OP, tokenize.NAME, tokenize.NUMBER
    spaced = """g ( f' a { b [ 0 ] } { f" ( { c } " } ' ) [ 1 ]"""
    strings = spaced.split()
    kinds = {"f'": opens, 'f"': opens, "'": closes, '"': closes, "a": middle, "g": name, "b": name, "c": name}
    kinds |= {"0": number, "1": number}
    parts = [(kinds.get(string, op), string) for string in strings]
    parts[12] = (middle, "(")
    tokens, at = [], 0
    for kind, string in parts:
        tokens.append(tokenize.TokenInfo(kind, string, (1, at), (1, at + len(string)), text))
        at += len(string)
    assert at == len(text)
    scan = module._Scan("t.py", text, [0])
    scan.read(tokens)
    depths = [scan.depths[next(k for k, end in enumerate(scan.ends) if c < end)] for c in range(len(text))]
    assert depths == [0, *[1] * (len(text) - 1)]


FILES = ["json/decoder.py", "json/encoder.py", "textwrap.py", "heapq.py", "contextlib.py", "dataclasses.py"]
LEXEME = re.compile(
    r"""(?P<string>(?i:[rbfu]{0,2})('''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|"""
    r"""'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"))"""
    r"|(?P<comment>\#[^\n]*)|(?P<join>\\\n)|(?P<line>\n)|(?P<open>[(\[{])|(?P<close>[)\]}])"
    r"|(?P<gap>\s)|(?P<word>\w+|.)",
    re.VERBOSE | re.DOTALL,
)


def scanned(text: str) -> dict[int, int]:
    """Give the depth of every character that is not white space, by a scanner of regular expressions."""
    columns, brackets, depth = [0], 0, {}
    for line in _logical_lines(text):
        column = line[0].start() - (text.rfind("\n", 0, line[0].start()) + 1)
        while columns[-1] > column:
            columns.pop()
        if columns[-1] < column:
            columns.append(column)
        for match in line:
            brackets += match.lastgroup == "open"
            for at in range(match.start(), match.end()):
                depth[at] = len(columns) - 1 + brackets
            brackets -= match.lastgroup == "close"
    return depth


def _logical_lines(text: str) -> Iterator[list[re.Match[str]]]:
    """Yield the lexemes of every logical line with code on it; comments alone on a line are left out."""
    line: list[re.Match[str]] = []
    brackets = 0
    for match in LEXEME.finditer(text):
        kind = match.lastgroup
        if kind is None or kind == "gap" or kind == "join":
            continue
        if kind == "line":
            if line and not brackets:
                yield line
                line = []
            continue
        if kind == "comment" and not line:
            continue
        brackets += (kind == "open") - (kind == "close")
        line.append(match)
    assert not line


@pytest.mark.parametrize("name", FILES)
def test_stdlib_files_agree_with_an_independent_scanner(name: str) -> None:
    text = (STDLIB / name).read_text()
    depths = at_every_character(text)
    expected = scanned(text)
    assert len(expected) > 2000
    assert max(expected.values()) >= 4
    assert {at: depths[at] for at in expected} == expected


@pytest.mark.parametrize("name", FILES)
def test_stdlib_statements_are_as_deep_as_their_blocks_in_the_syntax_tree(name: str) -> None:
    text = (STDLIB / name).read_text()
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
    expected: dict[int, int] = {}

    def visit(node: ast.AST, depth: int, line: int) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                is_elif = isinstance(child, ast.If) and text.startswith("elif", offset(child))
                same = is_elif or child.lineno == line  # `if x: y` opens no block
                inner = depth if same else depth + 1
                expected[offset(child)] = inner + (text[offset(child)] in "([{")
                visit(child, inner, child.lineno)
            else:
                visit(child, depth + isinstance(child, ast.match_case), line)

    def offset(node: ast.stmt) -> int:
        start = line_starts[node.lineno - 1]
        return start + len(text[start:].encode()[: node.col_offset].decode())

    visit(ast.parse(text), -1, -1)
    depths = at_every_character(text)
    assert len(expected) > 50
    assert {at: depths[at] for at in expected} == expected


def test_labelers_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_labels.py").write_text("def sides(name, text, start, end): return list(start)\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_labeler("code-depth") is code_depth
    start = np.array([4, 5], np.int32)
    labels = token_labels("n", load_labeler("my_own_labels:sides"), "d", "some text", start, start + 1)
    assert labels == [4, 5]
    assert [type(label) for label in labels] == [int, int]
    with pytest.raises(UnknownNameError, match="Did you mean 'code-depth'"):
        load_labeler("code_depth")
    with pytest.raises(UnknownNameError, match=r"no function 'side' in the module my_own_labels.*'sides'"):
        load_labeler("my_own_labels:side")
    with pytest.raises(RequestError, match="is not a function"):
        load_labeler("my_own_labels:number")
    with pytest.raises(RequestError, match=r"cannot be imported: No module named 'no_such_package'"):
        load_labeler("no_such_package:f")


def test_a_labeler_must_give_one_scalar_a_token() -> None:
    start = np.array([0, 1], np.int32)
    with pytest.raises(RequestError, match=r"'n' gave 1 labels for the 2 tokens of d\.py"):
        token_labels("n", lambda *_: [1], "d.py", "ab", start, start + 1)
    with pytest.raises(RequestError, match=r"'n' gave a tuple for token 1 of d\.py"):
        token_labels("n", lambda *_: [None, (1,)], "d.py", "ab", start, start + 1)
    with pytest.raises(DataError, match=r"d\.py is token ids"):
        token_labels("n", lambda *_: [1, 2], "d.py", None, start, start + 1)
