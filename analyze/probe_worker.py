"""The worker of a probe job: one array of a run, one probe, stored as an artifact with its lineage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptLakeError
from ..store.durable import file_sha256, new_folder, read_sealed, sealed_json
from ..store.lake import Lake
from ..store.parquet import read_table
from ..store.row_kinds import TOKENS
from ..store.run import ArraySpec
from ..store.selection import Selection
from .probe import Probe
from .profile import ProfileEntry


class ProbeWorker:
    """Fits the probe of one site and layer on the rows that the request kept."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.lake = Lake.open(spec["lake"])
        self.settings: dict[str, Any] = spec["settings"]
        self.lineage: dict[str, Any] = spec["lineage"]
        rows = read_table(self.lake.root / "artifacts" / f"{self.lineage['selection']}.parquet")
        runs = {self.lineage["run"]: self.lineage["identity"]}
        self.selection = Selection(self.lake, self.lineage["query"], rows, runs=runs)
        self.labels = np.array(rows["label"].to_pylist(), object)
        self.groups = np.array(rows["grouping"].to_pylist(), object)

    def run(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Fit and store the probe of `payload["site"]` and `payload["layer"]` as `payload["artifact"]`."""
        site, layer, artifact = payload["site"], payload["layer"], payload["artifact"]
        settings = self.settings
        probe = Probe(**settings["probe"])
        probe.fit(self.selection.array(layer, site, rows=TOKENS), self.labels, self.groups)
        content = {
            "kind": "probe",
            "site": site,
            "layer": layer,
            "lineage": self.lineage,
            "settings": settings,
            "summary": probe.summary(),
            "per_seed": probe.per_seed_,
        }
        _store(self.lake.root / "artifacts" / artifact, content, probe)
        return {"artifact": artifact, "accuracy": probe.accuracy_}


def load_entry(root: Path, artifact: str, array: ArraySpec) -> ProfileEntry:
    """Read a stored probe's results back as an entry of a profile."""
    path = root / "artifacts" / artifact / "artifact.json"
    content = read_sealed(path)
    try:
        return ProfileEntry(array.site, array.layer, content["summary"], tuple(content["per_seed"]), artifact)
    except (KeyError, TypeError) as error:
        raise CorruptLakeError(f"The stored probe {path} cannot be read: {error!r}.") from error


def _store(folder: Path, content: dict[str, Any], probe: Probe) -> None:
    from safetensors.numpy import save_file

    with new_folder(folder) as temporary:
        weights = {"coef": probe.coef_, "intercept": probe.intercept_}
        path = temporary / "probe.safetensors"
        save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, path)
        record = content | {"files": {path.name: file_sha256(path)}}
        (temporary / "artifact.json").write_bytes(sealed_json(record))
