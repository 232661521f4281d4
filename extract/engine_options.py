"""The options of every command that runs a job."""

from __future__ import annotations

from typing import Annotated

import typer

EngineOption = Annotated[str, typer.Option(help="inline (this process) or ray.")]
WorkersOption = Annotated[int, typer.Option(help="Ray actors.")]
ThreadsOption = Annotated[int, typer.Option(help="Compute threads a worker.")]
RayAddressOption = Annotated[
    str | None, typer.Option(help="A running Ray cluster to use. Default: a private one, on this machine.")
]
