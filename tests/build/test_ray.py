"""The Ray runner, on a real cluster of three nodes on the loopback interface and on one that it starts itself.

The cluster's scenarios are one test, so that parallel runs of the suite start one cluster.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.build.options import prepare_options
from penstock.build.run import Builder
from penstock.build.workers import ray as ray_workers
from penstock.build.workers.process import reported_error
from penstock.build.workers.ray import Beacon, RaySlot, sees_beacon, versions
from penstock.build.workers.ray_cluster import RayCluster, require_ray
from penstock.build.workers.runner import Setup
from penstock.child import environment
from penstock.errors import StoreError, UsageError, WorkerError
from penstock.store.local import LocalStorage
from tests.build.test_workers import conversation
from tests.support.ray_cluster import PATIENCE, LoopbackCluster, processes, wait

pytestmark = pytest.mark.slow

FILES, ROWS = 32, 80  # a file is a slice
SLOTS = 3
IN_FLIGHT = 2  # slices that a worker holds at most


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small files, one of them compressed."""
    folder = tmp_path_factory.mktemp("rows")
    for file in range(FILES):
        rows = [conversation(number) for number in range(file * ROWS, (file + 1) * ROWS)]
        (folder / f"{file:02}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    subprocess.run(["gzip", folder / "05.jsonl"], check=True)
    return folder


@pytest.fixture(scope="module")
def expected(source: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Shards and manifest of an undisturbed build without Ray."""
    cache = tmp_path_factory.mktemp("local")
    Builder([source], prepare_options({"tokenizer": str(tokenizer), "cache": cache, "workers": "1"}), None).run()
    return content(cache)


def content(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (*shards(cache), *cache.glob("datasets/*/manifest.json"))}


def shards(cache: Path) -> list[Path]:
    return list(cache.glob("shards/*/*.arrow"))


class Driver:
    """`penstock prepare --runner ray` in a process group of its own, with slow engines so that there is time to act."""

    def __init__(self, source: Path, tokenizer: Path, cache: Path, address: str, *options: str) -> None:
        self.cache = cache
        command = ["prepare", source, "--tokenizer", tokenizer, "--cache", cache, "--no-fast", "--json"]
        ray = ["--runner", "ray", "--ray-address", address, "--workers", str(SLOTS)]
        variables = {**environment(), "RAY_AUTH_MODE": "disabled"} if address != "local" else environment()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", *command, *ray, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            start_new_session=True,
        )

    def wait_for_shards(self, number: int) -> None:
        wait(lambda: len(shards(self.cache)) >= number or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()[1]

    def outcome(self) -> dict[str, Any]:
        """What `--json` printed about the build."""
        printed, messages = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, messages
        return {**json.loads(printed)["build"], "messages": messages}


def descendants(process: int) -> set[int]:
    found, listed = {process}, list(processes())
    while added := {pid for pid, parent, _ in listed if parent in found} - found:
        found |= added
    return found - {process}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LoopbackCluster]:
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short, for it holds sockets
        started = LoopbackCluster(SLOTS, folder)
        yield started
        started.close()


def test_a_build_on_a_cluster_survives_every_loss(
    source: Path, tokenizer: Path, expected: dict[str, bytes], cluster: LoopbackCluster, tmp_path: Path
) -> None:
    def start(name: str, *options: str) -> Driver:
        return Driver(source, tokenizer, tmp_path / name, cluster.address, *options)

    # a node is slow, and a worker is killed: the others take its slices, and its node gets a new worker
    driver = start("worker")
    os.kill(cluster.worker(2), signal.SIGKILL)
    with slowed(cluster.worker(1)):
        found = driver.outcome()
    assert content(driver.cache) == expected
    assert (found["slices_done"], found["retries"]) == (FILES, 1)
    assert 1 <= found["slices_retried"] <= IN_FLIGHT
    assert re.search(r"a worker died on .*\.jsonl.*: on \S+, .+; retrying the slice once", found["messages"])

    # the driver is killed; when it is run again, a node is lost, and the survivors finish without it
    driver = start("driver")
    driver.wait_for_shards(4)
    driver.process.kill()
    driver.process.communicate()
    wait(lambda: not cluster.workers())  # Ray ends them with their driver
    committed = len(shards(driver.cache))
    driver = start("driver")
    worker = cluster.worker(2)
    os.kill(worker, signal.SIGSTOP)  # so that it can't finish its slices before the node is gone
    cluster.remove(2)
    os.kill(worker, signal.SIGKILL)
    found = driver.outcome()
    assert content(driver.cache) == expected
    assert found["slices_done"] <= FILES - committed
    assert found["slices_reused"] + found["slices_elsewhere"] + found["slices_done"] == FILES
    assert 1 <= found["slices_retried"] <= IN_FLIGHT
    assert found["nodes"] == SLOTS - 1


@contextmanager
def slowed(process: int) -> Iterator[None]:
    """Lets a process run for a tenth of the time."""
    over = threading.Event()

    def hold() -> None:
        with suppress(ProcessLookupError):  # it has ended
            while not over.wait(0.02):
                os.kill(process, signal.SIGSTOP)
                over.wait(0.18)
                os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_cluster_of_our_own_is_private_and_ends_with_us(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    driver = Driver(source, tokenizer, tmp_path / "cache", "local")
    driver.wait_for_shards(2)
    started = descendants(driver.process.pid)
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    of_ours = [line.split()[3] for line in listening.splitlines() if any(f"pid={pid}," in line for pid in started)]
    assert of_ours
    assert all("127.0.0.1" in address for address in of_ours), of_ours
    os.kill(driver.process.pid, signal.SIGINT)
    _, messages = driver.process.communicate(timeout=PATIENCE)
    assert driver.process.returncode == 130, messages
    assert messages.endswith("penstock: stopped; the same command resumes from here\n")
    wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def test_nothing_of_ray_is_imported_without_it(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    code = (
        "import sys, penstock as ps\n"
        f"ps.prepare({str(source / '00.jsonl')!r}, tokenizer={str(tokenizer)!r}, cache={str(tmp_path)!r}, workers=1)\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'ray']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_the_error_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"runner='ray' needs Ray. Install it with: pip install 'penstock\[ray\]'"):
        require_ray()


def test_an_address_needs_the_runner() -> None:
    with pytest.raises(UsageError, match="ray_address='head:6379': it is only used with runner='ray'"):
        prepare_options({"tokenizer": "t", "ray_address": "head:6379"})


def test_a_worker_refuses_a_folder_that_is_not_shared(
    source: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host may have another cache at the same path. The reply carries what was logged meanwhile."""
    monkeypatch.setattr(ray_workers, "BEACON_PAUSES", (0.0,))
    monkeypatch.setattr(os, "environ", {**os.environ})  # which the worker changes
    options = prepare_options({"tokenizer": str(tokenizer), "cache": tmp_path})
    search = Builder([source], options, None).search
    search.cache.store_tokenizer(search.model.tokenizer_json)
    setup = Setup(search.recipe, search.cache, search.model.tokenizer_json, True)
    beacon = Beacon(search.cache.files)
    expected = versions(search.recipe)
    slot = RaySlot(setup.to_json(), expected, beacon.name)
    logging.getLogger("penstock").warning("a note from %s", "afar")
    logging.getLogger().removeHandler(slot._messages)
    reply = slot.start()
    assert reply["log"] == [(logging.WARNING, "a note from afar")]
    with pytest.raises(StoreError, match=rf"^here: {tmp_path} is not the cache folder of the build .*same path\.$"):
        raise reported_error(reply, "here: ")
    reply = RaySlot(setup.to_json(), {**expected, "penstock": "0.0"}, beacon.name).start()
    assert "another version of Penstock is installed here" in reply["error"]
    assert not shards(tmp_path)


def test_a_beacon_is_removed(tmp_path: Path) -> None:
    tree = LocalStorage(tmp_path)
    tree.make_folder("tmp")
    beacon = Beacon(tree)
    beacon.light()
    beacon.light()
    assert sees_beacon(tree, beacon.name)
    assert [entry.path for entry in tree.entries("tmp")] == [f"tmp/{beacon.name}"]
    beacon.close()
    assert tree.entries("tmp") == []


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("ray://head:10001", UsageError, "Ray Client is not supported, because the driver must see the cache"),
        ("head", UsageError, "ray_address='head': expected HOST:PORT, auto or local"),
        ("127.0.0.1:1", WorkerError, "the Ray cluster at 127.0.0.1:1 can't be reached: .* ray_address='local'"),
    ],
    ids=["client", "no port", "nobody listens"],
)
def test_a_wrong_address_is_explained(address: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RayCluster(address, "1")


def test_a_head_that_dies_before_the_first_shard_is_noticed(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Ray would wait for it for a minute, and then end the process with its own output."""
    driver = Driver(source, tokenizer, tmp_path / "cache", "local")
    wait(
        lambda: bool(named(driver.process.pid, "ray::RaySlot")) or driver.process.poll() is not None
    )  # it has connected
    for pid in named(driver.process.pid, "gcs_server"):
        os.kill(pid, signal.SIGKILL)
    _, messages = driver.process.communicate(timeout=PATIENCE)
    assert driver.process.returncode == 1, messages
    assert "Traceback" not in messages
    last = messages.strip().splitlines()[-1]
    assert last.startswith("penstock: ")
    assert "does not answer any more. Finished slices are kept" in last


def named(driver: int, name: str) -> list[int]:
    """The processes that a process has started and whose names start so."""
    found: list[int] = []
    for pid in descendants(driver):
        with suppress(OSError):  # gone
            found += [pid] if Path(f"/proc/{pid}/comm").read_text().startswith(name) else []
    return found


def test_ray_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "nowhere"))
    with pytest.raises(
        WorkerError, match=r"Ray can't be started on this machine: .*nowhere.*\. Use runner='local', or"
    ):
        RayCluster("local", "1")
