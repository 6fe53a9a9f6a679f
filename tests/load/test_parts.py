"""The options `parts` and `part_weights`: which parts of an assistant's message are trained, and how much."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import RegionsUnknown, UsageError
from penstock.load.options import ViewOptions
from penstock.load.parts import CHOICES, part_table
from penstock.load.view import Mixture, mix
from penstock.prepare.chat.conversation import BODY_PARTS, Part, Role
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import PARTS, answer, chat, tool_chat

SINGLE = [name for name, parts in CHOICES.items() if len(parts) == 1 and name != "tail"]
P = Part


def row(weight: float | None = None) -> list[Piece]:
    """A turn that reasons, answers and calls a tool, whose result the message prints itself."""
    return [
        Piece(0, Role.USER, P.BODY, (1, 2), 3.0 if weight else None),
        *answer(1, weight=weight),
        Piece(1, Role.TOOL, P.BODY, (3,), weight),
        *answer(2, [P.HEADER, P.EMPTY_REASONING, P.CONTENT, P.STOP, P.TAIL], 200),
    ]


def weights(pieces: list[Piece], **options: object) -> dict[Part, set[float]]:
    """The loss weights of assistants' tokens by part, without those that are masked throughout."""
    example = MemoryDataset.of([pieces]).view(**options).example(0)  # type: ignore[arg-type]
    found: dict[Part, set[float]] = {}
    for piece, (start, end) in zip(pieces, _bounds(pieces), strict=True):
        if piece.role is Role.ASSISTANT:
            found.setdefault(piece.part, set()).update(np.round(example.loss_weights[start:end], 6).tolist())
    return {part: values for part, values in found.items() if values != {0.0}}


def _bounds(pieces: list[Piece]) -> list[tuple[int, int]]:
    ends = np.cumsum([len(piece.ids) for piece in pieces]).tolist()
    return list(zip([0, *ends], ends, strict=False))


def trained(parts: str) -> set[Part]:
    return set(weights(row(), parts=parts))


BODY = {part for part in BODY_PARTS if part is not P.BODY}
REASONING = {P.REASONING, P.REASONING_MARKUP, P.EMPTY_REASONING}
CALLS = {P.CALL_NAME, P.CALL_ARGUMENTS, P.CALL_MARKUP}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("", BODY | {P.STOP}),
        ("body", BODY),
        ("body,stop", BODY | {P.STOP}),
        ("reasoning", REASONING),
        ("=reasoning", {P.REASONING}),
        (" content , stop ", {P.CONTENT, P.STOP}),
        ("calls", CALLS),
        ("call_name,call_arguments", {P.CALL_NAME, P.CALL_ARGUMENTS}),
        ("tail,content", {P.TAIL, P.CONTENT}),
        ("-reasoning", (BODY - REASONING) | {P.STOP}),
        ("-=reasoning", (BODY - {P.REASONING}) | {P.STOP}),
        ("-reasoning,+=reasoning", (BODY - REASONING) | {P.REASONING, P.STOP}),
        ("-stop", BODY),
        ("+tail", BODY | {P.STOP, P.TAIL}),
        ("+tail,-empty_reasoning", (BODY - {P.EMPTY_REASONING}) | {P.STOP, P.TAIL}),
    ],
)
def test_which_parts_are_trained(parts: str, expected: set[Part]) -> None:
    assert trained(parts) == expected


@settings(max_examples=80, deadline=None)
@given(names=st.lists(st.sampled_from(SINGLE), min_size=1, unique=True))
def test_names_together_train_what_they_train_alone(names: list[str]) -> None:
    together = part_table(",".join(names), ()).assistant
    assert np.array_equal(together[BODY_PARTS[1] :], sum(part_table(name, ()).assistant for name in names)[7:])


def test_all_names_together_are_the_default() -> None:
    """Also of a body that is not divided."""
    table = part_table(",".join(SINGLE), ())
    assert np.array_equal(table.assistant, part_table("", ()).assistant)
    assert not table.divides
    assert [name for name in CHOICES if part_table(name, ()).divides] == [n for n in CHOICES if n not in UNDIVIDED]


