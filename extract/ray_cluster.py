"""The Ray cluster behind a driver: a private one on this machine, or one whose address was given."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError, RequestError, WorldError
from .ray_guard import start_guard, stop_guard

OBJECT_STORE_BYTES = 80 * 2**20  # near Ray's minimum: only short JSON texts pass through it
LOG_TAIL = 4000


class RayCluster:
    """Connects this process to Ray, and undoes that.

    Without an address it starts a cluster of its own, and `RAY_ADDRESS` is not looked at. That cluster
    listens on the loopback device only, asks for a token that is made for it (unless `RAY_AUTH_MODE` says
    otherwise), keeps its files in a folder that only this user can read and that goes with it, and dies with
    the driver, however that dies. On Linux it is bound to the thread that opens it: keep that thread alive.
    """

    def __init__(self, *, cpus: int, address: str | None) -> None:
        self.cpus = cpus
        self.address = address
        self.ray: Any = None
        self._folder: Path | None = None
        self._finalizer: weakref.finalize[..., RayCluster] | None = None

    def open(self) -> Any:
        """Connect, and give back the ``ray`` module."""
        try:
            ray = importlib.import_module("ray")
        except ImportError as error:
            raise MissingExtraError.of("ray", "--engine ray") from error
        if ray.is_initialized():
            self._share(ray)
        elif self.address is None:
            self._start(ray)
        else:
            self._attach(ray, self.address)
        self.ray = ray
        return ray

    @property
    def own(self) -> bool:
        """Whether the cluster is one that this object started."""
        return self._folder is not None

    def log_tail(self, pid: int) -> str:
        """Give the end of what the worker process `pid` wrote to its error stream, where that can be read."""
        if self._folder is None:
            return f"The output of process {pid} is in the logs of the Ray cluster."
        logs = sorted(self._folder.glob(f"session_2*/logs/worker-*-{pid}.err"))
        return logs[0].read_text(errors="replace")[-LOG_TAIL:] if logs else ""

    def close(self) -> None:
        """Shut the cluster down if it is our own, else leave it as it was found."""
        self.ray = None
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
        self._folder = None

    def _share(self, ray: Any) -> None:
        """Use the connection that this process has already; it is left open by `close`."""
        connected = ray.get_runtime_context().gcs_address
        if self.address not in ("auto", connected):
            raise RequestError(
                f"This process is already connected to the Ray cluster at {connected}, and can hold one "
                "connection only: call ray.shutdown() first, or give 'auto' as the Ray address to use it."
            )

    def _attach(self, ray: Any, address: str) -> None:
        try:
            _knock(address)
            with _same_sigterm():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise WorldError(
                f"Ray did not connect to the cluster at {address!r}: {_first_line(error)} Check that it runs "
                "and that its token is set in RAY_AUTH_TOKEN, or leave the address out to use this machine."
            ) from error
        self._finalizer = weakref.finalize(self, ray.shutdown)

    def _start(self, ray: Any) -> None:
        # Socket paths have a length limit of about 100, which the temporary folder of macOS would break.
        base = tempfile.gettempdir()
        folder = Path(tempfile.mkdtemp(prefix="layerlake-ray-", dir=base if len(base) < 20 else "/tmp"))
        try:
            with _same_sigterm(), _token(), _loopback():
                ray.init(
                    address="local",
                    num_cpus=self.cpus,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(folder),
                    _skip_env_hook=True,
                )
        except BaseException as error:
            _stop(ray, folder)
            if not isinstance(error, Exception):
                raise
            raise WorldError(
                f"Ray did not start a cluster on this machine: {_first_line(error)} "
                "Try again, or use the engine 'inline', which needs no Ray."
            ) from error
        node = importlib.import_module("ray._private.worker")._global_node
        guard = start_guard(folder, node.all_processes["raylet"][0].process.pid)
        self._folder = folder
        self._finalizer = weakref.finalize(self, _stop, ray, folder, guard)


def wait_until_gone(pids: set[int], seconds: float = 5.0) -> None:
    """Wait until none of the processes `pids` of this machine is left, then kill those that are."""
    deadline = time.monotonic() + seconds
    left = set(pids)
    while left:
        late = time.monotonic() > deadline
        for pid in list(left):
            try:
                os.kill(pid, signal.SIGKILL if late else 0)
            except OSError:
                left.discard(pid)
        if late:
            return
        time.sleep(0.02)


def _knock(address: str) -> None:
    """Fail at once where nobody listens; Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in address:
        return  # "auto", or an address with a protocol
    services = importlib.import_module("ray._private.services")
    # Ray takes a local host to mean the address of the network card, where its clusters listen.
    socket.create_connection((services.resolve_ip_for_localhost(host), int(port)), timeout=10).close()


def _stop(ray: Any, folder: Path, guard: subprocess.Popen[bytes] | None = None) -> None:
    ray.shutdown(wait_for_processes=True)
    _refresh_token()
    if guard is not None:
        stop_guard(guard)
    shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    line = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {line[:300].rstrip('.')}."


def _refresh_token() -> None:
    """Have Ray read its token settings from the environment again; it reads them once, when imported."""
    raylet = importlib.import_module("ray._raylet")
    # In this order: with the token gone and the mode still on, a thread of Ray's would abort the process.
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Have `values` in the environment for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _token() -> Iterator[None]:
    """Have a new token in the environment while Ray's processes start, which inherit it.

    A token in the environment also keeps Ray from writing one into a file that everybody can read.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        yield
        return
    with _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
        _refresh_token()
        yield


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Have Ray listen on 127.0.0.1 only, as it does by itself on macOS and Windows.

    On Linux Ray replaces a `_node_ip_address` of 127.0.0.1 with the address of the network card and then
    listens on all of them; this constant of Ray's is the switch between the two.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Put back the driver's handler for SIGTERM, which ``ray.init`` replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
