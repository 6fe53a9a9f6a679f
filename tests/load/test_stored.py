"""Batches of cached datasets equal those of their views and use the tokenizer's padding token."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.load.loader import Loader
from tests.support.feed_data import plains


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, examples: Path) -> ps.Dataset:
    cache = tmp_path_factory.mktemp("cache")
    return ps.prepare(examples / "data" / "chats.jsonl", tokenizer=str(tokenizer), cache=cache, workers="1")


def test_packed_batches_hold_the_examples_of_the_view(chats: ps.Dataset) -> None:
    view = chats.view(max_length=512)
    seen = []
    for batch in Loader(view, batch_size=4, collate="packed"):
        bounds = batch.tensors["cu_seq_lens_q"]
        for item, row, first in zip(batch.items.tolist(), batch.rows, bounds, strict=False):
            example = view.example(item)
            own = slice(first, first + len(example))
            assert example.row == row
            assert np.array_equal(batch.tensors["input_ids"][0, own], example.input_ids)
            assert np.array_equal(batch.tensors["labels"][0, own][1:], example.labels[1:])
            assert np.array_equal(batch.tensors["loss_weights"][0, own][1:], example.loss_weights[1:])
            seen.append(item)
    assert sorted(seen) == list(range(len(view)))


def test_padding_uses_the_tokenizers_pad_token(chats: ps.Dataset) -> None:
    wanted = chats.token_id("pad_token")
    wanted = chats.token_id("eos_token") if wanted is None else wanted
    batch = Loader(chats.view(), batch_size=8).batch(0)
    padding = batch.tensors["input_ids"][batch.tensors["attention_mask"] == 0]
    assert wanted is not None and set(padding.tolist()) == {wanted}


def test_loaders_of_stored_datasets_pickle(chats: ps.Dataset) -> None:
    run = Loader(chats.view(max_length=256), batch_size=8, collate="packed")
    assert plains(pickle.loads(pickle.dumps(run))) == plains(run)


def test_two_loaders_share_a_dataset(chats: ps.Dataset) -> None:
    view = chats.view(max_length=256)
    wanted = plains(Loader(view, batch_size=4, epochs=4, prefetch=0))
    found: list[list[dict[str, object]]] = []
    readers = [
        threading.Thread(target=lambda: found.append(plains(Loader(view, batch_size=4, epochs=4, prefetch=2))))
        for _ in range(3)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found == [wanted] * 3


def test_pairs(tmp_path: Path, tokenizer: Path, examples: Path) -> None:
    pairs = ps.prepare(examples / "data" / "pairs.jsonl", tokenizer=str(tokenizer), cache=tmp_path, workers="1").view()
    batch = Loader(pairs, batch_size=4, shuffle=False).batch(0)
    for number in range(4):
        pair = pairs.pair(number)
        for row, side in ((number, pair.chosen), (4 + number, pair.rejected)):
            assert np.array_equal(batch.tensors["input_ids"][row, : len(side)], side.input_ids)
            assert batch.tensors["completion_mask"][row].sum() == len(side) - pair.prompt_length
