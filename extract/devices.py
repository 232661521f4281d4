"""On which device a model runs, and that all of it is there."""

from __future__ import annotations

import re

import torch

from ..errors import RequestError, WorldError


def check_device(device: str) -> None:
    """Raise `RequestError` for a device that is neither cpu nor cuda, `WorldError` for one that is not there."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise RequestError(f"{device!r} is not a device; use cpu or cuda.")
    if device != "cpu" and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise WorldError(f"This process sees no device {device}: use --device cpu, or a torch built for your GPU.")


def device_of(module: torch.nn.Module) -> torch.device:
    """Give the one device of a model's weights; `RequestError` names a weight that lies elsewhere, or nowhere."""
    places: dict[torch.device, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type == "meta":
            raise RequestError(
                f"{type(module).__name__} has weights without values ({name} is on the meta device). Load them into "
                "memory first; weights that are off-loaded to disk cannot be used."
            )
    for name, parameter in module.named_parameters():
        places.setdefault(parameter.device, name)
    if len(places) > 1:
        shown = " and ".join(f"{device} ({name})" for device, name in places.items())
        raise RequestError(f"{type(module).__name__} has weights on {shown}. Put the whole model on one device.")
    return next(iter(places), torch.device("cpu"))
