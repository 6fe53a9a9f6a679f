"""The spot check finds whatever differs from the references in a checked row, and nothing in untouched results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.build.options import prepare_options
from penstock.build.outcome import Outcome
from penstock.build.run import Builder
from penstock.native import RenderedBatch, RowStatus
from penstock.prepare.chat.conversation import Part
from penstock.prepare.chat.formats import detect
from penstock.prepare.check import WINDOW, mismatches, sampled_rows
from penstock.prepare.pipeline import Pipeline
from penstock.prepare.recipe import make_recipe
from penstock.prepare.slice_record import SliceRecord
from penstock.prepare.sources.slices import SliceRows
from penstock.prepare.template.compiler import CompiledTemplate
from penstock.prepare.template.turns import SpanColumn
from penstock.prepare.tokenizer.files import load_tokenizer

pytestmark = pytest.mark.slow

TURNS: Final = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven, e\u0301."}]
CHATS: Final[list[Any]] = [
    {"messages": TURNS},
    {"messages": [{"role": "system", "content": "Be brief."}, *TURNS * 3]},
    {"messages": [{"role": "user", "content": "no answer"}]},
    {"messages": [{"role": "user", "content": "日本 <|im_end|>"}, {"role": "assistant", "content": " \n"}]},
    {"messages": TURNS, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"messages": TURNS * 2},
]
WEIGHTED: Final[list[Any]] = [
    {"messages": [TURNS[0], {**TURNS[1], "weight": 0.5}, TURNS[0], {**TURNS[1], "weight": 0}]},
    {"messages": TURNS},
    {"messages": [{**TURNS[0], "train": False}, {**TURNS[1], "train": True}]},
    {"messages": [TURNS[0], {**TURNS[1], "masked": True}]},
    {"messages": [{**turn, "loss_weight": 0.25} for turn in TURNS * 300]},
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
SOURCES: Final = {"chats": CHATS, "weighted": WEIGHTED, "long": LONG, "pairs": PAIRS, "texts": TEXTS}
MAGIC: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if 'magic' in m.content %}TRICK{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Change = Callable[[SliceRecord, int], SliceRecord]


class Slice:
    """Rows, their pipeline, and its result."""

    def __init__(self, tokenizer: Path, rows: list[Any], **more: Any) -> None:
        model = load_tokenizer(str(tokenizer))
        options = prepare_options({"tokenizer": str(tokenizer), **more})
        recipe = make_recipe(options, detect(rows[:1], options), model)
        self.lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
        self.pipeline = Pipeline(recipe, model.tokenizer_json)
        self.rows = SliceRows(self.lines, list(range(1, len(rows) + 1)))
        self.result = self.pipeline.run(self.rows)

    def wrong(self, sample: list[int], result: SliceRecord | None = None) -> list[int]:
        return mismatches(self.pipeline, self.rows, sample, self.result if result is None else result)

    def example(self, row: int, side: int = 0) -> int:
        """Returns the number of a row's example."""
        return int(np.flatnonzero(self.result.columns.rows == row)[side])


@pytest.fixture(scope="module")
def slices(tokenizer: Path) -> Mapping[str, Slice]:
    return {name: Slice(tokenizer, rows) for name, rows in SOURCES.items()}


def replaced(result: SliceRecord, **columns: Any) -> SliceRecord:
    """Returns the result with other columns."""
    return replace(result, columns=result.columns._replace(**columns))


def altered(result: SliceRecord, column: str, place: int, by: int = 1) -> SliceRecord:
    """Returns the result with one value of a column changed."""
    values = getattr(result.columns, column).copy()
    values[place] += by
    return replaced(result, **{column: values})


def changed_id(result: SliceRecord, example: int, token: int = 0) -> SliceRecord:
    return altered(result, "ids", int(result.columns.id_offsets[example]) + token)


def changed(column: str, run: int) -> Change:
    """Returns a function that changes one segment of an example."""

    def change(result: SliceRecord, example: int) -> SliceRecord:
        offsets = result.columns.segment_offsets
        return altered(result, column, int(offsets[example + 1 if run < 0 else example]) + run)

    return change


