"""Locks between threads that a forked process does not inherit closed."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """Make a lock that is open in a process that is forked while another thread holds it.

    The holder is not there in the new process, so that it would wait for ever. What the lock guards must be whole at
    any moment.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _open_all() -> None:
    for lock in _locks:
        if lock.locked():
            lock.release()


os.register_at_fork(after_in_child=_open_all)
