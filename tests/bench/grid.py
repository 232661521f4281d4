"""The cells of the formal study: ``python tests/bench/grid.py --folder formal-grid``, or ``make grid``.

Trains every architecture on every task by the recipe of the cell (`layerlake train ARCH TASK --out FOLDER/ARCH-TASK`),
goes on where it was left, and writes what was reached as a table for people and as Parquet: every cell that is there,
and the name of every one that is not. With ``--collect`` nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from layerlake.extract.models import ARCHITECTURES

TASKS = ("parity", "s3", "dyck", "code-depth")
LENGTHS = (40, 60, 80, 100, 120)
REACHED = 0.99

INTRODUCTION = """# The formal grid

What each architecture reaches on each task: trained at length 40 by the one recipe of its cell
(`extract/training/recipes.py`, and in every checkpoint), measured at 40 to 120 on 500 test strings a length that no
training saw. Made by `make grid`, which for each cell runs

    layerlake train ARCHITECTURE TASK --out formal-grid/ARCHITECTURE-TASK --seeds {seeds}

and can be stopped and started again; a line is also in [formal-grid.parquet](formal-grid.parquet), a row a length, with
options, recipe, accuracy at last positions and of whole strings, and the majority baseline. Accuracies are shares of
positions. `99 % at step` is the first look (each 50 steps) at which 99 % of the positions of 256 validation strings of
length 40 were right, `CPU s` one thread's. `no positions`: a table of positions that was trained at length 40 has none
beyond. Code-Depth is a budget of 1,500 steps: what opened a block may lie before the string, so nobody can be right
everywhere; its majority baseline at length 40 is {code_depth}.

"""

SCHEMA = pa.schema(
    [
        ("architecture", pa.string()),
        ("task", pa.string()),
        ("target", pa.string()),
        ("seed", pa.int32()),
        ("parameters", pa.int64()),
        ("options", pa.string()),  # of the model, as JSON
        ("recipe", pa.string()),  # as JSON
        ("steps", pa.int64()),
        ("stopped", pa.string()),
        ("steps_to_99", pa.int64()),  # the first look at full length with 99 % of the validation tokens right
        ("cpu_seconds_to_99", pa.float64()),
        ("cpu_seconds", pa.float64()),
        ("best_validation", pa.float64()),  # token accuracy, full length
        ("length", pa.int32()),
        ("token", pa.float64()),  # accuracies on the test side; NULL where the model has no positions
        ("last", pa.float64()),
        ("string", pa.float64()),
        ("majority", pa.float64()),
        ("strings", pa.int32()),
        ("layerlake", pa.string()),
        ("torch", pa.string()),
        ("cpu", pa.string()),
    ]
)


def facts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Give what a finished training says of itself, a row a length."""
    cell = result["cell"]
    recipe, model = cell["recipe"], dict(cell["model"])
    full = [h for h in result["history"] if h["length"] == recipe["length"]]
    there = next((h for h in full if h["token"] >= REACHED), None)
    same = {
        "architecture": model.pop("architecture"),
        "task": cell["task"],
        "target": cell["target"],
        "seed": result["seed"],
        "parameters": result["parameters"],
        "options": json.dumps(model, sort_keys=True),
        "recipe": json.dumps(recipe, sort_keys=True),
        "steps": result["steps"],
        "stopped": result["stopped"],
        "steps_to_99": there and there["step"],
        "cpu_seconds_to_99": there and there["cpu_seconds"],
        "cpu_seconds": result["cpu_seconds"],
        "best_validation": max((h["token"] for h in full), default=None),
        "strings": result["evaluation"]["strings"],
        "layerlake": result["compute"]["layerlake"],
        "torch": result["compute"]["torch"],
        "cpu": result["compute"]["cpu"],
    }
    measures = ("length", "token", "last", "string", "majority")
    return [same | {m: at.get(m) for m in measures} for at in result["evaluation"]["lengths"]]


def collect(folder: Path) -> tuple[pa.Table, list[str]]:
    """Read every finished seed below `folder`, and name the cells that have none."""
    rows, missing = [], []
    for architecture in ARCHITECTURES:
        for task in TASKS:
            found = sorted((folder / f"{architecture}-{task}").glob("seed-*/training.json"))
            finished = [r for r in (json.loads(f.read_bytes()) for f in found) if "evaluation" in r]
            for result in finished:
                rows += facts(result)
            if not finished:
                missing.append(f"{architecture} on {task}")
    return pa.Table.from_pylist(rows, SCHEMA), missing


def markdown(table: pa.Table, missing: list[str]) -> str:
    """Write the table for people: a line a cell and seed."""
    head = ["cell", "seed", "parameters", "steps", "99 % at step", "CPU s to 99 %", "CPU s", *map(str, LENGTHS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    by_cell: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        by_cell.setdefault((row["architecture"], row["task"], row["seed"]), []).append(row)
    for (architecture, task, seed), rows in by_cell.items():
        first = rows[0]
        at = {r["length"]: r["token"] for r in rows}
        cells = [
            f"{architecture} on {task.partition('?')[0]}",
            str(seed),
            f"{first['parameters']:,}",
            f"{first['steps']:,}",
        ]
        best = first["best_validation"]
        if first["steps_to_99"]:
            cells += [f"{first['steps_to_99']:,}", f"{first['cpu_seconds_to_99']:,.0f}"]
        else:
            cells += [f"not reached ({'no look at 40' if best is None else f'{best:.3f} at most'})", ""]
        cells.append(f"{first['cpu_seconds']:,.0f}")
        cells += [f"{at[n]:.3f}" if at.get(n) is not None else "no positions" for n in LENGTHS]
        lines.append("| " + " | ".join(cells) + " |")
    gaps = "; ".join(missing) if missing else "none"
    of_code = [r["majority"] for r in table.to_pylist() if r["task"].startswith("code-depth") and r["length"] == 40]
    seeds = ",".join(map(str, sorted(set(table["seed"].to_pylist()))))
    introduction = INTRODUCTION.format(seeds=seeds, code_depth=f"{of_code[0]:.3f}" if of_code else "not measured")
    return introduction + "\n".join([*lines, "", f"Not trained here: {gaps}."]) + "\n"


def main() -> int:
    """Train what is not trained, unless told not to, and write what was reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("formal-grid"), help="where cells are trained")
    parser.add_argument("--out", type=Path, default=Path("formal-grid"), help="the table's path, without its ending")
    parser.add_argument("--seeds", default="0", help="as 0,1,2")
    parser.add_argument("--collect", action="store_true", help="train nothing")
    asked = parser.parse_args()
    if not asked.collect:
        for architecture in ARCHITECTURES:
            for task in TASKS:
                cell = asked.folder / f"{architecture}-{task}"
                command = [sys.executable, "-m", "layerlake", "train", architecture, task, "--out", str(cell)]
                subprocess.run([*command, "--seeds", asked.seeds], check=True)
    table, missing = collect(asked.folder)
    pq.write_table(table, asked.out.with_suffix(".parquet"))
    asked.out.with_suffix(".md").write_text(markdown(table, missing))
    print(markdown(table, missing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