def without(result: SliceRecord, example: int) -> SliceRecord:
    """Returns the result without one example."""
    columns = result.columns
    ids, id_offsets = _removed(columns.id_offsets, example)
    runs, segment_offsets = _removed(columns.segment_offsets, example)
    segments = {
        name: None if (values := getattr(columns, name)) is None else values[runs]
        for name in columns._fields
        if name.startswith("segment_") and name != "segment_offsets"
    }
    return replaced(
        result,
        **segments,
        ids=columns.ids[ids],
        id_offsets=id_offsets,
        segment_offsets=segment_offsets,
        rows=np.delete(columns.rows, example),
        row_hashes=np.delete(columns.row_hashes, example),
        sides=None if columns.sides is None else np.delete(columns.sides, example),
    )


def _removed(offsets: Any, example: int) -> tuple[Any, Any]:
    """Returns the elements that remain without one list, and the new offsets."""
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


IN_TEXTS: Final = sorted(CHANGES.keys() - {"an end", "a role", "a part", "a message's number"})  # one segment each
PLACES: Final = [  # a slice, a row of it, a side of the row; those of the long slice stand beside a long text
    *(("chats", row, 0) for row in (0, 1, 3, 4, 5)),
    *(("weighted", row, 0) for row in range(4)),
    *(("long", row, 0) for row in (0, 2)),
    *(("pairs", 1, side) for side in (0, 1)),
    ("texts", 1, 0),
]
FOUND: Final = [(*place, change) for place in PLACES for change in (IN_TEXTS if place[0] == "texts" else CHANGES)]


@pytest.mark.parametrize("name", SOURCES)
def test_untouched_results(slices: Mapping[str, Slice], name: str) -> None:
    one = slices[name]
    rows = list(range(len(one.lines)))
    assert one.wrong(rows) == []
    assert [one.wrong([row]) for row in rows] == [[]] * len(rows)
    assert one.wrong([]) == []
    assert [entry["row"] for entry in one.result.rejected] == ([2] if name == "chats" else [])


def assert_found(one: Slice, row: int, result: SliceRecord) -> None:
    """Asserts that a change is found in its row and in no other."""
    rows = list(range(len(one.lines)))
    assert one.wrong([row], result) == [row]
    assert one.wrong(rows, result) == [row]
    assert one.wrong([other for other in rows if other != row], result) == []


@pytest.mark.parametrize(("name", "row", "side", "change"), FOUND)
def test_changes_are_found_only_in_the_sampled_row(
    slices: Mapping[str, Slice], name: str, row: int, side: int, change: str
) -> None:
    one = slices[name]
    assert_found(one, row, CHANGES[change](one.result, one.example(row, side)))


def test_changes_of_several_rows(slices: Mapping[str, Slice]) -> None:
    chats = slices["chats"]
    result = changed_id(changed("segment_parts", 0)(chats.result, chats.example(5)), chats.example(1))
    assert chats.wrong([0, 1, 2, 3, 5], result) == [1, 5]
    assert chats.wrong([0, 5], result) == [5]


def test_a_duplicate_example(slices: Mapping[str, Slice]) -> None:
    """An example that is stored twice is a mismatch."""
    chats = slices["chats"]
    rows = chats.result.columns.rows.copy()
    rows[chats.example(1)] = 0
    assert chats.wrong([0, 1, 3], replaced(chats.result, rows=rows)) == [0, 1]


def test_a_row_that_should_have_been_rejected(slices: Mapping[str, Slice]) -> None:
    chats = slices["chats"]
    assert chats.wrong([0, 2, 3], replace(chats.result, rejected=[])) == [2]


def test_a_row_rejected_for_another_reason(tokenizer: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('No ' ~ messages[0].content) if messages | length > 2 }}" + MAGIC)
    rows = [{"messages": TURNS}, {"messages": TURNS * 2}, {"messages": TURNS * 3}]
    one = Slice(tokenizer, rows, template=str(template))
    assert [entry["row"] for entry in one.result.rejected] == [1, 2]
    assert one.wrong([0, 1, 2]) == []
    other = [{**one.result.rejected[0], "reason": "something else"}, one.result.rejected[1]]
    assert one.wrong([0, 1, 2], replace(one.result, rejected=other)) == [1]
    assert one.wrong([0, 1, 2], replace(one.result, rejected=[{**other[1], "row": 0}, *other[1:]])) == [0, 1]


