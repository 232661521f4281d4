"""Code-Depth: how deeply nested every token of Python source is."""

from __future__ import annotations

import bisect
import io
import re
import token as token_types
import tokenize
from collections.abc import Iterable

import numpy as np

from ..errors import DataError

_CLOSES = {")": "(", "]": "[", "}": "{"}
_NO_PYTHON = frozenset("$?!`")  # Python 3.12 calls them operators, 3.11 errors
_LINE_END = re.compile(r"\r\n|\r|\n")


def _types(*names: str) -> frozenset[int]:
    return frozenset(getattr(token_types, name) for name in names if hasattr(token_types, name))


# From 3.12 on an f-string, from 3.14 on a t-string, is a row of tokens; before, an f-string is one STRING.
_OPENS_STRING = _types("FSTRING_START", "TSTRING_START")
_CLOSES_STRING = _types("FSTRING_END", "TSTRING_END")


def code_depth(document_name: str, text: str, start: np.ndarray, end: np.ndarray, /) -> list[int]:
    """Give the nesting depth of every token span of Python source.

    The depth of a Python token, as Python's own `tokenize` finds them, is the number of indented blocks that
    are open at it plus the number of brackets ``( [ {`` that are open at it:

    - A block is open from the first token of its first line to the last token before the line that dedents.
    - A bracket and the one that closes it count as inside their own pair, as deep as what they enclose.
    - A string or an f-string is one token: nothing inside it counts, on any version of Python.
    - A comment that stands alone on its line, outside of brackets, is invisible to Python's indentation. It
      counts the blocks that its own column reaches, of those open before it and the one that the next line of
      code opens.

    Every character of a Python token has its depth. Characters between tokens (white space, newlines, the
    backslash of a continued line) have the depth of the next token, and 0 after the last. A span has the
    depth of its first character that is not white space, or of its first character when all are.

        def f(x):                 def f=0   ( x )=1   :=0
            # twice                # twice=1
            return g(x[0])         return g=1   ( x=2   [ 0 ]=3   )=2
        y = "(("                  y = "(("=0

    `start` and `end` are int32 (n,), characters of `text`. Source that Python cannot tokenize, and brackets
    that do not match, are a DataError that names the line. (Versions of Python differ in what they refuse,
    such as tabs mixed with spaces, and agree in the depths of what they read.)
    """
    ends, depths = _depths(document_name, text)
    labels: list[int] = []
    for first, stop in zip(start.tolist(), end.tolist(), strict=True):
        at = first
        while at < stop and text[at].isspace():
            at += 1
        piece = bisect.bisect_right(ends, at if at < stop else first)
        labels.append(depths[piece] if piece < len(depths) else 0)
    return labels


def character_depths(name: str, text: str) -> np.ndarray:
    """Give the nesting depth of every character of Python source, (characters,) int64, as `code_depth` has it."""
    ends, depths = _depths(name, text)
    lengths = np.diff(np.array([0, *ends]))
    whole = np.repeat(np.array(depths, np.int64), lengths)
    return np.pad(whole, (0, len(text) - len(whole)))


def _depths(name: str, text: str) -> tuple[list[int], list[int]]:
    """Give (ends, depths): characters from ends[k - 1] up to ends[k] have depths[k]."""
    line_starts = [0, *(match.end() for match in _LINE_END.finditer(text))]
    # Python reads source with any line end; tokenize on its own does not know a lone "\r", and its versions
    # differ in "\r\n". Columns do not depend on how a line ends, so line and column lead back into the text
    # as it is.
    source = io.StringIO(_LINE_END.sub("\n", text))
    scan = _Scan(name, text, line_starts)
    try:
        scan.read(tokenize.generate_tokens(source.readline))
    except tokenize.TokenError as error:
        if scan.brackets:
            raise scan.refuse(scan.brackets[-1][1], f"{scan.brackets[-1][0]!r} is never closed") from None
        raise scan.refuse(error.args[1][0], str(error.args[0])) from None
    except SyntaxError as error:
        raise scan.refuse(error.lineno or 1, error.msg) from None
    return scan.ends, scan.depths


class _Scan:
    """Reads Python tokens in order and keeps what is open."""

    def __init__(self, name: str, text: str, line_starts: list[int]) -> None:
        self.name, self.text, self.line_starts = name, text, line_starts
        self.ends: list[int] = []
        self.depths: list[int] = []
        self.blocks: list[int] = []  # the column of each open block
        self.brackets: list[tuple[str, int]] = []  # each open bracket with its line
        self.comments: list[tuple[int, int]] = []  # (end, column) of comments that wait for the next line of code

    def refuse(self, line: int, why: str) -> DataError:
        return DataError(
            f"{self.name}, line {line}: Python cannot tokenize this source ({why}). Code-Depth needs whole"
            f" Python files: mend this one or leave it out."
        )

    def read(self, tokens: Iterable[tokenize.TokenInfo]) -> None:
        fresh = True  # at the start of a line, with no token on it yet
        strings = 0  # f-strings that are open, one in another
        for token in tokens:
            kind, string, line = token.type, token.string, token.start[0]
            end = self._at(token.end)
            if strings or kind in _OPENS_STRING:
                self._settle()
                strings += (kind in _OPENS_STRING) - (kind in _CLOSES_STRING)
                self._add(end)
                fresh = False
            elif kind == tokenize.COMMENT and fresh and not self.brackets:
                self.comments.append((end, self._column(token.start)))
                fresh = False
            elif kind == tokenize.NL:
                fresh = True
            elif kind == tokenize.INDENT:
                self.blocks.append(self._column(token.end))
                self._settle()
            elif kind == tokenize.DEDENT:
                self._settle()
                self.blocks.pop()
            elif kind in (tokenize.NEWLINE, tokenize.ENDMARKER):
                self._settle()
                fresh = True
            elif (kind == tokenize.ERRORTOKEN and not string.isspace()) or string in _NO_PYTHON:
                raise self.refuse(line, f"{string[:20]!r} at column {token.start[1]}")
            else:
                self._settle()
                fresh = False
                if kind == tokenize.OP and string in ("(", "[", "{"):
                    self.brackets.append((string, line))
                self._add(end)
                if kind == tokenize.OP and string in _CLOSES:
                    if not self.brackets or self.brackets[-1][0] != _CLOSES[string]:
                        raise self.refuse(line, f"{string!r} closes no bracket")
                    self.brackets.pop()
        if self.brackets:
            raise self.refuse(self.brackets[-1][1], f"{self.brackets[-1][0]!r} is never closed")

    def _settle(self) -> None:
        """Give the comments that waited their depth: the blocks that their column reaches."""
        for end, column in self.comments:
            self._add(end, sum(block <= column for block in self.blocks))
        self.comments.clear()

    def _add(self, end: int, depth: int | None = None) -> None:
        self.ends.append(end)
        self.depths.append(len(self.blocks) + len(self.brackets) if depth is None else depth)

    def _at(self, position: tuple[int, int]) -> int:
        # The last tokens may lie on a line that the text does not have.
        line, column = position
        if line > len(self.line_starts):
            return len(self.text)
        return min(self.line_starts[line - 1] + column, len(self.text))

    def _column(self, position: tuple[int, int]) -> int:
        """Measure indentation as Python does: tabs to the next multiple of 8, a form feed starts again."""
        column = 0
        line_start = self.line_starts[position[0] - 1]
        for character in self.text[line_start : line_start + position[1]]:
            column = 0 if character == "\f" else (column // 8 + 1) * 8 if character == "\t" else column + 1
        return column
