"""The front door: joins each room's commands, and turns errors into sentences and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from . import __version__
from .analyze.cli import app as analyze_app
from .errors import JobError, LakeWarning, LayerlakeError
from .extract.cli import app as extract_app
from .store.cli import app as store_app

app = typer.Typer(
    name="layerlake",
    help="Extract layerwise activations of sequence models into a lake, ask for them in SQL, probe them.",
    epilog="Exit codes: 0 done, 1 the world failed, 2 asked wrongly. Errors are sentences on standard error.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for room in (extract_app, store_app, analyze_app):
    app.add_typer(room)

_INTERRUPTED = 130


def _version(asked: bool) -> None:
    if asked:
        print(f"layerlake {__version__}")
        raise typer.Exit


@app.callback()
def _globals(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; works anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program on `arguments` (default: those of the process) and return its exit code."""
    for name in ("stdout", "stderr"):  # closed by the caller: what would be printed there is not wanted
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - as long as the process
    argv = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in argv
    warnings.showwarning = _show_warning
    argv = [a for a in argv if a != "--debug"]
    try:
        result = app(argv, prog_name="layerlake", standalone_mode=False)
        sys.stdout.flush()
        if result == _INTERRUPTED:  # typer turns Ctrl-C into this code
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except TyperException as error:
        return _fail(f"{error.format_message()} See `layerlake --help`.", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        message = "Stopped. What was committed is kept; the same command goes on from there."
        return _fail(message, _INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output left, as `| head` does. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except LayerlakeError as error:
        if debug:
            traceback.print_exc()
            for text in getattr(error, "tracebacks", {}).values() if isinstance(error, JobError) else ():
                print(text, file=sys.stderr)
        return _fail(str(error), error.exit_code)
    except Exception as error:  # noqa: BLE001 - the last stop: no bare traceback reaches a user
        if debug:
            traceback.print_exc()
        kind = type(error).__name__
        if isinstance(error, OSError):
            return _fail(f"{error.strerror or error} ({error.filename or kind}). Mend that and ask again.", 1)
        return _fail(f"This is a fault of layerlake: {kind}: {error}. Run it again with --debug for details.", 1)


def _show_warning(message: Warning | str, category: type[Warning], *place: object) -> None:
    if issubclass(category, LakeWarning):  # what other libraries warn their developers of is none of a user's business
        print(f"layerlake: warning: {message}", file=sys.stderr)


def _fail(message: str, code: int) -> int:
    print(f"layerlake: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
