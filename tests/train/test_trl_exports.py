"""TRL's trainers on an export have the same loss as Penstock's on the same batch, and skip preparation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import penstock as ps
from penstock.load.collate import Batch
from penstock.train.config import Mean
from penstock.train.objective import Dpo, Policy, Sft, pair_log_probs
from tests.train.test_trl import QUIET, tiny

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def view(examples: Path, cache: Path) -> Any:
    prepared = ps.prepare(examples / "data" / "chats.jsonl", tokenizer=examples / "tokenizer", cache=cache)
    return prepared.view(max_length=128)


def own_loss(model: Any, batch: Batch) -> float:
    objective = Sft(Policy(model, model, torch.device("cpu"), None), Mean.TOKEN, fused=False)
    return float((objective.loss(batch).loss / objective.weight(batch)).item())


def sft_trainer(model: Any, folder: Path, work: Path, **options: Any) -> SFTTrainer:
    class Unprepared(SFTTrainer):
        def _prepare_dataset(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("TRL prepares the dataset again")

    config = SFTConfig(str(work), dataset_kwargs={"skip_prepare_dataset": True}, **QUIET, **options)
    return Unprepared(
        model,
        args=config,
        train_dataset=load_from_disk(folder),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_sft(view: Any, models: Path, tmp_path: Path, architecture: str) -> None:
    view.export("trl", tmp_path / "rows", part_tokens=9000)
    model = tiny(models, architecture)
    trainer = sft_trainer(model, tmp_path / "rows", tmp_path / "run")
    batch = next(iter(view.loader(batch_size=6, framework="torch", seed=3)))
    inputs = trainer.data_collator([trainer.train_dataset[int(item)] for item in batch.items])
    assert inputs["input_ids"].tolist() == batch.tensors["input_ids"].tolist()
    model.train()
    theirs = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(batch.counts.trained))
    assert own_loss(model, batch) == pytest.approx(theirs.item(), abs=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_packed_sft(view: Any, models: Path, tmp_path: Path, architecture: str) -> None:
    view.export("trl", tmp_path / "rows", capacity=256)
    model = tiny(models, architecture)
    trainer = sft_trainer(model, tmp_path / "rows", tmp_path / "run", packing=False, padding_free=True)
    loader = view.loader(batch_size=1, collate="packed", capacity=256, shuffle=False, framework="torch")
    for step, batch in zip(range(3), loader, strict=False):
        inputs = trainer.data_collator([trainer.train_dataset[step]])
        assert inputs["labels"].tolist() == batch.tensors["labels"][:, : inputs["labels"].shape[1]].tolist()
        model.train()
        theirs = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(batch.counts.trained))
        assert own_loss(model, batch) == pytest.approx(theirs.item(), abs=1e-5)


def test_dpo(examples: Path, cache: Path, models: Path, tmp_path: Path) -> None:
    pairs = ps.prepare(examples / "data" / "pairs.jsonl", tokenizer=examples / "tokenizer", cache=cache)
    view = pairs.view(max_length=128)
    view.export("trl", tmp_path / "rows")
    model, reference = tiny(models, "llama"), tiny(models, "llama", 1)
    page = (ROOT / "docs" / "coming-from.md").read_text()
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Prepared(DPOTrainer)" in block
    )
    names: dict[str, Any] = {}
    exec(code[code.index("class Prepared") :].split("\n\n\n")[0], {"DPOTrainer": DPOTrainer}, names)
    trainer = names["Prepared"](
        model,
        ref_model=reference,
        args=DPOConfig(str(tmp_path), beta=0.3, **QUIET),
        train_dataset=load_from_disk(tmp_path / "rows"),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "rows" / "tokenizer"),
    )
    assert trainer.train_dataset.column_names == ["prompt_ids", "chosen_ids", "rejected_ids"]
    batch = next(iter(view.loader(batch_size=6, framework="torch", seed=3)))
    policy = Policy(model, model, torch.device("cpu"), None)
    with torch.no_grad():
        known = pair_log_probs(policy, batch, model=reference)
    objective = Dpo(policy, lambda batch: known, 0.3, 0.0)
    ours = objective.loss(batch).loss / objective.weight(batch)
    inputs = trainer.data_collator([trainer.train_dataset[int(item)] for item in batch.items])
    model.train()
    theirs = trainer.compute_loss(model, inputs)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    assert ours.item() != pytest.approx(0.6931, abs=1e-2)


@pytest.mark.parametrize("capacity", [None, 256])
def test_short_run(view: Any, models: Path, tmp_path: Path, capacity: int | None) -> None:
    """Runs TRL's own training loop on the export."""
    view.export("trl", tmp_path / "rows", capacity=capacity)
    options: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    if capacity is not None:
        options |= {"padding_free": True, "packing": False}
    result = sft_trainer(tiny(models, "llama"), tmp_path / "rows", tmp_path / "run", **options).train()
    assert result.global_step == 2
    assert 0 < result.training_loss < 10
