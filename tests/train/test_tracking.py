"""What a run tells trackers, and losses by source and role: exact means that add up to the loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import penstock as ps
from penstock.errors import UnsupportedError, UsageError
from penstock.load.options import Collate
from penstock.prepare.chat.conversation import Part
from penstock.train.config import Mean
from penstock.train.objective import Groups, Policy, Sft
from penstock.train.run import train
from tests.train.runs import Config, environment, metrics

pytestmark = pytest.mark.slow

SOURCES = ("loss_by_source/first", "loss_by_source/second")


def two_sources(config: Config, examples: Path, cache: Path, method: str = "sft", **more: Any) -> dict[str, Any]:
    path = str(examples / "data" / ("chats.jsonl" if method == "sft" else "pairs.jsonl"))
    sources = [
        {"path": path, "name": "first", "prepare": {"split": "train[:50]"}},
        {"path": path, "name": "second", "prepare": {"split": "train[50:80]"}},
    ]
    data = {"sources": sources, "prepare": {"cache": str(cache)}}
    held_out = [
        {"path": path, "name": "easy", "prepare": {"split": "train[80:90]"}},
        {"path": path, "name": "hard", "prepare": {"split": "train[90:105]"}},
    ]
    return config(method, data=data, eval={"sources": held_out, "every": 3}, **more)


@pytest.mark.parametrize("collate", [Collate.PADDED, Collate.PACKED])
def test_losses_by_source_and_role_are_exact(collate: Collate, examples: Path, models: Path, cache: Path) -> None:
    ds = ps.prepare(examples / "data/chats.jsonl", tokenizer=examples / "tokenizer", cache=cache)
    members = {
        "first": (ds.view(train_on="all_messages", max_length=90), 1.0),
        "second": (ds.view(train_on="all_user_and_system_messages", max_length=64), 0.5),
    }
    mixed = ps.mix(members, seed=1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models / "llama"))
    policy = Policy(model, model, torch.device("cpu"), None)
    objective = Sft(policy, Mean.TOKEN, fused=False, groups=Groups(mixed))
    capacity = {"capacity": 128} if collate is Collate.PACKED else {}
    batch = next(iter(mixed.loader(batch_size=6, collate=collate, framework="torch", seed=2, epochs=1, **capacity)))
    found = objective.loss(batch)
    expected: dict[str, list[float]] = {name: [0.0, 0.0] for name in found.groups}
    for item in batch.items.tolist():
        name, _ = mixed.place(item)
        example = mixed[item]
        with torch.no_grad():
            logits = model(torch.from_numpy(example.input_ids)[None]).logits[0]
        losses = -torch.log_softmax(logits[:-1], -1)[torch.arange(len(example) - 1), example.input_ids[1:]]
        roles, parts = (np.repeat(of, example.runs.lengths) for of in (example.runs.roles, example.runs.parts))
        for k, weight in enumerate(example.loss_weights[1:].tolist()):
            role = {1: "system", 2: "user", 3: "assistant", 4: "tool"}.get(int(roles[k + 1]), "other")
            for group in (f"loss_by_source/{name}", f"loss_by_role/{role}") if weight else ():
                expected[group][0] += losses[k].item() * weight
                expected[group][1] += weight
            if weight:  # of parts, the plain mean
                expected[f"loss_by_part/{Part(parts[k + 1]).name.lower()}"][0] += losses[k].item()
                expected[f"loss_by_part/{Part(parts[k + 1]).name.lower()}"][1] += 1
    of_sets = [weight for name, (_, weight) in expected.items() if not name.startswith("loss_by_part/")]
    assert sum(of_sets) == 2 * objective.weight(batch)
    for name, (loss, weight) in found.groups.items():
        assert (loss.item(), weight.item()) == pytest.approx(tuple(expected[name]), rel=1e-4)


def test_named_evaluation_sets_and_sources_of_a_run(config: Config, examples: Path, cache: Path) -> None:
    values = two_sources(config, examples, cache, loader={"batch_size": 8, "steps": 6, "micro_batch": 4})
    train("sft", values)
    lines = metrics(values)
    steps, evaluations = [x for x in lines if "loss" in x], [x for x in lines if "eval_loss" in x]
    assert any(set(SOURCES) <= line.keys() for line in steps)
    for line in steps:
        known = [line[name] for name in SOURCES if name in line]
        assert min(known) - 1e-4 <= line["loss"] <= max(known) + 1e-4
    assert len(evaluations) == 2
    assert {"eval_loss_by_source/easy", "eval_loss_by_source/hard"} <= evaluations[0].keys()
    pairs = two_sources(config, examples, cache, "dpo", name="dpo", loader={"batch_size": 8, "steps": 3})
    train("dpo", pairs)
    assert {"eval_loss_by_source/easy", "eval_loss_by_source/hard"} <= metrics(pairs)[-1].keys()


def test_wandb_offline_and_tensorboard(config: Config, examples: Path, cache: Path, tmp_path: Path) -> None:
    log = {"trackers": ["wandb", "tensorboard"], "project": "first-hour", "run_name": "told"}
    values = two_sources(config, examples, cache, log=log)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    variables = {**environment(), "WANDB_MODE": "offline", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "penstock.cli", "train", "sft", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    output = Path(values["output"])
    (written,) = output.glob("wandb/offline-run-*/run-*.wandb")
    data = written.read_bytes()
    for name in ("loss_by_source/first", "eval_loss_by_source/hard", "grad_norm", "told", "first-hour", "optim.lr"):
        assert name.encode() in data, name
    (events,) = (output / "first-hour").glob("events.*")
    assert b"eval_loss_by_source/hard" in events.read_bytes()


def test_mlflow_in_a_folder(config: Config, examples: Path, cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    values = two_sources(config, examples, cache, log={"trackers": ["mlflow"], "project": "first-hour"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    variables = {**environment(), "HOME": str(tmp_path), "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri()}
    variables |= {"MLFLOW_ALLOW_FILE_STORE": "true"}
    command = [sys.executable, "-m", "penstock.cli", "train", "sft", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    written = {path.name: path for path in (tmp_path / "mlruns").rglob("*") if path.is_file()}
    assert {"loss", "grad_norm", "first", "hard"} <= written.keys()  # of loss_by_source/first, eval_loss_by_source/hard
    assert len(written["loss"].read_text().splitlines()) > 1


def test_trackers_that_can_not_be(config: Config) -> None:
    with pytest.raises(UsageError, match="log.trackers: 'wanbd' is unknown; expected wandb, tensorboard, mlflow"):
        train("sft", config(log={"trackers": ["wanbd"]}))
    with pytest.raises(UnsupportedError, match="log.trackers: clearml is not installed. pip install clearml"):
        train("sft", config(log={"trackers": ["clearml"]}))
