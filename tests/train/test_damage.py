"""What can happen to a run's folder: damaged checkpoints, stray files, a full disk, a second trainer, foreign code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.store.files import host_id, writer_name
from penstock.train.checkpoint import newest_valid
from penstock.train.errors import PromiseError, TrainError
from penstock.train.lock import locked
from penstock.train.run import train_sft
from tests.train.running import Config, environment, losses

STEPS = {"feed": {"steps": 4}, "checkpoint": {"every": 2}}


def checkpoints(config: dict[str, Any]) -> Path:
    return Path(config["output"]) / "checkpoints"


def flip(path: Path, at: int = -20) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(path: Path) -> None:
    path.unlink()


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a flipped bit of the model": ("model.safetensors", flip, "model.safetensors is damaged"),
    "a flipped bit of the optimiser": ("optimizer.bin", flip, "optimizer.bin is damaged"),
    "a cut-off model": ("model.safetensors", cut, "model.safetensors is damaged"),
    "missing random states": ("random_states_0.pkl", remove, "random_states_0.pkl is missing"),
    "a missing state": ("run.json", remove, "run.json is missing"),
    "a cut-off state": ("run.json", cut, "can't be read"),
    "a changed state": (
        "run.json",
        lambda path: path.write_text(path.read_text().replace('"step": 4', '"step": 3')),
        "run.json is damaged",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"folder": tmp_path_factory.mktemp("whole")}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_run_goes_on_from_the_last_valid_checkpoint(
    name: str, config: Config, whole: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    values = config(**STEPS)
    if "copy" not in whole:
        train_sft(values)
        whole["copy"] = {p.relative_to(checkpoints(values)): p.read_bytes() for p in checkpoints(values).rglob("*.*")}
    for path, data in whole["copy"].items():
        (checkpoints(values) / path).parent.mkdir(parents=True, exist_ok=True)
        (checkpoints(values) / path).write_bytes(data)
    file, damage, words = DAMAGE[name]
    damage(checkpoints(values) / "step-00000004" / file)
    saved = newest_valid(checkpoints(values))
    assert saved is not None and saved.step == 2
    assert words in caplog.text and "going on from step-00000002 instead" in caplog.text
    assert sorted(p.name for p in checkpoints(values).iterdir()) == ["damaged-step-00000004", "step-00000002"]


def test_a_resumed_run_is_the_undisturbed_one(config: Config) -> None:
    undisturbed, values = config(name="undisturbed", **STEPS), config(**STEPS)
    train_sft(undisturbed)
    train_sft(values)
    flip(checkpoints(values) / "step-00000004" / "model.safetensors")
    (checkpoints(values) / ".DS_Store").write_bytes(b"x")
    (checkpoints(values) / "step-notes.txt").write_text("mine")
    metrics = Path(values["output"]) / "metrics.jsonl"
    metrics.write_bytes(b"{not json\n[1]\n" + metrics.read_bytes())
    assert train_sft(values).steps == 4
    assert losses(values) == losses(undisturbed) and len(losses(values)) == 4
    names = {path.name for path in checkpoints(values).iterdir()}
    kept = {"step-00000002", "step-00000004"}
    assert names == {*kept, "damaged-step-00000004", ".DS_Store", "step-notes.txt"}
    for path in checkpoints(values).glob("step-0*"):
        flip(path / "optimizer.bin")
    with pytest.raises(TrainError, match=r"no checkpoint in .* can be gone on from: .*; .*optimizer.bin is damaged"):
        train_sft(values)


def test_a_step_is_saved_though_its_folder_exists(config: Config) -> None:
    values = config(**STEPS)
    stale = checkpoints(values) / "step-00000002"
    stale.mkdir(parents=True)
    (stale / "run.json").write_text("{}")
    with pytest.raises(TrainError, match="can be gone on from"):
        train_sft(values)
    (stale / "run.json").unlink()
    stale.rmdir()
    (checkpoints(values) / "step-00000004").write_text("a file")
    train_sft(values)
    saved = newest_valid(checkpoints(values))
    assert saved is not None and saved.step == 4
    assert {path.name for path in checkpoints(values).iterdir()} == {"step-00000002", "step-00000004"}


FULL = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # nothing larger can be written
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.argv = ["penstock", "train", "sft", sys.argv[1]]
from penstock.cli import main
main()
"""


def test_a_checkpoint_that_can_not_be_written(config: Config, tmp_path: Path) -> None:
    values = config(**STEPS)
    train_sft(values, "feed.steps=1", "output=" + str(tmp_path / "first"))  # prepares the data
    path = tmp_path / "run.json"
    path.write_text(json.dumps(values))
    child = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, env=environment(), check=False
    )
    assert child.returncode == 1
    assert "step-00000002 can't be written: " in child.stderr.replace("\n", "")
    assert "Traceback" not in child.stderr
    assert not list(checkpoints(values).iterdir())
    assert train_sft(values).steps == 4


# -- two trainers -------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from penstock.train.lock import locked
with locked(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_second_trainer_is_refused(config: Config) -> None:
    values = config(feed={"steps": 1})
    output = Path(values["output"])
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE, env=environment()
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        with pytest.raises(TrainError, match=rf"is in use: process {holder.pid} on this host trains there"):
            train_sft(values)
        holder.send_signal(signal.SIGKILL)
    assert (output / "run.lock").exists()
    assert train_sft(values).steps == 1  # taken over
    assert not [path.name for path in output.iterdir() if "lock" in path.name]


def test_locks_of_other_hosts_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "run.lock"
    lock.write_text("node7-0123abcd.4711.99")
    with (
        pytest.raises(TrainError, match=r"process 4711 on host node7 trains there.*remove .*run\.lock"),
        locked(tmp_path),
    ):
        pass
    lock.write_text(f"{host_id()}.{os.getpid()}.1")  # our number, of a process before
    with locked(tmp_path):
        assert lock.read_text() == writer_name()
        monkeypatch.setenv("RANK", "1")
        with locked(tmp_path):  # another rank of the same run
            pass
        assert lock.exists()
    assert not list(tmp_path.iterdir())


# -- foreign code -------------------------------------------------------------------------------------------------


def test_code_of_a_model_folder_is_never_run(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with pytest.raises(PromiseError, match="transformers refuses it"):
            train_sft(values)
    assert not mark.exists()
