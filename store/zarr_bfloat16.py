"""bfloat16 for zarr-python: ``import layerlake.store.zarr_bfloat16``, and it opens our arrays.

zarr-python 3.1 has no bfloat16 of its own; with this it gives ``ml_dtypes.bfloat16``. The type is also announced
through the entry point ``zarr.data_type``, which zarr-python 3.1.6 collects and never loads: until it does, the import
is needed. tensorstore knows the type by itself and needs nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import EndiannessStr
from zarr.core.dtype.npy.float import BaseFloat
from zarr.dtype import data_type_registry

_NATIVE = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True)
class BFloat16(BaseFloat[Any, Any]):
    """The Zarr v3 data type ``bfloat16``, read as ``ml_dtypes.bfloat16``."""

    dtype_cls = type(_NATIVE)
    _zarr_v3_name: ClassVar[str] = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()
    endianness: EndiannessStr = "little"

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> BFloat16:
        """Make the data type from a NumPy dtype, which must be ml_dtypes.bfloat16."""
        cls._check_native(dtype)
        return cls()

    @classmethod
    def _check_native(cls, dtype: Any) -> None:
        from zarr.core.dtype.common import DataTypeValidationError

        if dtype != _NATIVE:
            raise DataTypeValidationError(f"Invalid data type: {dtype}. Expected {_NATIVE}.")

    def to_native_dtype(self) -> Any:
        """Give the NumPy dtype; ml_dtypes has the machine's byte order only, and so has a lake: little."""
        return _NATIVE

    @property
    def item_size(self) -> int:
        """Bytes a value."""
        return 2


data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)