UNDIVIDED = ("body", "stop", "tail")


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from([*CHOICES]), min_size=1, unique=True),
    bodies=st.lists(st.lists(st.sampled_from(PARTS[1:]), min_size=1), min_size=1, max_size=3),
    shard_rows=st.integers(1, 2),
    limit=st.one_of(st.none(), st.integers(1, 20)),
    overlong=st.sampled_from(["truncate", "truncate_left", "drop", "split"]),
)
def test_a_view_masks_other_parts_and_its_ledger_counts_every_token(
    names: list[str], bodies: list[list[Part]], shard_rows: int, limit: int | None, overlong: str
) -> None:
    rows = [[Piece(0, Role.USER, P.BODY, (1,) * (at + 1)), *answer(1, body)] for at, body in enumerate(bodies)]
    dataset = MemoryDataset.of(rows, shard_rows=shard_rows)
    view = dataset.view(parts=",".join(names), max_length=limit, overlong=overlong)
    chosen = frozenset().union(*(CHOICES[name] for name in names))
    counted = [dict[str, int](), dict[str, int]()]
    for index in range(len(view)):
        example = view.example(index)
        roles, parts = (np.repeat(of, example.runs.lengths) for of in (example.runs.roles, example.runs.parts))
        expected = (roles == Role.ASSISTANT) & np.isin(parts, [part.value for part in chosen])
        assert np.array_equal(example.loss_mask, expected)
        for part, is_trained in zip(parts.tolist(), expected.tolist(), strict=True):
            name = Part(part).name.lower()
            counted[is_trained][name] = counted[is_trained].get(name, 0) + 1
    assert view.ledger.adds_up
    assert [dict(view.ledger.masked_by_part), dict(view.ledger.trained_by_part)] == counted


def test_the_ledger_of_pairs_counts_the_prompt_as_masked() -> None:
    sides = [[*chat((Role.USER, 2)), *answer(1, [P.HEADER, P.CONTENT, P.STOP], start)] for start in (100, 100)]
    sides[1][2] = Piece(1, Role.ASSISTANT, P.CONTENT, (7, 8, 9))
    ledger = MemoryDataset.of(sides, pairs=True).view(parts="content").ledger
    assert ledger.trained_by_part == {"content": 5}
    assert ledger.masked_by_part == {"body": 4, "header": 4, "stop": 4}
    assert ledger.adds_up
    assert (ledger + ledger).trained_by_part == {"content": 10}


def test_weights_of_parts_and_messages_multiply() -> None:
    given_weights = {"reasoning": 0.5, "=reasoning": 0.25, "calls": 0.0}  # the narrower name decides
    found = weights(row(), part_weights=given_weights)
    assert found == {
        P.REASONING: {0.25},
        P.REASONING_MARKUP: {0.5},
        P.EMPTY_REASONING: {0.5},
        P.CONTENT: {1.0},
        P.MARKUP: {1.0},
        P.STOP: {1.0},
    }
    for policy in ("all_assistant_messages", "customized"):
        found = weights(row(2.0), part_weights=given_weights, train_on=policy)
        assert (found[P.REASONING], found[P.CONTENT], found[P.STOP]) == ({0.5}, {2.0, 1.0}, {2.0, 1.0})


