"""Hostile output folders: damaged checkpoints, stray files, a full disk, a second process, untrusted code."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import TrainError, UnsupportedError
from penstock.store.files import host_id, writer_name
from penstock.train.checkpoint import Checkpoint, newest_valid, seed_new_rank
from penstock.train.run import train
from penstock.train.run_process import output_lock
from tests.train.runs import Config, environment, losses

pytestmark = pytest.mark.slow

STEPS = {"loader": {"steps": 4}, "checkpoint": {"every": 2}}


def checkpoints(config: dict[str, Any]) -> Path:
    return Path(config["output"]) / "checkpoints"


def flip(path: Path, at: int = -20) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(path: Path) -> None:
    path.unlink()


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "bit flip in model": ("model.safetensors", flip, "model.safetensors is damaged"),
    "bit flip in optimiser": ("optimizer.bin", flip, "optimizer.bin is damaged"),
    "truncated model": ("model.safetensors", truncate, "model.safetensors is damaged"),
    "missing random states": ("random_states_0.pkl", remove, "random_states_0.pkl is missing"),
    "missing run.json": ("run.json", remove, "run.json is missing"),
    "truncated run.json": ("run.json", truncate, "can't be read"),
    "modified run.json": (
        "run.json",
        lambda path: path.write_text(path.read_text().replace('"step": 4', '"step": 3')),
        "run.json is damaged",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"folder": tmp_path_factory.mktemp("whole")}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_set_aside(
    name: str, config: Config, whole: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    values = config(**STEPS)
    if "copy" not in whole:
        train("sft", values)
        whole["copy"] = {p.relative_to(checkpoints(values)): p.read_bytes() for p in checkpoints(values).rglob("*.*")}
    for path, data in whole["copy"].items():
        (checkpoints(values) / path).parent.mkdir(parents=True, exist_ok=True)
        (checkpoints(values) / path).write_bytes(data)
    file, damage, words = DAMAGE[name]
    damage(checkpoints(values) / "step-00000004" / file)
    saved = newest_valid(checkpoints(values))
    assert saved is not None and saved.step == 2
    assert words in caplog.text and "resuming from step-00000002 instead" in caplog.text
    assert sorted(p.name for p in checkpoints(values).iterdir()) == ["damaged-step-00000004", "step-00000002"]


def test_resumed_run_equals_an_uninterrupted_one(config: Config) -> None:
    uninterrupted, values = config(name="uninterrupted", **STEPS), config(**STEPS)
    train("sft", uninterrupted)
    train("sft", values)
    flip(checkpoints(values) / "step-00000004" / "model.safetensors")
    (checkpoints(values) / ".DS_Store").write_bytes(b"x")
    (checkpoints(values) / "step-notes.txt").write_text("mine")
    metrics = Path(values["output"]) / "metrics.jsonl"
    metrics.write_bytes(b'{not json\n[1]\n\xff\n{"step": 1, "loss": "x"}\n' + metrics.read_bytes())
    assert train("sft", values).steps == 4
    assert losses(values) == losses(uninterrupted) and len(losses(values)) == 4
    names = {path.name for path in checkpoints(values).iterdir()}
    kept = {"step-00000002", "step-00000004"}
    assert names == {*kept, "damaged-step-00000004", ".DS_Store", "step-notes.txt"}
    for path in checkpoints(values).glob("step-0*"):
        flip(path / "optimizer.bin")
    with pytest.raises(TrainError, match=r"no usable checkpoint in .*: .*; .*optimizer.bin is damaged"):
        train("sft", values)


def test_new_ranks_are_seeded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "random_states_0.pkl").touch()
    saved = Checkpoint(tmp_path, 4, {}, {})
    torch.manual_seed(1)
    start = torch.rand(3).tolist()
    drawn = {}
    for rank in (1, 2, 1):
        seed_new_rank(saved, rank, seed=0)
        found = torch.rand(3).tolist()
        assert drawn.setdefault(rank, found) == found  # repeatable
    assert drawn[1] != drawn[2]
    assert start not in drawn.values()  # not those of the run's first step again
    assert "was saved with fewer ranks: rank 1 has no saved random state and is seeded for step 4" in caplog.text
    state = torch.get_rng_state()
    seed_new_rank(saved, 0, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_existing_folder_is_replaced_by_the_checkpoint(config: Config) -> None:
    values = config(**STEPS)
    stale = checkpoints(values) / "step-00000002"
    stale.mkdir(parents=True)
    (stale / "run.json").write_text("{}")
    with pytest.raises(TrainError, match="no usable checkpoint"):
        train("sft", values)
    (stale / "run.json").unlink()
    stale.rmdir()
    (checkpoints(values) / "step-00000004").write_text("a file")
    train("sft", values)
    saved = newest_valid(checkpoints(values))
    assert saved is not None and saved.step == 4
    assert {path.name for path in checkpoints(values).iterdir()} == {"step-00000002", "step-00000004"}


FULL = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # no larger file can be written
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.argv = ["penstock", "train", "sft", sys.argv[1]]
from penstock.cli import main
main()
"""


