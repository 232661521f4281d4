"""Commands of extraction: extract, repair."""

from __future__ import annotations

from typing import Annotated

import typer

from ..store.cli import JsonOption, LakeOption

app = typer.Typer()

EngineOption = Annotated[str, typer.Option(help="inline (this process) or ray.")]
WorkersOption = Annotated[int, typer.Option(help="Ray actors.")]
ThreadsOption = Annotated[int, typer.Option(help="Compute threads a worker.")]
RayAddressOption = Annotated[
    str | None, typer.Option(help="A running Ray cluster to use. Default: a private one, on this machine.")
]


@app.command(
    epilog="Example: layerlake extract ./model corpus/ --lake lake --window 256 --label code-depth --engine ray "
    "--workers 2"
)
def extract(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A local Hugging Face folder, a hub name, or package.module:function."),
    ],
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="A .txt file (a document a line), a .jsonl file, or a folder or glob of source files."
        ),
    ],
    lake: Annotated[str, typer.Option("--lake", metavar="DIR", help="The lake's folder; made if there is none.")],
    run: Annotated[str | None, typer.Option(help="The run's name; default: from model and data.")] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE", help="A site to store; repeat for more. Default: embed and resid_post."),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(metavar="N", help="A layer to store, from 0; repeat for more. Default: all.")
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
    text_column: Annotated[str, typer.Option(help="The column of a .jsonl file that holds the text.")] = "text",
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
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABELER",
            help="Label tokens by code-depth (the column depth) or column=package.module:function; repeat for more.",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="The revision of a hub model.")] = None,
    model_dtype: Annotated[str, typer.Option(help="Run the model as auto, float32, bfloat16 or float16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a hub model.")
    ] = False,
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
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run a model over data and store the activations of every token.

    The same command again does only what is missing. Other settings into a run of the same name are refused.
    """
    import sys

    from ..store.printing import count, print_json
    from .driver import extract as run_extraction

    report = run_extraction(
        model,
        data,
        lake,
        run=run,
        sites=tuple(site) if site else ("embed", "resid_post"),
        layers=layer,
        dtype=dtype,
        codec=codec,
        window=window,
        text_column=text_column,
        label_columns=label_column or (),
        split_column=split_column,
        labels=label or (),
        revision=revision,
        model_dtype=model_dtype,
        trust_remote_code=trust_remote_code,
        padding=padding,
        batch_tokens=batch_tokens,
        unit_rows=unit_rows,
        engine=engine,
        workers=workers,
        threads=threads,
        device=device,
        ray_address=ray_address,
    )
    for warning in report.warnings:
        print(f"layerlake: warning: {warning}", file=sys.stderr)
    if json:
        print_json(report.to_json())
        return
    for lost in report.lost_workers:
        print(f"layerlake: {lost}", file=sys.stderr)
    named = " to ".join(dict.fromkeys((report.arrays[0], report.arrays[-1])))
    arrays = f"{count(len(report.arrays), 'array')} ({named})"
    size = (
        f"{count(report.tokens, 'token')} in {count(report.sequences, 'sequence')} "
        f"of {count(report.documents, 'document')}"
    )
    if report.units_done == 0:
        print(f"Run {report.run} is complete already: {size}, {arrays}.")
    else:
        before = report.units - report.units_done
        kept = f", {before} were there" if before else ""
        print(f"Run {report.run} is complete: {size}, {arrays}; {count(report.units_done, 'unit')} written{kept}.")


@app.command(epilog="Example: layerlake repair --lake lake --dry-run")
def repair(
    lake: LakeOption,
    run: Annotated[str | None, typer.Option(help="Repair this run only.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the run's model lies now. Default: where it was when the run was made.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a hub model.")
    ] = False,
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
