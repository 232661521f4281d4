"""Code-Depth as a task of bytes: its labels are those of the whole file, its sides share no file."""

from __future__ import annotations

import numpy as np
import pytest
from layerlake.errors import DataError, RequestError
from layerlake.extract.code_depth import character_depths, code_depth
from layerlake.extract.tasks import parse_task
from layerlake.extract.tasks.sides import SIDES

SOURCE = """def f(x):
    if x:
        return g(x[0], {"a": "(("})
    # a comment
    return x


class A:
    y = (1,
         2)
"""


@pytest.fixture
def folder(tmp_path):
    """Sixty files that differ in one line each, so that it is known which of them a string is from."""
    for i in range(60):
        (tmp_path / f"m{i}.py").write_text(f"# file {i:02} " + "-" * 20 + f"\n{SOURCE}z{i} = [{i}]\n")
    return tmp_path


def test_the_depth_of_every_character_is_that_of_its_span():
    start = np.arange(len(SOURCE), dtype=np.int32)
    assert character_depths("m.py", SOURCE).tolist() == code_depth("m.py", SOURCE, start, start + 1)
    assert character_depths("m.py", "f(x)").tolist() == [0, 1, 1, 1]  # the example of the docstring
    assert character_depths("m.py", "\n\n").tolist() == [0, 0]


def test_strings_are_stretches_of_files_with_the_depths_of_their_places(folder):
    task = parse_task(f"code-depth?source={folder}&max_depth=2")
    files = {p.read_text(): p.name for p in folder.glob("*.py")}
    for split in SIDES:
        strings, labels = task.sample_labelled(40, 25, np.random.default_rng(1), split, ["depth"])
        for string, depths in zip(strings, labels["depth"], strict=True):
            text = "".join(task.symbols[i] for i in string)
            options = []
            for content, name in files.items():
                at = content.find(text)
                while at >= 0:
                    start = np.arange(at, at + 25, dtype=np.int32)
                    options.append([min(2, d) for d in code_depth(name, content, start, start + 1)])
                    at = content.find(text, at + 1)
            assert depths.tolist() in options
        assert labels["depth"].max() == 2  # deeper ones are cut to it


def test_no_file_is_on_two_sides(folder):
    task = parse_task(f"code-depth?source={folder}")
    files: dict[str, set[bytes]] = {}
    for split in SIDES:
        strings = [bytes(s) for s in task.sample(3000, 12, np.random.default_rng(2), split).astype(np.uint8)]
        files[split] = {s[7:9] for s in strings if s.startswith(b"# file ")}
    assert all(files.values())
    assert not (files["train"] & files["test"] or files["train"] & files["validation"])
    assert not files["test"] & files["validation"]


def test_every_place_of_every_file_is_drawn_evenly(folder):
    task = parse_task(f"code-depth?source={folder}")
    strings = task.sample(20_000, 5, np.random.default_rng(3))
    places = len((folder / "m11.py").read_text()) - 4
    share = np.mean([bytes(s.astype(np.uint8)) == b"class" for s in strings])
    assert abs(share - 1 / places) < 4 * np.sqrt(1 / places / 20_000)


def test_the_same_generator_draws_the_same_and_the_spec_names_the_content(folder):
    task = parse_task(f"code-depth?source={folder}")
    assert "digest=" in task.spec and parse_task(task.spec) == task
    drawn = [task.sample(5, 9, np.random.default_rng(4)) for _ in range(2)]
    assert (drawn[0] == drawn[1]).all()
    with pytest.raises(DataError, match="not those that this task was made with"):
        parse_task(f"code-depth?source={folder}&digest=0123456789ab")


def test_files_that_cannot_be_read_are_left_out(tmp_path):
    (tmp_path / "good.py").write_text("x = (1)\n" * 20)
    (tmp_path / "broken.py").write_text("x = ((1\n")
    (tmp_path / "other.py").write_text("x = 'é'\n")
    task = parse_task(f"code-depth?source={tmp_path}")
    assert task._corpus.left_out == 2
    side = next(s for s in SIDES if len(task._corpus.files[s]))
    assert set(task.sample(50, 4, np.random.default_rng(0), side).ravel()) <= set(b"x = (1)\n")
    with pytest.raises(RequestError, match="has 1000 characters"):
        task.sample(1, 1000, np.random.default_rng(0), side)


def test_a_string_alone_has_no_labels_and_no_other_task_takes_them(folder):
    task = parse_task(f"code-depth?source={folder}")
    with pytest.raises(RequestError, match="whole files"):
        task.label(np.zeros((1, 3), np.int64), "depth")
    with pytest.raises(RequestError, match="follow from more than a string"):
        parse_task(f"parity?labels=code-depth?source={folder}")
    both = parse_task(f"code-depth?source={folder}&labels=parity")
    strings, labels = both.sample_labelled(4, 9, np.random.default_rng(5), "test", ["parity"])
    assert (labels["parity"] == np.cumsum(strings % 2, 1) % 2).all()


def test_wrong_requests_are_refused(tmp_path):
    with pytest.raises(RequestError, match="no folder"):
        parse_task(f"code-depth?source={tmp_path}/none")
    with pytest.raises(DataError, match="no Python files"):
        parse_task(f"code-depth?source={tmp_path}")
    with pytest.raises(RequestError, match="at least 1"):
        parse_task(f"code-depth?source={tmp_path}&max_depth=0")
