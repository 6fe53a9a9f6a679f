"""Rows read by the machine from bytes give the same result as rows read in Python and rendered with jinja2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.build.options import prepare_options
from penstock.native import native
from penstock.prepare.chat.formats import detect
from penstock.prepare.pipeline import Pipeline
from penstock.prepare.recipe import make_recipe
from penstock.prepare.slice_record import SliceRecord
from penstock.prepare.sources.slices import SliceRows
from penstock.prepare.tokenizer.files import load_tokenizer
from tests.prepare.template.row_cases import (
    ALPACA,
    BESIDE,
    BROKEN,
    HOSTILE,
    SHAREGPT,
    TEXT,
    TURNS,
    UNUSUAL,
    USUAL,
    as_bytes,
    called,
    row,
    with_column,
)
from tests.support.splitting import trl_template

pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")

TOKENIZER = Path(__file__).parents[3] / "examples" / "tokenizer"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}: {{ c.function.arguments | tojson }}]{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "own": (TOKENIZER / "chat_template.jinja").read_text(),
    "words": "{% for m in messages %}" + TURN + "<|im_end|>\n{% endfor %}" + PROMPT,
    "all": "{{ x }}{{ tools | tojson if tools }}{% for m in messages %}{{ m.name }}" + TURN + CALLS
    + "{{ m.thinking }}{{ m.x | tojson if m.x }}<|im_end|>\n{% endfor %}" + PROMPT,
    "refuses": "{% if messages | length > 2 %}{{ raise_exception('Too long: ' ~ messages[0].content) }}{% endif %}"
    "{% for m in messages %}" + TURN + "<|im_end|>\n{% endfor %}" + PROMPT,
    "tags": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% endfor %}" + PROMPT,
    **{name: trl_template(name) for name in ("qwen3", "llama3_1", "deepseekv3", "gptoss", "gemma3", "llava_next")},
}  # fmt: skip
QUICK = ("own", "words", "all", "refuses", "qwen3", "gptoss")
FORMATS: dict[str, dict[str, bytes]] = {
    "messages": {
        **{f"usual: {name}": data for name, data in USUAL.items()},
        **{f"unusual: {name}": data for name, data in UNUSUAL.items()},
        **{f"hostile: {name}": data for name, data in HOSTILE.items()},
        **{f"beside: {name}": data for name, data in BESIDE.items()},
        **{f"broken: {name}": with_column(data) for name, data in BROKEN.items()},
    },
    "sharegpt": SHAREGPT,
    "alpaca": ALPACA,
    "query_response": {
        name: data.replace(b'"instruction"', b'"query"').replace(b'"output"', b'"response"')
        for name, data in ALPACA.items()
        if b'"input"' not in data
    },
}


@cache
def pipelines(format_: str, template: str, *options: tuple[str, Any]) -> tuple[Pipeline, Pipeline]:
    """A pipeline with the machine and one without it."""
    model = load_tokenizer(str(TOKENIZER))
    given = {"tokenizer": str(TOKENIZER), "date": "2026-01-02", **{k: v for k, v in options if k != "sample"}}
    chosen = prepare_options(given)
    sample = dict(options).get("sample") or next(iter(FORMATS[format_].values()))
    recipe = make_recipe(chosen, detect([json.loads(sample)], chosen), model)
    recipe = recipe.__class__(**{**fields_of(recipe), "templates": {"default": TEMPLATES[template]}})
    fast, slow = (Pipeline(recipe, model.tokenizer_json, fast=fast) for fast in (True, False))
    assert fast.renderings["default"].renderer.why_reference == ""
    assert fast.renderings["default"].renderer.reads_rows
    return fast, slow


def fields_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def run(pipeline: Pipeline, rows: Sequence[bytes]) -> tuple[dict[int, Any], dict[str, int]]:
    """The outcome of each row, and the notes."""
    result = pipeline.run(SliceRows(list(rows), list(range(1, len(rows) + 1))))
    return outcomes(result), {note.value: len(rows) for note, rows in result.noted.items()}


def outcomes(result: SliceRecord) -> dict[int, Any]:
    columns = result.columns
    found: dict[int, Any] = {entry["row"]: entry for entry in result.rejected}
    weights = columns.segment_weights
    if weights is None:
        weights = np.full(len(columns.segment_ends), np.nan, np.float32)
    ends = zip(pairwise(columns.id_offsets.tolist()), pairwise(columns.segment_offsets.tolist()), strict=True)
    for number, (ids, runs) in zip(columns.rows.tolist(), ends, strict=True):
        assert number not in found
        parts = (columns.segment_ends, columns.segment_roles, columns.segment_parts, columns.segment_messages, weights)
        found[number] = columns.ids[slice(*ids)].tolist(), [repr(part[slice(*runs)].tolist()) for part in parts]
    return found


def check(pair: tuple[Pipeline, Pipeline], rows: Sequence[bytes]) -> dict[int, Any]:
    fast, slow = (run(pipeline, rows) for pipeline in pair)
    differing = {rows[n]: (fast[0][n], slow[0][n]) for n in slow[0] if fast[0][n] != slow[0][n]}
    assert not differing
    assert fast == slow
    return fast[0]


@pytest.mark.parametrize("template", [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in TEMPLATES])
@pytest.mark.parametrize("format_", FORMATS)
def test_every_row_in_every_format(format_: str, template: str) -> None:
    pair = pipelines(format_, template)
    rows = list(FORMATS[format_].values())
    together = check(pair, rows)
    assert len(together) == len(rows)
    for number, data in enumerate(rows):  # the result must not depend on other rows
        alone = run(pair[0], [data])[0][0]
        expected = together[number]
        assert alone == ({**expected, "row": 0} if isinstance(expected, dict) else expected)


@pytest.mark.parametrize("option", [("special_tokens_in_text", "reject"), ("dropped_tool_calls", "keep")])
@pytest.mark.parametrize("template", ["own", "words", "qwen3"])
def test_options(template: str, option: tuple[str, str]) -> None:
    for format_ in FORMATS:
        check(pipelines(format_, template, option), list(FORMATS[format_].values()))


RENAMED = as_bytes({"dialog": [{"speaker": "bot", "words": "a"}], "functions": [], "persona": "p", "settings": {}})
NAMES = (
    ("sample", RENAMED), ("messages_key", "dialog"), ("role_key", "speaker"), ("content_key", "words"),
    ("tools_key", "functions"), ("system_key", "persona"), ("variables_key", "settings"),
    ("roles", (("bot", "assistant"), ("me", "user"), ("result", "tool"), ("plan", "tool_calls"))),
    ("weight_keys", ("score",)),
)  # fmt: skip


def renamed(template: str) -> tuple[Pipeline, Pipeline]:
    options = tuple((name, dict(value) if name == "roles" else value) for name, value in NAMES)
    return pipelines.__wrapped__("messages", template, *options)


def dialog(*turns: dict[str, Any], **more: Any) -> bytes:
    return as_bytes({"dialog": turns, **more})


ME, BOT = {"speaker": "me", "words": "q"}, {"speaker": "bot", "words": "a"}
OTHERS = [
    dialog(ME, BOT),
    dialog(ME, {**BOT, "score": 0.5}, persona="p", functions=[{"name": "f"}], settings={"x": 1}),
    dialog(ME, {"speaker": "plan", "words": '{"name": "f", "arguments": {}}'}, {**ME, "speaker": "result"}, BOT),
    dialog({**ME, "weight": "kept"}, {**BOT, "score": None}),
    dialog(ME, {**BOT, "score": -1}),
    dialog(ME, {**BOT, "role": "assistant"}),
    dialog(ME, {**BOT, "content": "b"}),
    dialog(ME, {"speaker": "user", "words": "q"}, BOT),
    dialog(ME, {"speaker": "bot", "content": "a"}),
    dialog(ME, {"role": "assistant", "content": "a"}),
    dialog(ME, {"words": "a", "x": 1, "speaker": "bot"}, system="unused", tools=[1], chat_template_kwargs=5),
    dialog(ME, BOT, images=["x"]),
    row(TURNS),
]


@pytest.mark.parametrize("template", ["own", "all"])
def test_renamed_columns_keys_and_roles(template: str) -> None:
    found = check(renamed(template), OTHERS)
    assert sum(isinstance(outcome, dict) for outcome in found.values()) == 6


BESIDE_READ = ("a system prompt", "variables", "tools as text", "parts", "reasoning", "a bare call as text")


@pytest.mark.parametrize("name", [*USUAL, *BESIDE_READ])
def test_the_machine_reads_common_rows(name: str) -> None:
    renderer = pipelines("messages", "qwen3")[0].renderings["default"].renderer
    data = (BESIDE | USUAL)[name]
    assert renderer.render_rows([data], lambda _: pytest.fail("read in Python")).left == []


# ---- laws

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**66), 2**66), st.floats(allow_nan=False, allow_infinity=False))
    | st.text(max_size=4),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.text(max_size=3), JSON, max_size=2)
WORDS = st.text(max_size=5) | st.sampled_from(("", " ", "<|im_end|>", "</think>", "\u2003\n", "\x1c", "e\u0301"))
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(("f", "", "ü\x01", 'a"b')), "arguments": OBJECTS | OBJECTS.map(json.dumps) | WORDS}
)
BARE = FUNCTIONS.map(lambda function: {"id": "1", **function})
WRAPPED = st.fixed_dictionaries({"function": FUNCTIONS}, optional={"type": st.just("function"), "id": WORDS})
WEIGHTS = st.none() | st.booleans() | st.integers(-1, 2) | st.floats(-1, 3) | st.sampled_from((10**400, 1e308, "1", []))
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": WORDS}), max_size=2)
SAYINGS = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "tool", "system", "developer"))},
    optional={
        "content": WORDS | WORDS | st.none() | PARTS | JSON,
        "name": WORDS,
        "x": JSON,
        "reasoning_content": WORDS | st.none(),
        "thinking": WORDS,
        "tool_calls": st.lists(WRAPPED | BARE, max_size=2) | st.none(),
        "weight": WEIGHTS,
        "masked": WEIGHTS,
    },
)
ANSWERS = st.lists(SAYINGS, max_size=4).map(lambda said: [*said, *TURNS])
TOOLS = st.lists(OBJECTS | BARE | WRAPPED | OBJECTS.map(json.dumps), max_size=2)
RECORDS = st.fixed_dictionaries(
    {"messages": ANSWERS},
    optional={
        "x": JSON,
        "system": WORDS,
        "tools": TOOLS | TOOLS.map(json.dumps) | st.none() | JSON,
        "chat_template_kwargs": st.dictionaries(st.sampled_from(("x", "enable_thinking")), JSON) | JSON,
        "images": st.sampled_from((None, [], 0, ["x"])),
    },
)
CHOICES = st.sampled_from(["own", "all", "refuses", "qwen3", "llama3_1", "deepseekv3", "gemma3", "llava_next"])


@settings(max_examples=200, deadline=None)
@given(CHOICES, st.lists(RECORDS, min_size=1, max_size=4), st.booleans())
def test_any_rows(template: str, records: list[dict[str, Any]], ascii_only: bool) -> None:
    rows = [json.dumps(record, ensure_ascii=ascii_only).encode(errors="replace") for record in records]
    check(pipelines("messages", template), rows)


ALL = sorted({*USUAL.values(), *BESIDE.values(), called({"a": [1, {"b": "é"}]}), TEXT % b"\\ud83d\\ude00 \xc3\xa9"})
PUT = st.binary(max_size=3) | st.sampled_from((b'"', b"\\", b"\\u", b"{", b"]", b",", b"0", b"-", b"e", b"."))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(ALL), st.integers(0, 600), PUT, st.integers(0, 3))
def test_any_corruption(data: bytes, at: int, put: bytes, cut: int) -> None:
    at %= len(data) + 1
    damaged = data[:at] + put + data[at + cut :]
    check(pipelines("messages", "all"), [row(TURNS), damaged, row(TURNS)])


@pytest.mark.parametrize("name", ["tools, calls, weights and more", "escapes", "numbers"])
def test_truncated_rows(name: str) -> None:
    data = USUAL[name]
    check(pipelines("messages", "all"), [data[:size] for size in range(len(data))])