# ---- weights


@pytest.mark.parametrize(
    ("row", "message", "weight"),
    [
        pytest.param(0, 1, 0.25, id="another"),
        pytest.param(0, 1, np.nan, id="lost"),
        pytest.param(0, 3, 1.0, id="one for zero"),
        pytest.param(0, 3, np.nan, id="none for zero"),
        pytest.param(0, 0, 1.0, id="of a message without one"),
        pytest.param(1, 1, 1.0, id="in a row without any"),
        pytest.param(2, 1, 0.0, id="zero for true"),
        pytest.param(3, 1, 1.0, id="not masked"),
    ],
)
def test_changed_weights(slices: Mapping[str, Slice], row: int, message: int, weight: float) -> None:
    one = slices["weighted"]
    columns = one.result.columns
    assert columns.segment_weights is not None
    first, end = columns.segment_offsets[one.example(row) :][:2]
    for place in first + np.flatnonzero(columns.segment_messages[first:end] == message):
        weights = columns.segment_weights.copy()
        weights[place] = weight
        assert_found(one, row, replaced(one.result, segment_weights=weights))


def test_no_weights_at_all(slices: Mapping[str, Slice]) -> None:
    weighted, chats = slices["weighted"], slices["chats"]
    assert weighted.wrong([0, 1, 2, 3, 4], replaced(weighted.result, segment_weights=None)) == [0, 2, 3, 4]
    none = np.full(len(chats.result.columns.segment_ends), np.nan, np.float32)
    assert chats.result.columns.segment_weights is None
    assert chats.wrong(list(range(len(CHATS))), replaced(chats.result, segment_weights=none)) == []


# ---- long texts: compared up to the first end of a turn beyond the window


def last_compared(one: Slice, row: int) -> tuple[int, int]:
    """Returns the last token and the last segment that are compared, counted from the start of the example."""
    conversation = one.pipeline.reader.conversations(one.lines[row])[0]
    rendering = one.pipeline.renderings["default"]
    segments, _ = rendering.splitter.split(rendering.renderer.render_reference([conversation]))
    run = int(np.flatnonzero((segments.parts == Part.STOP) & (segments.ends >= WINDOW))[0])
    own = int(one.result.columns.segment_offsets[one.example(row)])
    return int(one.result.columns.segment_ends[own + run]) - 1, run


