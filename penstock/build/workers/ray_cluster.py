"""Connects to a Ray cluster, or starts one on this machine.

A cluster that we start is for this process alone: it listens on the loopback interface, has no dashboard, sends no
usage statistics, asks for a random token that is stored nowhere, and ends with this process. Ray runs whatever code it
is sent, so anything less would let other users of the machine act as this one.

By default Ray puts the driver's current folder, which holds data, first on the import path of every worker, and under
`uv run` it even uploads that folder. Connections made here do neither. A script that has called `ray.init` itself keeps
its own settings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock import child
from penstock.build.workers.runner import WORKER_BYTES, worker_count
from penstock.errors import UsageError, WorkerError

LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 10.0
SLOT_STORE_BYTES = 32 << 20  # of the object store, for the rows of streamed sources that a worker holds
_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}

log = logging.getLogger("penstock")


def require_ray() -> None:
    """Raises UsageError if Ray is not installed. Imports nothing."""
    if find_spec("ray") is None:
        raise UsageError("--runner ray needs Ray. Install it with: pip install 'penstock[ray]'.")


class RayCluster:
    """A connection to a cluster. Closing it ends what it started: nothing, the connection, or the whole cluster."""

    def __init__(self, address: str | None, workers: str) -> None:
        import ray

        self.ray: ModuleType = ray
        self.slots = 0  # workers to ask for
        self._folder: str | None = None  # of a cluster that this process started
        self._is_ours = not ray.is_initialized()  # otherwise the caller's script has connected
        if not self._is_ours and address is not None:
            raise UsageError(f"--ray-address {address}: this process is already connected to Ray. Leave it out.")
        try:
            if self._is_ours:
                _let_raylets_print(False)
                self._connect(address, workers)
            else:
                self.slots = self._slots(workers)
            self.head: str = ray.get_runtime_context().gcs_address  # HOST:PORT
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None, workers: str) -> None:
        given = address if address not in (None, "auto") else os.environ.get("RAY_ADDRESS") or _running_cluster()
        if given is None and address == "auto":
            raise WorkerError(
                "--ray-address auto: no Ray cluster is running on this machine. Start it with `ray start`, or let "
                "--ray-address local start one."
            )
        if given is None or given == "local":
            self._start(workers)
            return
        _check_address(given)
        is_local = given.startswith((f"{LOOPBACK}:", "localhost:"))
        try:
            with _ray_settings(loopback=is_local):
                loopback = {"_node_ip_address": LOOPBACK} if is_local else {}
                self.ray.init(address=given, job_config=_job(), **loopback, **_QUIET)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _unreachable(given, _first_line(error)) from error
        self.slots = self._slots(workers)

    def _start(self, workers: str) -> None:
        self.slots, notice = worker_count(workers)
        if notice:
            log.warning("%s", notice)
        try:
            self._folder = tempfile.mkdtemp(prefix="ray-", dir=os.environ.get("RAY_TMPDIR"))  # for this user only
            with _ray_settings(loopback=True), _private_environment():
                found = self.ray.init(
                    address="local",
                    job_config=_job(),
                    num_cpus=self.slots,
                    num_gpus=0,
                    _memory=self.slots * WORKER_BYTES,
                    object_store_memory=(128 << 20) + self.slots * SLOT_STORE_BYTES,
                    include_dashboard=False,
                    _node_ip_address=LOOPBACK,
                    _temp_dir=self._folder,
                    **_QUIET,
                )
        except Exception as error:  # Ray raises bare exceptions, too
            raise WorkerError(
                f"Ray can't be started on this machine: {_first_line(error)} Use --runner local, or give the "
                "--ray-address of a running cluster."
            ) from error
        where = found.address_info["node_ip_address"]
        if where != LOOPBACK:
            raise WorkerError(
                f"this version of Ray ({self.ray.__version__}) listens on {where}, not only on this machine. "
                "Start a cluster yourself and give its --ray-address."
            )

    def _slots(self, workers: str) -> int:
        """Number of workers to ask for: as given, or as many as fit on the nodes."""
        room = self.room()
        if workers == "auto":
            if not room:
                raise WorkerError(
                    f"no node of the Ray cluster has a CPU and {WORKER_BYTES >> 20} MB of memory for a worker"
                )
            return room
        if int(workers) > room:
            log.warning("--workers %s: %d fit on the nodes of the cluster; more start if nodes join", workers, room)
        return int(workers)

    @property
    def is_shared(self) -> bool:
        """Whether others may add nodes: not to a cluster that this process has started."""
        return self._folder is None

    def room(self) -> int:
        """Number of workers that fit on the nodes."""
        return sum(_room(node["Resources"]) for node in self.nodes().values())

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Returns the nodes that are alive, by id."""
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    def state(self) -> str:
        """Describes the cluster's resources, for messages."""
        free, total = self.ray.available_resources(), self.ray.cluster_resources()
        return f"{free.get('CPU', 0):.0f} of {total.get('CPU', 0):.0f} CPUs on {len(self.nodes())} nodes are free"

    @property
    def is_reachable(self) -> bool:
        """Whether the head of the cluster still answers. Ray itself would wait for a minute, in silence."""
        host, _, port = self.head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Disconnects, and stops a cluster that this process started."""
        if self._is_ours:
            self.ray.shutdown()
            _let_raylets_print(True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _room(resources: dict[str, float]) -> int:
    return int(min(resources.get("CPU", 0), resources.get("memory", 0) // WORKER_BYTES))


def _running_cluster() -> str | None:
    """Returns the address of the cluster that this user's `ray start` left on this machine.

    Other users can write the file, too. Theirs is ignored: a driver runs the code that its cluster sends.
    """
    from ray._common.utils import get_ray_address_file

    path = Path(get_ray_address_file(None))
    with contextlib.suppress(OSError):
        if path.lstat().st_uid == os.geteuid():
            return path.read_text().strip() or None
    return None


def _check_address(address: str) -> None:
    """Raises an error for an address that is of another kind or where nothing listens: Ray would wait for minutes."""
    if "://" in address:
        raise UsageError(
            f"--ray-address {address}: Ray Client is not supported, because the driver must see the cache. Run the "
            "command on a node of the cluster, with --ray-address auto."
        )
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"--ray-address {address}: expected HOST:PORT, auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, f"{error.strerror or error}.") from error


def _unreachable(address: str, reason: str) -> WorkerError:
    return WorkerError(
        f"the Ray cluster at {address} can't be reached: {reason} Start it with `ray start`, or let "
        "--ray-address local start one on this machine."
    )


def _let_raylets_print(yes: bool) -> None:
    """Whether Ray prints reports of its nodes to standard output, which `log_to_driver` doesn't turn off."""
    from ray._private import worker

    worker._worker_logs_enabled = yes


