"""Making a new run: its record, plan and empty arrays appear at once or not at all."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from .durable import file_sha256, new_folder, sealed_json, sweep
from .layout import make_lake, runs_folder
from .plan import write_plan
from .record import RunRecord
from .run import Run

WEIGHTS_FILE = "weights.json"


def create_run(
    root: Path,
    record: RunRecord,
    sequences: pa.Table,
    units: list[pa.Table],
    weights: Mapping[str, Any] | None = None,
    spans: pa.Table | None = None,
) -> Run:
    """Create a run with its plan and Zarr metadata, making the lake when there is none.

    `weights` are a digest for each tensor of the model, by name, kept to say what another model has otherwise.

    Everything is written into a folder of a temporary name, which is then renamed: a crash leaves no half-made run.
    When another process creates a run of that name meanwhile, theirs stands and is returned.
    """
    record.check()
    make_lake(root)
    for folder in (root, runs_folder(root)):
        sweep(folder)
    with new_folder(runs_folder(root) / record.name) as temporary:
        for folder in ("units", "tokens", "tmp"):
            (temporary / folder).mkdir()
        write_plan(temporary / "plan", sequences, units, spans)
        _create_arrays(temporary / "activations.zarr", record)
        if weights is not None:
            (temporary / WEIGHTS_FILE).write_bytes(weights_json(weights))
        written = sorted(p for p in temporary.rglob("*") if p.is_file())
        files = {str(p.relative_to(temporary)): file_sha256(p) for p in written}
        (temporary / "run.json").write_bytes(sealed_json(replace(record, files=files).to_json()))
    return Run(root, record.name)


def weights_json(weights: Mapping[str, Any]) -> bytes:
    """Encode the digests of a model's weights as `create_run` writes them."""
    return sealed_json({"tensors": dict(weights)})


def zarr_metadata(record: RunRecord) -> dict[str, bytes]:
    """Give the metadata files of a run's arrays as `create_run` writes them, by their path in the run's folder."""
    with tempfile.TemporaryDirectory() as folder:
        _create_arrays(Path(folder) / "activations.zarr", record)
        return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def _create_arrays(path: Path, record: RunRecord) -> None:
    import zarr

    from . import zarr_bfloat16

    group = zarr.create_group(path, zarr_format=3)
    for array in record.arrays:
        layout = array.layout(record.unit_size(array.rows))
        group.create_array(
            array.name,
            shape=(record.units * layout.rows, *array.shape),
            shards=(layout.rows, *array.shape),
            chunks=(layout.chunk_rows, *array.shape),
            dtype=zarr_bfloat16.BFloat16() if array.dtype == "bfloat16" else array.dtype,
            fill_value=float("nan"),
            compressors=None if array.codec == "none" else _archive(layout.dtype.itemsize),
            filters=None,
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=("row", *(f"dim_{i}" for i in range(len(array.shape)))),
        )
    with warnings.catch_warnings():
        # zarr-python warns that consolidated metadata are not in the Zarr v3 specification yet; readers that do not
        # know them read each array's own zarr.json.
        warnings.filterwarnings("ignore", "Consolidated metadata")
        zarr.consolidate_metadata(path)


def _archive(itemsize: int) -> Any:
    from zarr.codecs import BloscCodec

    return BloscCodec(typesize=itemsize, cname="lz4", clevel=5, shuffle="bitshuffle")  # as archive_shard.py compresses
