"""A selection as a torch dataset: each row once an epoch, the same for any number of workers and ways to start them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import make_run
from layerlake.errors import RequestError
from layerlake.store.lake import Lake
from layerlake.store.order import row_order
from torch.utils.data import DataLoader, DistributedSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),  # Python 3.12 says so of every fork
]

LENGTHS = (5, 9, 3, 16, 7, 12, 1)
QUERY = "SELECT run, row, depth, token, depth / 2 AS half, depth > 1 AS deep FROM tokens ORDER BY run, row"


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Lake:
    root = tmp_path_factory.mktemp("lake")
    for name, seed in (("a", 1), ("b", 2)):
        make_run(root, name=name, seed=seed, labels={"depth": [k % 4 for k in range(sum(LENGTHS))]})
    return Lake.open(root)


@pytest.fixture(scope="module")
def sel(lake) -> Any:
    return lake.select(QUERY + " LIMIT 53")  # all of run a


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as plain data that can be compared; values as bits, as NaN is not NaN."""
    made = {k: v.tolist() if isinstance(v, torch.Tensor) and k != "activations" else v for k, v in batch.items()}
    return made | {"activations": batch["activations"].view(torch.int16).tolist()}


def read(dataset: Any, workers: int = 0, **options: Any) -> list[dict[str, Any]]:
    return [plain(batch) for batch in DataLoader(dataset, batch_size=None, num_workers=workers, **options)]


def test_a_batch_has_activations_of_the_stored_dtype_their_index_and_columns(sel):
    dataset = sel.torch_dataset(1, size=10, shuffle=True, seed=4, columns=["depth", "token", "half", "deep", "run"])
    assert len(dataset) == len(list(dataset)) == 6
    every = sel.tensor(1).view(torch.int16)
    for batch in dataset:
        index = batch["index"]
        assert index.dtype == torch.int64
        assert batch["activations"].dtype == torch.bfloat16
        assert torch.equal(batch["activations"].view(torch.int16), every[index])
        rows = sel.table.take(index.numpy())
        kinds = {name: batch[name].dtype for name in ("depth", "half", "deep")}
        assert kinds == {"depth": torch.int64, "half": torch.float64, "deep": torch.bool}
        assert {n: batch[n].tolist() for n in kinds} == rows.select(list(kinds)).to_pydict()
        assert batch["token"] == rows["token"].to_pylist()
        assert batch["run"] == rows["run"].to_pylist()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_stored_dtypes_and_two_trailing_axes(tmp_path, dtype):
    make_run(tmp_path, dtype=dtype, trailing=(3, 2))
    sel = Lake.open(tmp_path).select("SELECT run, row FROM tokens ORDER BY row")
    (batch,) = sel.torch_dataset(site="embed", size=100)
    assert batch["activations"].dtype == getattr(torch, dtype)
    assert np.array_equal(batch["activations"].view(torch.uint8).numpy(), sel.tensor(site="embed").view(torch.uint8))
    assert next(iter(sel.torch_dataset(0, size=None)))["activations"].shape == (3, 2)


@pytest.mark.parametrize("size", [7, None])
def test_any_number_of_forked_workers_gives_the_same_batches_in_the_same_order(sel, size):
    sel.bits(0)  # maps are open in this process
    dataset = sel.torch_dataset(0, size=size, shuffle=True, seed=3, columns=["token", "depth"])
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        one = read(dataset)
        assert len(one) == len(dataset)
        index = np.concatenate([np.atleast_1d(b["index"]) for b in one])
        assert sorted(index) == list(range(len(sel)))
        assert index.tolist() == row_order(len(sel), shuffle=True, seed=3, epoch=epoch).tolist()
        for workers in (1, 2, 3):
            assert read(dataset, workers, multiprocessing_context="fork") == one


