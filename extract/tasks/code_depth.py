"""Code-Depth: how deeply nested each byte of Python source is, from stretches of real files."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from ...errors import DataError, RequestError, UnknownNameError
from ..code_depth import character_depths
from .sides import SHARES, SIDES
from .task import Task

_MOST_CHARACTERS = 2_000_000


class _Corpus(NamedTuple):
    """The files of a source one after the other, those of a side together."""

    text: np.ndarray
    """(characters,) uint8."""
    depth: np.ndarray
    """(characters,) int64."""
    files: dict[str, np.ndarray]
    """By side: the first character and the length of each of its files, (files, 2)."""
    digest: str
    left_out: int


@dataclass(frozen=True, kw_only=True)
class CodeDepth(Task):
    r"""Stretches of Python files as bytes; the label is how many blocks and brackets are open there.

        symbols   f ( x )
        depth     0 1 1 1

    `extract.code_depth` says what counts; a depth above `max_depth` is said to be `max_depth`. It follows from the
    whole file, so a string alone has no labels: `sample_labelled` draws both. A string starts at any character of any
    file, evenly. A file is on one side, by its content, so strings of two sides come from different files.

    Files are those in the folder `source` that end in .py (default: of the standard library of the running Python, its
    packages left out), in the order of a hash of their names, up to 2 million characters. Left out are files with other
    characters than ASCII and those that Python cannot read. `digest` says which content they had: it is in the spec of
    every task, and where it is given and is another, the task is refused, since labels and strings would be others.
    """

    name: ClassVar[str] = "code-depth"
    pure: ClassVar[bool] = False

    source: str = ""
    max_depth: int = 10
    digest: str = ""

    def __post_init__(self) -> None:
        if self.max_depth < 1:
            raise RequestError(f"The greatest depth of code is at least 1, not {self.max_depth}.")
        found = self._corpus.digest
        if self.digest not in ("", found):
            raise DataError(
                f"The Python files of {self.source or 'the standard library'} are not those that this task was made "
                f"with (digest {found}, not {self.digest}). Take the same files, or leave the digest out."
            )
        object.__setattr__(self, "digest", found)

    @property
    def _corpus(self) -> _Corpus:
        return _read(self.source)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The 128 characters of ASCII, by their codes."""
        return tuple(map(chr, range(128)))

    @property
    def targets(self) -> tuple[str, ...]:
        """The depth alone."""
        return ("depth",)

    def classes(self, target: str) -> tuple[int, ...]:
        """Give the depths, from 0 to the greatest."""
        self.known(target)
        return tuple(range(self.max_depth + 1))

    def label(self, strings: np.ndarray, target: str) -> np.ndarray:
        """Refuse: the depth of a stretch of code depends on the file around it."""
        raise RequestError("Labels of code-depth follow from whole files, not from a string: draw both together.")

    def sample(self, n: int, length: int, generator: np.random.Generator, split: str = "train") -> np.ndarray:
        """Draw `n` stretches of files of one side."""
        return self.sample_labelled(n, length, generator, split, ())[0]

    def sample_labelled(
        self, n: int, length: int, generator: np.random.Generator, split: str, targets: Sequence[str]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Draw stretches with the depths at their places in their files."""
        if n < 0 or length < 1:
            raise RequestError(f"{n} strings of length {length} cannot be drawn: both are whole numbers, from 1 on.")
        if split not in SIDES:
            raise UnknownNameError.of("side", split, SIDES)
        corpus = self._corpus
        first, size = corpus.files[split].T
        starts = np.cumsum(np.maximum(size - length + 1, 0))
        if not len(starts) or not starts[-1]:
            raise RequestError(f"No file on the {split} side has {length} characters: take shorter strings.")
        drawn = generator.integers(0, starts[-1], n)
        file = np.searchsorted(starts, drawn, side="right")
        at = first[file] + drawn - np.append(0, starts)[file]
        places = at[:, None] + np.arange(length)
        depths = np.minimum(corpus.depth[places], self.max_depth)
        return corpus.text[places].astype(np.int64), {self.known(t): depths for t in targets}


@functools.cache
def _read(source: str) -> _Corpus:
    folder = Path(source).expanduser() if source else Path(sysconfig.get_paths()["stdlib"])
    if not folder.is_dir():
        raise RequestError(f"{source} is no folder of Python files.")
    paths = sorted(folder.glob("*.py" if not source else "**/*.py"))
    paths.sort(key=lambda p: hashlib.sha256(p.relative_to(folder).as_posix().encode()).digest())
    whole = hashlib.sha256()
    texts: dict[str, list[tuple[bytes, np.ndarray]]] = {side: [] for side in SIDES}
    characters = left_out = 0
    for path in paths:
        content = path.read_bytes()
        if characters + len(content) > _MOST_CHARACTERS:
            break
        try:
            depth = character_depths(path.name, content.decode("ascii"))
        except (UnicodeDecodeError, DataError):
            left_out += 1
            continue
        hashed = hashlib.sha256(content).digest()
        whole.update(hashed)
        tenth = int.from_bytes(hashed[:8], "big") % sum(SHARES)
        side = SIDES[int(np.searchsorted(np.cumsum(SHARES), tenth, side="right"))]
        texts[side].append((content, depth))
        characters += len(content)
    if not characters:
        raise DataError(f"{folder} has no Python files in ASCII that can be read.")
    files, at = {}, 0
    for side, found in texts.items():
        sizes = [len(content) for content, _ in found]
        firsts = at + np.append(0, np.cumsum(sizes, dtype=np.int64))[:-1] if sizes else np.empty(0, np.int64)
        files[side] = np.stack((firsts, np.array(sizes, np.int64)), 1)
        at += sum(sizes)
    every = [one for found in texts.values() for one in found]
    text = np.frombuffer(b"".join(content for content, _ in every), np.uint8)
    return _Corpus(text, np.concatenate([d for _, d in every]), files, whole.hexdigest()[:12], left_out)
