"""Every kind of bad input gives an error with file and line; nothing is lost, and the ledger adds up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PenstockError, RowError, SourceError, TemplateError, TokenizerError, UsageError

Rows = Callable[..., Path]
GOOD = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]}


def turns(*pairs: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs], **more}


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"q": 1}}}
BAD: dict[str, tuple[object, str, str]] = {
    "invalid JSON": (b'{"messages": [', "invalid_json", "invalid JSON at byte 14"),
    "an id without an end": (
        b'{"id":"\\u0001null,"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}',
        "invalid_json", "invalid JSON at byte 19",
    ),
    "invalid UTF-8": (b'{"messages": "\xff"}', "invalid_utf8", "not valid UTF-8"),
    "lone surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone_surrogate", "surrogate"),
    "not an object": (b"[1, 2]", "not_an_object", "object"),
    "unknown role": (turns(("bot", "x")), "unknown_role", "role 'bot' is unknown; expected"),
    "no assistant": (turns(("user", "x")), "no_assistant", "no message has the role assistant"),
    "content of the wrong type": (turns(("user", 5), ("assistant", "x")), "bad_content", "content"),
    "an image": (
        turns(("user", [{"type": "image", "image": "a.png"}]), ("assistant", "x")), "image_content", "image",
    ),
    "a missing column": ({"conversation": []}, "missing_column", "conversation"),
    "no messages": ({"messages": []}, "no_messages", "empty"),
    "a template error": (turns(("user", "RAISE"), ("assistant", "x")), "template", "RAISE is not allowed"),
    "a bad weight": (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": -1}]},
        "bad_weight", "weight",
    ),
    "a weight beyond 32 bits": (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 1e39}]},
        "bad_weight", "messages[1].weight is larger than 3.4e+38. Give a smaller weight",
    ),
}  # fmt: skip


@pytest.fixture
def picky(tokenizer: Path, tmp_path: Path) -> Path:
    """A variant of the bundled template that refuses a word and doesn't print tools."""
    path = tmp_path / "picky.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.content == 'RAISE' %}{{ raise_exception('RAISE is not allowed') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return path


@pytest.mark.parametrize("name", BAD)
def test_error_names_file_line_and_remedy(
    name: str, write_rows: Rows, tokenizer: Path, picky: Path, tmp_path: Path
) -> None:
    row, kind, text = BAD[name]
    source = write_rows([GOOD, GOOD, row, GOOD])
    with pytest.raises(RowError) as caught:
        ps.prepare(source, tokenizer=tokenizer, template=picky, cache=tmp_path / "c")
    assert caught.value.kind == kind
    assert str(caught.value).startswith(f"{source}:3: ")
    assert text in str(caught.value)
    # the slice is stored with its rejected row: another run raises the same error
    with pytest.raises(RowError, match=r"rows\.jsonl:3: "):
        ps.prepare(source, tokenizer=tokenizer, template=picky, cache=tmp_path / "c")


def test_quarantine_keeps_good_rows_and_stores_bad_ones(
    write_rows: Rows, tokenizer: Path, picky: Path, tmp_path: Path
) -> None:
    source = write_rows([GOOD, *(row for row, _, _ in BAD.values()), "", GOOD])
    options: dict[str, Any] = {"tokenizer": tokenizer, "template": picky, "cache": tmp_path / "c"}
    ds = ps.prepare(source, **options, on_bad_row="quarantine", quarantine_file=tmp_path / "aside.jsonl")
    assert len(ds) == 2
    assert ds.ledger.rows == 2 + len(BAD) == ds.ledger.kept + sum(ds.ledger.rejected.values())
    assert ds.ledger.rejected == Counter(kind for _, kind, _ in BAD.values())
    aside = [json.loads(line) for line in (tmp_path / "aside.jsonl").read_text().splitlines()]
    assert [entry["where"] for entry in aside] == [f"{source}:{n}" for n in range(2, 2 + len(BAD))]
    assert aside[0]["data"] == '{"messages": ['
    assert aside[list(BAD).index("invalid UTF-8")]["data"] == {"base64": "eyJtZXNzYWdlcyI6ICL/In0="}
    # the same slices still stop a build with `error`
    with pytest.raises(RowError, match=r"rows\.jsonl:2: "):
        ps.prepare(source, **options)


def test_a_row_that_is_too_long(write_rows: Rows, tokenizer: Path, tmp_path: Path) -> None:
    source = write_rows([GOOD, turns(("user", "x" * 5000), ("assistant", "y"))])
    with pytest.raises(RowError, match=r"rows\.jsonl:2: the row has 5,\d+ bytes, more than 1,000"):
        ps.prepare(source, tokenizer=tokenizer, cache=tmp_path / "c", max_row_bytes=1000)


def test_tool_calls_that_the_template_drops(write_rows: Rows, tokenizer: Path, picky: Path, tmp_path: Path) -> None:
    row = {
        "messages": [
            *GOOD["messages"],
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ]
    }
    options: dict[str, Any] = {"tokenizer": tokenizer, "template": picky, "cache": tmp_path / "c"}
    with pytest.raises(RowError, match=r"rows\.jsonl:1: the chat template drops the tool calls"):
        ps.prepare(write_rows([row]), **options)
    ds = ps.prepare(write_rows([row]), **options, dropped_tool_calls="keep")
    assert ds.ledger.notes["tool_calls_dropped"] == 1


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (b"", SourceError, "empty"),
        (b"\n\n", SourceError, "no rows"),
        (b'{"foo": 1, "bar": 2}\n', SourceError, "foo"),
    ],
)
def test_files_without_rows(
    content: bytes, error: type[PenstockError], text: str, tmp_path: Path, tokenizer: Path
) -> None:
    source = tmp_path / "x.jsonl"
    source.write_bytes(content)
    with pytest.raises(error, match=text):
        ps.prepare(source, tokenizer=tokenizer, cache=tmp_path / "c")


def test_invalid_arguments(examples: Path, tokenizer: Path, tmp_path: Path) -> None:
    source = examples / "data" / "chats.jsonl"
    with pytest.raises(UsageError, match="unknown option 'tokeniser'. Did you mean 'tokenizer'?"):
        ps.prepare(source, tokeniser="x")
    with pytest.raises(UsageError, match="no tokenizer given"):
        ps.prepare(source)
    with pytest.raises(UsageError, match="regions"):
        ps.prepare(source, tokenizer=tokenizer, regions="x")
    with pytest.raises(SourceError, match="chat.jsonl"):
        ps.prepare(examples / "data" / "chat.jsonl", tokenizer=tokenizer, cache=tmp_path)
    with pytest.raises(TokenizerError, match=r"no tokenizer.json \(found: chats.jsonl, pairs.jsonl\)"):
        ps.prepare(source, tokenizer=examples / "data", cache=tmp_path)
    with pytest.raises(TemplateError, match="no such file"):
        ps.prepare(source, tokenizer=tokenizer, template="nowhere.jinja", cache=tmp_path)
    with pytest.raises(TemplateError, match="has no chat template. Give one with template="):
        (tmp_path / "bare").mkdir()
        (tmp_path / "bare" / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
        ps.prepare(source, tokenizer=tmp_path / "bare", cache=tmp_path)


def test_a_reason_that_is_a_sentence_gets_no_second_full_stop() -> None:
    assert str(RowError("template", "it said: Be kind.", "Change the row")) == "it said: Be kind. Change the row"
    assert str(RowError("template", "it said: no", "Change the row", "a:1")) == "a:1: it said: no. Change the row"
