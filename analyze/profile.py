"""How readable a label is, layer by layer."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..errors import MissingExtraError, RequestError
from .probe import Probe

METRICS = (
    "accuracy",
    "accuracy_std",
    "balanced_accuracy",
    "majority",
    "random_label",
    "auroc",
    "converged",
    "n_rows",
    "n_dropped",
    "n_groups",
)
SEED_METRICS = (
    "accuracy",
    "balanced_accuracy",
    "majority",
    "random_label",
    "auroc",
    "converged",
    "n_iter",
    "n_train",
    "n_test",
)


@dataclass(frozen=True)
class ProfileEntry:
    """What one probe found at one place of a model.

    `site` and `layer` name the place (`layer` is None where a site has no layer, as for ``embed``), `summary`
    is what ``Probe.summary()`` returns, `per_seed` what ``Probe.per_seed_`` holds.
    """

    site: str
    layer: int | None
    summary: Mapping[str, Any]
    per_seed: Sequence[Mapping[str, Any]] = ()
    artifact: str | None = None
    """The name under which the lake keeps the probe, where it does."""

    @classmethod
    def of(cls, probe: Probe, *, site: str, layer: int | None) -> ProfileEntry:
        """Take the results of a fitted probe."""
        return cls(site, layer, probe.summary(), tuple(probe.per_seed_))

    @property
    def place(self) -> str:
        """The layer's number as text, or the site's name where there is no layer."""
        return self.site if self.layer is None else str(self.layer)


@dataclass(frozen=True)
class Profile:
    """The probes of one label over the layers of one run, in the order in which the model computes them."""

    label: str
    run: str
    entries: Sequence[ProfileEntry] = field(default_factory=tuple)
    condition: str | None = None
    """The SQL condition that narrowed the rows, if any."""
    warnings: Sequence[str] = ()
    """What a reader of the figures must know, in words."""

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict a fact: run, label, site, layer, metric, value, seed, reason.

        `seed` is None for a figure over all seeds and for a split that was given. `value` is a float (a truth
        value is 0.0 or 1.0), or None for what was not measured; `reason` then says why, where it is known.
        """
        facts = []
        for entry in self.entries:
            for metrics, source, seed in [
                (METRICS, entry.summary, None),
                *((SEED_METRICS, one, one.get("seed")) for one in entry.per_seed),
            ]:
                for metric in metrics:
                    value = source.get(metric)
                    facts.append(
                        {
                            "run": self.run,
                            "label": self.label,
                            "site": entry.site,
                            "layer": entry.layer,
                            "metric": metric,
                            "value": None if value is None else float(value),
                            "seed": seed,
                            "reason": source.get(f"{metric}_reason"),
                        }
                    )
        return facts

    def table(self) -> Table:
        """Return a table for a terminal, one line a layer; ± is the deviation over the splits.

        A star marks an accuracy whose solver did not converge. AUROC has a column where any line has one.
        """
        where = f" where {self.condition}" if self.condition else ""
        title = Text(f"How readable is {self.label} in {self.run}{where}?", style="bold")
        table = Table(title=title, caption=self._caption(), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("site", no_wrap=True)
        headings = dict(zip(METRICS[:6], ("accuracy", "±", "balanced", "majority", "shuffled", "AUROC"), strict=True))
        if all(e.summary.get("auroc") is None for e in self.entries):
            del headings["auroc"]
        for heading in ("layer", *headings.values()):
            table.add_column(heading, justify="right", no_wrap=True)
        for entry in self.entries:
            cells = [_share(entry.summary.get(m)) for m in headings]
            cells[0] += "*" if _unfinished(entry) else " "
            table.add_row(Text(entry.site), "" if entry.layer is None else str(entry.layer), *cells)
        return table

    def save_picture(self, path: str | PathLike[str]) -> Path:
        """Draw accuracy and baselines over the layers into a .png, .svg or .pdf file, and return its path.

        Needs matplotlib (MissingExtraError without it). Another suffix, a folder that does not exist, and a
        profile without entries raise RequestError. The same profile gives the same bytes with the same
        matplotlib.
        """
        target = check_picture_path(path)
        if not self.entries:
            raise RequestError(
                f"The profile of {self.label!r} in {self.run!r} has no layers; there is nothing to draw."
            )
        from .profile_picture import draw_profile  # matplotlib is optional, and slow to import

        draw_profile(self, target)
        return target

    def _caption(self) -> str | None:
        notes = {e.summary.get("auroc_reason") for e in self.entries} - {None}
        parts = [
            self.counts(),
            *self.warnings,
            *(f"No AUROC: {n.removeprefix('undefined: ')}" for n in sorted(map(str, notes))),
        ]
        if any(map(_unfinished, self.entries)):
            parts.append("* the solver did not converge")
        return ". ".join(p for p in parts if p) or None

    def counts(self) -> str:
        """Say how many rows, groups and splits the figures rest on, as ranges where layers differ."""
        words = {
            "n_rows": "rows",
            "n_groups": "groups",
            "n_seeds": "splits",
            "n_dropped": "without a label left out",
        }
        parts = []
        for key, word in words.items():
            found = sorted({int(e.summary[key]) for e in self.entries if e.summary.get(key) is not None})
            if found and not (key == "n_dropped" and found == [0]):
                number = f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"
                parts.append(f"{number} {word.removesuffix('s') if found == [1] else word}")
        return ", ".join(parts)


def _unfinished(entry: ProfileEntry) -> bool:
    return entry.summary.get("converged") is False


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def check_picture_path(path: str | PathLike[str]) -> Path:
    """Return `path` if a picture can be written there: .png, .svg or .pdf in a folder that exists.

    Ask before the work whose picture it will be; RequestError says what is wrong.
    """
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise RequestError(
            "A picture can be written as .png, .svg or .pdf, not as "
            f"{target.suffix or 'a file without suffix'!r} ({target.name}); name the file with one of those suffixes."
        )
    if not target.parent.is_dir():
        raise RequestError(f"The folder {target.parent} does not exist; make it first.")
    try:
        drawing = importlib.util.find_spec("matplotlib")
    except ImportError:
        drawing = None
    if drawing is None:
        raise MissingExtraError.of("plot", "Drawing a profile")
    return target
