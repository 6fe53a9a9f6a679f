"""Losses equal TRL's on the same batch and model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from penstock.load.collate import Batch
from penstock.load.loader import Loader
from penstock.train.config import Mean, read_config
from penstock.train.data import open_data
from penstock.train.objective import Dpo, Policy, Sft, pair_log_probs
from tests.train.runs import Config

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "max_length": None, "disable_tqdm": True}


def tiny(models: Path, architecture: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models / architecture))


def first_batch(values: dict[str, Any]) -> Batch:
    return next(iter(Loader(open_data(read_config(values)).train, batch_size=6, framework="torch")))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_sft(config: Config, models: Path, examples: Path, tmp_path: Path, architecture: str) -> None:
    model, batch = tiny(models, architecture), first_batch(config())
    objective = Sft(Policy(model, model, torch.device("cpu"), None), Mean.TOKEN, fused=False)
    ours = objective.loss(batch).loss / objective.weight(batch)
    trainer = SFTTrainer(
        model,
        args=SFTConfig(str(tmp_path), dataset_kwargs={"skip_prepare_dataset": True}, **QUIET),
        train_dataset=Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]}),
        processing_class=AutoTokenizer.from_pretrained(examples / "tokenizer"),
    )
    inputs = {name: batch.tensors[name] for name in ("input_ids", "attention_mask", "labels")}
    model.train()
    theirs = trainer.compute_loss(model, dict(inputs), num_items_in_batch=torch.tensor(batch.counts.trained))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo(config: Config, models: Path, examples: Path, tmp_path: Path, smoothing: float) -> None:
    model, reference, batch = tiny(models, "llama"), tiny(models, "llama", 1), first_batch(config("dpo"))
    policy = Policy(model, model, torch.device("cpu"), None)
    with torch.no_grad():
        known = pair_log_probs(policy, batch, model=reference)
    objective = Dpo(policy, lambda batch: known, 0.3, smoothing)
    sums = objective.loss(batch)
    ours = sums.loss / objective.weight(batch)
    trainer = DPOTrainer(
        model,
        ref_model=reference,
        args=DPOConfig(str(tmp_path), beta=0.3, **QUIET),
        train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}),
        processing_class=AutoTokenizer.from_pretrained(examples / "tokenizer"),
    )
    inputs = {name: batch.tensors[name] for name in ("input_ids", "attention_mask")}
    inputs["completion_mask"] = (batch.tensors["labels"] != -100).long()
    model.train()
    # TRL's sigmoid loss ignores label_smoothing, so mix in the loss with swapped sides by hand.
    swapped = {name: torch.cat(tensor.chunk(2)[::-1]) for name, tensor in inputs.items()}
    right, wrong = trainer.compute_loss(model, inputs), trainer.compute_loss(model, swapped)
    theirs = (1 - smoothing) * right + smoothing * wrong
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    assert ours.item() != pytest.approx(0.6931, abs=1e-2)
