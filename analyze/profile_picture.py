"""The picture of a profile: readability over depth, beside what chance gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .profile import Profile

SIZE = (9.0, 5.0)  # inches, at 100 dots an inch
MAX_TICKS = 26
# Colours of Okabe and Ito (2008), told apart with every common kind of colour blindness; marks and dashes
# differ too.
LINES: dict[str, dict[str, Any]] = {
    "accuracy": {"label": "accuracy", "color": "#0072B2", "marker": "o", "lw": 2.4, "ms": 7, "zorder": 5},
    "majority": {
        "label": "majority (most frequent class)",
        "color": "#000000",
        "ls": (0, (1, 1.6)),
        "lw": 1.8,
        "zorder": 2,
    },
    "random_label": {
        "label": "shuffled labels",
        "color": "#009E73",
        "marker": "^",
        "ls": (0, (8, 6)),
        "lw": 1.0,
        "ms": 8,
        "zorder": 3,
    },
}
METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def draw_profile(profile: Profile, path: Path) -> None:
    """Draw `profile` into `path`, whose suffix is .png, .svg or .pdf; the bytes hold no date and no version."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise MissingExtraError.of("plot", "Drawing a profile") from err

    # pyplot would keep the figure in a global list and pick a window system; a Figure of one's own does
    # neither. The salt makes the ids in an SVG depend on its content alone; the text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "layerlake", "svg.fonttype": "none"}):
        figure = Figure(figsize=SIZE, dpi=100, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw_lines(axes, profile)
        _dress(axes, profile)
        title = f"How readable is “{_short(profile.label, 36)}” in {_short(profile.run, 40)}?"
        if profile.condition:
            title = f"{title[:-1]} where {_short(profile.condition, 30)}?"
        size = 15 if len(title) <= 62 else 11.5
        figure.suptitle(title, x=0.012, ha="left", fontsize=size, fontweight="bold")
        # Four names fit into a row, five do not.
        columns = 4 if len(axes.get_legend_handles_labels()[1]) <= 4 else 3
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=11, handlelength=3.2)
        figure.savefig(path, format=path.suffix.lower()[1:], metadata=METADATA[path.suffix.lower()])


def _draw_lines(axes: Axes, profile: Profile) -> None:
    x = range(len(profile.entries))
    crowded = len(profile.entries) > MAX_TICKS
    for metric, style in LINES.items():
        values = [_number(e.summary.get(metric)) for e in profile.entries]
        size = style.get("ms", 0) * (0.65 if crowded else 1)
        axes.plot(x, values, markeredgecolor="white", markeredgewidth=0.8, **(style | {"ms": size}))
    accuracy = [_number(e.summary.get("accuracy")) for e in profile.entries]
    spread = [_number(e.summary.get("accuracy_std")) for e in profile.entries]
    if any(math.isfinite(s) for s in spread):
        low = [a - s for a, s in zip(accuracy, spread, strict=True)]
        high = [a + s for a, s in zip(accuracy, spread, strict=True)]
        axes.fill_between(x, low, high, color=LINES["accuracy"]["color"], alpha=0.2, lw=0, zorder=1)
    unfinished = [i for i, e in enumerate(profile.entries) if e.summary.get("converged") is False]
    if unfinished:
        axes.plot(
            unfinished,
            [accuracy[i] for i in unfinished],
            ls="none",
            marker="o",
            ms=13,
            mfc="none",
            mec="#CC79A7",
            mew=2,
            label="solver did not converge",
            zorder=6,
        )


def _dress(axes: Axes, profile: Profile) -> None:
    places = [e.place for e in profile.entries]
    step = math.ceil(len(places) / MAX_TICKS)
    # Layer 0 gives way where not every layer has room, since "embed" stands beside it.
    named = [i for i, e in enumerate(profile.entries) if step == 1 or not e.layer or e.layer % step == 0]
    named = [i for i in named if step == 1 or profile.entries[i].layer != 0 or i == 0]
    axes.set_xticks(named, [places[i] for i in named])
    sites = list(dict.fromkeys(e.site for e in profile.entries if e.layer is not None))
    axes.set_xlabel(f"layer ({', '.join(sites)})" if sites else "site", fontsize=12)
    axes.set_ylabel("accuracy on held-out groups", fontsize=12)
    axes.set_ylim(0.0, 1.02)
    axes.set_xlim(-0.4, len(places) - 0.6)
    spread = any(e.summary.get("accuracy_std") is not None for e in profile.entries)
    notes = [profile.counts(), *(w.partition(":")[0] for w in profile.warnings)]
    notes += ["band: deviation over the splits"] if spread else []
    axes.set_title("  ·  ".join(notes), loc="left", fontsize=10, color="#444444")
    axes.grid(axis="y", color="#DDDDDD", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=11, color="#888888")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"
