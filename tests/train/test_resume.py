"""Runs that are killed and resumed have the same losses and final weights, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import TrainError
from penstock.train.checkpoint import _state_digest
from penstock.train.run import train
from tests.train.runs import Config, environment, losses, metrics

pytestmark = pytest.mark.slow

STEPS = 24


def start(config: dict[str, Any], **more: str) -> subprocess.Popen[bytes]:
    path = Path(config["output"]).with_suffix(".json")
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "penstock.cli", "train", "sft", str(path)]
    with path.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, env={**environment(), **more}, stderr=log, start_new_session=True)


def stderr(config: dict[str, Any]) -> str:
    """What the last process wrote to standard error."""
    return Path(config["output"]).with_suffix(".log").read_text()


def wait_for_step(config: dict[str, Any], step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not any(line["step"] >= step for line in metrics(config)):
        assert process.poll() is None or step >= STEPS, stderr(config)
        assert time.monotonic() < deadline
        time.sleep(0.005)


def final_weights(config: dict[str, Any]) -> bytes:
    return (Path(config["output"]) / "model" / "model.safetensors").read_bytes()


@pytest.fixture
def settings(config: Config) -> Any:
    """Dropout in the adapters (so that random states matter), prefetching across epochs, frequent checkpoints."""
    loader = {"batch_size": 24, "micro_batch": 12, "steps": STEPS, "prefetch": 2}
    lora = {"rank": 2, "dropout": 0.2, "merge": True}
    return lambda name: config(
        name=name, loader=loader, lora=lora, checkpoint={"every": 3}, view={"holdout": 10}, eval={"every": 5}
    )


def test_killed_at_random_steps(settings: Any) -> None:
    uninterrupted, killed = settings("uninterrupted"), settings("killed")
    train("sft", uninterrupted)
    chance = random.Random(7)
    step, kinds = 0, [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    codes = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
    for kind in kinds:
        step += chance.randrange(3, 6)
        process = start(killed)
        wait_for_step(killed, step, process)
        os.kill(process.pid, kind)
        assert process.wait() == codes[kind], stderr(killed)
    train("sft", killed)
    assert losses(killed) == losses(uninterrupted)
    timeless = [{k: v for k, v in line.items() if "second" not in k and k != "data_wait"} for line in metrics(killed)]
    expected = [
        {k: v for k, v in line.items() if "second" not in k and k != "data_wait"} for line in metrics(uninterrupted)
    ]
    assert timeless == expected
    assert final_weights(killed) == final_weights(uninterrupted)
    kept = sorted(path.name for path in (Path(killed["output"]) / "checkpoints").iterdir())
    assert kept == ["step-00000021", "step-00000024"]


@pytest.mark.parametrize("point", ["checkpoint.sync:2", "checkpoint.rename:2"])
def test_killed_while_saving(settings: Any, point: str) -> None:
    values = {**settings("saving"), "loader": {"batch_size": 8, "steps": 6}, "checkpoint": {"every": 2}}
    process = start(values, PENSTOCK_FAULT=point)
    assert process.wait() == -signal.SIGKILL
    train("sft", values)
    assert len(losses(values)) == 6
    assert not list((Path(values["output"]) / "checkpoints").glob(".*"))


def test_finished_run_is_not_repeated(config: Config) -> None:
    values = config(loader={"steps": 2})
    train("sft", values)
    before = final_weights(values)
    outcome = train("sft", values)
    assert (outcome.steps, outcome.first) == (2, None)
    assert final_weights(values) == before


def test_checkpoints_hold_keys_at_their_earlier_place(config: Config) -> None:
    values = config(loader={"steps": 2, "micro_batch": 4}, view={"holdout": 10})
    train("sft", values)
    for path in Path(values["output"]).glob("checkpoints/*/run.json"):
        state = json.loads(path.read_text())
        del state["digest"]
        view, loader = state["config"].pop("view"), state["config"].pop("loader")
        state["config"]["eval"] |= {name: view.pop(name) for name in ("holdout", "holdout_seed")}
        state["config"]["data"] |= view
        names = ("batch_size", "micro_batch", "collate", "capacity", "epochs", "steps")
        earlier = {"tail": loader["incomplete_step"], "ahead": loader["prefetch"]}
        state["config"]["feed"] = {name: loader[name] for name in names} | earlier
        path.write_text(json.dumps({**state, "digest": _state_digest(state)}))
    train("sft", values, "loader.prefetch=0")
    with pytest.raises(TrainError, match=r"view\.max_length was 128 and is 64"):
        train("sft", values, "view.max_length=64")


def test_changed_settings_are_refused(config: Config) -> None:
    values = config(loader={"steps": 2})
    train("sft", values)
    with pytest.raises(TrainError, match=r"optim\.lr was 0\.003 and is 0\.5.*checkpoint\.resume=anyway"):
        train("sft", values, "optim.lr=0.5")
    with pytest.raises(TrainError, match="'never'"):
        train("sft", values, "checkpoint.resume=never")
    train("sft", values, "loader.prefetch=0", "checkpoint.keep=1")  # these may change
    assert train("sft", values, "loader.steps=3", "checkpoint.resume=anyway").steps == 3
