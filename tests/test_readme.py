"""The README is a session: its commands are the program's, and its outputs are what they print."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from layerlake.__main__ import app
from processes import environment

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = ("docs/extraction.md", "docs/guarantees.md", "docs/models.md", "docs/training.md")
pytestmark = pytest.mark.skipif(not README.is_file(), reason="the tests stand alone, without the README beside them")

_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README.read_text(), re.DOTALL)


def session() -> list[tuple[str, str]]:
    """The commands of all console blocks with the output shown for each."""
    steps = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            steps.append((command, output.rstrip("\n")))
    return steps


def options_of(command: str) -> set[str]:
    group = typer.main.get_command(app)
    found = group.commands[command]  # pyright: ignore[reportAttributeAccessIssue]
    return {o for p in found.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h", "--debug"}


def test_commands_and_options_of_the_readme_are_the_programs():
    text = "\n".join(p.read_text() for p in (README, *(ROOT / page for page in PAGES)))
    known = set(typer.main.get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]
    shown = re.findall(r"layerlake ([a-z]+) ([^`\n|]*)", "\n".join(c for c, _ in session()) + "\n" + text)
    named = {command for command, _ in shown if command in known}
    assert named == known
    for command, rest in shown:
        if command in known:
            assert set(re.findall(r"(?<!\S)--?[A-Za-z][\w-]*", rest)) <= options_of(command), (command, rest)
    everywhere = set().union(*(options_of(c) for c in known)) | {"--version"}
    assert set(re.findall(r"`(--[a-z][\w-]*)", text)) <= everywhere


def test_the_demo_script_runs_the_commands_of_the_readme():
    script = re.sub(r"\\\n\s*", "", (ROOT / "demo.sh").read_text())
    demo = [line.removeprefix("run ").split() for line in script.splitlines() if line.startswith("run layerlake")]
    readme = [c.split() for c, _ in session()]
    plain = [[w.strip('"').replace("$LAKE", "demo-lake") for w in words] for words in demo]
    for words in plain:
        assert words in [[w.strip('"') for w in r] for r in readme], words


def test_the_adapter_shown_names_what_an_adapter_takes():
    """The example runs as it stands, on a module that has what it names."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleDict({"key": nn.Linear(4, 4)})
            self.mlp = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(self.attention["key"](x))

    class MyModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(9, 4)
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x)
            return x

    for page in ("README.md", *PAGES):
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            if "def my_model" in block:
                names = {"MyModule": MyModule}
                exec(block, names)  # the example of the page
                points = [p.name for p in names["my_model"]().points()]
                assert {"embed", "mlp_out-0", "keys-1", "resid_post-1"} <= set(points)


def test_the_example_of_a_model_that_is_built_here_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["logits"].shape == (1, 3, 2)
    assert names["about"]["task"] == "parity" and names["model"].config == names["config"]


def test_links_between_pages_lead_somewhere():
    for page in ("README.md", *PAGES):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).is_file(), (page, target)


def test_the_picture_is_there():
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", README.read_text()):
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> tuple[Path, list[str]]:
    """Run every console command of the README, in order, in one shell and one fresh folder."""
    folder = tmp_path_factory.mktemp("readme")
    mark = "=== next command ==="
    script = "set -e\n" + "".join(f"echo '{mark}'\n{command}\n" for command, _ in session())
    scripts = Path(sys.executable).parent
    env = environment()
    env["PATH"] = f"{scripts}:{env['PATH']}"
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=folder, env=env, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    return folder, [part.strip("\n") for part in result.stdout.split(f"{mark}\n")[1:]]


def test_outputs_of_the_readme_are_those_seen(outputs):
    """The same words and numbers, where Python is of the version that the README was made with.

    Counts are the same; statistics to their last printed digit, and figures of probes to 0.02, as other processors
    round otherwise.
    """
    same_sources = sys.version_info[:3] == (3, 11, 7)
    for (command, shown), seen in zip(session(), outputs[1], strict=True):
        assert _NUMBER.sub("N", squeezed(seen)) == _NUMBER.sub("N", squeezed(shown)) or not same_sources, (
            f"$ {command}\n{seen}"
        )
        if same_sources:
            for now, then in zip(_NUMBER.findall(seen), _NUMBER.findall(shown), strict=True):
                assert abs(number(now) - number(then)) <= allowed(command, then), f"$ {command}\n{seen}"
        else:
            assert bool(seen) == bool(shown), command


def test_the_python_of_the_readme_runs(outputs, monkeypatch):
    monkeypatch.chdir(outputs[0])
    examples = "\n".join(b for b in blocks("python") if ">>>" in b)
    test = doctest.DocTestParser().get_doctest(examples, {}, "README", "README.md", 0)
    result = doctest.DocTestRunner(verbose=False).run(test)
    assert result.attempted >= 7
    assert result.failed == 0


def allowed(command: str, shown: str) -> float:
    decimals = shown.partition(".")[2]
    if not decimals:
        return 0.0
    return 0.02 if "probe" in command else 1.01 * 10.0 ** -len(decimals)


def squeezed(text: str) -> str:
    """Leave out what follows from widths of columns: runs of spaces and rules."""
    return re.sub(r"─+", "─", re.sub(r" +", " ", text)).strip()


def number(text: str) -> float:
    return float(text.replace(",", ""))
