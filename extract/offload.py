"""Storing a batch's values while the model is at the next batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import torch

Convert = Callable[[int, torch.Tensor], torch.Tensor]
Store = Callable[[int, torch.Tensor], None]


class Offload:
    """Converts and stores the values of one batch in a thread of its own, one batch at a time.

    At most two batches of values are in memory: the one that is being stored and the one that the model computes. On a
    GPU values are converted there, and copied on a stream of their own into page-locked buffers that are used again, so
    that the copy too runs beside the next forward. An error of the thread is raised by the next `put`, or by `wait`.
    Leaving the ``with`` block waits for the thread; it can be entered again.
    """

    def __init__(self, device: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="layerlake-offload")
        self._pending: Future[None] | None = None
        self._stream: Any = torch.cuda.Stream(device) if device.startswith("cuda") else None
        self._buffers: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Offload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            wait([pending])  # nothing writes into shards that are abandoned

    def put(self, values: Sequence[torch.Tensor], convert: Convert, store: Store) -> None:
        """Have `store(i, convert(i, values[i]))` called for each value, in order, on the host.

        The values are the caller's no longer. It returns as soon as the batch before is stored.
        """
        self.wait()
        left = list(values)
        if self._stream is None:
            self._pending = self._pool.submit(self._on_host, left, convert, store)
        else:
            self._pending = self._pool.submit(*self._from_device(left, convert, store))

    def wait(self) -> None:
        """Wait until everything that was put is stored; raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @staticmethod
    def _on_host(values: list[torch.Tensor], convert: Convert, store: Store) -> None:
        with torch.inference_mode():
            for i in range(len(values)):
                value, values[i] = values[i], torch.empty(0)  # freed as soon as it is stored
                store(i, convert(i, value))

    def _from_device(self, values: list[torch.Tensor], convert: Convert, store: Store) -> tuple[Any, ...]:
        with torch.inference_mode():
            converted = [convert(i, v) for i, v in enumerate(values)]
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                hosts = []
                for i, value in enumerate(converted):
                    host = self._buffer(i, value)
                    host.copy_(value, non_blocking=True)
                    value.record_stream(self._stream)
                    hosts.append(host)
                done = torch.cuda.Event()
                done.record(self._stream)

        def finish() -> None:
            done.synchronize()
            for i, host in enumerate(hosts):
                store(i, host)

        return (finish,)

    def _buffer(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Give a page-locked buffer of the value's shape, out of one that was made for an earlier batch if it fits."""
        known = self._buffers.get(index)
        if known is None or known.dtype != value.dtype or known.numel() < value.numel():
            known = self._buffers[index] = torch.empty(value.numel(), dtype=value.dtype, pin_memory=True)
        return known[: value.numel()].view(value.shape)
