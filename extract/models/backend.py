"""The kernel that runs a Mamba's scan: plain torch, or the authors' CUDA kernels where they are asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import MissingExtraError, ModelError
from .scan import selective_scan
from .ssd import ssd

BACKENDS = ("torch", "mamba_ssm")


def run_selective_scan(backend: str, x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Run Mamba's scan by the named backend; arguments and result are those of `selective_scan`."""
    if backend == "torch":
        return selective_scan(x, delta, a, b, c)
    kernel = _kernel("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", x)
    # The kernel wants time last.
    x, delta, b, c = (v.transpose(1, 2).contiguous() for v in (x, delta, b, c))
    return kernel(x, delta, a, b, c).transpose(1, 2)


def run_ssd(backend: str, x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Run Mamba-2's scan by the named backend; arguments and result are those of `ssd`."""
    if backend == "torch":
        return ssd(x, delta, a, b, c)
    kernel = _kernel("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", x)
    return kernel(x, delta, a, b, c, chunk_size=64)


def _kernel(module: str, name: str, x: Tensor) -> Any:
    if not x.is_cuda:  # never taken by accident, and never left by accident either
        raise ModelError(
            f"The backend 'mamba_ssm' runs on CUDA, and the model is on {x.device.type}. Use --device cuda, or make "
            "the model with the option backend=torch."
        )
    import importlib

    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise MissingExtraError.of("mamba", "The backend 'mamba_ssm'") from error
