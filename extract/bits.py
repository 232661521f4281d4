"""Between values in memory and the raw bits of a stored dtype."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import RequestError


def rounded_to(value: torch.Tensor, dtype: str, site: str, advice: str) -> torch.Tensor:
    """Round a captured value to a dtype by name, where it is.

    Rounding is to nearest even, as torch converts. A finite value that would become infinite is refused, naming site
    and value and with `advice`, instead of kept as something else: float16 ends at 65,504, bfloat16 just below float32.
    """
    rounded = value.to(getattr(torch, dtype))
    if rounded.dtype != value.dtype:
        lost = torch.isinf(rounded) & torch.isfinite(value)
        if lost.any():
            raise RequestError(
                f"Site {site} has the value {value[lost][0].item():.6g}, which {dtype} cannot hold. {advice}"
            )
    return rounded


def bits_of(stored: torch.Tensor) -> np.ndarray:
    """Give the raw bits of a tensor as a NumPy array of the same shape."""
    whole = stored.cpu().contiguous()
    if whole.dtype == torch.float32:
        return whole.view(torch.int32).numpy().view(np.uint32)
    return whole.view(torch.int16).numpy().view(np.uint16)


def from_bits(bits: np.ndarray, dtype: str) -> torch.Tensor:
    """Give raw bits as a torch tensor of their dtype, a copy."""
    signed = np.ascontiguousarray(bits).view(np.int32 if dtype == "float32" else np.int16)
    return torch.from_numpy(signed.copy()).view(getattr(torch, dtype))
