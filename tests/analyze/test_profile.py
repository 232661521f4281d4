"""The profile: facts as rows, a table, and a picture whose bytes repeat."""

from __future__ import annotations

import builtins
import sys

import numpy as np
import pytest
from layerlake.analyze.probe import Probe
from layerlake.analyze.profile import Profile, ProfileEntry
from layerlake.errors import MissingExtraError, RequestError
from rich.console import Console


@pytest.fixture(scope="module")
def profile():
    """Three places of a pretend model, the label readable ever better."""
    rng = np.random.default_rng(0)
    y, groups = rng.integers(0, 2, 600), np.repeat(np.arange(60), 10)
    entries = []
    for site, layer, strength in (("embed", None, 0.0), ("resid_post", 0, 1.0), ("resid_post", 1, 5.0)):
        X = rng.normal(size=(600, 4))
        X[:, 0] += strength * y
        entries.append(ProfileEntry.of(Probe(label_name="depth").fit(X, y, groups), site=site, layer=layer))
    return Profile("depth", "tiny", entries)


def shown(table, width=80):
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as text:
        console.print(table)
    return text.get()


def test_rows_hold_one_fact_each(profile):
    rows = profile.rows()
    assert {tuple(r) for r in rows} == {("run", "label", "site", "layer", "metric", "value", "seed", "reason")}
    keys = [(r["site"], r["layer"], r["metric"], r["seed"]) for r in rows]
    assert len(set(keys)) == len(keys)
    facts = dict(zip(keys, rows, strict=True))
    for entry in profile.entries:
        mean = facts[entry.site, entry.layer, "accuracy", None]
        assert mean["value"] == entry.summary["accuracy"] and mean["run"] == "tiny" and mean["label"] == "depth"
        by_seed = [facts[entry.site, entry.layer, "accuracy", seed]["value"] for seed in (0, 1, 2)]
        assert mean["value"] == pytest.approx(np.mean(by_seed))
    assert facts["embed", None, "converged", None]["value"] == 1.0
    assert facts["embed", None, "random_label", 1]["value"] is None


def test_rows_say_why_a_value_is_not_there():
    X, y = np.random.default_rng(0).normal(size=(9, 3)), list("aabbccaab")
    probe = Probe().fit(X, y, range(9), split=["train"] * 6 + ["test"] * 3)
    facts = Profile("y", "tiny", [ProfileEntry.of(probe, site="embed", layer=None)]).rows()
    undefined = [r for r in facts if r["metric"] == "auroc"]
    assert len(undefined) == 2
    assert all(r["value"] is None and "class c on the test side" in r["reason"] for r in undefined)
    assert all(r["reason"] is None for r in facts if r["metric"] != "auroc")


def test_table_shows_each_layer_beside_its_baselines_in_80_characters(profile):
    text = shown(profile.table())
    assert "How readable is depth in tiny?" in text and "600 rows, 60 groups, 3 splits" in text
    assert "…" not in text
    lines = [line.split() for line in text.splitlines() if line.split()[:1] in (["embed"], ["resid_post"])]
    assert [line[:2] for line in lines[1:]] == [["resid_post", "0"], ["resid_post", "1"]]
    s = profile.entries[2].summary
    metrics = ("accuracy", "accuracy_std", "balanced_accuracy", "majority", "random_label", "auroc")
    assert lines[2][2:] == [f"{s[m]:.3f}" for m in metrics]
    assert "*" not in text


def test_table_marks_a_layer_whose_solver_did_not_converge():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(100, 4)), rng.integers(0, 2, 100)
    entries = [
        ProfileEntry.of(Probe(max_iter=m).fit(X, y, np.arange(100)), site="resid_post", layer=i)
        for i, m in enumerate((100, 1))
    ]
    text = shown(Profile("y", "tiny", entries).table())
    accuracies = [line.split()[2] for line in text.splitlines() if "resid_post" in line]
    assert [a.endswith("*") for a in accuracies] == [False, True]
    assert "* the solver did not converge" in text


def test_square_brackets_in_names_are_shown_as_they_are():
    assert "[bold]x" in shown(Profile("[bold]x", "[run]", []).table())


@pytest.mark.parametrize(
    ("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_picture_has_the_format_of_its_suffix_and_repeats_its_bytes(profile, tmp_path, suffix, magic):
    one, two = (profile.save_picture(tmp_path / f"{n}.{suffix}") for n in "ab")
    assert one.read_bytes().startswith(magic)
    assert one.read_bytes() == two.read_bytes()
    assert b"CreationDate" not in one.read_bytes() and b"matplotlib.org" not in one.read_bytes().split(b"<defs>")[0]


def test_picture_names_what_it_shows(profile, tmp_path):
    svg = profile.save_picture(tmp_path / "p.svg").read_text()
    for words in (
        "depth",
        "tiny",
        "majority (most frequent class)",
        "shuffled labels",
        "embed",
        "layer",
    ):
        assert words in svg


def test_picture_is_900_by_500_and_leaves_pyplot_alone(profile, tmp_path):
    loaded = "matplotlib.pyplot" in sys.modules
    data = profile.save_picture(tmp_path / "p.png").read_bytes()
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (900, 500)
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_picture_follows_the_data(profile, tmp_path):
    changed = Profile("depth", "tiny", list(reversed(profile.entries)))
    one, two = profile.save_picture(tmp_path / "a.png"), changed.save_picture(tmp_path / "b.png")
    assert one.read_bytes() != two.read_bytes()


def test_picture_of_one_layer_one_seed_and_no_baseline_can_be_drawn(tmp_path):
    rng = np.random.default_rng(0)
    probe = Probe(seeds=(0,), random_label_seeds=0, max_iter=1)
    probe.fit(rng.normal(size=(60, 3)), rng.integers(0, 2, 60), np.arange(60))
    one = Profile("y", "tiny", [ProfileEntry.of(probe, site="resid_post", layer=0)])
    svg = one.save_picture(tmp_path / "p.svg").read_text()
    assert "solver did not converge" in svg and "band" not in svg


def test_other_suffixes_missing_folders_and_empty_profiles_are_refused(profile, tmp_path):
    for name in ("p.gif", "p"):
        with pytest.raises(RequestError, match=r"\.png, \.svg or \.pdf"):
            profile.save_picture(tmp_path / name)
    with pytest.raises(RequestError, match="does not exist"):
        profile.save_picture(tmp_path / "no" / "p.png")
    with pytest.raises(RequestError, match="no layers"):
        Profile("y", "tiny").save_picture(tmp_path / "p.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_names_the_extra(profile, tmp_path, monkeypatch):
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"layerlake\[plot\]"):
        profile.save_picture(tmp_path / "p.png")
