"""What only the engine on Ray can do: lose workers, own a cluster, leave others alone, clean up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from layerlake import errors
from layerlake.extract.engine import Item, Job
from layerlake.extract.ray_engine import RayEngine

TESTS = str(Path(__file__).parent.parent)

DRIVER = """
import json, os, sys, time
from layerlake.extract.engine import Item, Job, make_engine
tests, address = sys.argv[1:3]
with make_engine("ray", workers=1, ray_address=address or None) as engine:
    pids = []
    job = Job("toy_workers:Echo", {}, [Item("a", {})], import_path=(tests,))
    def on_record(key, record):
        print(json.dumps({"worker": record["pid"], "path": record["path"]}), flush=True)
        if "wait" in sys.argv:
            time.sleep(600)
    engine.run(job, on_record)
"""

INTERRUPTED = """
import json, os, sys, time
from layerlake.extract.engine import Item, Job, make_engine
def say(words):
    print(json.dumps(words), flush=True)
def job(*items):
    return Job("toy_workers:Echo", {}, items, import_path=(sys.argv[1],))
with make_engine("ray") as engine:
    try:
        engine.run(job(Item("a", {}), Item("b", {"sleep": 600})), lambda _, record: say(record["pid"]))
    except KeyboardInterrupt:
        say("interrupted")
    say(engine.run(job(Item("a", {}))).done)
say("closed")
sys.stdin.read()
"""

OTHER = """
import os, ray, sys
context = ray.init(address="local", num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)
print(context.address_info["gcs_address"], flush=True)
@ray.remote
def double(x):
    return 2 * x
for line in sys.stdin:
    jobs = len(ray._private.state.jobs())
    print(ray.get(double.remote(int(line))), jobs, flush=True)
"""


def toy(worker: str, items: Any, **spec: Any) -> Job:
    return Job(f"toy_workers:{worker}", spec, items, import_path=(TESTS,))


def within(seconds: float, true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie waits for a parent that does not look, and is gone otherwise


def descendants(root: int) -> set[int]:
    """All processes under `root` that run."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
    found: set[int] = set()
    ring = {root}
    while ring := {pid for pid, parent in parents.items() if parent in ring}:
        found |= ring
    return {pid for pid in found if is_running(pid)}


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what a Ray of this process may have put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | more


