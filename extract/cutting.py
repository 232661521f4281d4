"""Cuts a text into windows, each of which the tokenizer turns into few enough tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import DataError, RequestError
from .encoding import Encoding, encode


def cut_text(
    name: str, text: str, whole: Encoding, tokenizer: Any, window: int, *, special_tokens: bool = True
) -> list[tuple[int, int, Encoding]]:
    """Cut a `text` whose tokens are `whole` into (begin, end, tokens) of slices of at most `window` tokens.

    The rule is the one of `make_sequences`: whole lines while they fit, cut lines where one does not. `special_tokens`
    is as in `encode`.
    """
    slices = _Cutter(name, text, whole, tokenizer, window, special_tokens).slices()
    return [one for one in slices if one[2].real]


class _Cutter:
    """Cuts one text into windows.

    The tokens of the whole text say about where a window ends; tokenizing the slice itself, and the one that
    is a line longer, decides. So the work is a few times that of tokenizing the text, however long it is.
    """

    def __init__(
        self, name: str, text: str, whole: Encoding, tokenizer: Any, window: int, special_tokens: bool
    ) -> None:
        self.name, self.text, self.tokenizer, self.window = name, text, tokenizer, window
        self.special_tokens = special_tokens
        self.room = window - int(whole.special.sum())
        if self.room < 1:
            raise RequestError(
                f"A window of {window} tokens has no room beside the {window - self.room} special tokens"
                f" that the tokenizer adds. Ask for a longer window."
            )
        self.starts: list[int] = whole.raw_start[~whole.special].tolist()
        self.lines = [at for at in _line_starts(text) if at < len(text)] + [len(text)]
        self.cuts = [*sorted(set(self.starts)), len(text)]

    def slices(self) -> Iterator[tuple[int, int, Encoding]]:
        """Yield (begin, end, encoding) of all windows, in order."""
        begin = 0
        while begin < len(self.text):
            made: dict[int, Encoding] = {}
            end = self._end(begin, made)
            yield begin, end, made[end]
            begin = end

    def _end(self, begin: int, made: dict[int, Encoding]) -> int:
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
            low = bisect_right(ends, begin)
            at = _last_fitting(lambda k, ends=ends: fits(ends[k]), bisect_right(ends, guess) - 1, low, len(ends) - 1)
            if at >= low:
                return ends[at]
        last = self.cuts[bisect_right(self.cuts, begin)]
        at = _last_fitting(fits, begin + 1, begin + 1, last)
        if at > begin:
            return at
        raise DataError(
            f"The document {self.name}: the character {begin} alone has {len(made[begin + 1].ids)} tokens"
            f" with the special ones, which a window of {self.window} does not hold. Ask for a longer window."
        )


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
