"""The contract of the engines: one set of tests that both engines pass.

What only an engine with processes of its own can do is in test_ray_engine.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layerlake import errors
from layerlake.extract.engine import Engine, Item, Job, make_engine

TESTS = str(Path(__file__).parent.parent)


def toy(worker: str, items: Any, **spec: Any) -> Job:
    return Job(f"toy_workers:{worker}", spec, items, import_path=(TESTS,))


def breaking(how: str, worker: str = "Breaks") -> Job:
    return toy(worker, [Item("bad", {"how": how}), Item("good", {"how": "well"})])


@pytest.fixture(scope="module", params=["inline", "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make_engine(request.param, workers=1 if request.param == "inline" else 2) as engine:
        yield engine


class TestContract:
    def test_every_item_gives_one_record(self, engine: Engine) -> None:
        records: dict[str, dict[str, Any]] = {}

        def on_record(key: str, record: dict[str, Any]) -> None:
            assert key not in records
            records[key] = record

        items = (Item(f"k{i}", {"i": i, "text": "é\ud800", "list": [1, None]}) for i in range(20))
        report = engine.run(toy("Echo", items, colour="red"), on_record)
        assert (report.done, report.retried, report.lost_workers) == (20, {}, [])
        assert {key: record["payload"]["i"] for key, record in records.items()} == {f"k{i}": i for i in range(20)}
        assert records["k3"]["payload"] == {"i": 3, "text": "é\ud800", "list": [1, None]}
        assert records["k3"]["spec"] == {"colour": "red"}
        here = {record["pid"] == os.getpid() for record in records.values()}
        assert here == {engine.name == "inline"}

    def test_no_items_is_a_job_done(self, engine: Engine) -> None:
        assert engine.run(toy("NoSuchWorker", [])).done == 0

    def test_a_generator_is_read_only_as_far_as_workers_are_fed(self, engine: Engine) -> None:
        taken, done, ahead = 0, 0, 0

        def items() -> Iterator[Item]:
            nonlocal taken
            for i in range(50):
                taken += 1
                yield Item(str(i), {})

        def on_record(key: str, record: dict[str, Any]) -> None:
            nonlocal done, ahead
            done += 1
            ahead = max(ahead, taken - done)

        engine.run(toy("Echo", items()), on_record)
        assert done == 50
        assert ahead <= 3 * engine.workers

    def test_failed_attempts_are_retried_and_reported(self, engine: Engine, tmp_path: Path) -> None:
        fails = {"a": 0, "b": 1, "c": 2}
        items = [Item(name, {"name": name, "fails": count}) for name, count in fails.items()]
        records: dict[str, Any] = {}
        report = engine.run(toy("Flaky", items, folder=str(tmp_path)), records.__setitem__)
        assert report.done == 3
        assert report.retried == {"b": 1, "c": 2}
        assert {key: record["attempt"] for key, record in records.items()} == {"a": 1, "b": 2, "c": 3}

    def test_an_item_that_fails_three_times_is_named_and_the_others_are_done(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        items = [Item(name, {"name": name, "fails": 99 * (name == "p")}) for name in "opq"]
        records: dict[str, Any] = {}
        with pytest.raises(errors.JobError) as caught:
            engine.run(toy("Flaky", items, folder=str(tmp_path)), records.__setitem__)
        assert set(records) == {"o", "q"}
        assert (tmp_path / "p").read_text() == "xxx"
        assert caught.value.failures == {"p": "ValueError: attempt 3 of p failed"}
        assert "'p': ValueError: attempt 3 of p failed" in str(caught.value)
        assert "in run" in caught.value.tracebacks["p"]
        assert "toy_workers.py" in caught.value.tracebacks["p"]
        assert caught.value.exit_code != 0

    @pytest.mark.parametrize(
        ("how", "words"),
        [
            ("two arguments", "TwoArgumentsError: layer 7 broke: forward"),
            ("textless", "TextlessError: (its text could not be made: RuntimeError)"),
            ("system exit", "SystemExit: leaving with words"),
            ("sys.exit", "SystemExit: 3"),
            ("lock", "TypeError: the record that run() returned does not fit into JSON: "
             "Object of type lock is not JSON serializable"),
            ("circle", "TypeError: the record that run() returned does not fit into JSON: "
             "Circular reference detected"),
            ("list", "TypeError: run() must return a dict, not list"),
        ],
    )  # fmt: skip
    def test_the_original_text_survives(self, engine: Engine, how: str, words: str) -> None:
        done: dict[str, Any] = {}
        with pytest.raises(errors.JobError) as caught:
            engine.run(breaking(how), done.__setitem__)
        assert caught.value.failures == {"bad": words}
        assert done == {"good": {"how": "well"}}

    def test_a_request_error_ends_the_job_as_itself(self, engine: Engine) -> None:
        with pytest.raises(errors.DataError) as caught:
            engine.run(toy("Breaks", [Item("bad", {"how": "data error"})]))
        assert type(caught.value) is errors.DataError
        assert str(caught.value) == "column 'x' holds no numbers"
        assert "toy_workers.py" in caught.value.__notes__[0]

    def test_a_request_error_of_the_users_own_is_a_job_error(self, engine: Engine) -> None:
        with pytest.raises(errors.JobError, match=r"Item 'bad' .*NarrowError: of the user's own"):
            engine.run(toy("Breaks", [Item("bad", {"how": "own request error"})]))

    def test_a_worker_that_cannot_be_constructed_ends_the_job(self, engine: Engine) -> None:
        items = [Item(str(i), {}) for i in range(30)]
        done: list[str] = []
        with pytest.raises(errors.JobError, match=r"toy_workers:Breaks could not be .*layer 7 broke: forw"):
            engine.run(toy("Breaks", items, how="two arguments"), lambda key, _: done.append(key))
        with pytest.raises(errors.DataError, match="column 'x' holds no numbers"):
            engine.run(toy("Breaks", items, how="data error"))
        with pytest.raises(errors.JobError, match="No module named 'no_such_module'"):
            engine.run(Job("no_such_module:Worker", {}, items))
        assert done == []

    def test_a_job_in_which_everything_fails_stops_early(self, engine: Engine) -> None:
        taken = 0

        def items() -> Iterator[Item]:
            nonlocal taken
            for i in range(1000):
                taken += 1
                yield Item(str(i), {"how": "two arguments"})

        with pytest.raises(errors.JobError, match="stopped early because 8 items failed") as caught:
            engine.run(toy("Breaks", items()))
        assert len(caught.value.failures) == 8
        assert taken < 8 + 4 * engine.workers

    @pytest.mark.parametrize("make", [list, iter])
    def test_two_items_of_one_key_are_refused(self, engine: Engine, make: Any) -> None:
        items = [Item("a", {}), Item("b", {}), Item("a", {})]
        with pytest.raises(errors.RequestError, match="Two items of the job have the key 'a'"):
            engine.run(toy("Echo", make(items)))

    def test_what_json_cannot_hold_is_refused_by_name(self, engine: Engine) -> None:
        with pytest.raises(errors.RequestError, match="The payload of item 'a' does not fit into JSON"):
            engine.run(toy("Echo", [Item("a", {"x": b"bytes"})]))
        with pytest.raises(errors.RequestError, match="The spec of the worker toy_workers:Echo"):
            engine.run(toy("Echo", [Item("a", {})], x=b"bytes"))
        with pytest.raises(errors.RequestError, match="'toy_workers' does not name a worker"):
            engine.run(Job("toy_workers", {}, [Item("a", {})]))

    def test_an_error_in_on_record_or_in_the_items_stops_the_job(self, engine: Engine) -> None:
        done: list[str] = []

        def on_record(key: str, record: dict[str, Any]) -> None:
            done.append(key)
            raise LookupError("of the driver")

        def items() -> Iterator[Item]:
            yield Item("a", {})
            raise OSError("of the items")

        with pytest.raises(LookupError, match="of the driver"):
            engine.run(toy("Echo", [Item(str(i), {}) for i in range(9)]), on_record)
        assert len(done) == 1
        with pytest.raises(OSError, match="of the items"):
            engine.run(toy("Echo", items()))
        assert engine.run(toy("Echo", [Item("again", {})])).done == 1

    def test_an_interrupt_of_the_driver_propagates(self, engine: Engine) -> None:
        def on_record(key: str, record: dict[str, Any]) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.run(toy("Echo", [Item(str(i), {}) for i in range(9)]), on_record)

    def test_a_worker_is_not_heard(self, engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
        assert engine.run(toy("Noisy", [Item("a", {}), Item("b", {})])).done == 2
        out, err = capfd.readouterr()
        assert "NOISE" not in out + err

    def test_the_users_own_modules_are_found_in_import_path(self, engine: Engine, tmp_path: Path) -> None:
        name = f"users_module_for_{engine.name}"
        source = "class Mine:\n    def __init__(self, spec): pass\n    def run(self, payload): return payload\n"
        (tmp_path / f"{name}.py").write_text(source)
        records: dict[str, Any] = {}
        job = Job(f"{name}:Mine", {}, [Item("a", {"x": 1})], import_path=(str(tmp_path),))
        engine.run(job, records.__setitem__)
        assert records == {"a": {"x": 1}}
        assert str(tmp_path) not in sys.path

    def test_a_worker_computes_with_the_threads_of_its_engine(self, engine: Engine) -> None:
        before, environment = torch.get_num_threads(), dict(os.environ)
        records: dict[str, Any] = {}
        usual = engine.threads
        try:
            for threads in (1, 2):
                engine.threads = threads
                engine.run(toy("Threads", [Item("a", {})]), records.__setitem__)
                assert records["a"] == {"torch": threads, "pools": [threads], "omp": str(threads)}
        finally:
            engine.threads = usual
        assert torch.get_num_threads() == before
        assert dict(os.environ) == environment


def test_an_engine_that_cannot_be_is_refused() -> None:
    with pytest.raises(errors.UnknownNameError, match=r"no engine 'rya'.*Did you mean 'ray'"):
        make_engine("rya")  # pyright: ignore[reportArgumentType] - the mistake is the point
    wrong: list[dict[str, Any]] = [{"workers": 0}, {"threads": 0}, {"workers": 2}, {"ray_address": "auto"}]
    for arguments in wrong:
        with pytest.raises(errors.RequestError):
            make_engine("inline", **arguments)


def test_an_inline_job_imports_no_ray() -> None:
    code = (
        "import sys, json\n"
        "from layerlake.extract.engine import Item, Job, make_engine\n"
        "with make_engine('inline') as engine:\n"
        "    job = Job('toy_workers:Echo', {}, [Item('a', {})], import_path=(sys.argv[1],))\n"
        "    done = engine.run(job).done\n"
        "print(json.dumps([done, 'ray' in sys.modules, 'torch' in sys.modules]))\n"
    )
    result = subprocess.run([sys.executable, "-c", code, TESTS], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(result.stdout) == [1, False, False]


def test_an_empty_job_starts_no_ray() -> None:
    code = (
        "import sys\n"
        "from layerlake.extract.engine import Job, make_engine\n"
        "engine = make_engine('ray')\n"
        "assert engine.run(Job('toy_workers:Echo', {}, [])).done == 0\n"
        "assert 'ray' not in sys.modules\n"
        "sys.modules['ray'] = None  # as if it were not installed\n"
        "from layerlake.errors import MissingExtraError\n"
        "from layerlake.extract.engine import Item\n"
        "try:\n"
        "    engine.run(Job('toy_workers:Echo', {}, [Item('a', {})]))\n"
        "except MissingExtraError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "--engine ray needs an optional extra: pip install 'layerlake[ray]'"