def test_changes_before_the_cut_are_found(slices: Mapping[str, Slice]) -> None:
    long = slices["long"]
    example = long.example(1)
    token, run = last_compared(long, 1)
    assert len(long.lines[1]) > 2 * WINDOW
    for place in (0, 1, token // 2, token - 1, token):
        assert long.wrong([0, 1, 2], changed_id(long.result, example, place)) == [1]
    for column in ("segment_ends", "segment_roles", "segment_parts", "segment_messages"):
        for place in (0, run // 2, run):
            assert long.wrong([0, 1, 2], changed(column, place)(long.result, example)) == [1]
    assert long.wrong([0, 1, 2], without(long.result, example)) == [1]


def test_changes_after_the_cut_are_not_found(slices: Mapping[str, Slice]) -> None:
    """The price of the window: a sampled long text is checked in part."""
    long = slices["long"]
    example = long.example(1)
    token, run = last_compared(long, 1)
    assert long.wrong([1], changed_id(long.result, example, token + 1)) == []
    assert long.wrong([1], changed("segment_ends", run + 1)(long.result, example)) == []
    assert long.wrong([1], changed("segment_parts", -1)(long.result, example)) == []


def test_weights_are_compared_up_to_the_cut(slices: Mapping[str, Slice]) -> None:
    one = slices["weighted"]
    run = last_compared(one, 4)[1]
    for place in (0, run // 2, run):
        assert_found(one, 4, changed("segment_weights", place)(one.result, one.example(4)))
    assert one.wrong([4], changed("segment_weights", run + 1)(one.result, one.example(4))) == []


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


# ---- paths: every branch that a row takes for the first time is compared


def changed_text(batch: RenderedBatch) -> RenderedBatch:
    texts = [text.replace(b"TRICK", b"TRACK") for text in batch.texts]
    return batch._replace(data=batch.data.replace(b"TRICK", b"TRACK"), texts=texts)


def changed_spans(batch: RenderedBatch) -> RenderedBatch:
    """Truncates the last span of a row on the branch."""
    spans = np.frombuffer(batch.spans, np.int32).reshape(-1, len(SpanColumn)).copy()
    for row, text in enumerate(batch.texts):
        if b"TRICK" in text:
            spans[np.flatnonzero(spans[:, SpanColumn.ROW] == row)[-1], SpanColumn.END] -= len("<|im_end|>\n")
    return batch._replace(spans=spans.tobytes())


def refused(batch: RenderedBatch) -> RenderedBatch:
    wrong = [b"TRICK" in text for text in batch.texts]
    status = bytes(RowStatus.REFUSED if bad else status for bad, status in zip(wrong, batch.status, strict=True))
    reasons = ["no magic" if bad else reason for bad, reason in zip(wrong, batch.reasons, strict=True)]
    return batch._replace(status=status, reasons=reasons)


def magic_files(folder: Path, count: int = 1500) -> list[Path]:
    """Writes two slices; in each, only the last row takes the branch."""
    paths = []
    for name in ("one", "two"):
        rows = [{"messages": [{"role": "user", "content": f"{name} {n}"}, TURNS[1]]} for n in range(count)]
        rows[-1]["messages"] = [TURNS[0], {"role": "assistant", "content": f"magic {name}"}]
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def shards(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.glob("shards/*/*.arrow")}


@pytest.mark.parametrize("sabotage", [changed_text, changed_spans, refused])
def test_a_faulty_branch_is_found_when_a_row_takes_it(
    sabotage: Callable[[RenderedBatch], RenderedBatch],
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row of 1,500: the sample alone would miss it."""
    template, files = tmp_path / "template.jinja", magic_files(tmp_path)
    template.write_text(MAGIC)

    def build(name: str, **options: Any) -> Outcome:
        given = {"tokenizer": str(tokenizer), "template": str(template), "cache": tmp_path / name, "workers": "1"}
        return Builder(files, prepare_options({**given, **options}), None).run()

    untouched = build("untouched")
    assert (untouched.progress.mismatches, untouched.progress.checked) != (0, 0)
    assert "spot check" not in untouched.progress.engines
    render = CompiledTemplate.render
    monkeypatch.setattr(CompiledTemplate, "render", lambda machine, rows: sabotage(render(machine, rows)))
    found = build("sabotaged")
    assert found.progress.mismatches == 2  # in both slices, though the second took no new branch
    assert found.progress.engines["spot check"] == {"the spot check found a difference": 3000}
    slow = build("slow", fast=False)
    assert slow.progress.checked == 0
    assert shards(tmp_path / "sabotaged") == shards(tmp_path / "untouched") == shards(tmp_path / "slow")
    assert len(shards(tmp_path / "slow")) == 2


def test_rows_on_new_paths_are_reported(tokenizer: Path) -> None:
    one = Slice(tokenizer, CHATS)
    assert one.result.fresh[0] == 0
    assert {1, 4} <= set(one.result.fresh)  # the first with a system prompt, the first with tools
    rows = SliceRows(one.lines, list(range(1, len(one.lines) + 1)))
    taken, ways = one.pipeline.renderings["default"].renderer.paths
    assert 0 < taken <= ways
    assert one.pipeline.run(rows).fresh == []
    assert one.pipeline.renderings["default"].renderer.paths == (taken, ways)
    for rendering in one.pipeline.renderings.values():
        rendering.renderer.forget_paths()
    assert one.pipeline.renderings["default"].renderer.paths == (0, ways)
    assert one.pipeline.run(rows).fresh == one.result.fresh
