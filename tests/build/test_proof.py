"""The proof finds whatever differs from the references in a sampled row, and nothing in untouched results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.build.options import prepare_options
from penstock.build.pipeline import Pipeline, SliceResult
from penstock.build.proof import WINDOW, mismatches, sampled_rows
from penstock.build.recipe import make_recipe
from penstock.chat.conversation import Part
from penstock.chat.formats_detect import detect
from penstock.sources import Rows, model_folder

TURNS: Final = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven, e\u0301."}]
CHATS: Final[list[Any]] = [
    {"messages": TURNS},
    {"messages": [{"role": "system", "content": "Be brief."}, *TURNS * 3]},
    {"messages": [{"role": "user", "content": "no answer"}]},
    {"messages": [{"role": "user", "content": "日本 <|im_end|>"}, {"role": "assistant", "content": " \n"}]},
    {"messages": TURNS, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"messages": TURNS * 2},
]
LONG: Final[list[Any]] = [{"messages": TURNS * 2}, {"messages": TURNS * 300}, {"messages": TURNS}]
PAIRS: Final[list[Any]] = [
    {
        "prompt": TURNS[:1],
        "chosen": [{"role": "assistant", "content": "Good."}],
        "rejected": [{"role": "assistant", "content": bad}],
    }
    for bad in ("Bad.", "Worse.", "Worst of them all.")
]
TEXTS: Final[list[Any]] = [{"text": "Once upon a time."}, {"text": "日本 " * 20}, {"text": "The end."}]
Change = Callable[[SliceResult, int], SliceResult]


class Slice:
    """Rows, the pipeline that they went through, and what became of them."""

    def __init__(self, tokenizer: Path, rows: list[Any]) -> None:
        model = model_folder.load(str(tokenizer))
        options = prepare_options({"tokenizer": str(tokenizer)})
        recipe = make_recipe(options, detect(rows[:1], options), model)
        self.lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
        self.pipeline = Pipeline(recipe, model.tokenizer_json)
        self.result = self.pipeline.run(Rows(self.lines, list(range(1, len(rows) + 1))))

    def wrong(self, sample: list[int], result: SliceResult | None = None) -> list[int]:
        return mismatches(self.pipeline, self.lines, sample, self.result if result is None else result)

    def example(self, row: int, side: int = 0) -> int:
        """The number of a row's example."""
        return int(np.flatnonzero(self.result.columns.rows == row)[side])


@pytest.fixture(scope="module")
def chats(tokenizer: Path) -> Slice:
    return Slice(tokenizer, CHATS)


@pytest.fixture(scope="module")
def long(tokenizer: Path) -> Slice:
    return Slice(tokenizer, LONG)


@pytest.fixture(scope="module")
def pairs(tokenizer: Path) -> Slice:
    return Slice(tokenizer, PAIRS)


@pytest.fixture(scope="module")
def texts(tokenizer: Path) -> Slice:
    return Slice(tokenizer, TEXTS)


def altered(result: SliceResult, column: str, place: int, by: int = 1) -> SliceResult:
    """The result with one value of a column changed."""
    values = getattr(result.columns, column).copy()
    values[place] += by
    return replace(result, columns=result.columns._replace(**{column: values}))


def changed_id(result: SliceResult, example: int, token: int = 0) -> SliceResult:
    return altered(result, "ids", int(result.columns.id_offsets[example]) + token)


def changed(column: str, run: int) -> Change:
    """A change to one of the segments of an example."""

    def change(result: SliceResult, example: int) -> SliceResult:
        offsets = result.columns.segment_offsets
        return altered(result, column, int(offsets[example + 1 if run < 0 else example]) + run)

    return change


def without(result: SliceResult, example: int) -> SliceResult:
    """The result without one example."""
    columns = result.columns
    ids, id_offsets = _removed(columns.id_offsets, example)
    runs, segment_offsets = _removed(columns.segment_offsets, example)
    own = columns._replace(
        ids=columns.ids[ids],
        id_offsets=id_offsets,
        segment_offsets=segment_offsets,
        segment_ends=columns.segment_ends[runs],
        segment_roles=columns.segment_roles[runs],
        segment_parts=columns.segment_parts[runs],
        segment_messages=columns.segment_messages[runs],
        rows=np.delete(columns.rows, example),
        row_hashes=np.delete(columns.row_hashes, example),
        sides=None if columns.sides is None else np.delete(columns.sides, example),
    )
    return replace(result, columns=own)


def _removed(offsets: Any, example: int) -> tuple[Any, Any]:
    """Which elements stay when one list is taken out, and the offsets of the others."""
    stays = np.ones(int(offsets[-1]), np.bool_)
    stays[int(offsets[example]) : int(offsets[example + 1])] = False
    return stays, np.concatenate(([0], np.cumsum(np.delete(np.diff(offsets), example))))


CHANGES: Final[dict[str, Change]] = {
    "the first id": changed_id,
    "the last id": lambda result, example: altered(result, "ids", int(result.columns.id_offsets[example + 1]) - 1),
    "an end": changed("segment_ends", 1),
    "the last end": changed("segment_ends", -1),
    "a role": changed("segment_roles", 1),
    "a part": changed("segment_parts", 1),
    "the last part": changed("segment_parts", -1),
    "a message's number": changed("segment_messages", 1),
    "no example": without,
}


