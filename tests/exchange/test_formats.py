"""Every format, read back by independent readers, has the ids and masks of the view."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.arguments import ViewArguments
from penstock.errors import UsageError
from penstock.exchange import rows as export_rows
from penstock.exchange.export import export
from penstock.exchange.format import find_format
from penstock.exchange.formats import format_names
from penstock.load.example import Example, Pair
from penstock.load.options import PlanOptions
from penstock.load.plan import Plan
from penstock.load.view import Count, Served, mix
from penstock.prepare.chat.conversation import Part, Role
from tests.exchange.readers import READERS, Row, read
from tests.support import view_rows as made
from tests.support.memory_dataset import MemoryDataset, Piece

pytestmark = pytest.mark.slow

SHIFTED = ("skyrl", "skyrl_cache", "nemo")  # formats whose mask is for predictions: nothing predicts the first token
FORMATS = format_names()
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # syncing to disk would take most of the test time


def test_every_format_has_a_reader() -> None:
    assert sorted(READERS) == FORMATS


def sequence(example: Example, *, predicted: bool) -> tuple[list[int], list[bool]]:
    mask = example.loss_mask.tolist()
    return example.input_ids.tolist(), [False, *mask[1:]] if predicted else mask


def expected(to: str, item: Example | Pair, *, packed: bool = False) -> Row:
    predicted = packed or to in SHIFTED
    if isinstance(item, Example):
        return [sequence(item, predicted=predicted)]
    sides = [sequence(side, predicted=False) for side in (item.chosen, item.rejected)]
    if to == "trl":  # TRL scores every token, so those after the last trained one are omitted
        sides = [(ids[: _last(mask)], mask[: _last(mask)]) for ids, mask in sides]
    return sides


def _last(mask: list[bool]) -> int:
    return max(place for place, trained in enumerate(mask) if trained) + 1


def check(to: str, served: Served, capacity: int | None = None, **options: Any) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        exported = export(served, to, Path(folder) / "out", capacity=capacity, weights="mask", **options)
        found = read(to, Path(folder) / "out")
        assert list(Path(folder).iterdir()) == [exported.path]
    items = served.epoch_indices(options.get("epoch", 0))
    if capacity is None:
        assert found == [expected(to, served[int(item)]) for item in items]
        return
    plan = Plan(served, PlanOptions(1, capacity, shuffle=False))
    taken = plan.take(0, np.arange(plan.steps_in(0)))
    flat = [expected(to, served[int(item)], packed=True)[0] for item in taken.items]
    assert [sequence for row in found for sequence in row] == flat
    assert [len(row) for row in found] == taken.counts.tolist()
    assert all(sum(len(ids) for ids, _ in row) <= capacity for row in found)


def high(rows: list[list[Piece]]) -> list[list[Piece]]:
    """The same rows with ids above 65,535."""
    return [[piece._replace(ids=tuple(70_000 * t for t in piece.ids)) for piece in row] for row in rows]


OPTIONS = st.fixed_dictionaries(
    {
        "train_on": st.sampled_from(["all_assistant_messages", "last_assistant_message", "all_tokens", "all_messages"]),
        "max_length": st.sampled_from([None, 1, 3, 7]),
        "overlong": st.sampled_from(["truncate", "truncate_left", "drop", "split"]),
        "regions_unknown": st.just("drop"),
    }
)
TABLES = st.lists(made.rows(), min_size=1, max_size=12)


@pytest.mark.parametrize("to", FORMATS)
@settings(deadline=None, max_examples=25)
@given(rows=TABLES, options=OPTIONS, part_tokens=st.integers(1, 40), shard_rows=st.integers(1, 5), wide=st.booleans())
def test_singles(
    to: str, rows: list[list[Piece]], options: ViewArguments, part_tokens: int, shard_rows: int, wide: bool
) -> None:
    view = MemoryDataset.of(high(rows) if wide else rows, shard_rows=shard_rows).view(**options)
    if not len(view) or (to.startswith("skyrl") and view.lengths.min() < 2):  # refused; see test_refusals.py
        return
    check(to, view, part_tokens=part_tokens, workers=2)


@pytest.mark.parametrize("to", FORMATS)
def test_masks_of_parts(to: str) -> None:
    rows = [[Piece(0, Role.USER, Part.BODY, (1, 2)), *made.answer(1, first_id=9 * at)] for at in range(5)]
    for options in ({"parts": "-reasoning,+tail"}, {"parts": "=reasoning"}, {"part_weights": {"calls": 0.5}}):
        check(to, MemoryDataset.of(rows, shard_rows=2).view(**options), part_tokens=30)


@pytest.mark.parametrize("to", [to for to in FORMATS if find_format(to).supports.packed])
@settings(deadline=None, max_examples=25)
@given(rows=TABLES, options=OPTIONS, part_tokens=st.integers(1, 40), more=st.integers(0, 9))
def test_packed(to: str, rows: list[list[Piece]], options: ViewArguments, part_tokens: int, more: int) -> None:
    view = MemoryDataset.of(rows, shard_rows=3).view(**options)
    if len(view):
        check(to, view, int(view.lengths.max()) + more, part_tokens=part_tokens)


@pytest.mark.parametrize("to", ["hf", "jsonl", "parquet"])
@settings(deadline=None, max_examples=25)
@given(pairs=st.lists(made.pairs(), min_size=1, max_size=8), options=OPTIONS, part_tokens=st.integers(1, 40))
def test_pairs(to: str, pairs: list[list[list[Piece]]], options: ViewArguments, part_tokens: int) -> None:
    chosen: ViewArguments = {**options, "overlong": "truncate_left"}
    view = MemoryDataset.of([side for pair in pairs for side in pair], shard_rows=4, pairs=True).view(**chosen)
    if len(view):
        check(to, view, part_tokens=part_tokens)


@pytest.mark.parametrize("to", FORMATS)
@settings(deadline=None, max_examples=15)
@given(left=TABLES, right=TABLES, passes=st.sampled_from([0.4, 1.0, 2.3]), epoch=st.integers(0, 2))
def test_mixtures(to: str, left: list[list[Piece]], right: list[list[Piece]], passes: float, epoch: int) -> None:
    views = [
        MemoryDataset.of(rows, shard_rows=3).view(train_on=policy, regions_unknown="drop")
        for rows, policy in ((left, "all_tokens"), (right, "all_assistant_messages"))
    ]
    if min(map(len, views)) < 1 or round(passes * len(views[0])) < 1:
        return
    if to.startswith("skyrl") and min(view.lengths.min() for view in views) < 2:
        return
    check(to, mix({"left": (views[0], passes), "right": (views[1], Count(2))}, 3), part_tokens=30, epoch=epoch)


@pytest.mark.parametrize("to", ["hf", "jsonl", "parquet"])
@settings(deadline=None, max_examples=15)
@given(
    left=st.lists(made.pairs(), min_size=1, max_size=6),
    right=st.lists(made.pairs(), min_size=1, max_size=6),
    passes=st.sampled_from([0.5, 1.0, 2.3]),
    epoch=st.integers(0, 2),
)
def test_mixtures_of_pairs(to: str, left: Any, right: Any, passes: float, epoch: int) -> None:
    views = [
        MemoryDataset.of([side for pair in pairs for side in pair], shard_rows=4, pairs=True).view(
            train_on="all_tokens", max_length=7, overlong="truncate_left", regions_unknown="drop"
        )
        for pairs in (left, right)
    ]
    if min(map(len, views)) < 1 or round(passes * len(views[0])) < 1:
        return
    check(to, mix({"left": (views[0], passes), "right": (views[1], Count(2))}, 3), part_tokens=30, epoch=epoch)


def test_blocks_do_not_depend_on_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.feed_data import mixture, pair_view, view

    for served in (view(50), pair_view(), mixture()):
        found = []
        for tokens in (10**6, 100, 1):
            monkeypatch.setattr(export_rows, "BLOCK_TOKENS", tokens)
            rows = export_rows.ExportRows(served)
            found.append([row for block in rows.blocks(0, len(rows)) for row in _sequences(block)])
        assert found[0] == found[1] == found[2]
        assert len(found[0]) == len(rows)


def _sequences(block: export_rows.Block) -> list[Any]:
    """The ids and masks of each row; for pairs, of both sides, which are not adjacent in a block."""
    ids, masks = (np.split(array, np.cumsum(block.lengths)[:-1]) for array in (block.ids, block.trained))
    made = [(own.tolist(), mask.tolist()) for own, mask in zip(ids, masks, strict=True)]
    count = len(block.prompts)
    return list(zip(made[:count], made[count:], strict=True)) if count else made


def test_fractional_weights_are_exported(tmp_path: Path) -> None:
    from tests.exchange.readers import table
    from tests.support.feed_data import view

    served = view(9)
    export(served, "hf", tmp_path / "hf")
    weights = [row["loss_weights"] for row in table(tmp_path / "hf")]
    assert weights == [served[i].loss_weights.tolist() for i in range(len(served))]


@pytest.mark.parametrize("to", ["olmo", "jsonl", "megatron"])
def test_shuffled_rows_are_the_same_rows(dataset: ps.Dataset, place: Path, to: str) -> None:
    view = dataset.view(max_length=90)
    for name, options in (("plain", {}), ("one", {"shuffle_seed": 1}), ("two", {"shuffle_seed": 2})):
        view.export(to, place / name, part_tokens=4000, **options)
    plain, one, two = (read(to, place / name) for name in ("plain", "one", "two"))
    assert one != two and one != plain
    assert sorted(one) == sorted(two) == sorted(plain)
    view.export(to, place / "again", part_tokens=4000, shuffle_seed=1, workers=1)
    assert read(to, place / "again") == one
    with pytest.raises(UsageError, match="shuffle_seed: '1' there, '2' here"):
        view.export(to, place / "one", part_tokens=4000, shuffle_seed=2)


def test_shuffled_pairs_and_packed_rows(dataset: ps.Dataset, pairs: ps.Dataset, place: Path) -> None:
    pairs.view().export("hf", place / "plain")
    pairs.view().export("hf", place / "shuffled", shuffle_seed=0)
    plain, shuffled = read("hf", place / "plain"), read("hf", place / "shuffled")
    assert plain != shuffled and sorted(plain) == sorted(shuffled)
    dataset.view(max_length=90).export("hf", place / "packed", capacity=256)
    dataset.view(max_length=90).export("hf", place / "packed-shuffled", capacity=256, shuffle_seed=0)
    rows = [read("hf", place / name) for name in ("packed", "packed-shuffled")]
    assert rows[0] != rows[1] and len(rows[0]) == len(rows[1])
    assert sorted(ids for row in rows[0] for ids, _ in row) == sorted(ids for row in rows[1] for ids, _ in row)


def test_a_separator_ends_each_olmo_document(dataset: ps.Dataset, place: Path) -> None:
    view = dataset.view(max_length=90)
    view.export("olmo", place / "plain")
    view.export("olmo", place / "out", part_tokens=4000, separator="<|endoftext|>")
    token = dataset.vocabulary.id_of("<|endoftext|>")
    plain = read("olmo", place / "plain")
    assert read("olmo", place / "out") == [[([*ids, token], [*mask, False])] for ((ids, mask),) in plain]
    for to, separator, text in (
        ("olmo", "<|im_end|>", "inside documents"),
        ("olmo", "no token", "not a token of"),
        ("hf", "<|im_end|>", "needs no"),
    ):
        with pytest.raises(UsageError, match=text):
            view.export(to, place / "wrong", separator=separator)
    assert not (place / "wrong").exists()
