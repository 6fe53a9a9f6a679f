"""Notebook HTML is escaped, shows text if the dataset is available, and doesn't affect pickling."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import penstock as ps
from penstock.look.notebook import html_of
from tests.look.conftest import HOSTILE
from tests.support.memory_dataset import MemoryDataset
from tests.support.view_rows import chat


def test_every_object_has_a_table(dataset: ps.Dataset, pairs: ps.Dataset) -> None:
    view = dataset.view(max_length=64)
    batch = view.loader(batch_size=4, collate="packed", capacity=128, prefetch=0).batch(0)
    shown = {
        "dataset": dataset._repr_html_(),
        "view": view._repr_html_(),
        "stats": view.stats()._repr_html_(),
        "example": view[0]._repr_html_(),
        "pair": pairs.view()[0]._repr_html_(),
        "batch": batch._repr_html_(),
    }
    for name, page in shown.items():
        assert page is not None and page.strip().startswith('<div class="penstock">'), name
        assert "<script" not in page
    assert f"{view.ledger.trained:,}" in str(shown["view"]) and f"{view.ledger.trained:,}" in str(shown["stats"])
    assert "The quick brown fox." in re.sub(r"</?span[^>]*>", "", str(shown["example"]))
    assert "rejected" in str(shown["pair"]) and "position_ids" in str(shown["batch"])
    assert "Example(" in repr(view[1]) and "dataset" not in repr(view[1])


def test_rows_are_escaped(dataset: ps.Dataset) -> None:
    assert "<script>" in HOSTILE
    page = dataset.view()[0]._repr_html_()
    assert page is not None
    assert "<script" not in page and "<img" not in page and "\u202e" not in page


def test_pickles_do_not_contain_the_dataset(dataset: ps.Dataset) -> None:
    view = dataset.view(max_length=64)
    again = pickle.loads(pickle.dumps(view[1]))
    assert again.dataset is None and (again.input_ids == view[1].input_ids).all() and "title=" in again._repr_html_()
    batch = view.loader(batch_size=2, prefetch=0).batch(0)
    copied = pickle.loads(pickle.dumps(batch))
    assert copied.served is None and copied.rows == batch.rows and copied._repr_html_() is not None


def test_without_a_tokenizer_ids_are_shown() -> None:
    from penstock.prepare.chat.conversation import Role

    view = MemoryDataset.of([chat((Role.USER, 3), (Role.ASSISTANT, 2))]).view()
    page = html_of(replace(view[0], dataset=None))
    assert page is not None and "⟨10⟩" in page
    assert html_of(object()) is None