def test_untouched_results(chats: Slice, long: Slice, pairs: Slice, texts: Slice) -> None:
    assert [entry["row"] for entry in chats.result.rejected] == [2]
    for one in (chats, long, pairs, texts):
        rows = list(range(len(one.lines)))
        assert one.wrong(rows) == []
        assert [one.wrong([row]) for row in rows] == [[]] * len(rows)
        assert one.wrong([]) == []


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("row", [0, 1, 3, 4, 5])
def test_changes_are_found_in_the_sampled_row_alone(chats: Slice, row: int, change: str) -> None:
    result = CHANGES[change](chats.result, chats.example(row))
    assert chats.wrong([row], result) == [row]
    assert chats.wrong(list(range(len(CHATS))), result) == [row]
    assert chats.wrong([other for other in range(len(CHATS)) if other != row], result) == []


def test_changes_of_several_rows(chats: Slice) -> None:
    result = changed_id(changed("segment_parts", 0)(chats.result, chats.example(5)), chats.example(1))
    assert chats.wrong([0, 1, 2, 3, 5], result) == [1, 5]
    assert chats.wrong([0, 5], result) == [5]


def test_a_row_too_many(chats: Slice) -> None:
    """An example that stands twice is not what the row says."""
    columns = chats.result.columns
    rows = columns.rows.copy()
    rows[chats.example(1)] = 0
    result = replace(chats.result, columns=columns._replace(rows=rows))
    assert chats.wrong([0, 1, 3], result) == [0, 1]


def test_a_row_that_should_have_been_rejected(chats: Slice) -> None:
    result = replace(chats.result, rejected=[])
    assert chats.wrong([0, 2, 3], result) == [2]


# ---- both sides of pairs, plain text


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_pairs(pairs: Slice, change: str, side: int) -> None:
    result = CHANGES[change](pairs.result, pairs.example(1, side))
    assert pairs.wrong([0, 1, 2], result) == [1]
    assert pairs.wrong([0, 2], result) == []


@pytest.mark.parametrize("change", sorted(CHANGES.keys() - {"an end", "a role", "a part", "a message's number"}))
def test_plain_text(texts: Slice, change: str) -> None:
    result = CHANGES[change](texts.result, texts.example(1))
    assert texts.wrong([0, 1, 2], result) == [1]
    assert texts.wrong([0, 2], result) == []


# ---- long texts: compared up to the first end of a turn beyond the window


def last_compared(one: Slice, row: int) -> tuple[int, int]:
    """The last token and the last segment that are compared, counted from the example's start."""
    conversation = one.pipeline.reader.conversations(one.lines[row])[0]
    rendering = one.pipeline.renderings["default"]
    regions = rendering.engine.reference([conversation])
    segments, _ = rendering.splitter.split([conversation], regions)
    run = int(np.flatnonzero((segments.parts == Part.STOP) & (segments.ends >= WINDOW))[0])
    own = int(one.result.columns.segment_offsets[one.example(row)])
    return int(one.result.columns.segment_ends[own + run]) - 1, run


def test_changes_before_the_cut_are_found(long: Slice) -> None:
    example = long.example(1)
    token, run = last_compared(long, 1)
    assert len(long.lines[1]) > 2 * WINDOW
    for place in (0, 1, token // 2, token - 1, token):
        assert long.wrong([0, 1, 2], changed_id(long.result, example, place)) == [1]
    for column in ("segment_ends", "segment_roles", "segment_parts", "segment_messages"):
        for place in (0, run // 2, run):
            assert long.wrong([0, 1, 2], changed(column, place)(long.result, example)) == [1]
    assert long.wrong([0, 1, 2], without(long.result, example)) == [1]


def test_changes_behind_the_cut_are_not_found(long: Slice) -> None:
    """The price of the window: a sampled long text is proved in part."""
    example = long.example(1)
    token, run = last_compared(long, 1)
    assert long.wrong([1], changed_id(long.result, example, token + 1)) == []
    assert long.wrong([1], changed("segment_ends", run + 1)(long.result, example)) == []
    assert long.wrong([1], changed("segment_parts", -1)(long.result, example)) == []


def test_short_texts_beside_long_ones_are_compared_whole(long: Slice) -> None:
    for row in (0, 2):
        for change in CHANGES.values():
            assert long.wrong([0, 1, 2], change(long.result, long.example(row))) == [row]


# ---- the sample


def test_the_sample_is_a_function_of_digest_and_sizes() -> None:
    digest, other = "b3-" + "0f" * 32, "b3-" + "1e" * 32
    sizes = [100] * 5000
    sample = sampled_rows(digest, sizes)
    assert sample == sampled_rows(digest, sizes) == sorted(set(sample)) != sampled_rows(other, sizes)
    assert 1 <= len(sample) <= 64 and sum(sizes[row] for row in sample) <= 500
    assert sampled_rows(digest, []) == []
    assert len(sampled_rows(digest, [10])) == 1
    assert len(sampled_rows(digest, [1] * 200_000)) == 64
