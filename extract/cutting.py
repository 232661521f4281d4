"""Cuts a text into windows, each of which the tokenizer turns into few enough tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, RequestError
from .encoding import Encoding, encode


class Slice(NamedTuple):
    """A window of a text: the characters begin .. end, and what the tokenizer makes of them."""

    begin: int
    end: int
    cut: int
    """Where the window before ends: what lies in front of it is context, read again and not stored again."""
    encoding: Encoding

    @property
    def own(self) -> np.ndarray:
        """bool (n,): the window's own tokens, special ones included; False for context."""
        return self.encoding.special | (_begins(self.encoding) >= self.cut - self.begin)

    @property
    def context(self) -> int:
        """The number of tokens of context."""
        return len(self.own) - int(self.own.sum())

    @property
    def parted(self) -> bool:
        """Whether no token lies on both sides of the cut."""
        return not bool((self.encoding.end[~self.own] > self.cut - self.begin).any())


def cut_text(
    name: str,
    text: str,
    whole: Encoding,
    tokenizer: Any,
    window: int,
    overlap: int = 0,
    *,
    special_tokens: bool = True,
) -> list[Slice]:
    """Cut a `text` whose tokens are `whole` into slices of at most `window` tokens, `overlap` of them context.

    The rule is the one of `make_sequences`: whole lines while they fit, cut lines where one does not. `special_tokens`
    is as in `encode`.
    """
    slices = _Cutter(name, text, whole, tokenizer, window, overlap, special_tokens).slices()
    return [one for one in slices if bool((one.own & ~one.encoding.special).any())]


_LENGTHENED = 4


class _Cutter:
    """Cuts one text into windows.

    The tokens of the whole text say about where a window ends; tokenizing the slice itself, and the one that
    is a line longer, decides. So the work is a few times that of tokenizing the text, however long it is.
    """

    def __init__(
        self,
        name: str,
        text: str,
        whole: Encoding,
        tokenizer: Any,
        window: int,
        overlap: int,
        special_tokens: bool,
    ) -> None:
        self.name, self.text, self.tokenizer, self.window, self.overlap = name, text, tokenizer, window, overlap
        self.special_tokens = special_tokens
        self.room = window - int(whole.special.sum())
        if self.room < 1:
            raise RequestError(
                f"A window of {window} tokens has no room beside the {window - self.room} special tokens"
                f" that the tokenizer adds. Ask for a longer window."
            )
        if overlap >= self.room:
            raise RequestError(
                f"An overlap of {overlap} tokens leaves no room for others in a window of {window}, of which"
                f" {window - self.room} are special tokens. Ask for a longer window or a shorter overlap."
            )
        begins = _begins(whole) if overlap else whole.raw_start
        self.starts: list[int] = begins[~whole.special].tolist()
        self.cuts = [*sorted(set(self.starts)), len(text)]
        self.lines = [at for at in _line_starts(text) if at < len(text)] + [len(text)]
        if overlap:
            # A token that holds a line break and the indentation after it would lie on both sides of the cut.
            self.lines = list(dict.fromkeys(self.cuts[bisect_left(self.cuts, at)] for at in self.lines))

    def slices(self) -> Iterator[Slice]:
        """Yield all windows, in order."""
        cut = 0
        while cut < len(self.text):
            one = self._with_context(cut) if cut and self.overlap else None
            one = one or self._slice(cut, cut)
            assert one is not None  # a slice without context is made or refused
            yield one
            cut = one.end

    def _with_context(self, cut: int) -> Slice | None:
        """Make the window that follows a cut, with as much context as was asked for or as can be had; None for none."""
        known = bisect_left(self.starts, cut)
        at = first = max(0, known - self.overlap)
        best: Slice | None = None
        for _ in range(_LENGTHENED):  # the slice may have fewer tokens there than the whole text
            one = self._slice(self.starts[at] if at else 0, cut)
            if one is None:
                break
            best = one
            if one.context >= self.overlap or at == 0:
                return one
            at = max(0, at - (self.overlap - one.context))
        step = 1
        while best is None and first + step < known:
            best = self._slice(self.starts[first + step], cut)
            step *= 2
        return best

    def _slice(self, begin: int, cut: int) -> Slice | None:
        """Make the longest window that reads from `begin`; None when that context does not fit or cannot be told."""
        made: dict[int, Encoding] = {}
        end = self._end(begin, cut, made)
        if end is None:
            return None
        one = Slice(begin, end, cut, made[end])
        return one if one.parted else None

    def _end(self, begin: int, cut: int, made: dict[int, Encoding]) -> int | None:
        def fits(end: int) -> bool:
            # A slice with far more tokens in the whole text than a window holds is not even tokenized: a line
            # of a million characters would be, once for each of its windows.
            if bisect_left(self.starts, end) - bisect_left(self.starts, begin) > 4 * self.window + 64:
                return False
            (made[end],) = encode(self.tokenizer, [self.text[begin:end]], special_tokens=self.special_tokens)
            return len(made[end].ids) <= self.window

        token = bisect_left(self.starts, begin) + self.room
        guess = self.starts[token] if token < len(self.starts) else len(self.text)
        for ends in (self.lines, self.cuts):
            low = bisect_right(ends, cut)
            at = _last_fitting(lambda k, ends=ends: fits(ends[k]), bisect_right(ends, guess) - 1, low, len(ends) - 1)
            if at >= low:
                return ends[at]
        if begin < cut:
            return None
        last = self.cuts[bisect_right(self.cuts, begin)]
        at = _last_fitting(fits, begin + 1, begin + 1, last)
        if at > begin:
            return at
        raise DataError(
            f"The document {self.name}: the character {begin} alone has {len(made[begin + 1].ids)} tokens"
            f" with the special ones, which a window of {self.window} does not hold. Ask for a longer window."
        )


def _begins(encoding: Encoding) -> np.ndarray:
    """Give the first character of each token, int32 (n,), white space in front of it included where that is known.

    Never falling, and of no meaning for special tokens. A tokenizer that trims spans moves the raw start of white space
    to its end.
    """
    return np.minimum(encoding.raw_start, encoding.start)


def _last_fitting(fits: Callable[[int], bool], guess: int, low: int, high: int) -> int:
    """Give the last k of low .. high that fits, or low - 1; searched from `guess` in steps that double."""
    good, bad, step = low - 1, high + 1, 1
    k = guess
    while bad - good > 1:
        k = min(max(k, good + 1), bad - 1)
        if fits(k):
            good = k
            k = k + step if bad > high else (good + bad) // 2
        else:
            bad = k
            k = k - step if good < low else (good + bad) // 2
        step *= 2
    return good


def _line_starts(text: str) -> Iterator[int]:
    at = text.find("\n")
    while at >= 0:
        yield at + 1
        at = text.find("\n", at + 1)