def start_driver(code: str, *arguments: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", code, *arguments], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=clean_environment())


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result


def hear(driver: subprocess.Popen[str]) -> Any:
    """Read the next thing that a driver says."""
    assert driver.stdout is not None
    return json.loads(driver.stdout.readline())


@pytest.fixture(scope="module")
def engine() -> Iterator[RayEngine]:
    with RayEngine(workers=2) as engine:
        yield engine


def test_records_arrive_once_each_while_workers_are_killed(engine: RayEngine) -> None:
    count, records, killed = 200, {}, []
    pids: dict[int, int] = {}
    arrived = threading.Condition()

    def alive() -> list[int]:
        return [pid for pid in pids if pid not in killed]

    def killer() -> None:
        for threshold in (20, 70, 120):
            with arrived:
                assert arrived.wait_for(lambda least=threshold: len(records) >= least and alive(), timeout=60)
                victims = alive()
            killed.append(random.Random(threshold).choice(victims))
            os.kill(killed[-1], signal.SIGKILL)

    def on_record(key: str, record: dict[str, Any]) -> None:
        with arrived:
            assert key not in records
            records[key] = record
            pids[record["pid"]] = pids.get(record["pid"], 0) + 1
            arrived.notify_all()

    thread = threading.Thread(target=killer)
    thread.start()
    items = (Item(str(i), {"i": i, "sleep": 0.03}) for i in range(count))
    report = engine.run(toy("Echo", items), on_record)
    thread.join()
    assert {key: record["payload"]["i"] for key, record in records.items()} == {str(i): i for i in range(count)}
    assert report.done == count
    assert len(report.lost_workers) == len(set(killed)) == 3
    assert len(pids) >= 4, "dead workers are replaced"
    assert all("died while working on item" in words for words in report.lost_workers)
    assert {int(words.split()[2]) for words in report.lost_workers} == set(killed)
    assert sum(report.retried.values()) == 3


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_an_item_that_always_kills_its_worker_is_quarantined(engine: RayEngine, how: str) -> None:
    items = [Item(str(i), {"how": "well"}) for i in range(6)]
    items.insert(2, Item("poison", {"how": how}))
    done: list[str] = []
    with pytest.raises(errors.JobError) as caught:
        engine.run(toy("Breaks", items), lambda key, _: done.append(key))
    assert sorted(done) == ["0", "1", "2", "3", "4", "5"]
    assert list(caught.value.failures) == ["poison"]
    words = caught.value.failures["poison"]
    assert "worker process" in words
    assert "died while working on it" in words
    assert ("last words" in caught.value.tracebacks["poison"]) == (how == "exit")


def test_a_worker_that_dies_while_it_is_constructed_ends_the_job(engine: RayEngine) -> None:
    with pytest.raises(errors.JobError, match=r"Breaks could not be started: its process died 3 times") as e:
        engine.run(toy("Breaks", [Item(str(i), {}) for i in range(5)], how="exit"))
    assert "last words" in e.value.tracebacks[""]


def test_workers_are_gone_when_a_job_ends(engine: RayEngine) -> None:
    pids: set[int] = set()
    items = [Item(str(i), {"sleep": 0.05}) for i in range(6)]
    engine.run(toy("Echo", items), lambda _, record: pids.add(record["pid"]))
    assert pids
    assert not any(is_running(pid) for pid in pids)


def test_two_clusters_in_one_process_are_refused(engine: RayEngine) -> None:
    engine.run(toy("Echo", [Item("a", {})]))
    with RayEngine() as second, pytest.raises(errors.RequestError, match="already connected to the Ray"):
        second.run(toy("Echo", [Item("a", {})]))
    with RayEngine(address="auto") as sharing:
        assert sharing.run(toy("Echo", [Item("a", {})])).done == 1
    assert engine.run(toy("Echo", [Item("a", {})])).done == 1


def test_the_cluster_asks_for_a_token_and_listens_on_loopback_only(engine: RayEngine) -> None:
    import ray

    engine.run(toy("Echo", [Item("a", {})]))
    assert "RAY_AUTH_TOKEN" not in os.environ
    address = ray.get_runtime_context().gcs_address
    code = (
        "import sys\n"
        "from ray._raylet import GcsClient\n"
        "try:\n"
        "    GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None, 5)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__)\n"
        "else:\n"
        "    print('open')\n"
    )
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    for environment in (clean_environment(), clean_environment(**wrong)):
        command = [sys.executable, "-c", code, address]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
        assert result.stdout.strip() == "AuthenticationError"

    sockets: set[str] = set()
    for pid in {os.getpid(), *descendants(os.getpid())}:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(str(descriptor.readlink()))
            except OSError:
                continue  # closed meanwhile
    listening: list[str] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.append(fields[1].partition(":")[0])
    assert listening
    assert all(host.endswith("0100007F") for host in listening), listening


def test_close_leaves_no_process_and_no_file_behind_an_interrupted_job() -> None:
    # In a process of its own, as the cluster of this module is to live on.
    folders = set(Path("/tmp").glob("layerlake-ray-*"))
    with start_driver(INTERRUPTED, TESTS) as driver:
        worker = hear(driver)
        time.sleep(0.5)  # the driver waits for the second item by now
        driver.send_signal(signal.SIGINT)
        assert hear(driver) == "interrupted"
        assert not is_running(worker)
        assert hear(driver) == 1, "the next job runs"
        assert hear(driver) == "closed"
        left = descendants(driver.pid)
        driver.communicate()
    assert left == set()
    assert driver.returncode == 0
    assert set(Path("/tmp").glob("layerlake-ray-*")) == folders


def test_the_cluster_dies_with_a_driver_that_is_killed() -> None:
    folders = set(Path("/tmp").glob("layerlake-ray-*"))
    with start_driver(DRIVER, TESTS, "", "wait") as driver:
        worker = hear(driver)["worker"]
        family = descendants(driver.pid)
        driver.kill()
    assert worker in family
    assert len(family) >= 4
    assert within(30, lambda: not any(is_running(pid) for pid in family)), [
        Path(f"/proc/{pid}/cmdline").read_text() for pid in family if is_running(pid)
    ]
    assert set(Path("/tmp").glob("layerlake-ray-*")) == folders


def test_D03_another_cluster_is_left_alone_unless_it_is_named() -> None:
    off = clean_environment(RAY_AUTH_MODE="disabled")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=off
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        address = other.stdout.readline().strip()

        def ask() -> list[str]:
            assert other.stdin is not None and other.stdout is not None
            print(21, file=other.stdin, flush=True)
            return other.stdout.readline().split()

        def drive(named: str, environment: dict[str, str]) -> int:
            command = [sys.executable, "-c", DRIVER, TESTS, named]
            result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
            return json.loads(result.stdout)["worker"]

        assert ask() == ["42", "1"]
        own = drive("", clean_environment(RAY_ADDRESS=address))
        assert ask() == ["42", "1"], "no job but its own has come to it"
        guest = drive(address, off)
        assert ask() == ["42", "2"], "the other cluster lives on after its guest has left"
        assert not is_running(own)
        assert within(10, lambda: not is_running(guest))
        other.stdin.close()


def test_a_package_found_by_path_alone_is_found_in_workers(tmp_path: Path) -> None:
    import layerlake

    home = Path(str(layerlake.__file__)).parent
    package = tmp_path / "somewhere" / "layerlake"
    package.parent.mkdir()
    package.symlink_to(home, target_is_directory=True)
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n" + DRIVER
    environment = clean_environment()
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", code, TESTS, ""]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert result.returncode == 0, result.stderr
    assert str(package.parent) in json.loads(result.stdout)["path"]


def test_a_cluster_that_does_not_answer_is_one_sentence() -> None:
    code = (
        "from layerlake.extract.engine import Item, Job, make_engine\n"
        "from layerlake.errors import WorldError\n"
        "try:\n"
        "    job = Job('toy_workers:Echo', {}, [Item('a', {})])\n"
        "    make_engine('ray', ray_address='127.0.0.1:1').run(job)\n"
        "except WorldError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=60)
    assert "Ray did not connect to the cluster at '127.0.0.1:1'" in result.stdout, result.stderr
    assert "Traceback" not in result.stdout
