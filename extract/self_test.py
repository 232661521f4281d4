"""The self-test of a model: the equations that must hold between its sites, tried on the model itself.

Shipped, run by `layerlake doctor MODEL`, by the tests for every registered architecture, and before an architecture
that nobody registered is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ModelError
from .architectures import ARCHITECTURES
from .batch import Batch, Padding
from .batch_check import allowed_distance, row_distance
from .hooks import SitePoint
from .loaded_model import LoadedModel
from .reference import first_tensor, plain_forward
from .tail import apply_tail, scaled_head

_LENGTHS = (9, 1, 12, 4, 9)


@dataclass(frozen=True)
class Check:
    """One check of a self-test: `worst` is the largest difference found, as a share of a row's norm, at `where`.

    `passed` is None where the check does not apply to the model; `note` says why, or what was found.
    """

    name: str
    what: str
    passed: bool | None
    worst: float | None = None
    limit: float | None = None
    where: str = ""
    note: str = ""

    @property
    def shown_worst(self) -> str:
        """The largest difference as people read it."""
        return "" if self.worst is None else f"{self.worst:.2g}"

    @property
    def shown_limit(self) -> str:
        """What is allowed as people read it; 0 is bit for bit."""
        return "" if self.limit is None else f"{self.limit:.2g}"

    def to_json(self) -> dict[str, Any]:
        """Give the check as plain data."""
        return asdict(self)


@dataclass
class _Worst:
    """The largest difference met so far; `limit` None allows what the dtype's rounding explains."""

    model: LoadedModel
    limit: float | None = None
    value: float = 0.0
    where: str = ""
    allowed: float = 0.0
    failed: bool = False

    def see(self, found: Tensor, expected: Tensor, where: str) -> None:
        allowed = self.limit
        if allowed is None:
            allowed = allowed_distance(self.model, expected.dtype, where.partition("-")[0])
        same = found.shape == expected.shape
        value = row_distance(found, expected) if same else math.inf
        if not self.where or not value <= self.value:
            self.value, self.where, self.allowed = value, where, allowed
        self.failed |= not value <= allowed

    def check(self, name: str, what: str, none: str = "") -> Check:
        if not self.where:
            return Check(name, what, None, note=none or "does not apply to this model")
        return Check(name, what, not self.failed, self.value, self.allowed, self.where)


