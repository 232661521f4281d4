"""Commands of analysis: probe."""

from __future__ import annotations

from typing import Annotated

import typer

from ..extract.engine_options import EngineOption, RayAddressOption, ThreadsOption, WorkersOption
from ..store.cli import LakeOption

app = typer.Typer()


@app.command(epilog="Example: layerlake probe minilm --label depth --lake lake --plot profile.png")
def probe(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    label: Annotated[str, typer.Option(help="The column of tokens to probe for.")],
    lake: LakeOption,
    site: Annotated[
        list[str] | None, typer.Option(metavar="SITE", help="A site; repeat for more. Default: all stored.")
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(metavar="N", help="A layer; repeat for more. Default: all stored.")
    ] = None,
    where: Annotated[str | None, typer.Option(help="A SQL condition over the columns of tokens.")] = None,
    by: Annotated[str, typer.Option(help="Split train from test by document or by seq.")] = "document",
    seeds: Annotated[int, typer.Option(help="How many splits to fit.")] = 3,
    test_share: Annotated[float, typer.Option(help="The share of documents (or sequences) tested on.")] = 0.2,
    c: Annotated[float, typer.Option("--C", help="Inverse strength of the L2 penalty.")] = 1.0,
    max_iter: Annotated[int, typer.Option(help="Iterations after which a fit is reported as not converged.")] = 1000,
    engine: EngineOption = "inline",
    workers: WorkersOption = 1,
    threads: ThreadsOption = 1,
    ray_address: RayAddressOption = None,
    plot: Annotated[str | None, typer.Option(help="Save the profile as a picture: .png, .svg or .pdf.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the profile's facts as JSON.")] = False,
) -> None:
    """Fit a logistic-regression probe for a label at every layer.

    Beside the accuracy on unseen documents stand the majority baseline and the accuracy on shuffled labels. The same
    request again shows the stored probes.
    """
    import sys

    from ..errors import RequestError
    from ..store.lake import Lake
    from ..store.printing import print_json, print_rich
    from .probe_job import probe_layers
    from .profile import check_picture_path

    if seeds < 1:
        raise RequestError(f"A probe needs at least one split, not --seeds {seeds}.")
    picture = check_picture_path(plot) if plot else None
    profile = probe_layers(
        Lake.open(lake),
        run,
        label,
        sites=site,
        layers=layer,
        where=where,
        by=by,
        seeds=tuple(range(seeds)),
        test_share=test_share,
        C=c,
        max_iter=max_iter,
        engine=engine,
        workers=workers,
        threads=threads,
        ray_address=ray_address,
    )
    for warning in profile.warnings:
        print(f"layerlake: warning: {warning}", file=sys.stderr)
    if picture:
        profile.save_picture(picture)
    if json:
        print_json(profile.rows())
        return
    print_rich(profile.table())
    if picture:
        print(f"Picture: {picture}")