def _first_line(error: Exception) -> str:
    line = str(error).strip().split("\n")[0]
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _job() -> Any:
    """The configuration of a job whose workers import nothing from the driver's folders."""
    from ray.job_config import JobConfig

    class PathlessJob(JobConfig):
        """Ignores the folders that `ray.init` adds."""

        _py_driver_sys_path = property(lambda _: [], lambda _, __: None)

    return PathlessJob()


@contextlib.contextmanager
def _ray_settings(loopback: bool) -> Iterator[None]:
    """Keeps Ray from uploading the current folder under `uv run`.

    With `loopback`, also from replacing a loopback address by one that other machines can reach, as it does on macOS.
    """
    from ray._private import ray_constants

    off = ["RAY_ENABLE_UV_RUN_RUNTIME_ENV", *(["ENABLE_RAY_CLUSTER"] if loopback else [])]
    before = {name: getattr(ray_constants, name) for name in off}
    try:
        for name in off:
            setattr(ray_constants, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(ray_constants, name, value)


@contextlib.contextmanager
def _private_environment() -> Iterator[None]:
    """Sets what a cluster inherits if it is started meanwhile: no statistics, its own token, a child's import path."""
    values = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    values |= {"PYTHONPATH": child.import_path(), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in (*values, "RAY_AUTH_MODE")}  # Ray sets the mode to `token`
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
