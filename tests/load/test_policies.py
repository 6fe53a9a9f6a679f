"""Each policy on one conversation with hand-written results: trained messages, parts and weights."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import RegionsUnknown, UsageError, ViewError
from penstock.load.options import LossPolicy
from penstock.prepare.chat.conversation import Part, Role
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import chat, tool_chat

UNKNOWN = [Piece(-1, Role.NONE, Part.GLUE, (1, 2, 3))]


def trained(row: list[Piece], policy: str) -> dict[int, float]:
    """Weight by message; also checks that exactly the body and stop of assistant messages are trained."""
    example = MemoryDataset.of([row]).view(train_on=policy).example(0)
    weights: dict[int, float] = {}
    ends = example.runs.ends.tolist()
    for start, end, piece in zip([0, *ends], ends, row, strict=False):
        weight = set(example.loss_weights[start:end].tolist())
        assert len(weight) == 1
        if piece.part in (Part.HEADER, Part.TAIL) and policy != "all_tokens":
            assert weight == {0.0}
        elif weight != {0.0}:
            weights[piece.message] = weight.pop()
    return weights


@pytest.mark.parametrize(
    ("policy", "messages"),
    [
        ("all_assistant_messages", {2, 4, 6, 8}),
        ("last_assistant_message", {8}),
        ("last_assistant_turn", {6, 8}),
        ("all_messages", set(range(9))),
        ("all_user_and_system_messages", {0, 1, 5}),
        ("all_tokens", set(range(9))),
    ],
)
def test_which_messages_are_trained(policy: str, messages: set[int]) -> None:
    assert trained(tool_chat(), policy) == dict.fromkeys(messages, 1.0)


def test_all_tokens_trains_every_token() -> None:
    example = MemoryDataset.of([tool_chat()]).view(train_on="all_tokens").example(0)
    assert example.loss_mask.all()
    assert np.array_equal(example.labels, example.input_ids)


@pytest.mark.parametrize(
    ("policy", "weights"),
    [
        ("all_assistant_messages", {2: 0.5, 6: 1.0, 8: 2.0}),  # 4 has weight 0; the user's weight is ignored
        ("last_assistant_message", {8: 2.0}),
        ("all_user_and_system_messages", {0: 1.0, 1: 3.0, 5: 1.0}),
        ("customized", {1: 3.0, 2: 0.5, 6: 1.0, 8: 2.0}),  # no weight: assistants 1, others 0
    ],
)
def test_weights_in_rows(policy: str, weights: dict[int, float]) -> None:
    assert trained(tool_chat({1: 3.0, 2: 0.5, 4: 0.0, 8: 2.0}), policy) == weights


def test_customized_without_any_weight_is_refused() -> None:
    with pytest.raises(ViewError, match=r"needs per-message weights, but none of the 1 rows has any\. Give"):
        MemoryDataset.of([tool_chat()]).view(train_on="customized")


def test_unknown_regions_are_refused_by_name() -> None:
    dataset = MemoryDataset.of([tool_chat(), UNKNOWN, *[UNKNOWN] * 6], shard_rows=3)
    with pytest.raises(RegionsUnknown) as caught:
        dataset.view()
    assert str(caught.value) == (
        "7 of 8 rows have unknown regions, but train_on='all_assistant_messages' needs them: "
        "row 1 of source 0, row 2 of source 0, row 3 of source 0, row 4 of source 0, row 5 of source 0, …. "
        "Drop them with regions_unknown='drop', or use train_on='all_tokens'."
    )


def test_unknown_regions_can_be_dropped_or_trained_whole() -> None:
    dataset = MemoryDataset.of([tool_chat(), UNKNOWN])
    dropped = dataset.view(regions_unknown="drop")
    assert len(dropped) == 1
    assert (dropped.ledger.dropped_rows, dropped.ledger.dropped) == ({"regions_unknown": 1}, 3)
    assert len(dataset.view(train_on="all_tokens")) == 2


def test_a_row_that_ends_with_the_user_has_no_last_turn() -> None:
    row = chat((Role.USER, 2), (Role.ASSISTANT, 2), (Role.USER, 2))
    view = MemoryDataset.of([row]).view(train_on="last_assistant_turn")
    assert (len(view), view.ledger.dropped_rows) == (0, {"no_trained_token": 1})
    assert trained(row, "last_assistant_message") == {1: 1.0}


def test_every_policy_has_a_view() -> None:
    for policy in LossPolicy:
        assert len(MemoryDataset.of([tool_chat({2: 1.0})]).view(train_on=policy)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "all_assistant_message"}, "did you mean 'all_assistant_messages'"),
        ({"overlong": "cut"}, "overlong='cut' is unknown. Use one of: truncate, truncate_left, drop, split, error."),
        ({"max_len": 3}, "unknown option 'max_len'. Did you mean 'max_length'"),
        ({"max_length": 0}, "max_length=0 is not possible. Use a number of tokens of 1 or more"),
        ({"max_length": True}, "max_length=True"),
        ({"max_length": 1.5}, "max_length=1.5"),
        ({"holdout": 1.0}, "holdout=1.0 is not possible. Use a fraction"),
        ({"holdout": 0}, "holdout=0 is not possible"),
        ({"holdout": float("nan")}, "holdout=nan"),
        ({"holdout_side": "held_out"}, "needs a hold-out"),
        ({"holdout_seed": -1}, "holdout_seed=-1"),
    ],
)
def test_errors_for_invalid_options_name_the_valid_ones(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        MemoryDataset.of([tool_chat()]).view(**options)  # type: ignore[arg-type]
    assert message in str(caught.value)
