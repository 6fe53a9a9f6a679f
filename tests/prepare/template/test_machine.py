"""The machine matches transformers and the reference or gives up, and never gives up on common templates and rows."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import array
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks.clock import DATE, StoppedClock
from benchmarks.models import trl_templates
from penstock.native import native
from penstock.prepare.template.bytecode import NotCompiled
from penstock.prepare.template.compiler import CompiledTemplate, conversation_layout
from penstock.prepare.template.probes import PROBES
from penstock.prepare.template.sandbox import Sandbox
from tests.prepare.template.hostile import HOSTILE
from tests.prepare.template.operations import ODD, STATEMENTS, USUAL, VALUES
from tests.prepare.template.printing import CHATS, PRINTING
from tools.fuzz import RowCheck, TemplateCheck, replay
from tools.fuzz_rows import seeds

pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")

BASE = {"documents": None, "add_generation_prompt": False, "bos_token": "<s>"}
CORPUS = sorted(Path(__file__).with_name("fuzz_corpus").glob("*.json"))
SET = "{% set v = messages[0].v %}"


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", StoppedClock)


def machine(template: str) -> CompiledTemplate:
    return CompiledTemplate(Sandbox(DATE).parse_template(template), BASE, DATE, conversation_layout([]))


def row(messages: list[Any], variables: dict[str, Any] | None = None) -> bytes:
    return json.dumps({"messages": messages, "tools": None, "variables": variables}).encode()


def by_transformers(template: str, messages: list[Any]) -> bytes | None:
    try:
        return render_jinja_template([messages], chat_template=template, bos_token="<s>", row_variable="r")[0][
            0
        ].encode()
    except Exception:
        return None


# ---- operations


def outcomes(templates: Iterable[str]) -> list[tuple[str, Any, bytes | None, bytes | str]]:
    """Each template with each value: (template, value, transformers' text, the machine's text or why it gave up)."""
    chats = [[{"role": "user", "v": value}] for value in VALUES]
    found = []
    for template in templates:
        try:
            batch = machine(SET + template).render([row(chat, {"row_variable": "r"}) for chat in chats])
        except NotCompiled:
            continue
        for k, chat in enumerate(chats):
            own = str(batch.reasons[k]) if batch.status[k] else batch.texts[k]
            found.append((template, VALUES[k], by_transformers(SET + template, chat), own))
    return found


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("table", ["usual", "odd", "statements"])
def test_operations_print_the_same_as_in_transformers(table: str) -> None:
    templates = {"usual": USUAL, "odd": ODD, "statements": STATEMENTS}[table]
    if table != "statements":
        templates = tuple("{{ " + expression + " }}" for expression in templates)
    found = outcomes(templates)
    assert len(found) > 0.85 * len(templates) * len(VALUES)
    assert [one for one in found if isinstance(one[3], bytes) and one[3] != one[2]] == []


def test_the_machine_serves_common_operations() -> None:
    templates = ["{{ " + expression + " }}" for expression in USUAL]
    found = outcomes(templates)
    assert len(found) == len(templates) * len(VALUES)
    assert [one for one in found if one[2] is not None and isinstance(one[3], str)] == []


def test_the_machine_serves_common_statements() -> None:
    served: Counter[str] = Counter()
    rendered: Counter[str] = Counter()
    for template, _, theirs, own in outcomes(STATEMENTS):
        rendered[template] += theirs is not None
        served[template] += theirs is not None and isinstance(own, bytes)
    # they use a generator twice, leak a loop, or filter by a namespace that the loop changes
    given_up = [template for template in rendered if rendered[template] and not served[template]]
    assert len(given_up) <= 7
    assert served.total() > 0.84 * rendered.total()


@pytest.mark.parametrize("exponent", range(-1074, 1024, 100))
def test_floats_print_as_in_python(exponent: int) -> None:
    values = [
        sign * 2.0**e * factor
        for e in range(exponent, min(exponent + 100, 1024))
        for sign in (1, -1)
        for factor in (1, 0.7)
    ]
    batch = machine("{{ messages[0].v }}").render([row([{"v": value}]) for value in values])
    for value, text, reason in zip(values, batch.texts, batch.reasons, strict=True):
        assert reason is None
        assert text == repr(value).encode()


def test_refusals_quote_the_template() -> None:
    batch = machine("{% if messages[0].v %}{{ raise_exception('no ' ~ messages[0].v) }}{% endif %}x").render(
        [row([{"v": "é\n"}]), row([{"v": ""}]), row([{"v": "a\0b"}])]
    )
    assert list(batch.status) == [3, 0, 2]
    assert batch.reasons[0] == "no é\n"
    assert batch.texts == [b"", b"x", b""]


# ---- ownership


@pytest.mark.parametrize("template", PRINTING, ids=range(len(PRINTING)))
def test_spans_match_the_reference(template: str) -> None:
    counts: Counter[str] = Counter()
    assert list(TemplateCheck(template).differences([*CHATS, *PROBES], counts)) == []
    assert counts["equal"] > 10 or "batch" in template


@pytest.mark.parametrize("name", trl_templates())
def test_trl_templates_match_transformers(name: str) -> None:
    check = TemplateCheck(trl_templates()[name])
    counts: Counter[str] = Counter()
    assert list(check.differences([*PROBES, *CHATS], counts)) == []
    batch = check.render(list(PROBES))
    errors = check.reference.render(PROBES).errors
    assert [batch.reasons[k] for k in range(len(PROBES)) if batch.status[k] in (1, 2) and k not in errors] == []


# ---- rows


@pytest.mark.parametrize("name", seeds())
@pytest.mark.parametrize("template", ["qwen3", "gptoss", "llama3_1", "deepseekv3"])
def test_rows_of_every_format_match_the_python_reader(name: str, template: str) -> None:
    check = RowCheck(trl_templates()[template], name)
    rows = seeds()[name][1]
    counts: Counter[str] = Counter()
    assert list(check.differences(rows, counts)) == []
    unserved = 2 if template == "gptoss" else 0  # the template fails on a tool without details, in either column order
    assert counts["served by the machine"] >= len(rows) - unserved


NAMED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A", "weight": 0.5, "train": None}]
ODD_ROWS: list[dict[str, Any]] = [
    {"messages": [{**NAMED[0], "weight": 1}, {"role": "assistant", "content": "A", "masked": True}]},
    {"messages": [NAMED[0], {"role": "assistant", "content": "A", "weight": 3.401e38}]},
    {"messages": [NAMED[0], {"role": "assistant", "content": "A", "weight": 3.4e38, "loss": True}]},
    {"messages": [NAMED[0], {"role": "assistant", "content": "A", "weight": -0.0}]},
    {"messages": [NAMED[0], {"role": "assistant", "content": "A", "weight": 2, "loss": 2.0}]},
    {"messages": [NAMED[0], {"role": "assistant", "content": "A", "weight": "1"}]},
    {"messages": NAMED, "system": "", "tools": "", "chat_template_kwargs": None, "images": []},
    {"messages": NAMED, "system": "S", "tools": "[]", "chat_template_kwargs": " ", "images": None},
    {"messages": NAMED, "tools": ['{"name": "f"}', {"name": "g"}], "chat_template_kwargs": {"messages": 1}},
    {"messages": NAMED, "images": ["a.png"]},
    {"messages": [{"role": "system", "content": "S"}, *NAMED], "system": "S"},
    {"messages": [{"role": "system", "content": "S"}, *NAMED], "system": "other"},
    {"messages": [{"role": "developer", "content": "D"}, *NAMED]},
    {"messages": [{"role": "bot", "content": "D"}, *NAMED]},
    {"messages": [NAMED[0]]},
    {"messages": []},
    {"messages": [NAMED[0], {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": " "}]}]},
    {"messages": [NAMED[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
    {"messages": [NAMED[0], {"role": "assistant", "tool_calls": [{"name": "f", "id": 1, "type": "x", "arguments": {"a": "é\n"}}]}]},
    {"messages": [NAMED[0], {"role": "assistant", "content": None, "thinking": "t"}]},
    {"messages": [NAMED[0], {"role": "assistant", "content": None, "thinking": ""}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": []}]},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}, NAMED[1]]},
    {"messages": [NAMED[0], {"role": "tool", "content": None}, NAMED[1]]},
    {"messages": [NAMED[0], {"role": "assistant", "content": "x <|im_end|> y", "name": "</s>"}]},
]  # fmt: skip
SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "A"}]
ODD_SHAREGPT: list[dict[str, Any]] = [
    {"conversations": [SHARED[0], {"from": "function_call", "value": '{"name": "f", "arguments": {"x": "\\u00e9"}}'}]},
    {"conversations": [SHARED[0], {"from": "function_call", "value": '[{"function": {"name": "f"}}, {"name": "g"}]'}]},
    {"conversations": [SHARED[0], {"from": "function_call", "value": "not JSON"}]},
    {"conversations": [SHARED[0], {"from": "function_call", "value": "[]"}]},
    {"conversations": [SHARED[0], {"from": "gpt", "value": "A", "content": "B"}]},
    {"conversations": [{"from": "human", "value": "q", "loss": False}, {"from": "chatgpt", "value": "A", "loss": 1}], "system": "S"},
]  # fmt: skip
ODD_ANSWERS: list[dict[str, Any]] = [
    {"instruction": "i", "input": None, "output": "o", "history": [["a", "b"], ["", ""]], "system": "S"},
    {"instruction": "", "input": "x", "output": ""},
    {"instruction": "i", "input": ["x"], "output": "o"},
    {"instruction": "i", "input": "é\n", "output": "o", "history": [["a"]]},
    {"instruction": None, "input": "x", "output": "o"},
]


@pytest.mark.parametrize(
    "template", ["qwen3", "gptoss", "llama3_1", "cohere2", "deepseekv3", "gemma3", "keys", "parts"]
)
@pytest.mark.parametrize(
    ("name", "rows"), [("messages", ODD_ROWS), ("sharegpt", ODD_SHAREGPT), ("alpaca", ODD_ANSWERS)]
)
def test_unusual_rows_match_the_python_reader_or_are_left_to_it(name: str, rows: list[Any], template: str) -> None:
    own = {
        "keys": "{% for m in messages %}<{{ m.role }}>{% for k in messages[0] %}{{ k }} {% endfor %}{{ m.content }}</s>{% endfor %}",
        "parts": "{% for m in messages %}<{{ m.role }}>{{ messages[0].content[0].type }}{{ m.content[0].text }}</s>{% endfor %}",
    }
    check = RowCheck(own.get(template) or trl_templates()[template], name)
    given = [json.dumps(one, ensure_ascii=one is rows[0]).encode() for one in rows]
    assert list(check.differences(given, Counter())) == []


def test_a_refused_row_does_not_shift_the_weights_of_others() -> None:
    template = "{% for m in messages %}{{ raise_exception('no') if m.role == 'developer' }}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    refused = [{"role": "developer", "content": "D"}, *NAMED]
    for unusual in ({}, {"x": 1, "y": 2}):  # a repeated column is left to Python
        rows = [
            json.dumps({**unusual, "messages": chat}).replace('"y"', '"x"') for chat in (refused, NAMED, refused, NAMED)
        ]
        assert list(RowCheck(template, "messages").differences([one.encode() for one in rows], Counter())) == []


BROKEN_VALUES = (
    *(b"01", b"1.", b".5", b"+1", b"-", b"1e", b"NaN", b"Infinity", b"1e400", b"tru", b"nul", b"[1,]", b"[1 2]", b"{1: 2}"),
    *(b'"', b'"\t"', b'"\n"', b'"\\x"', b'"\\ud800"', b'"\\ud800\\u0041"', b'"\\udc00"', b'"\\u12"', b'"\\u12G4"', b'"\\'),
    *(b'"\xff"', b'"\xed\xa0\x80"', b'"\xc3\\u00a9"', b'"\xc0\xaf"', b'"\xe0\x80\xaf"', b'"\xf4\x90\x80\x80"', b'"\xe2\x82"'),
    *(b'{"a" 1}', b'{"a": 1,}', b"'a'", b"1} {", b"1}x", b"[" * 5000 + b"]" * 5000, b"1" * 4001, b"// a\n1"),
)  # fmt: skip
BROKEN_ROWS = (
    b"",
    b" ",
    b"{",
    b"[]",
    b"null",
    b'{"messages": [}',
    b"\xef\xbb\xbf{}",
    b'{"messages": [], "messages": []}',
)


def test_broken_json_is_left_to_python() -> None:
    check = RowCheck(PRINTING[0], "messages")
    good = json.dumps({"messages": NAMED}).encode()
    broken = [*BROKEN_ROWS, *(good[:-1] + b', "x": ' + value + b"}" for value in BROKEN_VALUES)]
    counts: Counter[str] = Counter()
    assert list(check.differences([row for one in broken for row in (one, good)], counts)) == []
    assert counts["served by the machine"] == counts["left to the reader"] == len(broken)


ODD_JSON = (
    *(b'"\\b\\f\\n\\r\\t\\/\\\\\\""', b'"\\u0041\\u00e9\\u65e5\\ud83d\\ude00\\u0000x"', b'"\\uD83D\\uDE00\\uABcd"', b'"\x7f\xc2\x80"'),
    *(b'{"a": 1, "b": 2, "a": 3}', b'{"a": {"b": 1}, "a": {"c": [2]}}', b'[{"": 1, "": 2}]', b' [ 1 , 2\t,\r\n3 ] ', b"{ }", b"[ ]"),
    *(b"-0", b"-0.0", b"0", b"1E5", b"1e+5", b"-1.5e-3", b"0.1e1", b"123456789012345678", b"-123456789012345678", b"1e-400", b"5e-324"),
    *(b'"' + b"x" * 15 + b'"', b'"' + b"x" * 16 + b'\\n"', b'"' + "é".encode() * 40 + b'\\n"', b'"' + b"\\n" * 40 + b'"', b'"a\\\\"'),
    *(b"true", b"false", b"null", b"[[[[]]]]", b'{"a": [], "b": {}}', '"日本語😀\u2028"'.encode(), b'"\xf4\x8f\xbf\xbf\xee\x80\x80"'),
)  # fmt: skip


def test_json_is_parsed_as_in_python() -> None:
    template = "{{ messages[0].v|tojson }} {{ messages[0].v }} {{ messages[0].v is integer }}"
    rows = [b'{"messages": [{"v": ' + value + b'}], "tools": null, "variables": null}' for value in ODD_JSON]
    batch = machine(template).render(rows)
    assert batch.texts == [by_transformers(template, json.loads(row)["messages"]) for row in rows]


# ---- the loader


def program(code: list[int], constants: list[Any] | None = None, macros: list[Any] | None = None) -> Any:
    assert native is not None
    assembled = array.array("i", code).tobytes()
    return native.Program(assembled, constants or ["a", 1, ["x"]], macros or [], 2, 2, conversation_layout([]))


def test_valid_bytecode_is_loaded() -> None:
    assert native is not None
    op = {name: number for number, name in enumerate(native.OPS)}
    made = program([op["PRINT_CONST"], 0, op["JUMP"], 4, op["CONST"], 1, op["PRINT"], op["HALT"]])
    assert made.render([row([])])[1] == [b"a1"]


def test_invalid_bytecode_is_refused() -> None:
    assert native is not None
    op = {name: number for number, name in enumerate(native.OPS)}
    halt = op["HALT"]
    bad: list[tuple[Any, ...]] = [
        ([],),
        ([len(op), halt],),
        ([-1, halt],),
        ([op["CONST"]],),
        ([op["CONST"], 0],),
        ([halt, op["POP"]],),
        ([op["CONST"], 3, halt],),
        ([op["CONST"], -1, halt],),
        ([op["PRINT_CONST"], 1, halt],),
        ([op["LOAD_GLOBAL"], 2, halt],),
        ([op["LOAD_LOCAL"], 0, halt],),
        ([op["JUMP"], 3, halt],),
        ([op["JUMP"], -1, halt],),
        ([op["JUMP"], 1, halt],),
        ([op["JUMP_FALSE"], 3, 2, halt],),
        ([op["METHOD"], len(native.METHODS), 0, halt],),
        ([op["FILTER"], len(native.FILTERS), 1, 0, halt],),
        ([op["TEST"], len(native.TESTS), 0, halt],),
        ([op["CALL"], 0, 0, 1, 0, halt],),
        ([op["CONST"], 0, op["CALL_PRINT"], 0, 0, 3, 4, halt], ["a", 1, ["x"], []]),
        ([op["MACRO"], 0, op["POP"], halt],),
        ([op["LOAD_OUTER"], 1, 0, op["POP"], halt],),
        (
            [
                op["LIST"],
                0,
                op["LOOP_BEGIN"],
                op["LOOP_RECURSIVE"],
                op["LOOP_NEXT"],
                8,
                op["JUMP"],
                4,
                op["LOOP_END"],
                halt,
            ],
        ),
        ([op["LOOP_ACCEPT"], halt],),
        ([op["LOOP_DONE"], halt],),
        ([op["SUM"], -1, halt],),
        ([op["LIST"], 1 << 20, halt],),
        ([halt], [object()]),
        ([halt], ["\ud800"]),
        ([halt, op["LOAD_LOCAL"], 1, op["RETURN"]], ["a"], [(1, 0, 1, -1, 0, ())]),
        ([halt, op["RETURN"]], ["a"], [(2, 0, 0, -1, 0, ())]),
        ([halt, op["RETURN"]], ["a"], [(1, 1, 0, -1, 0, ("x",))]),
        ([halt, op["RETURN"]], ["a"], [(1, 0, 1 << 20, -1, 0, ())]),
        ([halt, op["RETURN"]], ["a"], [(1, 1, 1, -1, 0, ())]),
        ([halt, op["RETURN"]], ["a"], [(1, 0, 0, 0, 0, ())]),
        ([halt, op["RETURN"]], ["a"], [(1, 0, 1, -1, 3, ())]),
        ([halt, op["MACRO"], 0, op["POP"], op["RETURN"]], ["a"], [(1, 0, 0, -1, 0, ())]),
        (
            [halt, op["LOAD_OUTER"], 1, 1, op["POP"], op["RETURN"], op["RETURN"]],
            ["a"],
            [(6, 0, 1, -1, 0, ()), (1, 0, 0, 0, 0, ())],
        ),
    ]
    for arguments in bad:
        with pytest.raises(ValueError):
            program(*arguments)
    with pytest.raises(ValueError):
        native.Program(b"abc", [], [], 0, 0, conversation_layout([]))
    with pytest.raises(ValueError):
        native.Program(array.array("i", [halt]).tobytes(), [], [], 0, 0, {})


def test_rows_must_be_a_list_of_bytes() -> None:
    made = machine("x")._program
    for wrong in ("x", (b"x",), ["x"], [None]):
        with pytest.raises(TypeError):
            made.render(wrong)  # type: ignore[arg-type]
    assert made.render([])[1] == []


# ---- limits

_BIG = "{% set big = 'a b' * 3000000 %}{% set same = 'a b' * 3000000 %}"
_KEYS = ", ".join(f"'k{i}': 1" for i in range(900))
_BACKWARDS = ", ".join(f"'k{i}': 1" for i in reversed(range(900)))


def _often(body: str, before: str = _BIG) -> str:
    return before + "{% for i in range(99999) %}{% for j in range(99) %}" + body + "{% endfor %}{% endfor %}"


WORSE = {
    "search": "{{ ('a' * 8000000).count('a' * 4000000 ~ 'ba') }}",
    "search by replace": "{{ ('a' * 8000000).replace('a' * 4000000 ~ 'ba', 'x')|length }}",
    "search by split": "{{ ('a' * 8000000).split('a' * 4000000 ~ 'ba')|length }}",
    "search by in": "{{ ('a' * 4000000 ~ 'ba') in ('a' * 8000000) }}",
    "strip spaces": _often("{% set x = big.strip() %}", "{% set big = ' ' * 9000000 %}"),
    "dropped captures": _often("{% set x %}{{ big }}{% continue %}{% endset %}"),
    "large keys": _often("{% set x = d[big] %}", _BIG + "{% set d = {same: 1} %}"),
    "large keys by get": _often("{% set x = d.get(big) %}", _BIG + "{% set d = {same: 1} %}"),
    "large keys in dicts": _often("{% set x = {big: 1, same: 2} %}"),
    "large prefixes": _often("{% set x = big.removeprefix(same) %}"),
    "large constants": _often("{% if big == '" + "a" * 1000000 + "' %}{% endif %}", "{% set big = 'a' * 1000000 %}"),
    "large items": _often("{% if big in l %}{% endif %}", _BIG + "{% set l = [same] %}"),
    "format": _often("{% set x = '{}'.format(big) %}"),
    "many keys": _often("{% set x = d.zzz %}" * 200, "{% set d = {" + _KEYS + "} %}"),
    "many keys compared": _often("{% if d == e %}{% endif %}", "{% set d = {" + _KEYS + "} %}{% set e = {" + _BACKWARDS + "} %}"),
    "many numbers": _often("{% set x = l|min %}", "{% set l = range(99999) %}"),
    "long bodies": _often("{% if d.a %}1{% endif %}" * 20000, "{% set d = {} %}"),
    "long macros": "{% macro f() %}" + "{% set x = 1 %}" * 3000 + "{% endmacro %}" + _often("{% set y = f() %}", ""),
    "many spans": "{% for m in messages %}{% for i in range(99999) %}{{ messages[0].content|list|join('-') }}{% endfor %}{% endfor %}",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HOSTILE, *WORSE])
def test_hostile_templates_are_stopped_quickly(name: str) -> None:
    try:
        made = machine(HOSTILE.get(name) or WORSE[name])
    except NotCompiled:
        return
    found: list[Any] = []
    chat = [{"role": "user", "content": "ab" * 500}, {"role": "assistant", "content": "x"}]

    def work() -> None:
        begun = time.thread_time()
        found.append(made.render([row(chat)]))
        found.append(time.thread_time() - begun)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(60)
    assert not worker.is_alive(), "still running after a minute"
    batch, seconds = found
    assert seconds < 10
    assert batch.status[0] == 2
    assert batch.reasons[0]
    assert batch.data == b""


def test_nesting_is_accepted_up_to_the_limit() -> None:
    deep: Any = "x"
    rows = []
    for depth in range(1, 250):
        deep = [deep]
        rows.append((depth, row([{"v": deep}])))
    batch = machine("{{ messages[0].v|tojson }}").render([data for _, data in rows])
    served = [depth for (depth, _), status in zip(rows, batch.status, strict=True) if status == 0]
    assert served == list(range(1, len(served) + 1))
    assert 150 < len(served) < 220
    assert batch.texts[99] == b"[" * 100 + b'"x"' + b"]" * 100


def test_giving_up_on_a_row_does_not_affect_the_next() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{% set x %}{{ m.content }}{{ m.v.strip() }}{% endset %}{{ x }}{% endfor %}"
    good = [{"role": "user", "content": "é", "v": "a "}, {"role": "assistant", "content": "b", "v": " c"}]
    bad = [*good, {"role": "user", "content": "q", "v": 5}]
    alone = machine(template).render([row(good)])
    mixed = machine(template).render([row(bad), row(good), b"{", row(good), row(bad)])
    assert list(mixed.status) == [2, 0, 1, 0, 2]
    assert mixed.texts == [b"", alone.texts[0], b"", alone.texts[0], b""]
    assert mixed.roles == alone.roles * 2
    spans = array.array("i", alone.spans).tolist()
    assert array.array("i", mixed.spans).tolist() == [
        value if place % 4 else number for number in (1, 3) for place, value in enumerate(spans)
    ]


# ---- branches


def test_a_branch_is_new_until_a_row_takes_it() -> None:
    made = machine("{% if messages[0].v %}a{% else %}b{% endif %}{{ 'x' if messages[0].v == 2 }}")
    assert made.paths == (0, 4)
    batch = made.render([row([{"v": value}]) for value in (0, 0, 1, 2, 2, 1, 0)])
    assert list(batch.fresh) == [1, 0, 1, 1, 0, 0, 0]
    assert made.paths == (4, 4)
    made.forget()
    assert made.paths == (0, 4)
    assert list(made.render([row([{"v": 1}])]).fresh) == [1]


def test_giving_up_on_a_row_marks_no_branch() -> None:
    made = machine("{% if messages[0].v %}{{ messages[0].v.strip() }}{% endif %}")
    batch = made.render([row([{"v": 1}]), row([{"v": "a"}]), row([{"v": "b"}])])
    assert list(batch.status) == [2, 0, 0]
    assert list(batch.fresh) == [0, 1, 0]


def test_a_refused_row_has_no_tags() -> None:
    made = machine(
        "{% for m in messages %}{% generation %}{{ m.v }}{% endgeneration %}{{ m.v or raise_exception('no') }}{% endfor %}"
    )
    batch = made.render([row([{"v": "ab"}, {"v": ""}]), row([{"v": "cd"}])])
    assert list(batch.status) == [3, 0]
    assert np.frombuffer(batch.tags, np.int32).tolist() == [1, 0, 2]


# ---- threads


def test_two_programs_render_in_two_threads() -> None:
    rows = [
        row([{"role": "user", "content": f"{k} é" * (k % 50)}, {"role": "assistant", "content": "1.5"}])
        for k in range(4000)
    ]
    templates = (PRINTING[0], "{% for m in messages %}{{ m.content|upper|tojson }}{{ 0.1 }}{% endfor %}")
    expected = [machine(template).render(rows).data for template in templates]
    machines = [machine(template) for template in templates]
    found: list[list[bytes]] = [[], []]

    def work(k: int) -> None:
        for _ in range(5):
            found[k].append(machines[k].render(rows).data)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[text] * 5 for text in expected]


def test_one_program_renders_one_batch_at_a_time() -> None:
    made = machine("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    refused: list[str] = []

    def work() -> None:
        try:
            made.render([row([])] * 20)
        except RuntimeError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(refused) <= {"a program renders one batch at a time"}
    assert refused


# ---- regression tests from the fuzzer


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_fuzzer_findings_stay_fixed(path: Path) -> None:
    assert replay(json.loads(path.read_text())) == []
