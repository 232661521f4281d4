"""What there is to know about a run, for people and programs."""

from __future__ import annotations

from typing import Any

from .catalog import refresh_catalog
from .label_sets import newest_label_sets
from .lake import Lake
from .plan import label_columns
from .printing import print_rows
from .row_kinds import TOKENS


def describe_run(lake: Lake, name: str) -> dict[str, Any]:
    """Collect a run's record, progress, labels and the statistics of its arrays."""
    run = lake.run(name)
    refresh_catalog(lake.root)
    record = run.record
    quoted = "'" + name.replace("'", "''") + "'"
    progress = lake.sql(f"SELECT units, tokens, sequences FROM runs WHERE run = {quoted}").to_pylist()
    arrays = lake.sql(
        "SELECT arrays.site, arrays.layer, arrays.rows, dtype, width, codec, mean, sqrt(variance) AS std, min, max, "
        "norm, nonfinite FROM arrays LEFT JOIN stats ON arrays.run = stats.run AND arrays.site = stats.site "
        f"AND arrays.layer IS NOT DISTINCT FROM stats.layer AND arrays.rows = stats.rows WHERE arrays.run = {quoted} "
        "ORDER BY 1, 2, 3"
    ).to_pylist()
    described = lake.sql(
        f"SELECT split, count(*) AS tokens, count(DISTINCT seq) AS sequences FROM tokens WHERE run = {quoted} "
        "GROUP BY split ORDER BY split"
    ).to_pylist()
    added, faults = newest_label_sets(run)
    return {
        "run": name,
        "source": record.source,
        "created": record.created,
        "created_by": record.created_by,
        "identity": record.identity,
        "plan_hash": record.plan_hash,
        "planned": {"units": record.units, "tokens": record.tokens, "sequences": record.sequences},
        "stored": progress[0] if progress else {"units": 0, "tokens": 0, "sequences": 0},
        "unit_rows": record.unit_rows,
        "rows": str(record.row_kinds),
        "unit_sizes": {kind: record.unit_size(kind) for kind in record.row_kinds.kinds},
        "settings": record.settings,
        "labels": [f.name for f in label_columns(run.folder / "plan")["tokens"]],
        "annotated": [
            {"name": s.name, "version": s.version, "columns": [c.name for c in s.columns], "labelled": s.labelled}
            | {"created": s.created, "source": s.source["file"], "damaged": False}
            for s in added
        ]
        + [{"name": set_name, "damaged": True, "what": what} for set_name, what in faults.items()],
        "splits": described,
        "arrays": arrays,
    }


def print_description(description: dict[str, Any]) -> None:
    """Print what `describe_run` collected."""
    stored, planned = description["stored"], description["planned"]
    settings = description["settings"]
    lines = {
        "run": description["run"],
        "model": f"{description['source'].get('model')} ({settings.get('model', {}).get('kind')})",
        "weights": settings.get("model", {}).get("fingerprint"),
        "data": description["source"].get("data"),
        "created": f"{description['created']} by layerlake {description['created_by']}",
        "identity": description["identity"],
        "units": f"{stored['units']} of {planned['units']}, {_sizes(description['unit_sizes'])} each",
        "rows": description["rows"],
        "tokens": f"{stored['tokens']} of {planned['tokens']} in {planned['sequences']} sequences",
    }
    lines |= {name: str(settings[name]) for name in ("window", "overlap", "keep") if settings.get(name)}
    lines["labels"] = ", ".join(description["labels"]) or "none"
    for one in description["annotated"]:
        lines[f"labels {one['name']}"] = (
            "damaged: run `layerlake verify`"
            if one["damaged"]
            else f"{', '.join(one['columns'])}: version {one['version']}, {one['labelled']} tokens, "
            f"from {one['source'] or 'a table'}"
        )
    lines |= {f"split {s['split']}": f"{s['tokens']} tokens, {s['sequences']} sequences" for s in description["splits"]}
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
    columns = list(description["arrays"][0]) if description["arrays"] else []
    if columns:
        print()
        rows = [list(a.values()) for a in description["arrays"]]
        print_rows(columns, rows, numbers=frozenset(columns) - {"site", "rows", "dtype", "codec"})


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{n} rows" if kind == TOKENS else f"{n} rows of {kind}" for kind, n in sizes.items())
