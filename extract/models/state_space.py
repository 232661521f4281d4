"""What the configurations of Mamba and Mamba-2 share."""

from __future__ import annotations

from dataclasses import dataclass

from .backend import BACKENDS
from .config import ModelConfig
from .norms import RMSNorm


@dataclass(frozen=True, kw_only=True)
class StateSpaceConfig(ModelConfig):
    """A state space behind a convolution, with the authors' initialisation.

    `d_inner` is 3.5 times d_model by default, not twice it, so that four layers have as many parameters as the other
    architectures of the study; `d_conv` 0 leaves the convolution out.
    """

    d_inner: int = 448
    d_conv: int = 4
    dt_min: float = 0.001
    dt_max: float = 0.1
    """Steps at the start are log-uniform from dt_min to dt_max."""
    backend: str = "torch"
    """What runs the scan: ``torch``, or ``mamba_ssm`` on CUDA."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_of("backend", BACKENDS)
        if not 0 < self.dt_min <= self.dt_max:
            raise self.refuse("dt_min", f"is {self.dt_min}, and must lie above 0 and not above dt_max ({self.dt_max})")

    def least(self, name: str) -> int:
        """Let the convolution be left out."""
        return 0 if name == "d_conv" else super().least(name)

    def final_norm(self) -> RMSNorm:
        """Build the norm before the head."""
        return RMSNorm(self.d_model)
