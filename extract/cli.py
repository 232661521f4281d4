"""Commands that fill lakes: extract, plan, repair."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..store.cli import JsonOption, LakeOption
from .engine_options import EngineOption, RayAddressOption, ThreadsOption, WorkersOption
from .model_cli import AttentionOption, ModelArgument, ModelDtypeOption, RevisionOption, TrustOption
from .model_cli import app as model_app
from .train_cli import app as train_app

app = typer.Typer()
app.add_typer(model_app)
app.add_typer(train_app)


@app.command(
    epilog="Example: layerlake extract ./model corpus/ --lake lake --window 256 --label code-depth --engine ray "
    "--workers 2"
)
def extract(
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A .txt file (a document a line), a .jsonl, .csv or .parquet file (a document a row), a folder or "
            "glob of files, hf:NAME, a data set of the datasets library, or task:NAME?OPTIONS, strings of a task.",
        ),
    ],
    lake: Annotated[str, typer.Option("--lake", metavar="DIR", help="The lake's folder; made if there is none.")],
    run: Annotated[str | None, typer.Option(help="The run's name; default: from model and data.")] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            "--site", "--sites", metavar="SITE", help="Sites to store, as embed,resid_post. Default: these two."
        ),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option("--layer", "--layers", metavar="N", help="Layers to store, from 0, as 0,3,5-8. Default: all."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Stored as bfloat16, float16 or float32. Default: the model's own.")
    ] = None,
    codec: Annotated[
        str, typer.Option(help="none (raw rows) or archive (compressed without loss; needs the extra archive).")
    ] = "none",
    window: Annotated[
        int | None, typer.Option(help="Split documents at lines into sequences of at most so many tokens.")
    ] = None,
    overlap: Annotated[
        int, typer.Option(help="Tokens of the text before it that each window reads first; stored once all the same.")
    ] = 0,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SQL",
            help="Store only tokens that meet a condition over the columns of tokens and sequences: 'pos = length - 1' "
            "(the last), 'depth IS NOT NULL', 'sample(0.01, 7)' (one in a hundred, seed 7).",
        ),
    ] = None,
    rows: Annotated[
        str,
        typer.Option(
            metavar="KINDS",
            help="tokens, sequences (means over each), spans:LABEL (means over neighbouring tokens with one value of a "
            "label); several as tokens,sequences.",
        ),
    ] = "tokens",
    special_tokens: Annotated[
        str, typer.Option(help="auto (those the tokenizer adds to a text, in every window) or none.")
    ] = "auto",
    text_column: Annotated[str, typer.Option(help="The column that holds the text, or input_ids.")] = "text",
    messages_column: Annotated[
        str | None,
        typer.Option(
            help="The column that holds messages, rendered by the chat template. Default: messages, where no text is."
        ),
    ] = None,
    generation_prompt: Annotated[
        bool, typer.Option("--generation-prompt", help="End chats with the start of the next answer.")
    ] = False,
    chat_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An option of the chat template, such as enable_thinking=false; repeat for more.",
        ),
    ] = None,
    roles: Annotated[
        bool, typer.Option("--roles/--no-roles", help="Label the tokens of chats with whose message they are.")
    ] = True,
    label_column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="A column of labels: one a document, or a list with one a token; repeat for more."
        ),
    ] = None,
    split_column: Annotated[
        str | None,
        typer.Option(help="The column that says train or test. Default: a fifth of the documents is test."),
    ] = None,
    data_config: Annotated[str | None, typer.Option(help="The configuration of a data set hf:NAME.")] = None,
    data_split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPLIT", help="A split of hf:NAME, as train or train[:1000]; repeat for more. Default: all."
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABELER",
            help="Label tokens by code-depth (the column depth) or column=package.module:function; repeat for more.",
        ),
    ] = None,
    revision: RevisionOption = None,
    model_dtype: ModelDtypeOption = "auto",
    trust_remote_code: TrustOption = False,
    attention: AttentionOption = "auto",
    padding: Annotated[str | None, typer.Option(help="right, left or none. Default: what the model allows.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens a forward, padding included.")] = 4096,
    unit_rows: Annotated[
        int | None, typer.Option(help="Rows of a unit, a power of two. Default: from the data's size.")
    ] = None,
    engine: EngineOption = "inline",
    workers: WorkersOption = 1,
    threads: ThreadsOption = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    ray_address: RayAddressOption = None,
    ignore_free_space: Annotated[
        bool, typer.Option("--ignore-free-space", help="Go on when the disk is too small for the run.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run a model over data and store the activations of every token, of those that --keep names, or means of them.

    The same command again does only what is missing. Other settings into a run of the same name are refused.
    """
    asked = extract_options(locals())
    import sys

    from ..store.printing import count, print_json
    from .driver import extract as run_extraction

    report = run_extraction(model, data, lake, **asked)
    for warning in report.warnings:
        print(f"layerlake: warning: {warning}", file=sys.stderr)
    if json:
        print_json(report.to_json())
        return
    for lost in report.lost_workers:
        print(f"layerlake: {lost}", file=sys.stderr)
    named = " to ".join(dict.fromkeys((report.arrays[0], report.arrays[-1])))
    arrays = f"{count(len(report.arrays), 'array')} ({named})"
    stored = "" if report.tokens == report.tokens_read else f"{report.tokens:,} of "
    size = (
        f"{stored}{count(report.tokens_read, 'token')} in {count(report.sequences, 'sequence')} "
        f"of {count(report.documents, 'document')}"
    )
    if report.units_done == 0:
        print(f"Run {report.run} is complete already: {size}, {arrays}.")
    else:
        before = report.units - report.units_done
        kept = f", {before} were there" if before else ""
        print(f"Run {report.run} is complete: {size}, {arrays}; {count(report.units_done, 'unit')} written{kept}.")
    if report.pooled:
        print(f"Means: {', '.join(f'{n:,} of {kind}' for kind, n in report.pooled.items())}.")
    if report.left_out:
        print(f"Not run, as nothing of them is kept: {count(report.left_out, 'sequence')}.")


