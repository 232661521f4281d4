"""Sequence models that are built and trained here: Transformer, Mamba, Mamba-2, LSTM and GRU."""

from .architectures import ARCHITECTURES, make_config
from .backbone import SequenceModel
from .checkpoint import load_checkpoint, save_checkpoint
from .config import ModelConfig

__all__ = ["ARCHITECTURES", "ModelConfig", "SequenceModel", "load_checkpoint", "make_config", "save_checkpoint"]