class SelfTest:
    """Tries a loaded model on a few short random sequences; the same `seed` tries the same ones.

    All sites of the model are settled and read. The model is not changed; forwards are of at most five sequences of
    twelve tokens, about a dozen for each padding side and site.
    """

    def __init__(self, model: LoadedModel, *, seed: int = 0) -> None:
        self.model = model
        generator = np.random.default_rng(seed)
        longest = model.max_length or max(_LENGTHS)
        self.sequences = [
            generator.integers(0, model.vocab_size or 2, min(n, longest), dtype=np.int64) for n in _LENGTHS
        ]
        self.points = model.settled(model.points)
        self.alone = [self._run([ids], "none")[0] for ids in self.sequences]
        self.values, self.result = self._run(self.sequences[:1], "none")

    def run(self) -> list[Check]:
        """Run all checks, in the order in which a reader would ask for them."""
        return [
            self._repeats(),
            self._moment(),
            self._blocks(),
            self._embedding(),
            self._chain(),
            self._sums(),
            self._head(),
            self._states(),
            self._patterns(),
            *(self._batched(side) for side in ("none", "right", "left")),
            self._patched_back(),
            self._edits_are_felt(),
        ]

    def _run(self, sequences: Sequence[np.ndarray], padding: Padding, **more: Any) -> tuple[dict[str, Tensor], Tensor]:
        batch = Batch.of(sequences, padding, self.model.device)
        values, output = self.model.run(batch, more.pop("points", self.points), more.pop("edits", None), whole=True)
        return values, first_tensor(output)

    def _of(self, site: str) -> dict[int | None, Tensor]:
        """Give the values of the first sequence at a site, (time, ...), by layer."""
        return {p.layer: self.values[p.name][0] for p in self.points if p.site == site}

    def _repeats(self) -> Check:
        worst = _Worst(self.model, 0.0)
        again, result = self._run(self.sequences[:1], "none")
        for point in self.points:
            worst.see(again[point.name][0], self.values[point.name][0], point.name)
        worst.see(result, self.result, "output")
        return worst.check("repeats", "the same forward gives the same bits: no dropout, no random numbers, no memory")

    def _moment(self) -> Check:
        """Compare what was captured with copies that hooks of torch's own made in the same forward."""
        worst = _Worst(self.model, 0.0)
        batch = Batch.of(self.sequences[:1], "none", self.model.device)
        copies: dict[str, Tensor] = {}
        handles = []
        for point in self.points:
            if point.derive is None and point.side != "input":

                def hook(_m: Any, _i: Any, output: Any, name: str = point.name) -> None:
                    copies[name] = first_tensor(output).clone()

                handles.append(self.model.module.get_submodule(point.module).register_forward_hook(hook))
        try:
            values, _ = self.model.run(batch, self.points, whole=True)
        finally:
            for handle in handles:
                handle.remove()
        for name, copy in copies.items():
            worst.see(values[name][0].reshape(-1), copy.reshape(-1), name)
        return worst.check("moment", "a value is the one at the moment its module returned, not changed in place later")

    def _blocks(self) -> Check:
        worst = _Worst(self.model)
        paths = self.model.block_paths() or [p.module for p in self.points if p.site == "resid_post"]
        plain = plain_forward(self.model, self.sequences[0], paths, whole=False)
        for layer, value in self._of("resid_post").items():
            assert layer is not None
            found = replace(self._point("resid_post", layer), module=paths[layer])
            worst.see(value, plain.value(self.model, found), f"resid_post-{layer}")
        return worst.check("blocks", "resid_post i is what block i returns in a plain forward of one sequence")

    def _point(self, site: str, layer: int | None) -> SitePoint:
        return next(p for p in self.points if p.site == site and p.layer == layer)

    def _base(self) -> Any:
        return self.model.module.get_submodule(self.model.prefix)

    def _embedding(self) -> Check:
        worst = _Worst(self.model)
        what = "embed is the table's rows, with the positions and the norm that the model adds there"
        found = self._of("embed").get(None)
        if found is None:
            return worst.check("embedding", what)
        ids = torch.from_numpy(self.sequences[0]).to(self.model.device)
        note = ""
        with torch.inference_mode():
            for made_of, expected in self._embeddings(ids, found):
                tried = _Worst(self.model)
                tried.see(expected.to(found.dtype), found, "embed")
                if not worst.where or tried.value < worst.value:
                    worst, note = tried, made_of
                if not tried.failed:
                    break
        return replace(worst.check("embedding", what), note="" if worst.failed else note)

    def _embeddings(self, ids: Tensor, found: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Give what `embed` may be: as registered, or else what models are known to do with their tables' rows."""
        architecture = self.model.architecture
        positions = torch.arange(len(ids), device=ids.device)
        if architecture is not None and architecture.embedding is not None:
            yield "", architecture.embedding(self._base(), ids, positions)
            return
        if architecture is None:
            tables = [m for m in self.model.module.modules() if isinstance(m, torch.nn.Embedding)]
            rows = tables[0].weight[ids] if len(tables) == 1 else None
        else:
            rows = self._base().get_input_embeddings().weight[ids]
        if rows is None or rows.shape != found.shape:
            return
        yield "rows of the table", rows
        scale = (rows.float() * found.float()).sum() / rows.float().square().sum()
        yield f"rows of the table times {scale.item():.4g}", rows * scale
        for path, module in self.model.module.named_modules():
            if isinstance(module, torch.nn.Embedding) and module.weight.shape[1] == rows.shape[1]:
                for first in (0, 2):
                    if first + len(ids) <= len(module.weight):
                        yield f"rows of the table and positions of {path}", rows + module.weight[positions + first]

    def _chain(self) -> Check:
        worst = _Worst(self.model, 0.0)
        after, before = self._of("resid_post"), self._of("resid_pre")
        for layer, value in before.items():
            if layer:
                worst.see(value, after[layer - 1], f"resid_pre-{layer}")
        return worst.check(
            "chain", "resid_pre of a block is resid_post of the one before", "one block, or no resid_pre"
        )

    def _sums(self) -> Check:
        worst = _Worst(self.model)
        what = "resid_pre + attn_out (or mixer_out) + mlp_out = resid_post, and resid_mid between them"
        architecture = self.model.architecture
        if architecture is None or not (architecture.additive or architecture.post_norms):
            return Check("sums", what, None, note="not known to be additive")
        branches = [self._of(s) for s in ("attn_out", "mixer_out", "mlp_out")]
        middle, after = self._of("resid_mid"), self._of("resid_post")
        with torch.inference_mode():
            for layer, value in self._of("resid_pre").items():
                attention, mixer, mlp = (b.get(layer) for b in branches)
                norms = self._norms(layer)
                value = value.to(after[layer].dtype)  # some models keep the stream in float32
                first = norms[0](sum((b for b in (attention, mixer) if b is not None), value))
                if layer in middle:
                    worst.see(first.to(middle[layer].dtype), middle[layer], f"resid_mid-{layer}")
                last = first if mlp is None else norms[1](first + mlp)
                worst.see(last.to(after[layer].dtype), after[layer], f"resid_post-{layer}")
        return worst.check("sums", what)

    def _norms(self, layer: int | None) -> list[Callable[[Tensor], Tensor]]:
        assert self.model.architecture is not None
        if self.model.architecture.post_norms is None:
            return [lambda x: x, lambda x: x]
        block = self.model.module.get_submodule(self._point("resid_post", layer).module)
        return [block.get_submodule(n) for n in self.model.architecture.post_norms]

    def _head(self) -> Check:
        what = "the last resid_post through the final norm and the head gives the model's output"
        if self.model.architecture is None:
            return Check("head", what, None, note="a model of a function's own: its head is not known")
        worst = _Worst(self.model)
        last = max(k for k in self._of("resid_post") if k is not None)
        with torch.inference_mode():
            normed, output = apply_tail(self.model, self._of("resid_post")[last])
        if (found := self._of("final_norm").get(None)) is not None:
            worst.see(normed, found, "final_norm")
        if output is None:
            return replace(worst.check("head", what), note="the head is of a kind that is not known")
        output, scale = scaled_head(self.model, output, self.result[0])
        note = f"times {scale:.4g}" if scale != 1 else ""
        worst.see(output, self.result[0], "output")
        return replace(worst.check("head", what), note=note)

    def _states(self) -> Check:
        """Compute a module's output from its derived state, and compare."""
        worst = _Worst(self.model, allowed_distance(self.model, torch.float64, "resid_post"))
        what = "what is derived (states, gates) gives back what the model computes from it"
        derived = [p for p in self.points if p.derive is not None]
        plain = plain_forward(self.model, self.sequences[2], {p.module for p in derived}, whole=False)
        with torch.inference_mode():
            for point in derived:
                if point.gives_back is None or point.derive is None:
                    continue
                module, call = self.model.module.get_submodule(point.module), plain.calls[point.module]
                output = point.gives_back(module, call, point.derive(module, call))
                worst.see(output, first_tensor(call.output), point.name)
        return worst.check("states", what, "no site is derived")

    def _patterns(self) -> Check:
        worst = _Worst(self.model)
        for layer, value in self._of("pattern").items():
            sums = value.float().sum(-1).to(value.dtype)
            worst.see(sums, torch.ones_like(sums), f"pattern-{layer}")
        return worst.check("patterns", "the attention pattern of a head sums to 1", "no pattern is computed")

    def _batched(self, side: Padding) -> Check:
        what = f"a sequence has the same values alone and in a batch padded on the {side}, in any order"
        members = range(len(self.sequences))
        if side == "none":
            what = "a sequence has the same values alone and in a batch of equal lengths, in any order"
            members = [i for i in members if len(self.sequences[i]) == len(self.sequences[0])]
        elif side not in self.model.padding:
            return Check(side, what, None, note="this side is never used")
        worst = _Worst(self.model)
        for order in (list(members), list(members)[::-1]):
            batch = [self.sequences[i] for i in order]
            values, _ = self._run(batch, side)
            rows = Batch.of(batch, side).rows
            for k, i in enumerate(order):
                for point in self.points:
                    worst.see(rows(values[point.name], k, keys=point.keys), self.alone[i][point.name][0], point.name)
        return worst.check("alone" if side == "none" else side, what)

    def _patched_back(self) -> Check:
        worst = _Worst(self.model, 0.0)
        for site in dict.fromkeys(p.site for p in self.points if p.editable):
            edits = {p.name: self._returning(p) for p in self.points if p.site == site and p.editable}
            _, result = self._run(self.sequences[:1], "none", edits=edits)
            worst.see(result, self.result, site)
        return worst.check("patched back", "a run's own values, patched back, leave its output unchanged")

    def _returning(self, point: SitePoint) -> Callable[[Tensor], Tensor]:
        return lambda value: self.values[point.name].clone()

    def _edits_are_felt(self) -> Check:
        what = "an edit at any site that can be edited changes the output"
        deaf = []
        editable = [p for p in self.points if p.editable]
        for point in editable:
            _, result = self._run(
                self.sequences[:1], "none", points=[point], edits={point.name: lambda v: v + 1 + v.abs().flip(-1)}
            )
            if torch.equal(result, self.result):
                deaf.append(point.name)
        return Check("edits", what, not deaf, where=", ".join(deaf[:5]), note=f"{len(editable)} sites edited")


def adopt(model: LoadedModel) -> None:
    """Hold a model of a found architecture to its self-test; what passes stays, and `ModelError` says what does not.

    A padding side on which a sequence has other values in a batch than alone is taken out of what is allowed.
    """
    test = SelfTest(model)
    checks = test.run()
    model.padding = tuple(s for s in model.padding if all(c.passed is not False for c in checks if c.name == s))
    failed = [c for c in checks if c.passed is False and c.name not in ("right", "left")]
    if failed:
        raise ModelError(
            f"{model.source.title} is of no registered architecture ({model.identity['kind']}), and where its sites "
            f"seem to lie does not hold: {'; '.join(map(_told, failed))}. "
            f"Registered are {', '.join(sorted(ARCHITECTURES))}. Write a function that returns a TorchModel."
        )


def _told(check: Check) -> str:
    return f"{check.what} ({check.where}{'' if check.worst is None else f': {check.worst:.3g}'})"
