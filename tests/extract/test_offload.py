"""One batch is stored while the next is computed, in order, and an error is not lost."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from layerlake.extract.offload import Offload


def test_values_are_converted_and_stored_in_order_and_all_of_them():
    found = []
    with Offload("cpu") as offload:
        for batch in range(5):
            values = [torch.full((2, 3), float(10 * batch + i)) for i in range(3)]
            offload.put(values, lambda i, v: (v + i).to(torch.bfloat16), lambda i, v: found.append((i, v[0, 0].item())))
        offload.wait()
    assert found == [(i, float(10 * b + 2 * i)) for b in range(5) for i in range(3)]


def test_a_batch_is_stored_while_the_next_is_computed_and_never_two_at_once():
    at_work, most = 0, 0
    lock = threading.Lock()

    def store(index, value):
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.05)
        with lock:
            at_work -= 1

    start = time.perf_counter()
    with Offload("cpu") as offload:
        for _ in range(8):
            time.sleep(0.05)  # the forward
            offload.put([torch.zeros(1)], lambda i, v: v, store)
        offload.wait()
    assert most == 1
    assert time.perf_counter() - start < 0.7  # one after the other it would be 0.8


@pytest.mark.parametrize("then", ["put", "wait"])
def test_an_error_of_the_thread_is_raised_by_what_comes_next(then):
    def full(index, value):
        raise OSError(28, "No space left on device")

    with Offload("cpu") as offload, pytest.raises(OSError, match="No space left"):
        offload.put([torch.zeros(1)], lambda i, v: v, full)
        if then == "put":
            offload.put([torch.zeros(1)], lambda i, v: v, full)
        offload.wait()


def test_nothing_is_written_after_it_was_left():
    seen = []

    def store(index, value):
        time.sleep(0.1)
        seen.append(index)

    with pytest.raises(KeyboardInterrupt), Offload("cpu") as offload:
        offload.put([torch.zeros(1)], lambda i, v: v, store)
        raise KeyboardInterrupt
    count = len(seen)
    time.sleep(0.2)
    assert len(seen) == count == 1
