"""The program from outside: help, exit codes, sentences instead of tracebacks, JSON for programs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from layerlake.__main__ import main
from processes import environment, layerlake_command, run_layerlake

COMMANDS = ("extract", "sql", "ls", "show", "annotate", "index", "verify", "rm", "repair", "probe", "train", "convert")


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(0)
    rows = []
    for i in range(40):
        ids = rng.integers(0, 50, int(rng.integers(2, 12))).tolist()
        rows.append({"input_ids": ids, "even": [t % 2 == 0 for t in ids], "one": 1, "side": i % 2})
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    result = run_layerlake(
        "extract", "toy_models:tuples", folder / "d.jsonl", "--lake", folder / "lake", "--run", "toy",
        "--label-column", "even", "--label-column", "one", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["run"] == "toy"
    return folder / "lake"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_an_example(command):
    result = run_layerlake(command, "--help")
    assert result.returncode == 0
    assert f"Example: layerlake {command}" in result.stdout
    assert "--json" in result.stdout


def test_the_front_page_names_every_command_and_the_exit_codes():
    for arguments in ([], ["--help"]):
        result = run_layerlake(*arguments)
        assert result.returncode == 0
        assert all(f"\n  {c} " in result.stdout for c in COMMANDS)
        assert "Exit codes" in result.stdout
    assert run_layerlake("--version").stdout.startswith("layerlake ")


def test_asking_wrongly_is_exit_code_2_and_one_sentence(lake, capsys):
    data = lake.parent / "d.jsonl"
    cases = [
        ["bogus"],
        ["sql"],
        ["sql", "SELECT 1"],
        ["ls", "--lake", ""],
        ["sql", "SELECT 1; SELECT 2", "--lake", lake],
        ["sql", "DROP TABLE tokens", "--lake", lake],
        ["sql", "SELECT * FROM nowhere", "--lake", lake],
        ["show", "toi", "--lake", lake],
        ["verify", "--run", "toi", "--lake", lake],
        ["rm", "toi", "--lake", lake, "--yes"],
        ["rm", "../toy", "--lake", lake, "--yes"],
        ["repair", "--run", "toi", "--lake", lake],
        ["repair", "--lake", lake, "--workers", "2"],
        ["annotate", "toi", data, "--lake", lake],
        ["annotate", "toy", lake / "no-such-file.csv", "--lake", lake],
        ["annotate", "toy", data, "--lake", lake],
        ["extract", "toy_models:tuples", lake / "no-such-file.txt", "--lake", lake],
        ["extract", "toy_models:tuples", data, "--lake", lake, "--layer", "deep"],
        ["extract", "toy_models:tuples", data, "--lake", lake, "--site", "resid_pots"],
        ["extract", "toy_models:tuples", data, "--lake", lake, "--run", "toy", "--dtype", "bfloat16"],
        ["extract", "toy_models:tuples", data, "--lake", lake, "--workers", "2"],
        ["extract", "toy_models:tuples", data, "--lake", lake, "--label", "code-deph"],
        ["extract", "toy_models:tuples", data, "--lake", "s3://bucket/lake"],
        ["probe", "toy", "--lake", lake, "--label", "evn"],
        ["probe", "toy", "--lake", lake, "--label", "one"],
        ["probe", "toy", "--lake", lake, "--label", "even", "--by", "token"],
        ["probe", "toy", "--lake", lake, "--label", "even", "--layer", "9"],
        ["probe", "toy", "--lake", lake, "--label", "even", "--where", "nonsense ="],
        ["probe", "toy", "--lake", lake, "--label", "even", "--where", "pos > 99"],
        ["probe", "toy", "--lake", lake, "--label", "even", "--plot", lake.parent / "p.doc"],
        ["probe", "toy", "--lake", lake, "--label", "even", "--seeds", "0"],
        ["train", "lstmm", "parity", "--out", lake.parent / "cell"],
        ["train", "lstm", "paritty", "--out", lake.parent / "cell"],
        ["train", "lstm", "parity", "--out", lake.parent / "cell", "--set", "d_sate=16"],
        ["train", "lstm", "parity", "--out", lake.parent / "cell", "--set", "layers"],
        ["train", "lstm", "parity", "--out", lake.parent / "cell", "--recipe", "learning_rate=1"],
        ["train", "lstm", "parity", "--out", lake.parent / "cell", "--curriculum", "start=5"],
        ["train", "lstm", "parity", "--out", lake.parent / "cell", "--seeds", "0,0"],
        ["train", "lstm", "parity", "--out", lake.parent / "cell", "--length", "0"],
        ["train", "lstm", "parity", "--out", data],
    ]
    for arguments in cases:
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), (arguments, out, err)
        assert err.startswith("layerlake: "), arguments
        assert "Traceback" not in err, arguments
        assert "fault of layerlake" not in err, arguments


def test_a_failed_world_is_exit_code_1(lake, tmp_path):
    nothing = run_layerlake("ls", "--lake", tmp_path)
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "is not a lake" in nothing.stderr
    broken = run_layerlake("extract", "toy_models:raises", lake.parent / "d.jsonl", "--lake", tmp_path / "lake")
    assert broken.returncode == 1
    assert "no weights at 3" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert not (tmp_path / "lake").exists()


def test_debug_shows_the_traceback_before_or_after_the_command(tmp_path):
    for arguments in (["--debug", "ls", "--lake", tmp_path], ["ls", "--lake", tmp_path, "--debug"]):
        result = run_layerlake(*arguments)
        assert result.returncode == 1
        assert "Traceback" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("layerlake: ")


def test_json_is_one_document_with_nothing_around_it(lake):
    runs = json.loads(run_layerlake("ls", "--lake", lake, "--json").stdout)
    assert [(r["run"], r["arrays"]) for r in runs] == [("toy", 3)]
    shown = json.loads(run_layerlake("show", "toy", "--lake", lake, "--json").stdout)
    assert [a["site"] for a in shown["arrays"]] == ["embed", "resid_post", "resid_post"]
    query = "SELECT 1.5 AS a, 'nan'::DOUBLE AS b, NULL AS c, 'x' AS d"
    rows = json.loads(run_layerlake("sql", query, "--lake", lake, "--json").stdout)
    assert rows == [{"a": 1.5, "b": "NaN", "c": None, "d": "x"}]
    assert json.loads(run_layerlake("verify", "--lake", lake, "--json").stdout) == {"runs": ["toy"], "problems": []}
    indexed = json.loads(run_layerlake("index", "--lake", lake, "--json").stdout)
    assert (indexed["runs"], indexed["tokens"]) == (1, shown["planned"]["tokens"])


def test_sql_says_when_rows_are_left_out(lake):
    query = "SELECT row FROM tokens ORDER BY row"
    cut = run_layerlake("sql", query, "--lake", lake).stdout.splitlines()
    assert cut[-1].startswith("40 of ")
    whole = run_layerlake("sql", query, "--lake", lake, "--all").stdout.splitlines()
    counted = run_layerlake("sql", "SELECT count(*) AS n FROM tokens", "--lake", lake, "--json").stdout
    total = json.loads(counted)[0]["n"]
    assert len(whole) == total + 2
    plan = run_layerlake("sql", "EXPLAIN SELECT 1", "--lake", lake)
    assert plan.returncode == 0
    assert "projection" in plan.stdout.lower()


def test_a_reader_that_leaves_early_is_no_error_message(lake):
    command = layerlake_command("sql", "SELECT * FROM range(20000)", "--lake", lake, "--all")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_verify_names_a_flipped_byte(lake, tmp_path):
    import shutil

    copy = tmp_path / "lake"
    shutil.copytree(lake, copy)
    shard = copy / "runs" / "toy" / "activations.zarr" / "resid_post-1" / "c.0.0"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    result = run_layerlake("verify", "--lake", copy)
    assert result.returncode == 1
    assert "activations.zarr/resid_post-1/c.0.0: holds other values than were written, from row 0" in result.stdout
    assert result.stdout.splitlines()[-1] == "Checked 1 run, 2 units: 1 problem."
    assert run_layerlake("verify", "--lake", lake).returncode == 0


def test_only_what_a_command_needs_is_imported(lake):
    code = (
        "import sys; from layerlake.__main__ import main; "
        f"assert main(['sql', 'SELECT 1', '--lake', {str(lake)!r}]) == 0; "
        "print(sorted({'torch', 'ray', 'transformers', 'sklearn', 'matplotlib', 'zarr'} & sys.modules.keys()))"
    )
    import sys

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True, timeout=60
    )
    assert result.stdout.splitlines()[-1] == "[]"
