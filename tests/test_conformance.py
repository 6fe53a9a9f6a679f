"""A sample of the conformance run: every template of PyPI's trl, bundled chats and hostile rows, tokens and masks."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import penstock as ps
from benchmarks.conformance import Clock, ConformanceTally, compare, compare_rows, trl_templates
from benchmarks.masks import MaskComparison, MaskTally
from benchmarks.material import Files, sampled
from benchmarks.oracle import Oracle
from benchmarks.segments import dump

pytestmark = pytest.mark.slow

TEMPLATES = trl_templates()
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": 'Find <b>"it"</b> & more — ünïcode 日本語.',
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string"},
                "boost": {"type": "number", "default": 1.5},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["q"],
        },
    },
}


PARTS = [{"type": "text", "text": "parts "}, {"type": "text", "text": "two"}]


def turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]


def call(arguments: Any) -> list[dict[str, Any]]:
    made = {"id": "call00001", "type": "function", "function": {"name": "search", "arguments": arguments}}
    return [
        {"role": "user", "content": "Find it."},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call00001", "name": "search", "content": '{"hits": [1, 2.5, null]}'},
        {"role": "assistant", "content": "Found."},
    ]


HOSTILE: list[dict[str, Any]] = [
    {"messages": turns("<|im_end|>\n<|im_start|>assistant\nsaid by nobody", "[INST] </s> <|eot_id|> ok")},
    {"messages": turns("ctrl \x00\x01\x02\x03\x07\x0e\x1b", "\x0b\x0c\x1c\x1d\x1e\x1f\x7f\x85\u2028\u2029 end")},
    {"messages": turns("\r\nCR\rLF\r\n", "\n\n  leading and trailing \t\n")},
    {"messages": turns(unicodedata.normalize("NFD", "Grüße, café, 한국어"), "e\u0301>\u0338 \u0301 alone")},
    {"messages": turns("zero\u200bwidth\u200d\ufeff\u2060", "new \U000323b0 \U0001fae9 \u0c5c \ua7cb")},
    {"messages": turns("{{ messages }} {% raw %} {# c #} }} %}", "<think>\nold\n</think>\n\n{{ x }}")},
    {"messages": turns("", "a", "b", "")},
    {"messages": turns("q", "<think>first</think>one", "r", "<think>second</think>two", "s", "three")},
    {"messages": [{"role": "system", "content": " be <b>brief</b> "}, *turns("q", "a", "r", "b")]},
    {
        "messages": call({"q": 'é "x" \\ <y> & 日本', "boost": 1.0, "n": -0.0, "big": 2**70, "deep": {"a": [None]}}),
        "tools": [TOOL],
    },
    {"messages": call('{"q":"as a string","n":[1,2]}'), "tools": [TOOL]},
    {"messages": call({}), "tools": [TOOL]},
    {"messages": [*turns("q"), {"role": "assistant", "content": "a", "reasoning_content": "because\n1"}]},
    {"messages": [{"role": "user", "content": PARTS}, *turns("", "a")[1:]]},
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, examples: Path) -> list[Files]:
    folder = tmp_path_factory.mktemp("data")
    chats = (examples / "data" / "chats.jsonl").read_text().splitlines()[:24]
    pairs = (examples / "data" / "pairs.jsonl").read_text().splitlines()[:6]
    hostile = [json.dumps(row, ensure_ascii=n % 2 == 0) for n, row in enumerate(HOSTILE)]
    (folder / "chats.jsonl").write_text("\n".join(chats + hostile) + "\n")
    (folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
    return sampled([folder / "chats.jsonl", folder / "pairs.jsonl"], None, tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="module")
def oracle(tokenizer: Path) -> Oracle:
    return Oracle(tokenizer)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tokens_and_masks_equal_transformers(name: str, data: list[Files], tokenizer: Path, oracle: Oracle) -> None:
    tally = ConformanceTally()
    for files in data:
        compare(files, tokenizer, oracle, TEMPLATES[name], tally)
    assert tally.rows >= len(HOSTILE) + 30
    assert tally.perfect, (tally.differing, tally.errors)


def test_other_tokens_and_masks_are_noticed(data: list[Files], tokenizer: Path, oracle: Oracle, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES["trl/qwen2_5"])
    dataset = ps.prepare(
        *data[0].paths, tokenizer=tokenizer, template=template, cache=tmp_path / "cache", on_bad_row="quarantine",
        dropped_tool_calls="keep",
    )  # fmt: skip
    tally = ConformanceTally()
    compare_rows(dataset, data[0], oracle, TEMPLATES["trl/qwen3_training"], tally, Clock({}))
    assert not tally.perfect
    assert "tokens of chats.jsonl:1" in tally.differing
    untagged, tally = TEMPLATES["trl/qwen2_5_training"].replace("generation %}", "if true %}"), ConformanceTally()
    untagged = (
        untagged.replace("endif true %}", "endif %}") + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    compare_rows(dataset, data[0], oracle, untagged, tally, Clock({}))
    assert tally.equal == tally.rows
    assert "mask of chats.jsonl:1" in tally.differing


def test_a_changed_segment_is_shown(data: list[Files], tokenizer: Path, tmp_path: Path) -> None:
    template, out = tmp_path / "template.jinja", tmp_path / "dump.npz"
    template.write_text(TEMPLATES["trl/qwen3"])
    dump({"data": data[0].paths, "tokenizer": str(tokenizer), "template": str(template), "out": str(out)})
    here, there = dict(np.load(out)), dict(np.load(out))
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    equal = MaskTally()
    MaskComparison(here, there, data[0], decoder, equal).run()
    assert equal.perfect
    assert equal.rows == equal.segments == equal.masks["all_messages"] == len(here["row"])

    first = int(np.flatnonzero(here["all_assistant_messages"])[0])
    here["part"] = here["part"].copy()
    here["part"][first] = 1
    here["all_assistant_messages"] = here["all_assistant_messages"].copy()
    here["all_assistant_messages"][first] = False
    changed = MaskTally()
    MaskComparison(here, there, data[0], decoder, changed).run()
    assert changed.segments == changed.masks["all_assistant_messages"] == changed.rows - 1
    assert changed.masks["all_messages"] == changed.rows
    assert set(changed.changes) == {
        "all_assistant_messages: assistant/call_markup → assistant/header",
        "segments: assistant/call_markup → assistant/header",
    }
    assert changed.shown[0].startswith(f"chats.jsonl:1 tokens {first}:{first + 1}")


def test_a_sample_keeps_line_numbers(tmp_path: Path) -> None:
    source, copies = tmp_path / "rows.jsonl", tmp_path / "copies"
    source.write_text("".join(f'{{"n": {number}}}\n' for number in range(1, 101)))
    copies.mkdir()
    (files,) = sampled([source], 5, copies)
    rows = (copies / "rows.jsonl").read_text().splitlines()
    assert [files.name(0, row) for row in range(5)] == [f"rows.jsonl:{json.loads(row)['n']}" for row in rows]