def extract_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the options of the command `extract`, as its function got them, into the arguments of the function."""
    from .settings import named_values

    renamed = {
        "site": "sites",
        "layer": "layers",
        "label": "labels",
        "label_column": "label_columns",
        "data_split": "data_splits",
        "chat_option": "chat_options",
    }
    options = {renamed.get(k, k): v for k, v in given.items() if k not in ("model", "data", "lake", "json")}
    options["sites"] = tuple(options["sites"] or ("embed", "resid_post"))
    options["chat_options"] = named_values(options["chat_options"] or (), "the chat template")
    return options | {k: options[k] or () for k in ("labels", "label_columns", "data_splits")}


def plan(no_timing: bool, json: bool, **options: Any) -> None:
    """Tell what `layerlake extract` with the same arguments would take: rows, bytes, memory, time.

    Nothing is written into the lake. Exit code 1 when the disk would not hold the run.
    """
    import sys

    from ..store.printing import print_json
    from .cost import plan as cost_of
    from .cost_text import cost_lines

    model, data, lake = (options[k] for k in ("model", "data", "lake"))
    cost = cost_of(model, data, lake, timed=not no_timing, **extract_options(options))
    for warning in cost.warnings:
        print(f"layerlake: warning: {warning}", file=sys.stderr)
    if json:
        print_json(cost.to_json())
    else:
        print("\n".join(cost_lines(cost)))


def _same_arguments(command: Any, as_command: Any, **more: Any) -> Any:
    """Give `command` the arguments of another one, and `more` of its own."""
    same = [p for p in inspect.signature(as_command, eval_str=True).parameters.values() if p.name != "json"]
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in more.items()
    ]
    command.__signature__ = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in same] + own)
    command.__annotations__ = {p.name: p.annotation for p in [*same, *own]}
    return command


app.command(epilog="Example: layerlake plan ./model corpus/ --lake lake --window 256 --dtype bfloat16")(
    _same_arguments(
        plan,
        extract,
        no_timing=Annotated[bool, typer.Option("--no-timing", help="Run no batches: sizes only.")],
        json=Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")],
    )
)


@app.command(epilog="Example: layerlake repair --lake lake --dry-run")
def repair(
    lake: LakeOption,
    run: Annotated[str | None, typer.Option(help="Repair this run only.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the run's model lies now. Default: where it was when the run was made.")
    ] = None,
    trust_remote_code: TrustOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    engine: EngineOption = "inline",
    workers: WorkersOption = 1,
    ray_address: RayAddressOption = None,
    json: JsonOption = False,
) -> None:
    """Make again what verify finds broken, byte for byte.

    Damaged activations are redone by the model; the data are not needed. What is damaged is set aside, and what cannot
    be recreated is left as it is and named. Exit code 1 when something remains.
    """
    import sys

    from ..store.printing import print_json
    from .repair import repair as run_repair
    from .repair import report_lines

    report = run_repair(
        lake,
        run=run,
        model=model,
        trust_remote_code=trust_remote_code,
        dry_run=dry_run,
        engine=engine,
        workers=workers,
        ray_address=ray_address,
    )
    for lost in report.lost_workers:
        print(f"layerlake: {lost}", file=sys.stderr)
    if json:
        print_json(report.to_json())
    else:
        print("\n".join(report_lines(report)))
    if not report.whole:
        raise typer.Exit(1)