def epochs_of_persistent_workers(sel: Any, context: str, workers: int, sent: bool = False) -> None:
    dataset = sel.torch_dataset(0, size=7, shuffle=True, seed=3, columns=["token"])
    if sent:
        dataset = pickle.loads(pickle.dumps(dataset))  # noqa: S301  (bytes made here)
    expected = {}
    for epoch in (4, 0, 1):
        dataset.set_epoch(epoch)
        expected[epoch] = read(dataset)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, persistent_workers=True, multiprocessing_context=context
    )
    assert expected[0] != expected[1] != expected[4]
    dataset.set_epoch(4)
    running = iter(loader)
    dataset.set_epoch(0)  # a spawned process takes a second to get to its first batch: its epoch is 4 nevertheless
    assert [plain(b) for b in running] == expected[4]
    for epoch in (0, 1, 1, 4):
        dataset.set_epoch(epoch)
        assert len(loader) == 8
        assert [plain(b) for b in loader] == expected[epoch]
    for _ in loader:  # an epoch that is left early does not spoil the next
        break
    dataset.set_epoch(4)
    assert [plain(b) for b in loader] == expected[4]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_set_epoch_reaches_persistent_workers_that_were_forked(sel, workers):
    epochs_of_persistent_workers(sel, "fork", workers)


def test_set_epoch_reaches_persistent_workers_of_a_dataset_that_was_pickled(sel):
    epochs_of_persistent_workers(sel, "fork", 2, sent=True)


def test_set_epoch_reaches_persistent_workers_that_were_spawned(sel):
    epochs_of_persistent_workers(sel, "spawn", 1)  # with more of them: below


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_started_anew_gives_the_same_batches(sel, context, workers):
    dataset = sel.torch_dataset(0, size=7, shuffle=True, seed=3, columns=["token"])
    assert read(dataset, workers, multiprocessing_context=context) == read(dataset)
    epochs_of_persistent_workers(sel, context, workers)