def test_checkpoint_that_can_not_be_written(config: Config, tmp_path: Path) -> None:
    values = config(**STEPS)
    train("sft", values, "loader.steps=1", "output=" + str(tmp_path / "first"))  # prepares the data
    path = tmp_path / "run.json"
    path.write_text(json.dumps(values))
    child = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, env=environment(), check=False
    )
    assert child.returncode == 1
    assert "step-00000002 can't be written: " in child.stderr.replace("\n", "")
    assert "Traceback" not in child.stderr
    assert not list(checkpoints(values).iterdir())
    assert train("sft", values).steps == 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many KiB."""
    folder, mounted = tmp_path / "disk", []

    def mount(size: int) -> Path:
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "penstock-test", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)  # a traceback may hold a file open


@pytest.mark.parametrize(
    ("size", "what"),
    [(100, "step-00000001"), (600, "step-00000001"), (1300, "step-00000002"), (2250, "model")],
    ids=["weights", "optimiser", "second checkpoint", "final model"],
)
def test_full_disk(size: int, what: str, config: Config, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(size)
    values = {**config(loader={"steps": 2}, checkpoint={"every": 1}), "output": str(disk / "run")}
    with pytest.raises(TrainError, match=rf"{what} can't be written: the disk is full\. Once this is fixed"):
        train("sft", values)
    assert not [path for path in disk.rglob("*") if "writing" in path.name or "removing" in path.name]
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    assert train("sft", values).steps == 2
    assert len(losses(values)) == 2


# -- two processes ------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from penstock.train.run_process import output_lock
with output_lock(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_second_process_is_refused(config: Config) -> None:
    values = config(loader={"steps": 1})
    output = Path(values["output"])
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE, env=environment()
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        with pytest.raises(TrainError, match=rf"is in use by process {holder.pid} on this host"):
            train("sft", values)
        holder.send_signal(signal.SIGKILL)
    assert (output / "run.lock").exists()
    assert train("sft", values).steps == 1  # taken over
    assert not [path.name for path in output.iterdir() if "lock" in path.name]


def test_lock_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    (tmp_path / "run.lock").write_text(f"{host_id()}.{os.getpid()}.1")
    with output_lock(tmp_path):
        assert (tmp_path / "run.lock").read_text() == writer_name()
        with pytest.raises(TrainError, match="is in use"), output_lock(tmp_path):
            pass
    assert not list(tmp_path.iterdir())


def test_locks_of_other_hosts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "run.lock"
    lock.write_text("node7-0123abcd.4711.99")
    with (
        pytest.raises(TrainError, match=r"in use by process 4711 on host node7.*remove .*run\.lock"),
        output_lock(tmp_path),
    ):
        pass
    lock.write_text(f"{host_id()}.{os.getpid()}.1")  # our pid, but of an earlier process
    with output_lock(tmp_path):
        assert lock.read_text() == writer_name()
        monkeypatch.setenv("RANK", "1")
        with output_lock(tmp_path):  # another rank of the same run
            pass
        assert lock.exists()
    assert not list(tmp_path.iterdir())


# -- untrusted code -----------------------------------------------------------------------------------------------


def test_code_in_a_model_folder_is_never_run(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mark = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    (folder / "own.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "class C(LlamaConfig):\n    model_type = 'own'\nclass M(LlamaForCausalLM):\n    config_class = C\n"
    )
    auto = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto, "vocab_size": 64}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for place in ("path", "init"):
        values = config(name=place)
        values["model"] = {place: str(folder), "tokenizer": values["model"]["tokenizer"]}
        with pytest.raises(UnsupportedError, match="rejected by transformers"):
            train("sft", values)
    assert not mark.exists()
