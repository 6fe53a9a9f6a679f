"""Prefetching, packing, gradient accumulation and the number of processes don't change the losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.load.collate import Batch
from penstock.load.loader import Loader
from penstock.train.config import Mean, read_config
from penstock.train.data import open_data
from penstock.train.objective import Policy, Sft
from penstock.train.run import train
from tests.train.runs import Config, environment, losses

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_prefetching_is_bit_identical(config: Config, method: str) -> None:
    found = []
    for prefetch in (0, 1, 4):
        values = config(method, f"prefetch-{prefetch}", loader={"prefetch": prefetch, "micro_batch": 3})
        train(method, values)
        found.append(losses(values))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_gradient_accumulation(config: Config, method: str) -> None:
    found = []
    for micro in (1, 2, 8, 3):
        values = config(method, f"micro-{micro}", loader={"micro_batch": micro})
        train(method, values)
        found.append(losses(values))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-5)


def loss_and_gradients(model: Any, batches: list[Batch], mean: Mean) -> tuple[float, list[torch.Tensor]]:
    objective = Sft(Policy(model, model, torch.device("cpu"), None), mean, fused=False)
    model.zero_grad()
    total = sum(objective.weight(batch) for batch in batches)
    loss = torch.stack([objective.loss(batch).loss for batch in batches]).sum() / total
    loss.backward()
    return loss.item(), [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mean", list(Mean))
def test_packed_and_padded(config: Config, models: Path, architecture: str, attention: str, mean: Mean) -> None:
    values = config()
    values["data"]["prepare"] = {**values["data"]["prepare"], "split": "train[:40]"}
    view = open_data(read_config(values)).train
    torch.manual_seed(0)
    settings = AutoConfig.from_pretrained(models / architecture)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation=attention)
    padded = Loader(view, batch_size=40, micro_batch=16, framework="torch")
    packed = Loader(view, batch_size=40, micro_batch=5, collate="packed", capacity=128, framework="torch")
    assert padded.steps == packed.steps == 1
    left, left_gradients = loss_and_gradients(model, list(padded), mean)
    right, right_gradients = loss_and_gradients(model, list(packed), mean)
    assert left == pytest.approx(right, abs=1e-5)
    for one, other in zip(left_gradients, right_gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_message_weights(config: Config, examples: Path, write_rows: Any) -> None:
    """A message with weight 0.5 counts half, in the sum and in the denominator."""
    rows = [json.loads(line) for line in (examples / "data" / "chats.jsonl").read_text().splitlines()[:6]]
    for row in rows:
        for number, message in enumerate(row["messages"]):
            message["weight"] = [0.5, 2.0, 1.0][number % 3]
    values = config(loader={"steps": 1, "micro_batch": 2}, data={"sources": [str(write_rows(rows))]})
    train("sft", values)
    view = open_data(read_config(values)).train
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(values["model"]["init"]))
    total, weight, seen = 0.0, 0.0, set[float]()
    for example in view:
        ids = torch.from_numpy(example.input_ids)[None]  # type: ignore[union-attr]
        with torch.no_grad():
            chances = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        own = torch.from_numpy(example.loss_weights)[1:]  # type: ignore[union-attr]
        seen |= set(own.tolist())
        total, weight = total - float((chances * own).sum()), weight + float(own.sum())
    assert seen > {0.0, 2.0}
    assert losses(values)[0] == pytest.approx(total / weight, abs=1e-5)


LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "penstock.cli", "train"]


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_two_processes(config: Config, tmp_path: Path, method: str) -> None:
    loader = {"batch_size": 9, "micro_batch": 2, "steps": 4}
    alone, together = config(method, "alone", loader=loader), config(method, "together", loader=loader)
    if method == "sft":
        for values in (alone, together):
            values["loader"] = {**loader, "collate": "packed", "capacity": 128}
            values["view"] = {**values["view"], "holdout": 10}
    train(method, alone)
    path = tmp_path / "together.json"
    path.write_text(json.dumps(together))
    done = subprocess.run([*LAUNCH, method, str(path)], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(together), losses(alone), atol=1e-5)
    assert (Path(together["output"]) / "model" / "model.safetensors").is_file()
    # A checkpoint written by two processes resumes with one.
    more = {**together, "loader": {**together["loader"], "steps": 6}, "checkpoint": {"resume": "anyway"}}
    train(method, more)
    assert len(losses(more)) == 6
