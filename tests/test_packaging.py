"""What is installed: one top-level name, and every room's folder."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="the tests stand alone, without the sources beside them"
)


def test_the_list_of_packages_is_the_list_of_folders():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    tracked = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, cwd=ROOT, check=True)
    parents = {Path(p).parent for p in tracked.stdout.split()}
    folders = {p for p in parents if "tests" not in p.parts}
    assert set(listed) == {".".join(["layerlake", *p.parts]) for p in folders}


def test_imports_run_one_way_only():
    """store knows nothing of extract, extract nothing of analyze."""
    for room, above in (("store", ("extract", "analyze")), ("extract", ("analyze",))):
        for path in (ROOT / room).glob("*.py"):
            for line in path.read_text().splitlines():
                assert not any(f"from ..{a}" in line or f"layerlake.{a}" in line for a in above), f"{path}: {line}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True, capture_output=True, timeout=300
    )
    return next(out.glob("*.whl"))


def test_the_wheel_has_one_top_level_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"layerlake"}
    assert {f"layerlake/{r}/cli.py" for r in ("store", "extract", "analyze")} <= set(names)
    assert not [n for n in names if "tests" in n]


def test_the_installed_wheel_runs_from_another_folder(wheel, tmp_path):
    """Unpacked as pip would: the program answers, and its imports come from there and not from the clone."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import layerlake.__main__ as m, layerlake; "
        f"assert layerlake.__file__.startswith({str(site)!r}), layerlake.__file__; "
        "from layerlake import Lake, Probe, extract; sys.exit(m.main(['--version']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120
    )
    assert (result.returncode, result.stdout.split()[0]) == (0, "layerlake"), result.stderr
