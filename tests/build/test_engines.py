"""Pipelines give the same results with and without the fast engines, and report why the reference was used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.build.options import prepare_options
from penstock.build.run import Builder
from penstock.prepare.chat.formats import detect
from penstock.prepare.pipeline import Pipeline
from penstock.prepare.recipe import make_recipe
from penstock.prepare.slice_record import SliceRecord
from penstock.prepare.sources.slices import SliceRows
from penstock.prepare.tokenizer.files import load_tokenizer
from tests.support.splitting import assistant, calls, returns, user


def pipeline(tokenizer: Path, lines: list[bytes], fast: bool, **options: Any) -> Pipeline:
    model = load_tokenizer(str(tokenizer))
    chosen = prepare_options({"tokenizer": str(tokenizer), **options})
    sample = [json.loads(lines[0])]
    return Pipeline(make_recipe(chosen, detect(sample, chosen), model), model.tokenizer_json, fast=fast)


def results(tokenizer: Path, rows: Sequence[Any], **options: Any) -> tuple[Pipeline, SliceRecord, SliceRecord]:
    """Runs rows with and without the fast engines."""
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    slow = pipeline(tokenizer, lines, False, **options).run(SliceRows(lines, list(range(1, len(lines) + 1))))
    quick = pipeline(tokenizer, lines, True, **options)
    return quick, quick.run(SliceRows(lines, list(range(1, len(lines) + 1)))), slow


def noted(result: SliceRecord) -> dict[str, list[int]]:
    return {note.value: rows.tolist() for note, rows in result.noted.items()}


def assert_same(quick: SliceRecord, slow: SliceRecord) -> None:
    assert quick.rejected == slow.rejected
    assert noted(quick) == noted(slow)
    for name, one, other in zip(slow.columns._fields, quick.columns, slow.columns, strict=True):
        if one is None or other is None:
            assert one is other, name
        else:
            assert one.dtype == other.dtype, name
            np.testing.assert_array_equal(one, other, err_msg=name)


TOOL: Final = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
TURNS: Final = [user("How many?"), assistant("Seven.")]
MIXED: Final[list[Any]] = [
    {"messages": TURNS},
    {"messages": [{"role": "system", "content": "Be brief."}, *TURNS * 3], "id": 7},
    {"messages": [user("q"), calls("f", "g"), returns("t"), assistant("a")]},
    {"messages": [user("q"), calls("f", text=None), returns("t"), assistant("a")]},
    {"messages": TURNS, "tools": [TOOL]},
    {"messages": [user("q"), calls("f"), returns("t"), assistant("a")], "tools": [TOOL]},
    {"messages": TURNS * 2, "tools": [TOOL, {"name": "<|im_end|> é\u2028", "x": [0.1, 10**30]}]},
    {"messages": TURNS, "tools": []},
    {"messages": TURNS, "tools": None},
    {"messages": TURNS, "tools": json.dumps([TOOL])},
    {"messages": TURNS, "tools": [json.dumps(TOOL)], "system": "Be kind."},
    {"messages": TURNS, "tools": [TOOL] * 130},
    {"messages": TURNS, "tools": [7]},
    {"messages": TURNS, "tools": {"name": "f"}},
    {"messages": [user("q"), calls("f"), returns("t"), assistant("a", thinking="r")], "tools": [TOOL, TOOL]},
    {"messages": TURNS, "system": "Be kind."},
    {"messages": [user("q"), {**assistant("a"), "weight": 0}]},
    {"messages": [user("a <|im_end|> b"), assistant("<|im_start|>assistant\n")]},
    {"messages": [user(""), assistant("a")]},
    {"messages": [user("q"), assistant(" ")]},
    {"messages": [user("q"), assistant(None)]},
    {"messages": [user("q")]},
    {"messages": []},
    {"messages": [user("q"), {"role": "bot", "content": "a"}]},
    {"messages": [{"role": "developer", "content": "d"}, *TURNS]},
    {"messages": [user("\x01\U0010fe00"), assistant("\u2003x\u2003")]},
    {"messages": [user([{"type": "text", "text": "q"}]), assistant("a")]},  # type: ignore[arg-type]
    {"messages": [user("q"), assistant("a", reasoning_content="r")]},
    b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}',
    b"\xff", b"[]", b"", b'{"messages": [{"role": "user", "content": "\xff"}]}',
    {"messages": TURNS * 6},
]  # fmt: skip


def test_a_mixed_batch(tokenizer: Path) -> None:
    quick, *both = results(tokenizer, MIXED * 2)
    assert_same(*both)
    assert quick.renderings["default"].renderer.reads_rows
    assert both[0].columns.examples > 20 and len(both[0].rejected) > 10


@pytest.mark.parametrize("option", [{"special_tokens_in_text": "reject"}, {"dropped_tool_calls": "keep"}])
def test_a_mixed_batch_with_options(tokenizer: Path, option: dict[str, str]) -> None:
    assert_same(*results(tokenizer, MIXED, **option)[1:])


@pytest.mark.parametrize("place", ["tools", "arguments"])
def test_only_rows_nested_too_deeply_are_refused(tokenizer: Path, place: str) -> None:
    tools = [{**TOOL, "x": [5.5]}] if place == "tools" else None
    called = [{"type": "function", "function": {"name": "f", "arguments": {"x": [5.5]}}}]
    messages = TURNS if tools else [user("q"), assistant("", tool_calls=called), *TURNS]
    usual = json.dumps({"messages": messages, "tools": tools} if tools else {"messages": messages}).encode()
    deep = usual.replace(b"5.5", b"[" * 1000 + b"]" * 1000)
    _, quick, slow = results(tokenizer, [usual, deep, usual])
    assert_same(quick, slow)
    assert [refused["row"] for refused in quick.rejected] == [1]
    assert "nested" in quick.rejected[0]["reason"] or "Recursion" in quick.rejected[0]["reason"]
    assert quick.columns.examples == 2


@pytest.fixture(scope="module")
def two_templates(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled tokenizer with a separate template for tools."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    text = (tokenizer / "chat_template.jinja").read_text()
    named = [{"name": "default", "template": text}, {"name": "tool_use", "template": "TOOLS " + text}]
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    return folder


def test_a_template_for_tools(two_templates: Path) -> None:
    quick, *both = results(two_templates, MIXED)
    assert set(quick.renderings) == {"default", "tool_use"}
    assert_same(*both)


def test_the_bundled_rows(tokenizer: Path, examples: Path) -> None:
    for name in ("chats", "pairs"):
        rows = (examples / "data" / f"{name}.jsonl").read_bytes().splitlines()
        assert_same(*results(tokenizer, rows)[1:])


# ---- why the reference rendered rows


def reasons(source: Path, tokenizer: Path, cache: Path, **options: Any) -> Counter[str]:
    chosen = prepare_options({"tokenizer": str(tokenizer), "cache": cache, "workers": "1", **options})
    return Builder([source], chosen, None).run().progress.engines.get("render", Counter())


def test_reasons_for_using_the_reference_are_reported(
    write_rows: Callable[..., Path], tokenizer: Path, tmp_path: Path
) -> None:
    usual = [{"messages": TURNS}, {"messages": TURNS, "tools": [TOOL], "chat_template_kwargs": {"x": 0.5}}]
    assert reasons(write_rows(usual), tokenizer, tmp_path / "usual") == {}
    big = {"messages": TURNS, "tools": [{**TOOL, "x": 10**30}]}
    assert reasons(write_rows([*usual, big]), tokenizer, tmp_path / "big") == {}
    huge = {"messages": TURNS, "tools": [{**TOOL, "x": 10**4000}]}
    why = "an integer of more than 4000 digits"
    assert reasons(write_rows([*usual, huge]), tokenizer, tmp_path / "huge") == {why: 1}
    off = {"the fast engine is switched off": 2}
    assert reasons(write_rows(usual), tokenizer, tmp_path / "off", fast=False) == off
    template = tmp_path / "template.jinja"
    template.write_text("{{ self | string | length }}" + (tokenizer / "chat_template.jinja").read_text())
    ((why, rows),) = reasons(write_rows(usual), tokenizer, tmp_path / "odd", template=str(template)).items()
    assert why.startswith("the template uses ")
    assert rows == 2
