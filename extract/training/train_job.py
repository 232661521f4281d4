"""Training a cell: its seeds are the items of a job on an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import RequestError, TrainingError
from ..engine import Item, Job, make_engine
from ..tasks import parse_task
from .cell import Cell, seed_folder
from .evaluation import LENGTHS, STRINGS, check_evaluation
from .recipe import Recipe
from .recipes import default_options, default_recipe
from .sources import NewModel
from .task_data import TaskData
from .train_worker import is_evaluation, load_trained, read_result
from .watch import TrainingWatch

SAVE_EVERY_S = 30.0


@dataclass
class TrainReport:
    """What became of the seeds of a cell."""

    out: Path
    results: list[dict[str, Any]]
    """What each seed's training.json says, in the order that was asked for."""
    trained: list[int]
    """The seeds that something was done for; the others were finished before."""
    lost_workers: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Give it as plain data, with the folder of each seed."""
        seeds = [{"folder": str(seed_folder(self.out, r["seed"]))} | r for r in self.results]
        return {"out": str(self.out), "seeds": seeds, "trained": self.trained, "lost_workers": self.lost_workers}


def train(
    architecture: str,
    task: str,
    out: str | Path,
    *,
    target: str | None = None,
    options: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    seeds: Sequence[int] = (0,),
    lengths: Sequence[int] | None = None,
    strings: int = STRINGS,
    engine: str = "inline",
    workers: int = 1,
    threads: int = 1,
    ray_address: str | None = None,
    save_every_s: float = SAVE_EVERY_S,
) -> TrainReport:
    """Train an architecture on a task with each of the `seeds`, into the folders ``out/seed-N``.

    `options` are the model's (`make_config`), `recipe` defaults to the cell's own, `target` to the task's first. The
    rest is as in `train_cell`.
    """
    return train_cell(
        new_cell(architecture, task, target=target, options=options, recipe=recipe),
        out,
        seeds=seeds,
        lengths=lengths,
        strings=strings,
        engine=engine,
        workers=workers,
        threads=threads,
        ray_address=ray_address,
        save_every_s=save_every_s,
    )


def new_cell(
    architecture: str,
    task: str,
    *,
    target: str | None = None,
    options: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
) -> Cell:
    """Put together a cell of an architecture that starts from random weights."""
    data = TaskData(parse_task(task), target)
    source = NewModel.of(architecture, default_options(architecture, task) | dict(options or {}), data)
    return Cell(source, data, recipe or default_recipe(architecture, task))


def fine_tuning_cell(
    model: str,
    task: str,
    *,
    revision: str | None = None,
    target: str | None = None,
    options: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
) -> Cell:
    """Put together a cell of a pretrained model: a folder in Hugging Face form, or a hub name with its revision.

    It is loaded for that. `options` are those of `PretrainedModel.of`.
    """
    from .pretrained import PretrainedModel  # it loads models of all kinds, which a new one does not need

    data = TaskData(parse_task(task), target)
    source = PretrainedModel.of(model, options or {}, data, revision=revision)
    return Cell(source, data, recipe or default_recipe(None, task))


def train_cell(
    cell: Cell,
    out: str | Path,
    *,
    seeds: Sequence[int] = (0,),
    lengths: Sequence[int] | None = None,
    strings: int = STRINGS,
    engine: str = "inline",
    workers: int = 1,
    threads: int = 1,
    ray_address: str | None = None,
    save_every_s: float = SAVE_EVERY_S,
) -> TrainReport:
    """Train a cell with each of the `seeds`, into the folders ``out/seed-N``.

    Each trained model is measured on `strings` test strings at each of the `lengths` (default: the trained one, 40, 60,
    80, 100 and 120). What is finished is not done again, and what was stopped goes on; `SettingsDifferError` when
    `out` holds another cell. `TrainingError`, after all other seeds were trained, names those whose loss was no number.
    """
    out = Path(out).expanduser().resolve()
    chosen = make_engine(engine, workers=workers, threads=threads, ray_address=ray_address)
    if not seeds or any(s < 0 for s in seeds) or len(set(seeds)) < len(seeds):
        raise RequestError(f"Seeds are different whole numbers from 0 on, at least one, not {list(seeds)}.")
    lengths = default_lengths(cell.recipe.length) if lengths is None else list(dict.fromkeys(lengths))
    check_evaluation(lengths, strings)
    cell.data.check_lengths(cell.recipe.lengths, lengths)
    cell.data.majority(cell.recipe.length)
    cell.claim(out)
    folders = {seed: seed_folder(out, seed) for seed in seeds}
    todo = [s for s in seeds if not _is_done(cell, folders[s], s, lengths, strings)]
    spec = {
        "out": str(out),
        "cell": cell.to_json(),
        "lengths": lengths,
        "strings": strings,
        "save_every_s": save_every_s,
    }
    diverged: list[str] = []

    def on_record(key: str, record: dict[str, Any]) -> None:
        if record["diverged"]:
            diverged.append(record["diverged"])

    lost: list[str] = []
    if todo:
        job = Job(f"{__package__}.train_worker:TrainWorker", spec, [Item(f"seed-{s}", {"seed": s}) for s in todo])
        with chosen, TrainingWatch({s: folders[s] for s in todo}, cell.recipe.steps):
            lost = chosen.run(job, on_record).lost_workers
    if diverged:
        raise TrainingError("\n".join(diverged))
    results = [r for s in seeds if (r := read_result(folders[s])) is not None]
    return TrainReport(out, results, todo, lost)


def default_lengths(trained: int) -> list[int]:
    """Give the lengths to measure at when none are asked for: the trained one and the study's above it."""
    return [trained, *(n for n in LENGTHS if n > trained)]


def _is_done(cell: Cell, folder: Path, seed: int, lengths: Sequence[int], strings: int) -> bool:
    result = read_result(folder)
    if result is None or not is_evaluation(result["evaluation"], list(lengths), strings):
        return False
    load_trained(cell, folder, seed)  # what is not there, or damaged, is not called finished
    return True
