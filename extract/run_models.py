"""The models of the runs of a lake: found where a run says, or where the user says, and held to the run's record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import LayerlakeError, ModelError, WorldError
from ..store.run import Run
from .devices import check_device
from .loaded_model import LoadedModel, ModelSource
from .loading import load_model
from .settings import other_compute, other_model
from .weights import Digests, other_weights


class RunModels:
    """Checks that the model of a run is at hand and the same; each is loaded once."""

    def __init__(self, name: str | None, trust_remote_code: bool) -> None:
        self.name = name
        self.trust_remote_code = trust_remote_code
        self._known: dict[tuple[ModelSource, str], tuple[dict[str, Any], Digests]] = {}

    def check(self, run: Run, *, same_bytes: bool = True) -> tuple[ModelSource, int, str]:
        """Give the source of a run's model, and the threads and device of its workers; `WorldError` says what differs.

        With `same_bytes` this machine must give the run's bytes, not only its values. Code that comes with a model runs
        only when it was asked for now: what a lake says is not enough.
        """
        source, threads, device = self._source(run, same_bytes=same_bytes)
        if (source, device) not in self._known:
            self._load(source, device)
        self._hold(run, source, device)
        return source, threads, device

    def load(self, run: Run) -> LoadedModel:
        """Load a run's model, held to the run's record; on any machine."""
        source, _, device = self._source(run, same_bytes=False)
        loaded = self._load(source, device)
        self._hold(run, source, device)
        return loaded

    def _source(self, run: Run, *, same_bytes: bool) -> tuple[ModelSource, int, str]:
        try:
            compute = run.record.settings["compute"]
            source = ModelSource(**run.record.source["load"]) if self.name is None else self._named(run)
            source = replace(source, trust_remote_code=self.trust_remote_code)
            threads, device = int(compute["threads"]), compute["device"]
            if not all(isinstance(v, str) for v in (source.name, source.dtype, source.revision or "")):
                raise TypeError("its model has no name")
            check_device(device)
            if same_bytes and (other := other_compute(run.record, device)):
                raise WorldError(
                    f"this machine would give other bytes than the run's: it has {'; '.join(other)}. Repair where it "
                    "is as it was then."
                )
        except LayerlakeError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"the run does not say which model made it, and how ({type(error).__name__}: {error})."
            ) from error
        return source, threads, device

    def _load(self, source: ModelSource, device: str) -> LoadedModel:
        try:
            loaded = load_model(source, device=device)
        except LayerlakeError as error:
            raise ModelError(f"the model does not load: {error} Where it lies elsewhere now, say --model.") from error
        self._known[source, device] = loaded.identity, loaded.weights
        return loaded

    def _hold(self, run: Run, source: ModelSource, device: str) -> None:
        identity, weights = self._known[source, device]
        if other := other_model(identity, run.record.settings):
            differs = other_weights(run, weights)
            raise ModelError(
                f"{source.name} has other {' and '.join(other)} than the model that made the run"
                f"{f' ({differs})' if differs else ''}. Say --model with the one that did."
            )

    def weights(self, run: Run) -> Digests:
        """Give the digests of the weights of a run's model, which is at hand and the same, on any machine."""
        source, _, device = self.check(run, same_bytes=False)
        return self._known[source, device][1]

    def _named(self, run: Run) -> ModelSource:
        assert self.name is not None
        return ModelSource(**(run.record.source.get("load", {}) | {"name": self.name}))
