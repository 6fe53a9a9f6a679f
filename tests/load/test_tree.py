"""Trees: the chains of a row in one sequence train like separate rows, and branches don't attend to each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import FeedError, UsageError
from penstock.load.assemble import block_mask
from tests.support.faithful_chats import CHATS, QWEN


@pytest.fixture(scope="module")
def chains(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> ps.Dataset:
    folder = tmp_path_factory.mktemp("trees")
    (folder / "template.jinja").write_text(QWEN)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    return ps.prepare(
        folder / "rows.jsonl", tokenizer=str(tokenizer), cache=folder / "cache", workers="1",
        template=str(folder / "template.jinja"), turns="faithful", dropped_tool_calls="keep",
    )  # fmt: skip


def model(kind: str, attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": attention}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).eval()


def summed_loss(net: Any, batch: Any) -> torch.Tensor:
    """The sum of the losses of all trained tokens."""
    tensors = {name: tensor for name, tensor in batch.inputs.items() if name != "labels"}
    logits = net(**tensors, use_cache=False).logits[:, :-1]
    labels = batch.tensors["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="sum"
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_loss_and_gradients_are_those_of_separate_rows(chains: ps.Dataset, kind: str, attention: str) -> None:
    net, view = model(kind, attention), chains.view()
    found: dict[str, tuple[float, list[torch.Tensor], int]] = {}
    for collate, size in (("padded", len(view)), ("tree", len(CHATS))):
        loader = view.loader(batch_size=size, collate=collate, shuffle=False, framework="torch", prefetch=0)
        batch = next(iter(loader))
        net.zero_grad()
        loss = summed_loss(net, batch)
        loss.backward()
        found[collate] = loss.item(), [p.grad.clone() for p in net.parameters()], batch.counts.tokens
        assert batch.counts.trained == view.ledger.trained
    (one, wanted, tokens), (other, gradients, fewer) = found["padded"], found["tree"]
    assert abs(one - other) / one < 1e-5
    for gradient, expected in zip(gradients, wanted, strict=True):
        assert torch.allclose(gradient, expected, atol=1e-4 * float(expected.abs().max() + 1))
    assert fewer < tokens


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_branches_change_no_logits(chains: ps.Dataset, attention: str) -> None:
    net, view = model("llama", attention), chains.view()
    batch = view.loader(batch_size=len(CHATS), collate="tree", shuffle=False, framework="torch", prefetch=0).batch(0)
    tensors = {name: tensor for name, tensor in batch.inputs.items() if name != "labels"}
    owner, parents = batch.tensors["branches"][0], batch.tensors["parents"]
    before = net(**tensors, use_cache=False).logits[0]
    for branch in range(int(owner.max()) + 1):
        changed = {**tensors, "input_ids": tensors["input_ids"].clone()}
        own = owner == branch
        changed["input_ids"][0, own] = (changed["input_ids"][0, own] + 7) % 500
        after = net(**changed, use_cache=False).logits[0]
        unrelated = ~own & (parents[owner] != branch)
        assert torch.equal(after[unrelated], before[unrelated])
        assert not torch.equal(after[own], before[own])


def test_the_mask_for_flex_attention_is_the_same(chains: ps.Dataset) -> None:
    from torch.nn.attention.flex_attention import create_mask

    batch = chains.view().loader(batch_size=3, collate="tree", framework="torch", prefetch=0).batch(0)
    blocks = block_mask(batch.tensors)
    size = batch.tensors["input_ids"].shape[1]
    dense = create_mask(blocks.mask_mod, 1, 1, size, size, device="cpu")
    assert torch.equal(dense, batch.tensors["attention_mask"] == 0)


def test_trees_hold_every_example_once_per_epoch(chains: ps.Dataset) -> None:
    view = chains.view()
    options: dict[str, Any] = {"batch_size": 3, "collate": "tree", "epochs": 2}
    whole = list(view.loader(**options))
    items = [item for batch in whole[: len(whole) // 2] for item in batch.items.tolist()]
    assert sorted(items) == list(range(len(view)))
    for step, batch in enumerate(whole):
        loader = view.loader(**options)
        loader.seek(step)
        again = next(iter(loader))
        assert all(np.array_equal(again.tensors[name], batch.tensors[name]) for name in batch.tensors)
        ranks = [view.loader(**options, rank=rank, world_size=2).batch(step) for rank in range(2)]
        assert sorted(i for own in ranks for i in own.items.tolist()) == sorted(batch.items.tolist())


def test_trees_of_mixtures_are_refused(chains: ps.Dataset) -> None:
    with pytest.raises(UsageError, match="one view"):
        ps.mix({"a": (chains, 1.0), "b": (chains, 0.5)}).loader(batch_size=2, collate="tree")


def test_the_state_of_a_padded_run_does_not_fit_trees(chains: ps.Dataset) -> None:
    """Their steps hold other rows."""
    state = chains.view().loader(batch_size=2).state_dict()
    trees = chains.view().loader(batch_size=2, collate="tree")
    with pytest.raises(FeedError, match="another plan"):
        trees.load_state_dict(state)
    trees.load_state_dict(trees.state_dict())
