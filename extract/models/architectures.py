"""The architectures by name."""

from __future__ import annotations

from typing import Any

from ...errors import UnknownNameError
from .config import ModelConfig
from .mamba import MambaConfig
from .mamba2 import Mamba2Config
from .recurrent import GRUConfig, LSTMConfig
from .transformer import TransformerConfig

ARCHITECTURES: dict[str, type[ModelConfig]] = {
    c.architecture: c for c in (TransformerConfig, MambaConfig, Mamba2Config, LSTMConfig, GRUConfig)
}
"""Each architecture's configuration, by its name."""


def make_config(architecture: str, **options: Any) -> ModelConfig:
    """Build the configuration of an architecture; `vocab_size` and `outputs` are always needed.

    A name that is not known, of an architecture or of an option, is an `UnknownNameError`; a value that cannot be, a
    `RequestError`.
    """
    if architecture not in ARCHITECTURES:
        raise UnknownNameError.of("architecture", architecture, ARCHITECTURES)
    return ARCHITECTURES[architecture].of(options)