def test_a_collating_data_loader_gets_each_row_once(sel):
    dataset = sel.torch_dataset(0, size=None, shuffle=True, columns=["token", "depth"])
    for workers in (0, 2):
        batches = list(DataLoader(dataset, batch_size=16, num_workers=workers))
        assert {b["activations"].shape[1:] for b in batches} == {(6,)}
        assert sorted(torch.cat([b["index"] for b in batches]).tolist()) == list(range(len(sel)))
        for batch in batches:
            assert batch["token"] == sel.table["token"].take(batch["index"].numpy()).to_pylist()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 80),
    size=st.one_of(st.none(), st.integers(1, 40)),
    ranks=st.integers(1, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_ranks_have_equally_many_batches_and_no_row_twice(lake, rows, size, ranks, shuffle, seed, drop_last, epoch):
    drop_last = drop_last and size is not None
    sel = lake.rows("b", np.resize([5, 3, 16, 40, 41], rows))
    batch = size or 1
    whole = rows // batch if drop_last else -(-rows // batch)
    options = dict(size=size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    if whole < ranks:
        with pytest.raises(RequestError, match="none"):
            sel.torch_dataset(0, rank=0, world_size=ranks, **options)
        return
    seen: list[list[list[int]]] = []
    for rank in range(ranks):
        dataset = sel.torch_dataset(0, rank=rank, world_size=ranks, **options)
        dataset.set_epoch(epoch)
        got = [np.atleast_1d(b["index"].numpy()).tolist() for b in dataset]
        assert len(got) == len(dataset) == whole // ranks
        seen.append(got)
    # in turn, the ranks give the one list of batches: order, cut, without what does not divide
    order = row_order(rows, shuffle=shuffle, seed=seed, epoch=epoch).tolist()
    cut = [order[k * batch : (k + 1) * batch] for k in range(whole)]
    assert [b for step in zip(*seen, strict=True) for b in step] == cut[: whole // ranks * ranks]


@pytest.mark.parametrize("workers", [2, 3])
def test_ranks_with_workers_give_the_batches_of_the_rank(sel, workers):
    for rank in range(2):
        dataset = sel.torch_dataset(0, size=9, shuffle=True, rank=rank, world_size=2)
        assert read(dataset, workers, multiprocessing_context="fork") == read(dataset)


def test_a_batch_may_lack_rows_of_one_of_several_runs(lake):
    sel = lake.select(QUERY)
    for dataset in (sel.torch_dataset(0, size=8, columns=["run"]), sel.torch_dataset(0, size=8, shuffle=True)):
        every = sel.tensor(0).view(torch.int16)
        seen = []
        for batch in dataset:
            assert torch.equal(batch["activations"].view(torch.int16), every[batch["index"]])
            seen += batch["index"].tolist()
        assert sorted(seen) == list(range(106))


def test_set_epoch_is_that_of_torch_distributed_sampler(sel):
    """Equal epochs are equal, others are not, and without a call every epoch is the first."""
    dataset = sel.torch_dataset(0, size=200, shuffle=True, seed=7)
    sampler = DistributedSampler(range(len(sel)), 1, 0, shuffle=True, seed=7)  # pyright: ignore
    for read_epoch in (lambda: next(iter(dataset))["index"].tolist(), lambda: list(sampler)):
        epochs = {}
        for epoch in (0, 1, 2):
            dataset.set_epoch(epoch)
            sampler.set_epoch(epoch)
            epochs[epoch] = read_epoch()
            assert read_epoch() == epochs[epoch]
        assert len({tuple(e) for e in epochs.values()}) == 3


def test_batches_and_torch_dataset_have_one_order(sel):
    for shuffle in (False, True):
        ours = [b.table["row"].to_pylist() for b in sel.batches(0, size=8, shuffle=shuffle, seed=5)]
        theirs = sel.torch_dataset(0, size=8, shuffle=shuffle, seed=5, columns=["row"])
        assert [b["row"].tolist() for b in theirs] == ours
    known = row_order(7, shuffle=True, seed=0).tolist()
    assert known == np.random.default_rng(0).permutation(7).tolist()


def test_a_dataset_can_be_pickled_and_has_the_epoch_it_had(sel):
    dataset = sel.torch_dataset(0, size=9, shuffle=True, columns=["token"])
    list(dataset)
    dataset.set_epoch(3)
    data = pickle.dumps(dataset)
    assert len(data) < 20_000
    again = pickle.loads(data)  # noqa: S301  (bytes made here)
    assert read(again) == read(dataset)
    again.set_epoch(4)
    assert read(again) != read(dataset)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size of a batch is 0"),
        ({"size": 1.5}, "whole number"),
        ({"seed": -1}, "seed is -1"),
        ({"rank": 2, "world_size": 2}, "no rank 2 among 2"),
        ({"rank": -1}, "rank is -1"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 3, "size": 60}, "each of 3 ranks none"),
        ({"size": 200, "drop_last": True}, "none"),
        ({"size": None, "drop_last": True}, "give drop_last to the DataLoader"),
        ({"columns": ["depht"]}, "no column 'depht' in the selection. Did you mean 'depth'"),
        ({"columns": "depth"}, r"write \['depth'\]"),
        ({"columns": ["index"]}, "its own 'index'"),
        ({"columns": ["missing"]}, "holds 53 NULLs"),
        ({"columns": ["twice"]}, "2 columns 'twice'"),
        ({"columns": ["huge"]}, "does not fit into 64-bit"),
        ({"site": "resid_pots"}, "Did you mean 'resid_post'"),
        ({"layer": 9}, "no layer '9'"),
    ],
)
def test_what_is_asked_wrongly_is_refused_before_a_worker_starts(lake, options, message):
    query = (
        "SELECT run, row, depth, depth AS index, CASE WHEN run = 'a' THEN depth END AS missing, 1 AS twice, "
        "2 AS twice, 18446744073709551615::UBIGINT AS huge FROM tokens"
    )
    with pytest.raises(RequestError, match=message):
        lake.select(query).torch_dataset(**({"layer": 0} | options))


def test_an_empty_selection_is_a_sentence(lake):
    with pytest.raises(RequestError, match="The selection is empty"):
        lake.select("SELECT run, row FROM tokens WHERE false").torch_dataset(0)


def test_a_damaged_shard_ends_the_loader_with_its_name(tmp_path):
    run, _, _ = make_run(tmp_path)
    dataset = Lake.open(tmp_path).select("SELECT run, row FROM tokens", verify=True).torch_dataset(0, size=8)
    shard = run.shard_path(run.array("resid_post", 0), 1)
    shard.write_bytes(shard.read_bytes()[:5] + b"\1" + shard.read_bytes()[6:])
    with pytest.raises(RuntimeError, match="holds other bytes than were written"):
        read(dataset, 2)
