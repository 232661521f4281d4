"""The class of the Ray actors that host workers, and what a process needs to import this package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def package_folders() -> list[str]:
    """Find the entry of ``sys.path`` that this package was loaded from, if it was loaded from one.

    An editable install maps the package's name to a folder by other means, which hold in the worker too.
    """
    package = (__package__ or "").partition(".")[0]
    home = Path(str(sys.modules[package].__file__)).parent
    entries = {str(Path(entry or ".").absolute()) for entry in sys.path}
    return [str(home.parent)] if home.name == package and str(home.parent) in entries else []


def actor_class() -> type:
    """Make the class of the actors, which Ray sends by value because it is local to a function.

    Thus it works in a process that cannot import this package yet, and can make it importable.
    """

    class LayerlakeWorker:
        def __init__(self, package: str, folders: list[str], worker: str, spec: str, threads: int) -> None:
            self.package = package
            self.folders = folders
            self.arguments = (worker, spec)
            self.threads = threads
            self.host: Any = None

        def where(self) -> tuple[int, str]:
            import os
            import socket

            return os.getpid(), socket.gethostname()

        def start(self) -> str:
            import importlib
            import json
            import sys
            import warnings

            sys.path.extend(folder for folder in self.folders if folder not in sys.path)
            try:
                hosting = importlib.import_module(f"{self.package}.extract.hosting")
                threads = importlib.import_module(f"{self.package}.extract.threads")
            except ImportError as error:
                text = f"{self.package} cannot be imported on a worker's node: {error}"
                failure = {"type_name": "ImportError", "text": text, "traceback": "", "final": True}
                return json.dumps({"failure": failure})
            warnings.simplefilter("ignore")
            limit = threads.ThreadLimit(self.threads)
            limit.__enter__()  # never left: the process ends with the job
            self.host = hosting.Host(*self.arguments, limit)
            return self.host.start()

        def run(self, payload: str) -> str:
            return self.host.run(payload)

    return LayerlakeWorker
