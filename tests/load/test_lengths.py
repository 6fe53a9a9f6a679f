"""Over-length policies on rows and pairs with known tokens."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from penstock.errors import UsageError, ViewError
from penstock.load.options import view_options
from penstock.load.view import View
from penstock.prepare.chat.conversation import Part, Role
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import chat

ROW = chat((Role.USER, 3), (Role.ASSISTANT, 4))  # user 10-12, header 13-14, body 15-18, stop 19, tail 20


def pair(prompt: int, chosen: tuple[int, ...], rejected: tuple[int, ...]) -> list[list[Piece]]:
    """The same prompt and header, then two answers with a stop token (9)."""
    head = [
        Piece(0, Role.USER, Part.BODY, tuple(range(100, 100 + prompt))),
        Piece(1, Role.ASSISTANT, Part.HEADER, (7, 8)),
    ]
    stop = Piece(1, Role.ASSISTANT, Part.STOP, (9,))
    return [[*head, Piece(1, Role.ASSISTANT, Part.BODY, answer), stop] for answer in (chosen, rejected)]


def test_truncate_keeps_the_head() -> None:
    view = MemoryDataset.of([ROW]).view(max_length=7)
    example = view.example(0)
    assert example.input_ids.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert example.labels.tolist() == [-100, -100, -100, -100, -100, 15, 16]
    ledger = view.ledger
    assert (ledger.trained, ledger.masked, ledger.truncated, ledger.dropped) == (2, 5, 4, 0)


def test_truncate_left_keeps_the_tail() -> None:
    example = MemoryDataset.of([ROW]).view(max_length=4, overlong="truncate_left").example(0)
    assert (example.input_ids.tolist(), example.start) == ([17, 18, 19, 20], 7)
    assert example.loss_mask.tolist() == [True, True, True, False]


def test_rows_without_trained_tokens_after_truncation_are_dropped() -> None:
    view = MemoryDataset.of([ROW]).view(max_length=5)
    assert (len(view), view.ledger.dropped_rows, view.ledger.dropped) == (0, {"no_trained_token": 1}, 11)


def test_split_drops_chunks_that_train_nothing() -> None:
    view = MemoryDataset.of([ROW]).view(max_length=4, overlong="split")
    assert [view.example(index).input_ids.tolist() for index in range(2)] == [[14, 15, 16, 17], [18, 19, 20]]
    assert (view.ledger.rows, view.ledger.kept, view.ledger.examples) == (1, 1, 2)
    assert view.ledger.dropped_tokens == {"chunk_without_trained_token": 4}


def test_drop_counts_rows_and_error_names_them() -> None:
    dataset = MemoryDataset.of([chat((Role.USER, 1), (Role.ASSISTANT, 1)), ROW])
    view = dataset.view(max_length=10, overlong="drop")
    assert (len(view), view.ledger.dropped_rows, view.ledger.dropped) == (1, {"overlong": 1}, 11)
    with pytest.raises(ViewError, match=r"row 1 of source 0 has 11 tokens, more than max_length=10\. Raise"):
        dataset.view(max_length=10, overlong="error")
    assert len(dataset.view(max_length=11, overlong="error")) == 2


def test_the_common_prompt_ends_where_the_answers_begin() -> None:
    view = MemoryDataset.of(pair(3, (1, 2, 3), (1, 2, 4)), pairs=True).view()
    assert len(view) == 1
    item = view.pair(0)
    assert item.prompt_length == 5  # "1 2" is common too, but the answer is one message
    assert item.chosen.labels.tolist() == [-100] * 5 + [1, 2, 3, 9]
    assert item.rejected.labels.tolist() == [-100] * 5 + [1, 2, 4, 9]


def test_an_equal_earlier_answer_is_part_of_the_prompt() -> None:
    opening = chat((Role.USER, 2), (Role.ASSISTANT, 2), (Role.USER, 1))
    sides = [[*opening, *(piece._replace(message=piece.message + 3) for piece in side)] for side in pair(1, (1,), (2,))]
    item = MemoryDataset.of(sides, pairs=True).view().pair(0)
    assert item.prompt_length == sum(len(piece.ids) for piece in opening) + 3
    assert item.chosen.loss_mask.sum() == item.rejected.loss_mask.sum() == 2


def test_pairs_are_truncated_together() -> None:
    dataset = MemoryDataset.of(pair(4, (1, 2, 3, 4), (5,)), pairs=True)  # 11 and 8 tokens, prompt 6
    head = dataset.view(max_length=8).pair(0)
    assert (head.chosen.input_ids.tolist()[6:], head.rejected.input_ids.tolist()[6:]) == ([1, 2], [5, 9])
    tail = dataset.view(max_length=8, overlong="truncate_left").pair(0)
    assert tail.prompt_length == 3
    assert tail.chosen.input_ids.tolist() == [103, 7, 8, 1, 2, 3, 4, 9]
    assert tail.rejected.input_ids.tolist() == [103, 7, 8, 5, 9]
    short = dataset.view(max_length=2, overlong="truncate_left").pair(0)  # no room for the prompt
    assert (short.prompt_length, short.chosen.input_ids.tolist()) == (0, [1, 2])
    assert len(dataset.view(max_length=6)) == 0
    assert dataset.view(max_length=8, overlong="drop").ledger.dropped_rows == {"overlong": 1}


def test_pairs_are_never_split() -> None:
    dataset = MemoryDataset.of(pair(4, (1,), (5,)), pairs=True)
    with pytest.raises(UsageError, match="would split pairs"):
        dataset.view(overlong="split")


def test_long_common_prompts_are_compared_to_their_end() -> None:
    for length in (1, 31, 32, 33, 300, 70_000):
        assert MemoryDataset.of(pair(length, (1,), (2,)), pairs=True).view().pair(0).prompt_length == length + 2


def test_a_view_pickles_without_its_index() -> None:
    view = MemoryDataset.of([ROW] * 50).view(max_length=8)
    copy = pickle.loads(pickle.dumps(view))
    assert isinstance(copy, View) and "index" not in vars(copy)
    assert (copy.settings, copy.digest, copy.ledger) == (view.settings, view.digest, view.ledger)
    assert np.array_equal(copy.example(3).input_ids, view.example(3).input_ids)


def test_the_digest_follows_the_settings_and_the_content() -> None:
    dataset = MemoryDataset.of([ROW])
    view = dataset.view(max_length=8)
    assert view.digest == dataset.view(max_length=8).digest
    others = [dataset.view(max_length=9), dataset.view(max_length=8, holdout=0.5), MemoryDataset.of([ROW] * 2).view()]
    assert len({view.digest, *(other.digest for other in others)}) == 4
    assert view.digest.startswith("b3-")


def test_the_bytes_of_a_digest_are_pinned() -> None:
    """Exports, loader states and cached references store digests: a renamed option must not change them."""
    settings = view_options(
        {
            "train_on": "last_assistant_turn",
            "max_length": 4096,
            "overlong": "split",
            "regions_unknown": "drop",
            "holdout": 0.05,
            "holdout_side": "held_out",
            "holdout_seed": 7,
        }
    )
    assert settings.digest("b3-0123") == "b3-66909da6b03aec0ae8aef3d6d770931f80b934f60ef13a2305915c938bd0da36"
    plain = view_options({"train_on": "all_assistant_messages"})
    assert plain.digest("b3-0123") == "b3-32083a05ff436cc24ef0b9531fc544b505e67912879fdb548c9f84c5ca3d5b50"


def test_indexing_behaves_like_a_list() -> None:
    view = MemoryDataset.of([ROW] * 3).view()
    assert view.example(-1).row.row == 2
    assert view.example(np.int64(1)).row.row == 1
    assert [item.row.row for item in view] == [0, 1, 2]
    for index in (3, -4):
        with pytest.raises(IndexError):
            view[index]


def test_an_empty_dataset_has_an_empty_view() -> None:
    for pairs in (False, True):
        view = MemoryDataset.of([], pairs=pairs).view()
        assert (len(view), view.ledger.adds_up, view.ledger.rows) == (0, True, 0)
