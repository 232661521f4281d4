"""From what was asked to the settings of a run: arrays, padding, names, and what moves a value's last bits."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from ..errors import RequestError
from ..store.dtypes import DTYPES, stored_dtype
from ..store.row_kinds import RowKinds
from ..store.run import ArraySpec, RunRecord
from .batch import Padding
from .hooks import SitePoint
from .hub_rows import HUB_PREFIX
from .loaded_model import LoadedModel, ModelSource, short_path
from .own_model import OWN_KIND
from .sites import parse_site
from .task_strings import TASK_PREFIX, TaskStrings

_NUMBERS = re.compile(r"\s*(-?\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*")
_MOST_NUMBERS = 100_000
_MAMBA_KERNELS = ("mamba-ssm", "causal-conv1d", "kernels", "mambapy")


def label_column(label: str) -> tuple[str, str]:
    """Split ``column=labeler``; without a column, code-depth is called depth and a function by its own name."""
    column, equals, name = label.rpartition("=")
    if not equals:
        column = {"code-depth": "depth"}.get(name, name.rpartition(":")[2].replace("-", "_"))
    if not column:
        raise RequestError(f"{label!r} names no column for its labels: write it as column=labeler.")
    return column, name


def site_names(asked: Sequence[str]) -> tuple[str, ...]:
    """Give the sites that were asked for: names, and lists of names as ``embed,resid_post``."""
    return tuple(name for one in asked for part in one.split(",") if (name := part.strip()))


def layer_numbers(asked: Sequence[int | str] | int | str | None) -> tuple[int, ...] | None:
    """Give the layers that were asked for: numbers, and lists and ranges as ``0,3,5-8``; None for all.

    `RequestError` for what is none of these. Whether the model has them is another question.
    """
    if asked is None:
        return None
    given = [asked] if isinstance(asked, int | str) else asked
    return tuple(dict.fromkeys(n for one in given for n in number_list(str(one), "layer")))


def number_list(text: str, what: str) -> tuple[int, ...]:
    """Read whole numbers, lists and ranges of them, as ``0,3,5-8``; `RequestError` for what is no `what` then."""
    found: list[int] = []
    for part in text.split(","):
        match = _NUMBERS.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + _MOST_NUMBERS:
            raise RequestError(
                f"{part.strip()!r} is no {what}: write numbers from 0, lists and ranges, such as 0,3,5-8."
            )
        found += range(first, last + 1)
    return tuple(found)


def choose_points(model: LoadedModel, sites: Sequence[str], layers: Sequence[int] | None) -> list[SitePoint]:
    """Choose the points of the asked sites at the asked layers (None: all), settled, in the model's own order.

    `UnknownNameError` lists the sites or layers that the model has.
    """
    points: list[SitePoint] = []
    for name in dict.fromkeys(sites):
        site, own = parse_site(name)
        of_site = [p for p in model.points if p.site == site]
        if own is not None:
            points.append(model.place(site, own))
        elif not of_site or of_site[0].layer is None:
            points.append(model.place(site, None))
        elif layers is None:
            points += of_site
        else:
            points += [model.place(site, layer) for layer in dict.fromkeys(layers)]
    if not points:
        raise RequestError("Name at least one site to extract.")
    points = model.settled(list({p.name: p for p in points}.values()))
    order = [p.name for p in model.points]
    points.sort(key=lambda p: order.index(p.name))  # the order in which they were asked for says nothing
    return points


def choose_arrays(
    model: LoadedModel,
    sites: Sequence[str],
    layers: Sequence[int] | None,
    dtype: str | None,
    codec: str = "none",
    *,
    longest: int = 0,
    kinds: RowKinds | None = None,
) -> tuple[ArraySpec, ...]:
    """Choose the arrays of a run from what `choose_points` gives; without `dtype` each keeps its own.

    There is one for each of the `kinds` of rows (default: tokens).
    `longest` is the longest sequence's length, the width of an attention pattern.
    """
    points = choose_points(model, sites, layers)
    odd = next((p for p in points if dtype is None and model.dtypes[p.name] not in DTYPES), None)
    if odd is not None:
        raise RequestError(
            f"Site {odd.name} is {model.dtypes[odd.name]}, which is not stored. Choose a --dtype: {', '.join(DTYPES)}."
        )
    arrays = tuple(
        ArraySpec(
            p.site,
            p.layer,
            stored_dtype(dtype or model.dtypes[p.name]).name,
            tuple(n or longest for n in model.shapes[p.name]),
            codec,
            kind,
        )
        for kind in (kinds or RowKinds()).kinds
        for p in points
    )
    if len({a.name for a in arrays}) < len(arrays):
        raise RequestError("Two of the sites are named as an array of pooled rows would be. Ask for fewer sites.")
    return arrays


def array_points(model: LoadedModel, arrays: Sequence[ArraySpec]) -> list[tuple[ArraySpec, SitePoint]]:
    """Find where the values of arrays come from; arrays of other rows of one site and layer share a point."""
    places = {p.name: p for p in (model.place(a.site, a.layer) for a in arrays)}
    settled = {p.name: p for p in model.settled(list(places.values()))}
    return [(a, settled[model.place(a.site, a.layer).name]) for a in arrays]


def check_special_tokens(asked: str) -> bool:
    """Say whether the tokenizer adds its special tokens: ``auto`` or ``none``, else `RequestError`."""
    if asked not in ("auto", "none"):
        raise RequestError(f"{asked!r} is not a rule for special tokens; use auto (the tokenizer's own) or none.")
    return asked == "auto"


def named_values(given: Sequence[str], of: str) -> dict[str, Any]:
    """Read options of something, ``NAME=VALUE`` each: true, false and numbers as in JSON, all else is text."""
    options: dict[str, Any] = {}
    for option in given:
        name, equals, text = option.partition("=")
        if not equals or not name.isidentifier():
            raise RequestError(f"{option!r} is no option of {of}: write it as NAME=VALUE.")
        if name in options:
            raise RequestError(f"The option {name!r} of {of} is given twice. Give it once.")
        try:
            value = json.loads(text, parse_constant=str)
        except ValueError:
            value = text
        options[name] = value if isinstance(value, bool | int | float | str) else text
    return options


def choose_padding(model: LoadedModel, asked: str | None) -> Padding:
    """Choose the padding side; `RequestError` for one that the model is not known to be unmoved by."""
    known = cast("tuple[Padding, ...]", (*model.padding, "none"))
    if asked is None:
        return known[0]
    if asked not in ("right", "left", "none"):
        raise RequestError(f"{asked!r} is not a padding; use right, left or none.")
    if asked not in known:
        raise RequestError(
            f"Padding on the {asked} is not known to leave this model's activations unchanged; "
            f"use {' or '.join(known)}."
        )
    return cast("Padding", asked)


def compute_settings(threads: int, device: str, kind: str, codec: str = "none") -> dict[str, Any]:
    """Record what moves the last bits of a value: the same command elsewhere is another run, and is told so.

    `kind` is the model's: transformers counts for its own models only, and so do the kernels that it takes for a
    Mamba where they are installed. pyarrow is here because its version stands inside every token table, and numcodecs
    where its compressor makes the bytes of shards.
    """
    found: dict[str, Any] = {
        "device": device,
        "threads": threads,
        "torch": torch.__version__,
        "pyarrow": importlib.metadata.version("pyarrow"),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    if codec != "none":
        found["numcodecs"] = importlib.metadata.version("numcodecs")
    found |= libraries(kind)
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
        found["tf32"] = [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
    return found


def libraries(kind: str) -> dict[str, str | None]:
    """Give the versions of the libraries that compute a model of this kind, beside torch."""
    found: dict[str, str | None] = {}
    if kind != "function" and not kind.startswith(OWN_KIND):
        found["transformers"] = importlib.metadata.version("transformers")
    if kind == "mamba":
        found["kernels"] = ", ".join(f"{n} {v}" for n in _MAMBA_KERNELS if (v := _version(n))) or None
    return found


def other_model(identity: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Name what a model of this `identity` has otherwise than the one that a run of these `settings` was made with."""
    found, planned = json.loads(json.dumps(identity)), settings["model"]
    other = sorted(k for k in found.keys() | planned.keys() if found.get(k) != planned.get(k))
    return ["weights" if k == "fingerprint" else k for k in other]


