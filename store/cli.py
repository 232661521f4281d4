"""Commands of the store: sql, ls, show, annotate, index, rm."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()

LakeOption = Annotated[str, typer.Option("--lake", metavar="DIR", help="The lake's folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]

_SHOWN_ROWS = 40


@app.command(epilog='Example: layerlake sql "SELECT run, tokens FROM runs" --lake lake')
def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="One SELECT or EXPLAIN statement.")],
    lake: LakeOption,
    all_rows: Annotated[bool, typer.Option("--all", help=f"Show more than {_SHOWN_ROWS} rows.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which the query is stopped.")] = 60.0,
    json: JsonOption = False,
) -> None:
    """Run one SQL query over a lake.

    Tables: runs, arrays, units, sequences, tokens, spans, labels, stats, probes, results, problems. The query can read
    the lake's catalog and nothing else: no files, no network, no changes.
    """
    from .lake import Lake
    from .printing import print_json_table, print_table

    table = Lake.open(lake).sql(query, timeout=timeout)
    if json:
        print_json_table(table)
    elif table.column_names == ["explain_key", "explain_value"]:
        print("\n".join(table["explain_value"].to_pylist()))
    else:
        print_table(table, limit=None if all_rows else _SHOWN_ROWS)


@app.command(epilog="Example: layerlake ls --lake lake")
def ls(lake: LakeOption, json: JsonOption = False) -> None:
    """List the runs of a lake."""
    from .catalog import refresh_catalog
    from .lake import Lake
    from .printing import print_json, print_table

    opened = Lake.open(lake)
    refresh_catalog(opened.root)
    table = opened.sql(
        "SELECT run, model, data, dtype, units || '/' || units_planned AS units, tokens, "
        "(SELECT count(*) FROM arrays WHERE arrays.run = runs.run) AS arrays, rows FROM runs ORDER BY run"
    )
    if json:
        print_json(table.to_pylist())
    elif table.num_rows:
        print_table(table, limit=None)
    else:
        print("This lake has no runs yet.")


@app.command(epilog="Example: layerlake show minilm --lake lake")
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    lake: LakeOption,
    json: JsonOption = False,
) -> None:
    """Show what a run was made from, its arrays and their statistics."""
    from .describe import describe_run, print_description
    from .lake import Lake
    from .printing import print_json

    description = describe_run(Lake.open(lake), run)
    if json:
        print_json(description)
    else:
        print_description(description)


@app.command(epilog="Example: layerlake annotate minilm sentiment.csv --lake lake")
def annotate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="A .parquet, .csv or .jsonl file.")],
    lake: LakeOption,
    name: Annotated[str | None, typer.Option(help="The label set's name. Default: the file's name.")] = None,
    json: JsonOption = False,
) -> None:
    """Add labels to a run later.

    FILE has the column row, or seq and pos, and a column a label. Other columns of the table tokens (token_id, token,
    ...) are not stored: they must equal what the run holds. Tokens that FILE leaves out have no label. The same name
    again makes the next version, and SQL shows the newest.
    """
    from .lake import Lake
    from .printing import count, print_json

    opened = Lake.open(lake)
    labels = opened.annotate(run, file, name)
    tokens = opened.run(run).record.tokens
    if json:
        print_json(labels.to_json() | {"tokens": tokens})
        return
    columns = ", ".join(f"{c.name} ({c.type}, {c.values:,})" for c in labels.columns)
    print(
        f"Labels {labels.name} version {labels.version} of run {run}: "
        f"{labels.labelled:,} of {count(tokens, 'token')} got one: {columns}."
    )


@app.command(epilog="Example: layerlake index --lake lake")
def index(lake: LakeOption, json: JsonOption = False) -> None:
    """Rebuild the catalog from the lake's files."""
    from .lake import Lake
    from .printing import count, print_json

    opened = Lake.open(lake)
    path = opened.index()
    counts = opened.sql("SELECT count(*) AS runs, sum(units)::BIGINT AS units, sum(tokens)::BIGINT AS tokens FROM runs")
    row = counts.to_pylist()[0]
    if json:
        print_json(row | {"catalog": str(path.relative_to(opened.root))})
    else:
        parts = [count(row[what] or 0, what.removesuffix("s")) for what in ("runs", "units", "tokens")]
        print(f"Indexed {', '.join(parts)}.")
    if opened.sql("SELECT run FROM problems").num_rows:  # each was named in a warning
        raise typer.Exit(1)


@app.command(epilog="Example: layerlake rm minilm --lake lake --dry-run")
def rm(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    lake: LakeOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove a run.

    Probes and results that were made from it stay, as facts with their lineage. Asks first, and elsewhere than on a
    terminal needs --yes.
    """
    import sys

    from ..errors import RequestError
    from .lake import Lake
    from .printing import print_json
    from .remove import removal_lines

    opened = Lake.open(lake)
    found = opened.remove(run, dry_run=True)
    if not (dry_run or yes):
        if not sys.stdin.isatty():
            raise RequestError(f"Removing run {run!r} cannot be taken back. Say --yes, or look first with --dry-run.")
        print(*removal_lines(found), f"Remove run {run}? [y/N] ", sep="\n", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("Nothing was removed.", file=sys.stderr)
            raise typer.Exit(1)
    if not dry_run:
        found = opened.remove(run)
    if json:
        print_json(found.to_json())
    else:
        print("\n".join(removal_lines(found)))
