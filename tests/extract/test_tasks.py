"""Tasks: labels against oracles of a few lines, distributions against counts, sides that share no string."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layerlake.errors import RequestError, UnknownNameError
from layerlake.extract.tasks import TASKS, parse_task
from layerlake.extract.tasks.dyck import Dyck
from layerlake.extract.tasks.finite_groups import FiniteGroup, named_group
from layerlake.extract.tasks.groups import GroupComposition
from layerlake.extract.tasks.sides import SIDES, side_of

SPECS = (
    "parity", "s3", "s3?generators=minimal", "group?group=a5", "group?group=z6&generators=minimal", "dyck",
    "dyck?k=1&max_depth=3", "dyck?k=4&max_depth=2", "modular-addition?modulus=5", "flip-flop", "flip-flop?ignore=0.1",
)  # fmt: skip


def generator(*seed: int) -> np.random.Generator:
    return np.random.default_rng(list(seed))


def labels(spec: str, string: list[int], target: str | None = None) -> list:
    task = parse_task(spec)
    target = target or task.targets[0]
    return [task.classes(target)[c] for c in task.label(np.array([string]), target)[0]]


def parity_oracle(string):
    return [sum(string[: t + 1]) % 2 for t in range(len(string))]


def s3_oracle(string, names):
    """Move three things about: the newest permutation acts on where they are now."""
    places = [1, 2, 3]
    for symbol in string:
        places = [int(names[symbol][p - 1]) for p in places]
        yield "".join(map(str, places))


def dyck_oracle(string, symbols, max_depth):
    stack = []
    for symbol in (symbols[i] for i in string):
        if symbol in "([{<" and len(stack) < max_depth:
            stack.append(symbol)
        elif stack and stack[-1] + symbol in ("()", "[]", "{}", "<>"):
            stack.pop()
        closing = {"(": ")", "[": "]", "{": "}", "<": ">"}[stack[-1]] if stack else ""
        opening = "".join(s for s in symbols if s in "([{<") if len(stack) < max_depth else ""
        yield len(stack), stack[-1] if stack else "-", opening + closing


def flip_flop_oracle(string):
    stored = "-"
    for before, symbol in zip([None, *string], string, strict=False):
        stored = "01"[symbol - 3] if before == 0 and symbol >= 3 else stored
        yield stored


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_labels_of_any_string_are_the_oracles(data):
    def string(alphabet: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=40))

    bits, permutations, numbers, brackets, flips = string(2), string(6), string(5), string(4), string(5)
    assert labels("parity", bits) == parity_oracle(bits)
    assert labels("modular-addition?modulus=5", numbers) == [int(s) % 5 for s in np.cumsum(numbers)]
    assert labels("s3", permutations) == list(s3_oracle(permutations, parse_task("s3").symbols))
    assert labels("flip-flop", flips) == list(flip_flop_oracle(flips))
    for depth in (1, 2, 10):
        expected = list(dyck_oracle(brackets, "()[]", depth))
        for i, target in enumerate(("depth", "top", "next")):
            assert labels(f"dyck?max_depth={depth}", brackets, target) == [e[i] for e in expected]


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_says_all_of_a_task_and_strings_are_strings_of_it(spec):
    task = parse_task(spec)
    assert task.spec == spec
    assert parse_task(task.spec) == task
    for split in SIDES:
        strings = task.sample(50, 24, generator(1), split)
        assert strings.shape == (50, 24) and strings.dtype == np.int64
        assert strings.min() >= 0 and strings.max() < len(task.symbols)
        assert (strings == task.sample(50, 24, generator(1), split)).all()
        assert (strings != task.sample(50, 24, generator(2), split)).any()
        for target in task.targets:
            found = task.label(strings, target)
            assert found.dtype == np.int64 and found.min() >= 0 and found.max() < len(task.classes(target))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("length", [10, 16])
def test_no_string_is_on_two_sides_and_each_side_has_its_share(spec, length):
    task = parse_task(spec)
    seen = {s: set(map(bytes, task.sample(300, length, generator(3), s))) for s in SIDES}
    for one, other in itertools.combinations(SIDES, 2):
        assert not seen[one] & seen[other]
    drawn = task.draw(4000, 24, generator(4))
    shares = np.bincount(side_of(np.unique(drawn, axis=0)), minlength=3) / len(np.unique(drawn, axis=0))
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.03)


def test_the_side_of_a_string_depends_on_every_symbol_its_place_and_the_length():
    strings = generator(5).integers(0, 4, (3000, 12))
    sides = side_of(strings)
    for place in (0, 5, 11):
        changed = strings.copy()
        changed[:, place] = (changed[:, place] + 1) % 4
        # independent sides agree for 0.8^2 + 0.1^2 + 0.1^2 = 66 % of the strings
        assert abs(np.mean(side_of(changed) == sides) - 0.66) < 0.04
    assert abs(np.mean(side_of(strings[:, ::-1]) == sides) - 0.66) < 0.04
    assert abs(np.mean(side_of(strings[:, :-1]) == sides) - 0.66) < 0.04


def test_a_side_without_a_string_of_a_length_is_said_to_have_none():
    sides = [SIDES[i] for i in side_of(np.array([[0], [1]]))]
    empty = next(s for s in SIDES if s not in sides)
    with pytest.raises(RequestError, match=f"length 1 .* on the {empty} side"):
        parse_task("parity").sample(1, 1, generator(0), empty)
    assert parse_task("parity").sample(3, 1, generator(0), sides[0]).shape == (3, 1)


def dyck_words(length: int, max_depth: int) -> set[tuple[int, ...]]:
    words = set()
    for steps in itertools.product((1, -1), repeat=length):
        heights = list(itertools.accumulate(steps))
        if min(heights) >= 0 and heights[-1] == 0 and max(heights) <= max_depth:
            words.add(tuple(0 if s == 1 else 1 for s in steps))
    return words


def test_dyck_words_are_drawn_evenly_among_all_of_a_length_and_depth():
    for length, depth in ((8, 3), (10, 10), (6, 1)):
        expected = dyck_words(length, depth)
        drawn = Dyck(k=1, max_depth=depth).draw(20_000, length, generator(length))
        counts = Counter(map(tuple, drawn.tolist()))
        assert set(counts) == expected
        mean = 20_000 / len(expected)
        chi_square = sum((counts[w] - mean) ** 2 / mean for w in expected)
        assert chi_square < len(expected) - 1 + 5 * np.sqrt(2 * len(expected))  # five deviations above its mean


def test_kinds_of_brackets_are_drawn_evenly_and_matched():
    drawn = Dyck(k=3).draw(3000, 20, generator(6))
    opens = drawn[drawn % 2 == 0] // 2
    np.testing.assert_allclose(np.bincount(opens) / len(opens), 1 / 3, atol=0.01)
    depth = Dyck(k=3).label(drawn, "depth")
    assert (np.diff(depth, prepend=0) == np.where(drawn % 2 == 0, 1, -1)).all()  # every bracket matches
    assert (depth[:, -1] == 0).all()


def test_depths_of_long_words_are_those_of_the_count():
    """The chance of each depth in the middle of a word, from paths counted exactly as whole numbers."""
    length, most = 40, 10

    def paths(steps: int, depth: int) -> int:
        counts = {0: 1}
        for _ in range(steps):
            new: Counter[int] = Counter()
            for d, n in counts.items():
                for e in (d - 1, d + 1):
                    if 0 <= e <= most:
                        new[e] += n
            counts = new
        return counts.get(depth, 0)

    exact = np.array([paths(20, d) * paths(20, d) for d in range(most + 1)], float)
    drawn = Dyck().label(Dyck().draw(30_000, length, generator(7)), "depth")[:, 19]
    np.testing.assert_allclose(np.bincount(drawn, minlength=most + 1) / 30_000, exact / exact.sum(), atol=0.012)


def test_the_sides_keep_the_distribution_of_the_task():
    task = parse_task("dyck?k=1&max_depth=10")
    whole = task.label(task.draw(8000, 20, generator(8)), "depth")
    for split in SIDES:
        side = task.label(task.sample(8000, 20, generator(9), split), "depth")
        np.testing.assert_allclose(side.mean(0), whole.mean(0), atol=0.15)


def test_flip_flop_reads_what_was_written_and_ignores_as_often_as_asked():
    task = parse_task("flip-flop?ignore=0.5")
    drawn = task.sample(2000, 40, generator(10))
    stored = task.label(drawn, "stored")
    reads = np.argwhere(drawn == 1)
    assert (drawn[:, 0] == 0).all() and len(reads) > 1000
    assert all(drawn[n, t + 1] - 2 == stored[n, t] for n, t in reads)
    shares = np.bincount(drawn[:, 2::2].ravel(), minlength=3) / drawn[:, 2::2].size
    np.testing.assert_allclose(shares, [0.25, 0.25, 0.5], atol=0.01)


def test_named_groups_are_groups_of_their_size_and_their_generators_make_them():
    for name, size, commutes in (("z2", 2, True), ("z12", 12, True), ("s3", 6, False), ("a4", 12, False),
                                 ("a5", 60, False), ("s5", 120, False), ("s1", 1, True), ("z1", 1, True)):  # fmt: skip
        group = named_group(name)
        table = np.array(group.table)
        assert len(group.elements) == size
        assert (table == table.T).all() == commutes
        made = {group.identity}
        while grown := {group.table[g][m] for g in group.generators for m in made} - made:
            made |= grown
        assert len(made) == size, name


def test_a5_is_simple_so_no_running_sum_decides_it():
    """Its commutators make all of it: no part of the state commutes."""
    group = named_group("a5")
    table = np.array(group.table)
    inverse = np.argmax(table == group.identity, axis=1)
    made = {int(table[table[a, b], table[inverse[a], inverse[b]]]) for a in range(60) for b in range(60)}
    while grown := {int(table[a, b]) for a in made for b in made} - made:
        made |= grown
    assert len(made) == 60


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (((0, 1), (1, 1)), "inverse"),
        (((1, 0), (0, 0)), "leaves all others"),
        (((0, 1), (1, 2)), "numbers"),
        (((0, 1, 2), (1, 0, 2), (2, 2, 0)), "inverse"),
        (((0, 1, 2, 3, 4), (1, 0, 3, 4, 2), (2, 4, 0, 1, 3), (3, 2, 4, 0, 1), (4, 3, 1, 2, 0)), "brackets"),
    ],
)
def test_a_table_that_is_no_groups_is_refused_by_what_fails(table, says):
    with pytest.raises(RequestError, match=says):
        FiniteGroup(tuple("abcde"[: len(table)]), table)


def test_a_group_of_ones_own_by_its_table():
    class Klein(GroupComposition):
        def table_of(self):
            return FiniteGroup(("e", "a", "b", "c"), ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)))

    assert [Klein().classes("element")[c] for c in Klein().label(np.array([[1, 2, 3, 1]]), "element")[0]] == list(
        "aCea".lower()
    )


@pytest.mark.parametrize("kind", [k for k in TASKS.values() if k.pure], ids=lambda k: k.name)
def test_the_example_in_the_docstring_is_true(kind):
    text = kind.__doc__ or ""
    if "symbols" not in text:
        text = GroupComposition.__doc__ or ""
    rows = {m[1]: m[2].split() for m in re.finditer(r"^ +(\w+)   +(.*)$", text, re.MULTILINE)}
    task = parse_task({"group": "group?group=s3"}.get(kind.name, kind.name))
    symbols = [s for s in rows["symbols"] if re.fullmatch(r"\S+", s) and s in task.symbols]
    string = np.array([[task.symbols.index(s) for s in symbols]])
    shown = {"all": None, "open": "(["}
    checked = 0
    for target in task.targets:
        found = [str(task.classes(target)[c]) for c in task.label(string, target)[0]]
        expected = rows[target][: len(symbols)]
        for value, word in zip(found, expected, strict=True):
            word = shown.get(word, word)
            assert (value in ("([)", "([]")) if word is None else value == word
            checked += 1
    assert checked >= 3


PURE = ("parity", "s3", "group?group=z4", "dyck", "modular-addition", "flip-flop")


@pytest.mark.parametrize(("first", "second"), list(itertools.product(PURE, PURE)))
def test_any_tasks_strings_take_any_other_tasks_labels(first, second):
    one, other = parse_task(first), parse_task(second)
    both = parse_task(f"{first}{'&' if '?' in first else '?'}labels={second}")
    assert parse_task(both.spec) == both
    strings = both.sample(20, 12, generator(11), "test")
    assert (strings == one.sample(20, 12, generator(11), "test")).all()  # the same inputs
    assert both.symbols == one.symbols and both.targets == other.targets
    for target in both.targets:
        assert (both.label(strings, target) == other.label(strings % len(other.symbols), target)).all()
        assert both.classes(target) == other.classes(target)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("paritty", "parity"),
        ("dyck?depth=3", "max_depth"),
        ("dyck?k=two", "no int"),
        ("dyck?k=2&k=3", "twice"),
        ("dyck?k=9", "1 to 4"),
        ("dyck?max_depth=0", "at least 1"),
        ("group?group=q8", "There is no group"),
        ("group?group=s9", "362880 elements|too many"),
        ("group?generators=some", "minimal"),
        ("flip-flop?ignore=1", "below 1"),
        ("parity?labels=dyck&labels=s3", "twice"),
        ("parity?labels=dyck?labels=s3", "labels of one other task"),
        ("modular-addition?modulus=0", "group"),
    ],
)
def test_what_cannot_be_is_refused_by_name(spec, says):
    with pytest.raises(RequestError, match=says):
        parse_task(spec)


@pytest.mark.parametrize("spec", ["dyck", "flip-flop", "dyck?labels=parity"])
def test_odd_lengths_are_refused_where_there_are_none(spec):
    with pytest.raises(RequestError, match="even length, not 7"):
        parse_task(spec).sample(1, 7, generator(0))


def test_other_wrong_requests_name_what_there_is():
    task = parse_task("parity")
    with pytest.raises(UnknownNameError, match="validation"):
        task.sample(1, 8, generator(0), "dev")
    with pytest.raises(UnknownNameError, match="parity"):
        task.label(np.zeros((1, 2), int), "depth")
    with pytest.raises(RequestError, match="length 0"):
        task.sample(1, 0, generator(0))
    assert task.sample(0, 8, generator(0)).shape == (0, 8)
