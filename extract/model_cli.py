"""Commands that look at models and hold lakes to them: sites, doctor, convert, verify."""

from __future__ import annotations

from typing import Annotated

import typer

from ..store.cli import JsonOption, LakeOption

app = typer.Typer()

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A local Hugging Face folder, a hub name, or package.module:function.")
]
RevisionOption = Annotated[str | None, typer.Option(help="The revision of a hub model.")]
ModelDtypeOption = Annotated[str, typer.Option(help="Run the model as auto, float32, bfloat16 or float16.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with a hub model.")]
AttentionOption = Annotated[
    str, typer.Option(help="The attention implementation: sdpa, eager, ... Default: what transformers takes.")
]


@app.command(epilog="Example: layerlake sites ./model")
def sites(
    model: ModelArgument,
    revision: RevisionOption = None,
    model_dtype: ModelDtypeOption = "auto",
    attention: AttentionOption = "auto",
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """List the sites that a model has: what can be stored, and what can be edited too.

    The path of any module is a site as well, for what the module returns; with :in at its end, for what enters it.
    """
    from ..store.printing import print_json, print_rows
    from .loaded_model import ModelSource
    from .loading import load_model
    from .run_units import import_from_here
    from .site_list import list_sites

    import_from_here()
    found = list_sites(load_model(ModelSource(model, revision, model_dtype, trust_remote_code, attention)))
    if json:
        print_json([s.to_json() for s in found])
        return
    columns = ("site", "layers", "shape", "dtype", "access", "what it is")
    print_rows(columns, [(s.site, s.layers_text, s.shape_text, s.dtype, s.access, s.what) for s in found])


@app.command(epilog="Example: layerlake doctor ./model")
def doctor(
    model: ModelArgument,
    revision: RevisionOption = None,
    model_dtype: ModelDtypeOption = "auto",
    attention: AttentionOption = "auto",
    trust_remote_code: TrustOption = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Draws the sequences that are tried.")] = 0,
    json: JsonOption = False,
) -> None:
    """Hold a model to the equations that must hold between its sites.

    Exit code 1 when one of them does not hold: then do not trust what is extracted from this model.
    """
    from ..store.printing import print_json, print_rows
    from .loaded_model import ModelSource
    from .loading import load_model
    from .run_units import import_from_here
    from .self_test import SelfTest

    import_from_here()
    source = ModelSource(model, revision, model_dtype, trust_remote_code, attention)
    checks = SelfTest(load_model(source, device=device), seed=seed).run()
    failed = [c for c in checks if c.passed is False]
    if json:
        print_json([c.to_json() for c in checks])
    else:
        words = {True: "holds", False: "FAILS", None: "-"}
        print_rows(
            ("check", "result", "worst", "allowed", "at", "what must hold"),
            [(c.name, words[c.passed], c.shown_worst, c.shown_limit, c.where or c.note, c.what) for c in checks],
        )
        print(f"{sum(c.passed is True for c in checks)} of {sum(c.passed is not None for c in checks)} checks hold.")
    if failed:
        raise typer.Exit(1)


@app.command(epilog="Example: layerlake convert state-spaces/mamba-130m --out mamba-130m")
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder or hub name whose config.json has d_model, n_layer and ssm_cfg and no model_type, as "
            "mamba-ssm, the Mamba authors' code, writes it.",
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="The folder to write; not there yet, or empty.")],
    revision: RevisionOption = None,
    json: JsonOption = False,
) -> None:
    """Write a Mamba or Mamba-2 checkpoint of mamba-ssm, its pickle included, as a folder that is a MODEL.

    Weights in a pickle (pytorch_model.bin) are read by torch.load(weights_only=True): torch's own reader, which makes
    tensors, containers and numbers, and refuses a file that names any other code to call. That reader may have faults:
    convert only what you trust. Where there is a model.safetensors, the weights are taken from it instead.

    What was written is loaded again and compared with what was read, tensor by tensor, before DIR is there.
    """
    from ..store.printing import count, print_json
    from .convert import convert as convert_checkpoint

    made = convert_checkpoint(source, out, revision=revision)
    if json:
        print_json(made.to_json())
        return
    print(
        f"Wrote {out}: {made.kind}, {count(made.layers, 'layer')}, {made.parameters:,} parameters in {made.dtype}, "
        f"from {made.read}; read back, {count(made.tensors, 'tensor')} compared."
    )
    if not made.tokenizer:
        print("There is no tokenizer beside it: for texts, put the files of the model's tokenizer into that folder.")


@app.command(epilog="Example: layerlake verify --lake lake --replay")
def verify(
    lake: LakeOption,
    run: Annotated[str | None, typer.Option(help="Check this run only.")] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Hold stored rows to plain forwards of the reloaded model too.")
    ] = False,
    share: Annotated[
        float | None, typer.Option(help="With --replay: the share of the tokens to run again; 1 is all. Default: 0.02.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --replay: where the run's model lies now, if it was moved.")
    ] = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Check counts and checksums of everything stored; with --replay also the values, by the model.

    Exit code 1 when anything is wrong; `layerlake repair` makes again what can be made again.
    """
    from ..errors import RequestError
    from ..store.lake import Lake
    from ..store.printing import count, print_json
    from .replay_check import BUDGET
    from .verify_replay import verify_replay

    if not replay and (share is not None or model is not None):
        raise RequestError("--share and --model are for --replay: add it, or leave them out.")
    opened = Lake.open(lake)
    problems = opened.verify(run)
    checked = [run] if run else opened.runs()
    replayed = None
    if replay:
        part = BUDGET if share is None else share
        replayed = verify_replay(lake, run=run, model=model, trust_remote_code=trust_remote_code, share=part)
        problems = [*problems, *replayed.problems]
    if json:
        found = {"runs": checked, "problems": [p.to_json() for p in problems]}
        print_json(found | ({"replay": replayed.to_json()} if replayed else {}))
    else:
        for problem in problems:
            print(f"{problem.path}: {problem.what}")
        units = sum(len(opened.run(name).committed()) for name in checked)
        ending = count(len(problems), "problem") if problems else "everything is as it was written"
        print(f"Checked {count(len(checked), 'run')}, {count(units, 'unit')}: {ending}.")
        if replayed is not None and replayed.values is not None:
            print(
                f"Replayed {count(replayed.sequences, 'sequence')} of {count(replayed.units, 'unit')}: stored rows are "
                f"within {replayed.values:.2g} of their norm of what the model gives each sequence alone."
            )
    if problems:
        raise typer.Exit(1)
