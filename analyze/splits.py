"""Train and test sides that keep every group whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import RequestError

WHY_GROUPS = (
    "Tokens of one sequence share context, so a split by token lets a probe recognise the sequence instead "
    "of reading the label"
)


@dataclass(frozen=True, eq=False)
class Split:
    """One division of rows: `train` and `test` are ascending int64 row positions; `seed` is None if given."""

    train: np.ndarray
    test: np.ndarray
    seed: int | None

    @classmethod
    def by_group(cls, groups: np.ndarray, test_share: float, seed: int) -> Split:
        """Split whole groups by `seed`; `groups` is (n,) group numbers 0..g-1 as `group_numbers` gives them.

        About `test_share` of the groups (not of the rows) are tested, at least one and at most all but one.
        The sides depend on the set of groups, the share and the seed, not on the order of the rows.
        """
        n_groups = int(groups.max()) + 1
        if n_groups < 2:
            raise RequestError(
                f"All {len(groups)} rows belong to one group, so no group is left to test on. Select rows of "
                "at least two documents or sequences."
            )
        n_test = min(max(round(test_share * n_groups), 1), n_groups - 1)
        tested = np.zeros(n_groups, dtype=bool)
        tested[np.random.default_rng([seed, 0]).permutation(n_groups)[:n_test]] = True
        side = tested[groups]
        return cls(np.flatnonzero(~side), np.flatnonzero(side), seed)

    @classmethod
    def given(cls, split: np.ndarray, groups: np.ndarray, names: np.ndarray) -> Split:
        """Take the sides from `split`, (n,) of "train" or "test"; a group on both sides is refused by name.

        `groups` and `names` are what `group_numbers` returns.
        """
        side = split.astype(object)
        odd = sorted({repr(v) for v in side.tolist()} - {"'train'", "'test'"})
        if odd:
            raise RequestError(
                f"The given split holds {', '.join(odd[:5])}; each row must say 'train' or 'test'. Leave "
                "other rows out of the query."
            )
        test = side == "test"
        if test.all() or not test.any():
            have, lack = ("test", "train") if test.all() else ("train", "test")
            raise RequestError(f"The given split puts all {len(side)} rows into {have!r}, none into {lack!r}.")
        both = np.intersect1d(groups[test], groups[~test])
        if len(both):
            first = ", ".join(repr(v) for v in names[both[:5]].tolist())
            raise RequestError(
                f"The given split puts {len(both)} group(s) on both sides, the first: {first}. {WHY_GROUPS}; "
                "put each document or sequence on one side."
            )
        return cls(np.flatnonzero(~test), np.flatnonzero(test), None)


def group_numbers(groups: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the groups of `rows` as numbers (m,) int64, and the names of these groups (g,) in sorted order.

    `groups` is (n,) names, one a row. A row without a name, and names of types that do not sort together,
    raise RequestError.
    """
    values = groups[rows].tolist()
    missing = [row for row, v in zip(rows.tolist(), values, strict=True) if v is None or v != v]
    if missing:
        raise RequestError(
            f"{len(missing)} of {len(rows)} rows have no group (the first is row {missing[0]}); every row "
            "must name its document or sequence."
        )
    try:
        found = sorted(set(values))
    except TypeError as err:
        kinds = ", ".join(sorted({type(v).__name__ for v in values}))
        raise RequestError(f"groups must be values of one type; they are of the types {kinds}.") from err
    place = {value: i for i, value in enumerate(found)}
    names = np.empty(len(found), dtype=object)
    names[:] = found
    return np.fromiter((place[v] for v in values), dtype=np.int64, count=len(values)), names


def permute_within_sides(codes: np.ndarray, groups: np.ndarray, split: Split, seed: int) -> tuple[np.ndarray, str]:
    """Return `codes` shuffled inside each side of `split`, and what was shuffled: "rows" or "groups".

    A label that is constant inside every group is shuffled over groups, since those are what could have been
    labelled otherwise (shuffling its rows would hide how few independent labels there are); any other label
    is shuffled over rows. Staying inside a side keeps its class counts (over groups: its group labels), so
    that the result compares with the majority baseline.
    """
    rng = np.random.default_rng([seed, 1])
    first = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    first[groups] = codes
    by_group = bool((first[groups] == codes).all())
    shuffled = codes.copy()
    for side in (split.train, split.test):
        if by_group:
            members = np.unique(groups[side])
            first[members] = first[rng.permutation(members)]
            shuffled[side] = first[groups[side]]
        else:
            shuffled[side] = codes[side][rng.permutation(len(side))]
    return shuffled, "groups" if by_group else "rows"