def test_other_roles_keep_their_bodies() -> None:
    dataset = MemoryDataset.of([row()])
    default = dataset.view(train_on="all_messages").example(0)
    example = dataset.view(train_on="all_messages", parts="content", part_weights={"content": 0.5}).example(0)
    others = np.repeat(example.runs.roles != Role.ASSISTANT, example.runs.lengths)
    assert np.array_equal(example.loss_weights[others], default.loss_weights[others])
    assert others.sum() == example.loss_weights[others].sum() == 3
    assert set(example.loss_weights[~others].tolist()) == {0.0, 0.5}
    customized = MemoryDataset.of([row(2.0)]).view(train_on="customized", parts="stop").example(0)
    assert customized.loss_weights[others].tolist() == [3.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": "resoning"}, "parts: 'resoning' is unknown. Did you mean 'reasoning'? Names: body, reasoning, "),
        ({"parts": "content,-stop"}, "parts='content,-stop' mixes plain names, which are all that is trained, with"),
        ({"parts": "content,"}, "parts: '' is unknown."),
        ({"parts": "header"}, "parts: the header can't be trained, since inference prints it before the model writes"),
        ({"parts": "-body,-stop"}, "parts='-body,-stop' leaves nothing to train. Take less away."),
        ({"parts": "-tail"}, "parts='-tail': 'tail' is not trained anyway. Leave '-tail' out."),
        ({"parts": "+content"}, "'content' is trained anyway. Leave '+content' out, or write 'content' to train it"),
        ({"parts": "content", "train_on": "all_tokens"}, "but train_on='all_tokens' trains everything. Use another"),
        ({"part_weights": {"stop": 0.5}, "train_on": "all_tokens"}, "train_on='all_tokens' trains everything"),
        ({"part_weights": {"header": 0.5}}, "part_weights: the header can't be trained"),
        ({"part_weights": {"call": 0.5}}, "part_weights: 'call' is unknown. Did you mean 'calls'?"),
        ({"part_weights": {"stop": -0.5}}, "part_weights: stop=-0.5 is not possible. Use a finite number of 0 or more"),
        ({"part_weights": {"stop": 1e39}}, "part_weights: stop=1e+39 is not possible"),
        ({"part_weights": {"stop": float("nan")}}, "part_weights: stop=nan is not possible"),
        ({"part_weights": {"stop": "much"}}, "part_weights='much' is not possible. Use names of parts, each with"),
        ({"part_weights": {"tail": 0.5}}, "part_weights: parts='body,stop' doesn't train 'tail'. Add it there, or"),
        ({"parts": "stop", "part_weights": {"calls": 1}}, "part_weights: parts='stop' doesn't train 'calls'"),
    ],
)
def test_errors_name_what_is_wrong_and_the_remedy(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        MemoryDataset.of([row()]).view(**options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_rows_that_are_not_divided_are_refused_by_name() -> None:
    dataset = MemoryDataset.of([row(), tool_chat(), row(), *[tool_chat()] * 5], shard_rows=3)
    assert len(dataset.view(parts="body,stop", part_weights={"body": 0.5})) == 8
    assert len(dataset.view(parts="+tail")) == 8
    with pytest.raises(RegionsUnknown) as caught:
        dataset.view(parts="content,stop")
    assert str(caught.value) == (
        "6 of 8 rows have answers that are not divided into parts, but parts='content,stop' needs that: row 1 of "
        "source 0, row 3 of source 0, row 4 of source 0, row 5 of source 0, row 6 of source 0, …. Prepare the data "
        "again if an older release did, drop the rows with regions_unknown='drop', or leave parts out."
    )
    with pytest.raises(RegionsUnknown, match=r"but part_weights=\{'content': 0.5\} needs that: row 1 of source 0"):
        dataset.view(part_weights={"content": 0.5})
    view = dataset.view(parts="content,stop", regions_unknown="drop")
    assert (len(view), view.ledger.dropped_rows) == (2, {"parts_unknown": 6})
    assert view.ledger.adds_up


def test_answers_that_are_not_trained_need_no_parts() -> None:
    whole = chat((Role.USER, 1), (Role.ASSISTANT, 2), weights={1: 0.0})
    last = [*whole, Piece(2, Role.USER, P.BODY, (1,)), *answer(3)]
    assert len(MemoryDataset.of([last]).view(parts="content")) == 1
    assert len(MemoryDataset.of([last]).view(parts="content", train_on="last_assistant_message")) == 1
    assert len(MemoryDataset.of([whole, last]).view(parts="content", train_on="all_user_and_system_messages")) == 2


def test_views_with_parts_are_pickled_mixed_and_have_their_own_digest() -> None:
    dataset = MemoryDataset.of([row()])
    views = [dataset.view(), dataset.view(parts="content"), dataset.view(part_weights={"content": 0.5})]
    assert len({view.digest for view in views}) == 3
    assert "parts" not in ViewOptions(train_on=views[0].settings.train_on).stored  # earlier digests keep their value
    for view in views:
        again = pickle.loads(pickle.dumps(view))
        assert again.digest == view.digest
        assert np.array_equal(again.example(0).loss_weights, view.example(0).loss_weights)
    mixture = mix({"all": (views[0], 1), "answers": (views[2], 1)})
    assert isinstance(mixture, Mixture)
    batch = next(iter(mixture.loader(batch_size=2, shuffle=False)))
    served = {name: batch.tensors["loss_weights"][at].sum() for at, name in enumerate(("all", "answers"))}
    assert served == {name: mixture[at].loss_weights.sum() for at, name in enumerate(served)}  # type: ignore[union-attr]
    changed = mixture.with_options(parts="content", part_weights={})
    assert [view.settings.parts for view in changed.views] == ["content"] * 2
