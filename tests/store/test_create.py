"""Making a lake and a run: at once or not at all, killed between any two steps, by several at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from lakes import make_run
from layerlake.errors import LakeFormatError, RequestError
from layerlake.store.catalog import publish_catalog
from layerlake.store.durable import ABANDONED_AFTER_S
from layerlake.store.lake import Lake
from layerlake.store.layout import make_lake
from processes import environment

KILLED = """
    import os, sys
    from pathlib import Path
    import zarr
    from dying import die_at_each_step
    from lakes import make_run

    steps = [(os, "mkdir"), (os, "rename"), (os, "link"), (os, "fsync"), (Path, "write_bytes")]
    root, stride = Path(sys.argv[1]), int(sys.argv[2])
    print(die_at_each_step(steps, lambda m: lambda: make_run(root / f"lake{m}", commit=False), stride))
"""


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_between_any_two_steps_there_is_a_run_or_none_and_the_next_one_works(tmp_path, stride):
    code = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), str(stride)]
    done = subprocess.run(code, capture_output=True, text=True, env=environment(), timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    states = []
    for moment in range(int(done.stdout)):
        root = tmp_path / f"lake{stride * moment}"
        try:
            states.append(Lake.open(root).runs())
        except LakeFormatError:
            states.append(["no lake"])
        if states[-1] == ["toy"]:
            run = Lake.open(root).run("toy")
            assert run.record.units == 3
        else:
            make_run(root, commit=False)
        publish_catalog(root)
        assert Lake.open(root).verify() == []
    assert states[0] == ["no lake"]
    assert states[-1] == ["toy"]
    assert [] in states
    assert states == sorted(states, key=[["no lake"], [], ["toy"]].index)


RACE = """
    import sys
    from pathlib import Path
    from lakes import make_run
    print("ready", flush=True)
    sys.stdin.readline()
    run = make_run(Path(sys.argv[1]), name=sys.argv[2], commit=False)[0]
    print(run.name, run.record.identity)
"""


@pytest.mark.parametrize("attempts", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_several_first_makers_at_once_all_succeed(tmp_path, attempts):
    for attempt in range(attempts):
        root = tmp_path / f"lake{attempt}"
        makers = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(RACE), str(root), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            )
            for name in ("same", "same", "other", "third")
        ]
        for maker in makers:
            assert maker.stdout and maker.stdout.readline() == "ready\n"
        answers = []
        for maker in makers:
            assert maker.stdin
            maker.stdin.write("\n")
            maker.stdin.flush()
        for maker in makers:
            out, err = maker.communicate(timeout=60)
            assert maker.returncode == 0, err
            answers.append(out.split())
        assert sorted(a[0] for a in answers) == ["other", "same", "same", "third"]
        assert answers[0] == answers[1]
        assert Lake.open(root).runs() == ["other", "same", "third"]
        assert not list(root.rglob("*.tmp"))


def test_what_killed_makers_left_is_swept_after_an_hour(tmp_path):
    make_run(tmp_path, name="one")
    old, fresh = (tmp_path / "runs" / f"x.{n}.0123456789ab.tmp" for n in (1, 2))
    for folder in (old, fresh):
        (folder / "plan").mkdir(parents=True)
        (folder / "plan" / "tokens.parquet").write_bytes(b"half")
    long_ago = time.time() - ABANDONED_AFTER_S - 10
    for path in (old / "plan" / "tokens.parquet", old / "plan", old):
        os.utime(path, (long_ago, long_ago))
    (tmp_path / f"lake.json.{os.getpid()}.0123456789ab.tmp").write_bytes(b"")
    os.utime(tmp_path / f"lake.json.{os.getpid()}.0123456789ab.tmp", (long_ago, long_ago))
    make_run(tmp_path, name="two")
    assert [p.name for p in tmp_path.rglob("*.tmp")] == [fresh.name]


def test_a_folder_that_holds_other_things_is_no_place_for_a_lake(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="holds other things"):
        make_lake(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="is a file"):
        make_lake(tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "notes.txt"]
    make_lake(tmp_path / "new" / "deep")
    make_lake(tmp_path / "new" / "deep")
    assert Lake.open(Path(tmp_path / "new" / "deep")).runs() == []
