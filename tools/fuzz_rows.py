"""Rows for the fuzzer: valid ones of every format that the machine reads, and mutations of them."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.prepare.chat.formats import ColumnMapping, FormatOptions, detect

ROOT: Final = Path(__file__).parent.parent

TEXTS: Final = (
    *("", " ", "\n", "\u00a0x\u2003", "\x1cx\x1f\x85", "\u200bz", "</think>", "<think>a</think>b", "a</think>\n\nb"),
    *("<think>\n\na\n</think>\n\nb</think>c", "Σας", "İstanbul", "ß", "é日本語😀", "a\u0301", "it's", 'say "x"', "\\n\\"),
    *("\x00\x07\x7f", "\u2028\u2029", "\ue000", "\U000e0001", "user", "assistant", "system", "tool", "developer"),
    *("function", "ipython", "items", "get", "type", "text", "image", "__class__", "_x", "<|im_end|>", "&<>'\"", "{}"),
    *("<tool_response>a</tool_response>", "[]", '{"a": 1}', '[{"name": "f"}]', "null", " [1] ", "%s", "x" * 300),
    *("function_call", "observation", "human", "gpt", "\u00ad\u0600", "\u0378", "<|endoftext|>", "{{ x }}", "\r", "a\r\nb"),
)  # fmt: skip
NUMBERS: Final = (
    *(0, 1, -1, 7, 10**17, -(10**17), 10**18, 10**19, 10**30, 2**53 + 1, 0.1, 1e22, 1.5, -0.0, 0.0, 1e-7, 5e-324),
    *(1.7976931348623157e308, 123456789.123456789, 1e16, 1e15, 100.0, 3.14, 3.401e38, 3.5e38, 1e39, 2.0**-44, 2.0**70),
)  # fmt: skip
CALL: Final = {"name": "f", "arguments": {"x": [1, 2.5, None, "é"], "y": {"b": True}}}
NESTED: Final[tuple[Any, ...]] = (
    *([], [1, 2], ["a", "b"], [{"type": "text", "text": "hi "}, {"type": "image"}], [{"type": "text", "text": " x\n"}]),
    *([{"type": "text"}], ["s"], {}, {"a": 1}, {"items": [1]}, {"type": "text", "text": "q"}, CALL, [CALL], [[]], [None]),
    *([{"type": "function", "function": CALL}], [{"id": "c1", "function": {**CALL, "arguments": '{"a": "\\n\\u00e9"}'}}]),
    *({"B": 1, "a": 2, "A": 3, "b": 4}, {"é": 1, "E": 2, "Ω": 3, "z": 0.5}, [[[[[[]]]]]], {"a": {"a": {"a": {}}}}),
    *([{"id": 1, "type": "function", "name": "g", "arguments": "{}"}], [{"type": "text", "text": "a"}] * 2),
)  # fmt: skip
KEYS: Final = (
    *("content", "role", "tool_calls", "name", "reasoning_content", "thinking", "reasoning", "tool_call_id", "arguments"),
    *("function", "type", "text", "id", "items", "get", "parameters", "properties", "required", "enum", "description"),
    *("keys", "title", "image", "images", "tool_plan", "citations", "return", "default", "pop", "weight", "masked"),
    *("train", "loss", "loss_scale", "tools", "system", "chat_template_kwargs", "history", "input", "from", "value"),
    *("enable_thinking", "thinking_budget", "documents", "range", "namespace", "add_generation_prompt", "messages"),
)  # fmt: skip
CUTS: Final = (
    *(b'"', b"\\", b"\\u", b"\\ud83d", b"\\ud83d\\ude00", b"\\udc00", b"\\u0000", b"\\u00e9", b"{", b"[", b"}", b"]"),
    *(b",", b":", b"\xe9", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"1e5", b"-", b"0", b"NaN", b"Infinity"),
    *(b"null", b"true", b"\t", b"\x00", b"1.", b".5", b"01", b"+1", b"1e", b"1E+400", b"[[[[[[[[", b"[" * 300, b" ", b"\n"),
    *(b'"a":1,', b'"role":"user",', b"\xef\xbb\xbf", b"\\/", b"\\b", b"\\x", b"'", b"/**/", b"123456789012345678901"),
)  # fmt: skip


def _tool(text: bool) -> Any:
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "array", "items": {"type": "integer"}}},
        "required": ["x"],
    }
    tools = [{"type": "function", "function": {"name": "f", "description": "Does <f>.", "parameters": parameters}}]
    return json.dumps(tools) if text else tools


def _messages() -> list[dict[str, Any]]:
    asked = {"role": "user", "content": "What is 1 + 1?"}
    said = {"role": "assistant", "content": "Two."}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": CALL}],
    }
    text = json.dumps(CALL["arguments"])
    bare = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": text}], "reasoning_content": "hm"}
    result = {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": '{"r": 1}'}
    parts = {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}
    thought = {"role": "assistant", "content": "<think>\nso\n</think>\n\nDone.", "thinking": "so"}
    system = {"role": "system", "content": "Be brief. é"}
    weighted = [{**asked, "weight": 0}, {**said, "weight": 0.5}, asked, {**said, "masked": True}]
    return [
        {"messages": [asked, said]},
        {"messages": [system, asked, said, asked, thought]},
        {"messages": [asked, called, result, said], "tools": _tool(False)},
        {"messages": [system, asked, bare, result, said], "tools": _tool(True)},
        {"messages": [parts, said, parts, said], "system": "Beside."},
        {"messages": weighted, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [asked, {**said, "reasoning": "r"}], "chat_template_kwargs": '{"thinking": true}', "other": [1]},
        {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": called["tool_calls"]}], "tools": []},
    ]


def _sharegpt() -> list[dict[str, Any]]:
    asked, said = {"from": "human", "value": "Hi\n"}, {"from": "gpt", "value": "Hello <b>."}
    called = {"from": "function_call", "value": json.dumps(CALL)}
    calls = {"from": "function_call", "value": json.dumps([CALL, {"type": "function", "function": CALL}])}
    result = {"from": "observation", "value": "3"}
    return [
        {"conversations": [asked, said]},
        {
            "conversations": [{"from": "system", "value": "s"}, asked, {**said, "train": False}],
            "tools": json.dumps([CALL]),
        },
        {"conversations": [asked, called, result, said], "tools": _tool(True), "system": "Be."},
        {"conversations": [asked, calls, result, said]},
    ]


def _answers(query: str, response: str) -> list[dict[str, Any]]:
    return [
        {query: "Say é.", response: "é"},
        {query: "Sum", "input": "1\n2", response: "3", "system": "s"},
        {query: "Go on", "input": "", response: "…", "history": [["a", "b"], ["c", "d"]], "tools": _tool(False)},
        {query: "", "input": "x", response: "", "history": [], "chat_template_kwargs": {"a": 1}},
    ]


def seeds(folder: Path | None = None, limit: int = 40) -> dict[str, tuple[ColumnMapping, list[bytes]]]:
    """Valid rows by format, with the mapping that reads them; `folder` adds rows from its JSON-lines files."""
    made: dict[str, list[Any]] = {
        "messages": _messages(),
        "sharegpt": _sharegpt(),
        "alpaca": _answers("instruction", "output"),
        "query_response": _answers("query", "response"),
    }
    found: dict[str, tuple[ColumnMapping, list[bytes]]] = {}
    for name, plain in made.items():
        rows = [*plain, *(dict(reversed(row.items())) for row in plain if len(row) > 1)]  # messages first, and last
        found[name] = detect(rows, FormatOptions(format=name)), [json.dumps(row).encode() for row in rows]
    more = sorted(folder.glob("*.jsonl")) if folder is not None else []
    for file in [ROOT / "examples" / "data" / "chats.jsonl", *more]:
        lines = [line for line in file.read_bytes().splitlines() if line and len(line) < 20_000]
        lines = lines[:: max(1, len(lines) // limit)]
        mapping = detect(list(map(orjson.loads, lines)), FormatOptions())
        if mapping.format in found:
            found[mapping.format] = found[mapping.format][0], found[mapping.format][1] + lines
    return found


def odd_value(rnd: random.Random) -> Any:
    """A value that is unusual in rows."""
    kind = rnd.random()
    if kind < 0.5:
        return rnd.choice(TEXTS)
    if kind < 0.65:
        return rnd.choice(NUMBERS)
    return copy.deepcopy(rnd.choice(NESTED)) if kind < 0.9 else rnd.choice((None, True, False))


def mutated_value(rnd: random.Random, value: Any) -> Any:
    """A copy of a JSON value with a few parts replaced, removed, added, repeated or lengthened."""
    value = copy.deepcopy(value)
    for _ in range(rnd.choice((1, 1, 2, 3, 5))):
        places = _places(value)
        if not places:
            break
        inside, key = rnd.choice(places)
        how = rnd.random()
        if how < 0.45:
            inside[key] = odd_value(rnd)
        elif how < 0.57:
            del inside[key]
        elif how < 0.75 and isinstance(inside, dict):
            inside[rnd.choice(KEYS)] = odd_value(rnd)
        elif how < 0.82 and isinstance(inside, list):
            inside.insert(key, odd_value(rnd))
        elif how < 0.88 and isinstance(inside, list):
            inside.append(copy.deepcopy(inside[key]))
        elif isinstance(inside[key], str):
            text, at = inside[key], rnd.randrange(len(inside[key]) + 1)
            inside[key] = text[:at] + rnd.choice(TEXTS) + text[at + rnd.choice((0, 0, 3)) :]
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every assignable place in a value, as (container, key)."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        inside = todo.pop()
        if isinstance(inside, dict | list):
            for key in list(inside) if isinstance(inside, dict) else range(len(inside)):
                found.append((inside, key))
                todo.append(inside[key])
    return found


def mutated_bytes(rnd: random.Random, row: bytes) -> bytes:
    """A row with some bytes changed, removed, added or repeated."""
    data = bytearray(row)
    for _ in range(rnd.choice((1, 1, 2, 4))):
        at, how = rnd.randrange(len(data)), rnd.random()
        if how < 0.25:
            data[at] = rnd.randrange(256)
        elif how < 0.35:
            data[at] ^= 1 << rnd.randrange(8)
        elif how < 0.5:
            del data[at : at + rnd.randrange(1, 5)]
        elif how < 0.85:
            data[at:at] = rnd.choice(CUTS)
        elif how < 0.95:
            other = rnd.randrange(len(data))
            data[at:at] = data[other : other + rnd.randrange(1, 40)]
        else:
            del data[at:]
        if not data:
            data = bytearray(b"{")
    return bytes(data)


def mutated_row(rnd: random.Random, row: bytes, *, bytes_share: float = 0.3) -> bytes:
    """A mutated row, usually still valid JSON."""
    if rnd.random() >= 0.5 * bytes_share:
        value = mutated_value(rnd, orjson.loads(row))
        row = json.dumps(value, ensure_ascii=rnd.random() < 0.3).encode("utf-8", "surrogatepass")
    return mutated_bytes(rnd, row) if rnd.random() < bytes_share else row
