"""Losses under masks of parts: those of masks made by hand, of TRL's DPO and of open-instruct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

import penstock as ps
from penstock.load.options import Collate
from penstock.load.view import Served
from penstock.prepare.chat.conversation import Part, Role
from penstock.train.config import Mean
from penstock.train.objective import Dpo, Groups, Policy, Sft, pair_log_probs
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import PARTS, answer
from tests.train.test_trl import QUIET, tiny

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
REASONING = (Part.REASONING, Part.REASONING_MARKUP, Part.EMPTY_REASONING)


def rows(masked: tuple[Part, ...] = ()) -> MemoryDataset:
    """Four conversations, in which some parts are masked by hand: as if the header printed them."""
    made = []
    for at in range(4):
        pieces = [Piece(0, Role.USER, Part.BODY, tuple(range(5, 8 + at))), *answer(1, first_id=20 + 40 * at)]
        pieces += [*answer(2, [*PARTS[at:], Part.EMPTY_REASONING, Part.STOP], 200 + 30 * at)]
        made.append([p._replace(part=Part.HEADER) if p.part in masked else p for p in pieces])
    return MemoryDataset.of(made)


def loss(model: Any, served: Served, groups: bool = False, mean: Mean = Mean.TOKEN) -> tuple[float, dict[str, Any]]:
    policy = Policy(model, model, torch.device("cpu"), None)
    objective = Sft(policy, mean, fused=False, groups=Groups(served) if groups else None)
    packed: dict[str, Any] = {"collate": Collate.PACKED, "capacity": 256} if groups else {}
    (batch,) = served.loader(batch_size=4, framework="torch", shuffle=False, epochs=1, **packed)
    found = objective.loss(batch)
    return float(found.loss / objective.weight(batch)), dict(found.groups)


@pytest.mark.parametrize(("parts", "masked"), [("-reasoning", REASONING), ("-stop", (Part.STOP,))])
def test_a_mask_of_parts_has_the_loss_of_a_mask_made_by_hand(
    models: Path, parts: str, masked: tuple[Part, ...]
) -> None:
    model = tiny(models, "llama")
    by_hand, _ = loss(model, rows(masked).view())
    assert loss(model, rows().view(parts=parts))[0] == pytest.approx(by_hand, abs=1e-6)
    zero = {name.removeprefix("-"): 0.0 for name in parts.split(",")}
    assert loss(model, rows().view(part_weights=zero))[0] == pytest.approx(by_hand, abs=1e-6)
    assert loss(model, rows().view())[0] != pytest.approx(by_hand, abs=1e-4)


@pytest.mark.parametrize("mean", list(Mean))
def test_losses_by_part_are_plain_means(models: Path, mean: Mean) -> None:
    model, served = tiny(models, "llama"), rows().view(parts="-stop", part_weights={"reasoning": 0.25, "calls": 3.0})
    _, found = loss(model, served, groups=True, mean=mean)
    expected: dict[str, list[float]] = {}
    for at in range(len(served)):
        example = served.example(at)
        ids = torch.from_numpy(example.input_ids)
        with torch.no_grad():
            chances = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        parts = np.repeat(example.runs.parts, example.runs.lengths)
        for token in np.flatnonzero(example.loss_mask):
            expected.setdefault(Part(parts[token]).name.lower(), []).append(-float(chances[token - 1]))
    assert found.keys() == {f"loss_by_part/{name}" for name in expected}
    assert len(expected) == 8
    for name, losses in expected.items():
        total, count = found[f"loss_by_part/{name}"]
        assert int(count) == len(losses)
        assert float(total / count) == pytest.approx(float(np.mean(losses)), rel=1e-4)


def test_with_the_tail_the_loss_is_that_of_trls_dpo(examples: Path, cache: Path, models: Path, tmp_path: Path) -> None:
    source = examples / "data" / "pairs.jsonl"
    view = ps.prepare(source, tokenizer=examples / "tokenizer", cache=cache).view(parts="+tail")
    model, reference = tiny(models, "llama"), tiny(models, "llama", 1)
    trainer = DPOTrainer(
        model,
        ref_model=reference,
        args=DPOConfig(str(tmp_path), beta=0.3, **QUIET),
        train_dataset=Dataset.from_list([json.loads(line) for line in source.read_text().splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(examples / "tokenizer"),
    )
    batch = next(iter(view.loader(batch_size=6, framework="torch", seed=3)))
    policy = Policy(model, model, torch.device("cpu"), None)
    with torch.no_grad():
        known = pair_log_probs(policy, batch, model=reference)
    objective = Dpo(policy, lambda batch: known, 0.3, 0.0)
    inputs = trainer.data_collator([trainer.train_dataset[int(item)] for item in batch.items])
    assert inputs["completion_mask"].bool().tolist() == (batch.tensors["labels"] != -100).tolist()
    model.train()
    ours = (objective.loss(batch).loss / objective.weight(batch)).item()
    assert ours == pytest.approx(trainer.compute_loss(model, inputs).item(), abs=1e-6)
    assert ours != pytest.approx(0.6931, abs=1e-2)


def open_instruct(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """The mask of open-instruct's `sft_tulu_tokenize_and_truncate_v1`: all but other messages and headers."""

    def size(upto: int, header: bool = False) -> int:
        made = tokenizer.apply_chat_template(messages[:upto], add_generation_prompt=header, return_dict=False)
        return len(made)

    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    mask = np.ones(len(ids), np.bool_)
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            start = size(at) if at else 0
            answered = at + 1 < len(messages) and messages[at + 1]["role"] == "assistant"
            mask[start : size(at + 1, header=answered)] = False
    return ids, mask.tolist()


def test_with_the_tail_masks_are_those_of_open_instruct(examples: Path, cache: Path) -> None:
    source = examples / "data" / "chats.jsonl"
    dataset = ps.prepare(source, tokenizer=examples / "tokenizer", cache=cache)
    tokenizer = AutoTokenizer.from_pretrained(examples / "tokenizer")
    view, compared = dataset.view(parts="+tail"), 0
    for example, line in zip(view, source.read_text().splitlines(), strict=True):
        row = json.loads(line)
        if "tools" in row or any("tool_calls" in message for message in row["messages"]):
            continue  # its template renders the conversation alone
        assert (example.input_ids.tolist(), example.loss_mask.tolist()) == open_instruct(tokenizer, row["messages"])  # type: ignore[union-attr]
        compared += 1
    assert compared > 20
