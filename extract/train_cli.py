"""The command that trains models: train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..store.cli import JsonOption
from .engine_options import EngineOption, RayAddressOption, ThreadsOption, WorkersOption
from .model_cli import RevisionOption

if TYPE_CHECKING:
    from .training.recipe import Recipe
    from .training.train_job import TrainReport

app = typer.Typer()


@app.command(
    epilog="Example: layerlake train lstm parity --out lstm-parity --seeds 0,1,2; or: layerlake train --from ./model "
    "parity --out fine-tuned"
)
def train(
    architecture: Annotated[
        str | None,
        typer.Argument(metavar="ARCH", help="transformer, mamba, mamba2, lstm or gru; left out with --from."),
    ] = None,
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="A task with its options, as parity, s3 or dyck?k=2.")
    ] = None,
    *,
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="The cell's folder; each seed has DIR/seed-N, a MODEL.")
    ],
    from_model: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Fine-tune this model with a new head: a folder in Hugging Face form, or a hub name.",
        ),
    ] = None,
    revision: RevisionOption = None,
    seeds: Annotated[str, typer.Option(metavar="N", help="Seeds to train, as 0,1,2 or 0-4.")] = "0",
    target: Annotated[str | None, typer.Option(help="The task's target to learn. Default: its first.")] = None,
    set_option: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="An option of the model, such as layers=2, or with --from freeze=true (the head alone is trained); "
            "repeat for more.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps at most.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate.")] = None,
    length: Annotated[int | None, typer.Option(help="Symbols of a training string.")] = None,
    curriculum: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Lengths that grow: start=5,grow=5,share=0.5 (over half of the steps), start=5,grow=5,accuracy=0.98 "
            "(when that is reached), or none.",
        ),
    ] = None,
    stop_at: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Validation accuracy at which to stop early, or none.")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Another field of the recipe, such as weight_decay=0.1; repeat for more."
        ),
    ] = None,
    test_lengths: Annotated[
        str | None,
        typer.Option(metavar="N", help="Lengths to measure at. Default: --length and, above it, 40,60,80,100,120."),
    ] = None,
    test_strings: Annotated[int, typer.Option(help="Test strings a length.")] = 500,
    save_every: Annotated[float, typer.Option(help="Seconds between two saved states.")] = 30.0,
    engine: EngineOption = "inline",
    workers: WorkersOption = 1,
    threads: ThreadsOption = 1,
    ray_address: RayAddressOption = None,
    json: JsonOption = False,
) -> None:
    """Train a model on a task with each seed, and measure it on strings of other lengths.

    It starts from random weights, or with --from from a pretrained model. The recipe is the cell's own where no option
    says otherwise. The same command again goes on where a seed was stopped, to the same weights; what is finished is
    shown. Other settings into the same folder are refused.
    """
    import sys

    from ..store.printing import count, print_json
    from .settings import named_values, number_list
    from .training.train_job import fine_tuning_cell, new_cell, train_cell

    architecture, task = what_to_train([n for n in (architecture, task) if n is not None], from_model, revision)
    given = {"steps": steps, "lr": lr, "length": length, "curriculum": curriculum, "stop_at": stop_at}
    fields = {k: v for k, v in given.items() if v is not None}
    asked: dict[str, Any] = {
        "target": target,
        "options": named_values(set_option or (), "the model"),
        "recipe": recipe_of(architecture, task, fields, named_values(recipe or (), "the recipe")),
    }
    if architecture is None:
        assert from_model is not None
        cell = fine_tuning_cell(from_model, task, revision=revision, **asked)
    else:
        cell = new_cell(architecture, task, **asked)
    report = train_cell(
        cell,
        out,
        seeds=number_list(seeds, "seed"),
        lengths=None if test_lengths is None else number_list(test_lengths, "length"),
        strings=test_strings,
        engine=engine,
        workers=workers,
        threads=threads,
        ray_address=ray_address,
        save_every_s=save_every,
    )
    if json:
        print_json(report.to_json())
        return
    for lost in report.lost_workers:
        print(f"layerlake: {lost}", file=sys.stderr)
    print_report(report)
    done = f"trained {count(len(report.trained), 'seed')}" if report.trained else "all was trained already"
    print(f"{cell.source.name} on {cell.data.task.spec}, target {cell.data.target}: {done}, in {out}/seed-N.")


def what_to_train(names: Sequence[str], from_model: str | None, revision: str | None) -> tuple[str | None, str]:
    """Tell architecture and task in the names that the command was given; with --from there is no architecture."""
    from ..errors import RequestError
    from .models import ARCHITECTURES

    if from_model is not None and len(names) == 2:
        raise RequestError(f"Give an architecture ({names[0]}) or --from, not both.")
    if revision is not None and from_model is None:
        raise RequestError("--revision is for a hub model: name it with --from, or leave --revision out.")
    if from_model is not None and names:
        return None, names[0]
    if len(names) < 2:
        missing = "a task" if from_model or (names and names[0] in ARCHITECTURES) else "an architecture and a task"
        raise RequestError(f"Name {missing}: `layerlake train ARCH TASK`, or `layerlake train --from MODEL TASK`.")
    return names[0], names[1]


def recipe_of(architecture: str | None, task: str, *given: Mapping[str, Any]) -> Recipe:
    """Give a cell's recipe with the fields that were `given`, as values or as their text; none twice.

    The architecture None is a pretrained model.
    """
    from ..errors import RequestError
    from .training.recipe import Recipe
    from .training.recipes import default_recipe

    fields: dict[str, Any] = {}
    for part in given:
        for name, value in part.items():
            if name in fields:
                raise RequestError(f"The recipe's {name} is given twice. Give it once.")
            fields[name] = _field(name, value)
    return Recipe.from_json(default_recipe(architecture, task).to_json() | fields)


def print_report(report: TrainReport) -> None:
    """Print a line a seed, with the token accuracy at each length, and the majority baseline below."""
    from ..store.printing import print_rows

    measured = [r["evaluation"]["lengths"] for r in report.results]
    lengths = [str(m["length"]) for m in measured[0]]
    rows = [
        (
            str(r["seed"]),
            f"{r['parameters']:,}",
            f"{r['steps']:,}",
            _why(r),
            *(f"{m['token']:.4f}" if m["measured"] else "no positions" for m in found),
        )
        for r, found in zip(report.results, measured, strict=True)
    ]
    rows.append(("majority", "", "", "", *(f"{m['majority']:.4f}" for m in measured[0])))
    columns = ("seed", "parameters", "steps", "stopped", *lengths)
    print_rows(columns, rows, numbers=frozenset({"parameters", "steps", *lengths}))


def _why(result: Mapping[str, Any]) -> str:
    reached = result["cell"]["recipe"]["stop_at"]
    return f"reached {reached}" if result["stopped"] == "accuracy" else "all steps"


def _field(name: str, value: Any) -> Any:
    """Read a field of a recipe from its text, where it is text."""
    from ..errors import RequestError
    from .settings import named_values

    if value == "none":
        return None
    if name == "curriculum" and isinstance(value, str):
        return named_values(value.split(","), "the curriculum")
    if name == "betas" and isinstance(value, str):
        return [_float(part, name) for part in value.split(",")]
    if name == "stop_at" and isinstance(value, str):
        return _float(value, name)
    if isinstance(value, str):
        raise RequestError(f"The recipe's {name} cannot be {value!r}.")
    return value


def _float(text: str, name: str) -> float:
    from ..errors import RequestError

    try:
        return float(text)
    except ValueError:
        raise RequestError(f"The recipe's {name} is a number, not {text!r}.") from None
