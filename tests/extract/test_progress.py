"""Progress: a line now and then where there is no terminal, a bar on a real one."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import time

from layerlake.extract.progress import LINE_EVERY_S, Progress
from processes import environment, layerlake_command


def test_a_line_comes_also_while_no_item_ends():
    assert LINE_EVERY_S == 30
    out = io.StringIO()
    with Progress(4, "units", "tokens", total_amount=100, stream=out, line_every=0.1) as progress:
        time.sleep(0.25)
        silent = out.getvalue()
        progress.advance(25)
        time.sleep(0.15)
    lines = out.getvalue().splitlines()
    assert silent.startswith("0/4 units, ") and "so far" in silent
    assert re.fullmatch(r"1/4 units, [\d,]+ tokens/s, 0:\d\d left", lines[-1])
    count = len(lines)
    time.sleep(0.2)
    assert len(out.getvalue().splitlines()) == count  # it ends with its block


def test_a_short_job_prints_nothing_where_there_is_no_terminal():
    out = io.StringIO()
    with Progress(2, "units", stream=out) as progress:
        progress.advance()
        progress.advance()
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar_with_rate_and_time_left(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n' * 300)
    command = layerlake_command(
        "extract", "toy_models:slow", tmp_path / "d.jsonl", "--lake", tmp_path / "lake", "--batch-tokens", 64
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env=environment() | {"TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other side was closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, seen
    assert b"is complete" in out
    seen = re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", seen)  # colours and cursor movements
    assert re.search(rb"\d+/\d+ units [\d,]+ tokens/s, 0:\d\d left", seen), seen
