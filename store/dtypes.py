"""The value types that a lake stores, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import UnknownNameError


@dataclass(frozen=True)
class StoredDtype:
    """A floating-point type under its Zarr v3 name, and how its raw bits are handled.

    Bits travel as unsigned integers inside the store, so that no library between the model and the file can
    round, canonicalise a NaN or reject a type it does not know.
    """

    name: str
    bits: np.dtype[Any]
    nan: int
    """The bit pattern of the quiet NaN that fills rows nothing was written to."""

    @property
    def itemsize(self) -> int:
        """Bytes a value."""
        return self.bits.itemsize

    def to_float32(self, bits: np.ndarray) -> np.ndarray:
        """Give the float32 numbers that raw `bits` stand for; exact, as float32 holds all three types."""
        if self.name == "bfloat16":
            return bits.view(ml_dtypes.bfloat16).astype(np.float32)  # NaN payloads included; twice as fast as shifting
        if self.name == "float16":
            with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
                return bits.view(np.float16).astype(np.float32)
        return bits.view(np.float32)


DTYPES: dict[str, StoredDtype] = {
    "bfloat16": StoredDtype("bfloat16", np.dtype(np.uint16), 0x7FC0),
    "float16": StoredDtype("float16", np.dtype(np.uint16), 0x7E00),
    "float32": StoredDtype("float32", np.dtype(np.uint32), 0x7FC00000),
}


def stored_dtype(name: str) -> StoredDtype:
    """Look up a stored type by its Zarr v3 name; `UnknownNameError` lists the ones there are."""
    if name not in DTYPES:
        raise UnknownNameError.of("stored dtype", name, DTYPES)
    return DTYPES[name]
