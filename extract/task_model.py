"""A pretrained model with a head for a task, and its folder: the model in transformers' form, the head beside it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..errors import ModelError, RequestError
from ..store.durable import fsync_folder, sweep, temporary_name
from .hugging_face import load_hugging_face, of_transformers
from .loaded_model import LoadedModel, ModelSource
from .weights import weight_digests, weights_fingerprint

TASK_FILE, HEAD_FILE, CONFIG = "task.json", "head.safetensors", "config.json"
_KIND, _FORMAT = "layerlake-task-model", 1


class TaskModel(nn.Module):
    """A headless transformers model and a linear head on what it returns, which comes after its final norm.

    The pretrained part is always in evaluation mode, also in training: its dropout would draw from torch's global
    generator, and its layers may compute otherwise.
    """

    base_model_prefix = "base"

    def __init__(self, base: Any, width: int, classes: int) -> None:
        super().__init__()
        self.base = base
        with torch.device("meta"):  # torch's own constructor would draw from the global generator
            head = nn.Linear(width, classes)
        self.head = head.to_empty(device="cpu")
        if getattr(self.config, "final_logit_softcapping", None):
            self.config.final_logit_softcapping = None  # it was the other head's
        self.train(self.training)

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Give the logits, (B, T, classes), of token ids, (B, T) int64; `options` are those of the pretrained part."""
        hidden = self.base(input_ids=input_ids, **options).last_hidden_state
        return self.head(hidden.to(self.head.weight.dtype))

    def train(self, mode: bool = True) -> TaskModel:
        """Set the mode of all but the pretrained part, which stays in evaluation mode."""
        super().train(mode)
        self.base.eval()
        return self

    @property
    def config(self) -> Any:
        """The configuration of the pretrained part."""
        return self.base.config

    def get_input_embeddings(self) -> nn.Module:
        """Give the table of token embeddings."""
        return self.base.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Linear:
        """Give the head."""
        return self.head


def save_task_model(folder: str | Path, model: TaskModel, tokenizer: Any, said: Mapping[str, Any]) -> None:
    """Write a model into a folder, with its tokenizer; `said` is plain data, and goes into task.json.

    task.json holds the hash of every other file. config.json, without which a folder is no MODEL, is written last: a
    folder never holds a model half.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    made = temporary_name(folder, "model")
    made.mkdir()
    try:
        model.base.save_pretrained(made, max_shard_size="1TB")  # one file
        tokenizer.save_pretrained(made)
        head = {n: t.detach().cpu().contiguous() for n, t in model.head.state_dict().items()}
        safetensors.torch.save_file(head, made / HEAD_FILE)
        files = {p.name: _sha256(p) for p in sorted(made.iterdir())}
        task = {"kind": _KIND, "format": _FORMAT, **said, "files": files}
        (made / TASK_FILE).write_text(json.dumps(task, indent=2) + "\n")
        for name in (*(n for n in files if n != CONFIG), TASK_FILE, CONFIG):
            fsync_folder(made / name)
            (made / name).replace(folder / name)
            fsync_folder(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def read_task(folder: str | Path) -> dict[str, Any] | None:
    """Give the task.json of a folder that `save_task_model` wrote; None for any other folder."""
    try:
        found = json.loads((Path(folder) / TASK_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("kind") == _KIND else None


def is_task_model(source: ModelSource) -> bool:
    """Tell whether a model's name is a folder that `save_task_model` wrote."""
    return not source.is_function and read_task(Path(source.name).expanduser()) is not None


def load_task_model(source: ModelSource) -> LoadedModel:
    """Load a folder that `save_task_model` wrote, with the sites of its architecture; `logits` are the task's.

    `ModelError` when a file is not the one that its task.json was written for.
    """
    folder = Path(source.name).expanduser()
    task = read_task(folder)
    if task is None:
        raise RequestError(f"{folder} holds no fine-tuned model: it has no {TASK_FILE} of that kind.")
    if task.get("format") != _FORMAT:
        raise ModelError(f"{folder} was written by another version of layerlake (format {task.get('format')}).")
    for name, digest in task.get("files", {}).items():
        try:
            intact = _sha256(folder / name) == digest
        except OSError as error:
            raise ModelError(f"{folder / name} cannot be read ({error.strerror}). Train the model again.") from error
        if not intact:
            raise ModelError(f"{folder / name} is not what {TASK_FILE} was written for. Train the model again.")
    plain = load_hugging_face(source)
    head = safetensors.torch.load_file(folder / HEAD_FILE)
    module = TaskModel(plain.module, head["weight"].shape[1], head["weight"].shape[0])
    module.head.load_state_dict(head)
    if source.dtype != "auto":
        module.head.to(getattr(torch, source.dtype))
    assert plain.architecture is not None
    model = of_transformers(source, module.eval(), plain.tokenizer, plain.architecture)
    model.weights = weight_digests(module)
    model.identity["fingerprint"] = weights_fingerprint(model.weights)
    return model


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