def other_compute(record: RunRecord, device: str) -> list[str]:
    """Say what would move a stored byte here, against what a run was planned with."""
    planned = record.settings["compute"]
    codec = record.arrays[0].codec  # extraction gives all arrays the same
    here = compute_settings(planned["threads"], device, record.settings["model"]["kind"], codec)
    return [f"{k} {v}, not {planned.get(k)}" for k, v in here.items() if v != planned.get(k)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def loadable(source: ModelSource) -> dict[str, Any]:
    """Give what a worker, or a later replay, needs to load the same model: a local folder by its full path."""
    spec = asdict(source)
    folder = Path(source.name).expanduser()
    if not source.is_function and folder.is_dir():
        spec["name"] = str(folder.resolve())
    return spec


def data_title(data: str | os.PathLike[str]) -> str:
    """Give a short name of data for people: a task with all that it was drawn with, a data set, or a path's end."""
    spec = os.fspath(data)
    if spec.startswith(TASK_PREFIX):
        return TaskStrings.parse(spec).title
    if not spec.startswith(HUB_PREFIX):
        return short_path(spec)
    name = spec.removeprefix(HUB_PREFIX)
    return HUB_PREFIX + (short_path(name) if Path(name).expanduser().is_dir() else name)


def default_name(source: ModelSource, data: str | os.PathLike[str]) -> str:
    """Make a run's name from those of model and data; strings of a task that are drawn otherwise have another name."""
    spec = os.fspath(data)
    if spec.startswith(TASK_PREFIX):
        stem = data_title(spec).removeprefix(TASK_PREFIX)
    else:
        stem = Path(spec.removeprefix(HUB_PREFIX).rstrip("/*")).stem or "data"
    raw = f"{source.title.split('/')[-1].replace(':', '.')}-{stem}"
    return "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in raw).strip("-._")[:100] or "run"
