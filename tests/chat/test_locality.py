"""Which templates are called local, which never may be, and the promise itself, held against rendered text."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import chain, pairwise
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import nodes

from benchmarks.conformance import trl_templates
from penstock.chat.conversation import Message
from penstock.chat.engine import TemplateEngine
from penstock.chat.locality import Locality, find_locality
from penstock.chat.sandbox import Sandbox
from penstock.chat.sentinels import CONTROL
from penstock.chat.sorts import NotLocal
from penstock.chat.truths import Truths
from penstock.errors import RowError
from tests.chat.engine_probes import BATTERY, DATE, TOKENS
from tests.chat.splitting import assistant, calls, returns, user
from tests.chat.test_parts import CHATML, NO_PROMPT, THINKS

PRINTED = "<{{ m.role }}>{{ m.content }}</>"
CALL = "[{{ c.function.name }}{{ c.function.arguments | tojson }}]"


def each(text: str) -> str:
    """A template that prints this before each message; what precedes a bar is printed once. Whole ones stay."""
    before, _, body = text.rpartition("¦")
    return text if "for m in" in text else f"{before}{{% for m in messages %}}{body}{PRINTED}{{% endfor %}}"


def each_call(text: str) -> str:
    """A template that prints this before each call."""
    return f"{{% for m in messages %}}{PRINTED}{{% for c in m.tool_calls %}}{text}{CALL}{{% endfor %}}{{% endfor %}}"


def parse(template: str) -> nodes.Template:
    return Sandbox(DATE, CONTROL).parse_template(template)


def locality(template: str, **variables: Any) -> Locality | None:
    try:
        return find_locality(parse(template), {"add_generation_prompt": False, **TOKENS, **variables})
    except NotLocal:
        return None


def reading(*keys: str, calls: bool = True) -> Locality:
    return Locality(frozenset(keys), calls)


def cases(table: dict[str, tuple[str, ...]]) -> list[Any]:
    return [pytest.param(text, id=f"{why}-{number}") for why in table for number, text in enumerate(table[why])]


WITHOUT_CALLS: Final = reading("tool_calls", calls=False)  # messages that have calls are not served
LOCAL: Final[dict[str, tuple[str, ...]]] = {
    "words, whole or trimmed": (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] | trim + eos_token }}{% endfor %}",
        "{% for m in messages %}{{ m.role ~ m.content.strip() }}|{% endfor %}",
        "{% set content = m.content | trim %}{{ content }}|",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% if m.content is string and m.content != '' %}+{% endif %}{{ '-' if not m.content }}",
    ),
    "the first messages": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %} ¦ ",
        "{% if loop.first and messages[0].role != 'system' %}<system>Be kind.{% endif %}",
        "{% for m in messages[1:] %}{{ m.content }}</>{% endfor %}",
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}"
        "{% endif %}{% for m in rest %}{{ m.content }}{{ rest[loop.index0 - 1].role }}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.k = messages[0].role %} ¦ {{ ns.k }}",
    ),
    "place and neighbours": (
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}",
        "{% if loop.previtem and loop.previtem.role == m.role %}+{% endif %}",
        "{{ loop.nextitem.role if not loop.last }}",
        "{% if loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}+{% endif %}",
        "{{ messages[loop.index0 - 1].role }}", "{{ bos_token if loop.index == 1 }}{{ '.' if loop.last }}",
        "{% if m.role == 'system' %}{% continue %}{% endif %}",
    ),
    "facts": (
        "{% macro head(r) %}<{{ r | upper }}>{% endmacro %} ¦ {{ head(m.role) }}",
        "{% set head %}<{{ m.role }}>{% endset %}{{ head }}", "{% if tools %}{{ messages | length }}{% endif %}",
    ),
}  # fmt: skip
LOCAL_AND_MORE: Final = {
    CHATML: reading(),
    NO_PROMPT: reading(),
    each_call("{{ ', ' if not loop.first }}"): reading(),
    each("{% if m.tool_calls | length == 1 %}{{ m.tool_calls[0].function.name }}{% endif %}"): reading(),
    each_call("{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}"): WITHOUT_CALLS,
    each("{% if 'name' in m %}{{ m.name }}{% endif %}{{ m.get('thinking') or '' }}"): reading("name", "thinking"),
    **{each(text): reading() for text in chain.from_iterable(LOCAL.values())},
}


@pytest.mark.parametrize("template", LOCAL_AND_MORE)
def test_local(template: str) -> None:
    assert locality(template) == LOCAL_AND_MORE[template]


NOT_LOCAL: Final[dict[str, tuple[str, ...]]] = {
    "words decide": (
        "{% if '</think>' in m.content %}+{% endif %}", "{% if m.content == 'hi' %}+{% endif %}",
        "{% set c = m.content %}{{ '+' if c > 'hi' }}", "{{ m.content == m.role }}", "{{ m.content | length }}",
        "{{ ('' ~ m.content) | length }}", "{{ m.content is upper }}", "{{ {'a': 1}[m.content] }}",
        "{{ raise_exception(m.content) }}", "{{ m.role in m.content }}",
        "{% if m.content | trim | length > 3 %}+{% endif %}",
    ),
    "words are changed": (
        "{{ m.content[:5] }}", "{{ m.content[0] }}", "{{ m.content.split('</think>')[-1] }}",
        "{% set c = m.content %}{{ c.split('x') | first }}", "{{ m.content | replace('a', 'b') }}",
        "{{ m.content | upper }}", "{{ m.content.upper() }}", "{{ m.content.lstrip() }}",
        "{{ m.content.strip('x') }}", "{{ m.content | trim('x') }}", "{{ m.content | tojson }}",
        "{{ '%s' % m.content }}", "{{ '%s' | format(m.content) }}", "{{ m.content * 2 }}",
        "{% for part in m.content %}{{ part }}{% endfor %}",
    ),
    "words are handed on": (
        "{% set block %}{{ m.content }}{% endset %}{{ block | length }}",
        "{% filter upper %}{{ m.content }}{% endfilter %}",
        "{% macro f(x) %}{{ x | length }}{% endmacro %} ¦ {{ f(m.content) }}",
        "{% macro f() %}{{ varargs }}{% endmacro %} ¦ {{ f(m.content) }}",
        "{% macro f(x) %}{{ x.content }}{% endmacro %} ¦ {{ f(m) }}",
        "{% macro f() %}{{ caller() | length }}{% endmacro %} ¦ {% call f() %}{{ m.content }}{% endcall %}",
    ),
    "a message as a whole": (
        "{{ m }}", "{{ m | tojson }}", "{{ [m] | map(attribute='content') | join }}",
        "{{ {'a': m}.a.content | length }}", "{% for k, v in m | items %}{{ v }}{% endfor %}",
        "{% for k in m %}{{ k }}{% endfor %}", "{{ m['con' ~ 'tent'] | length }}", "{{ m | attr('content') }}",
    ),
    "how many messages": (
        "{{ messages | length }}", "{{ messages | count }} ¦ ",
        "{{ messages | selectattr('role', 'eq', 'user') | list | length }}", "{{ loop.length }}",
        "{% if loop.revindex0 == 1 %}+{% endif %}", "{% set outer = loop %}{{ outer.length }}",
        "{% for x in [] %}{% else %}{{ loop.length }}{% endfor %}",
        "{% macro f() %}{{ loop.length }}{% endmacro %}{{ f() }}", "{{ loop | length }}",
    ),
    "which number": (
        "{{ loop.index }}", "{% if loop.index0 == 1 %}+{% endif %}", "{{ 1 < loop.index0 < 5 }}",
        "{{ loop.index0 % 3 }}", "{{ loop.index0 // 2 }}", "{% for x in range(loop.index0) %}+{% endfor %}",
        "{{ loop.cycle('a', 'b', 'c') }}", "{% set messages = 'abcdef' %}{{ messages[loop.index0] is defined }}",
    ),
    "messages far away": (
        "{% if messages[-1].role == 'user' %}+{% endif %} ¦ ", "{{ (messages | last).role }}",
        "{{ messages[1].role }}", "{% set k = 5 %} ¦ {{ messages[k].role }}", "{{ messages[loop.index0 + 2].role }}",
        "{{ messages[loop.index0 - 2].role }}", "{% set rest = messages[1:][1:] %} ¦ {{ rest[1:][0].role }}",
        "{% for m in messages[1:] %}{{ m.content }}{{ messages[loop.index0 + 1].role }}{% endfor %}",
        "{% set messages = messages[1:] %}{{ messages[loop.index0 + 1].role }}",
        "{% with messages = messages[1:] %}{{ messages[loop.index0 + 1].role }}{% endwith %}",
        "{% set messages, x = messages[1:], 1 %}{{ messages[loop.index0 + 1].role }}",
    ),
    "neighbours are more than roles": (
        "{{ loop.previtem.content if not loop.first }}",
        "{% if loop.nextitem and loop.nextitem.content %}+{% endif %}", "{{ messages[loop.index0 + 1].content }}",
        "{% if loop.previtem and loop.previtem.tool_calls %}+{% endif %}",
        "{% if loop.previtem and 'tool_calls' in loop.previtem %}+{% endif %}", "{{ loop.previtem == m }}",
    ),
    "the first message is more than a role": (
        "{{ messages[0].content }}", "{% set first = messages[0].content %} ¦ {{ first }}",
        "{% set first = messages[0].content %} ¦ {{ first ~ m.role }}",
        "{% if 'x' in messages[0].content %}+{% endif %} ¦ ", "{% if messages[0].tool_calls %}+{% endif %} ¦ ",
        "{{ m == messages[0] }}",
    ),
    "other loops": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for k in messages %}{% set ns.n = ns.n + 1 %}{% endfor %} ¦ {{ ns.n }}",
        "{% for k in messages %}{% set x = k.role %}{% endfor %}",
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ loop.index0 % 2 }}{% endfor %}",
        "{% for i in range(messages | length) %}{{ messages[i].content }}{% endfor %} ¦ ",
        "{% if m.role == 'tool' %}{% break %}{% endif %}", "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
        "{% for m in messages[::2] %}{{ m.content }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    ),
    "a state, or chance": (
        "{% set ns = namespace(n=0) %} ¦ {% set ns.n = ns.n + 1 %}{{ ns.n }}",
        "{% set ns = namespace(n=0) %} ¦ {% set ns.n = m.content %}",
        "{% set ns = namespace(x=messages[0].content) %} ¦ {{ ns.x }}",
        "{% set c = cycler('a', 'b', 'c') %} ¦ {{ c.next() }}",
        "{% set j = joiner() %} ¦ {% if m.role == 'user' %}{{ j() }}{% endif %}", "{{ loop.changed(m.role) }}",
        "{% set ns = namespace(n=0) %} ¦ {% set ns.n %}{{ m.role }}{% endset %}{{ ns.n }}",
        "{{ [1, 2, 3] | random }}", "{{ lipsum() }}",
    ),
    "other templates": (
        "{% include 'x' %}", "{% import 'x' as x %} ¦ {{ x.f() }}", "{% from 'x' import f %} ¦ {{ f() }}",
        "{% extends 'x' %} ¦ ", "{% block b %}{% for m in messages %}{{ m.content }}{% endfor %}{% endblock %}",
    ),
}  # fmt: skip
NOT_WITH_CALLS: Final[dict[str, tuple[str, ...]]] = {
    "ids": ("{{ c.id }}", "{{ 'id' in c }}", "{{ c.get('id') }}",),
    "a call as a whole": (
        "{{ c | tojson }}", "{{ c.function | tojson }}", "{{ m.tool_calls | tojson }}",
        "{{ m.tool_calls[1].function.name }}", "{{ m.tool_calls | map(attribute='function.name') | join }}",
    ),
    "names": (
        "{% if c.function.name == 'x' %}+{% endif %}", "{{ c.function.name | upper }}",
        "{{ 'x' in c.function.name }}", "{% for d in m.tool_calls if d.function.name == 'x' %}+{% endfor %}",
    ),
    "arguments": (
        "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}",
        "{% for k, v in c.function.arguments | items %}{{ k }}{% endfor %}",
        "{% if c.function.arguments %}+{% endif %}", "{{ c.function.arguments.city }}",
        "{{ c.function.arguments | length }}", "{{ c.function.arguments }}",
        "{{ c.function.arguments | tojson(indent=2) }}", "{{ c.function.arguments | tojson | length }}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", [*cases(NOT_LOCAL), THINKS])
def test_not_local(text: str) -> None:
    assert locality(each(text)) is None


@pytest.mark.parametrize("text", cases(NOT_WITH_CALLS))
def test_not_local_where_there_are_calls(text: str) -> None:
    assert locality(each_call(text)) == WITHOUT_CALLS


# What is called local, though it is not.
HOLES: Final[dict[str, tuple[str, ...]]] = {
    "a namespace under another name": (
        "{% set ns = namespace() %}{% set ns.x = messages[0].content %} ¦ {{ '+' if 'abc' in ns['x'] }}",
        "{% set ns = namespace() %}{% set ns.x = messages[0].content %} ¦ {{ ns | attr('x') | length }}",
        "{% set ns = namespace() %}{% set ns.x = messages[0].content %}{% set o = ns %} ¦ {{ o.x | length }}",
        "{% macro f(p) %}{{ p.x | length }}{% endmacro %}{% set ns = namespace() %}"
        "{% set ns.x = messages[0].content %} ¦ {{ f(ns) }}",
        "{% set m = namespace() %}{% set m.content = messages %}{% for m in messages %}{{ m.role }}"
        "{{ '+' if m.content[1:] }}{% endfor %}",
    ),
    "a state": (
        "{% set ns = namespace(n=0) %} ¦ {% set ns.n, x = ns.n + 1, 0 %}{{ ns.n }}",
        "{% set ns = namespace(n=0) %} ¦ {% set ns.n, x = [ns.n + 1, 0] %}{{ ns.n }}",
        "{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = ns.n + 1 %}{% endmacro %} ¦ {{ f() }}{{ ns.n }}",
        "{% set ns = namespace(n=0) %}{% set ns.m = messages %}{% for i in range(4) %}{% set ns.m = ns.m[1:] %}"
        "{% endfor %}{{ ns.m[0].role }} ¦ ",
    ),
    "an iterator that is used up": (
        "{% set g = range(99) | map('string') %} ¦ {{ g | first }}",
        "{% set g = [1, 2] | reverse %} ¦ {% if m.role == 'tool' %}{% for x in g %}{{ x }}{% endfor %}{% endif %}",
    ),
    "defaults": (
        "{% macro f(n=messages | length) %}{{ n }}{% endmacro %} ¦ {{ f() }}",
        "{% macro f(n=messages[-1].content) %}{{ n | length }}{% endmacro %} ¦ {{ f() }}",
        "{{ m.get('x', messages | length) }}",
    ),
    "arguments in a list": (
        "{{ '+' if 'abc' in m.get(*['content']) }}",
        "{% for m in messages %}{{ m.content.strip(*['abc']) }}{% endfor %}",
    ),
    "methods of a message": (
        "{% for k, v in m.items() %}{{ v | length }}{% endfor %}", "{{ m.values() | list | last | length }}",
        "{{ m.copy().content | length }}", "{{ m.keys() | list | length }}",
        "{% set g = m.get %}{{ g('content') | length }}",
        "{% set f = messages[0].values() | list %} ¦ {{ f[1] | length }}",
    ),
    "loop of the messages in the condition of an inner loop": ("{% for x in [1] if loop.index0 > 4 %}+{% endfor %}",),
    "names that are always defined": (
        "{% if strftime_now is defined %}{{ messages | length }}{% endif %}",
        "{% if range %}{{ messages | length }}{% endif %}", "{{ range and messages | length }}",
        "{% if self %}{{ messages | length }}{% endif %}",
        "{% macro f() %}{% if varargs %}{{ messages | length }}{% endif %}{% endmacro %} ¦ {{ f(1) }}",
        "{% macro f() %}{% if kwargs %}{{ messages | length }}{% endif %}{% endmacro %} ¦ {{ f(a=1) }}",
    ),
    "an error in a condition that is never true": (
        "{% if (raise_exception('x') if m.content | length > 9 else 1) and tools %}{% endif %}",
    ),
    "chance": ("{{ [range(9999)] | map('random') | first }}",),
}  # fmt: skip
HOLES_WITH_CALLS: Final[dict[str, tuple[str, ...]]] = {
    "methods of a call": (
        "{% for k, v in c.function.items() %}{{ v | length }}{% endfor %}", "{{ c.values() | list | length }}",
    ),
    "a call unpacked": ("{% for a, b in m.tool_calls %}+{% endfor %}",),
    "other calls, by loop": (
        "{% if not loop.first and loop.previtem.function.name == 'abc' %}+{% endif %}",
        "{% for d in loop %}{{ d[0].function.name | length }}{% endfor %}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", cases(HOLES))
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a hole of find_locality")
def test_holes(text: str) -> None:
    assert locality(each(text)) is None


@pytest.mark.parametrize("text", cases(HOLES_WITH_CALLS))
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a hole of find_locality")
def test_holes_where_there_are_calls(text: str) -> None:
    assert locality(each_call(text)) == WITHOUT_CALLS


@pytest.mark.xfail(strict=True, raises=ValueError, reason="tuples of different lengths")
def test_a_set_that_can_only_fail() -> None:
    locality(each("{% if m.role == 'x' %}{% set a, b = 1, 2, 3 %}{% endif %}"))


# ---- the promise: texts around words hang on facts alone

SPACE, HOLE = "\u2003", re.compile('{"⟦(\\d+)a(\\d+)⟧": 0}|⟦(\\d+)n(\\d+)⟧|(\u2003?)⟦(\\d+)⟧\u2003?')
ROLES: Final = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
ROWS: Final = (
    "ua", "uau", "uaua", "uauaua", "uauauaua", "uauauauaua", "sua", "suaua", "suauaua", "suauauaua", "suauauauau",
    "uauata", "uauauata", "uauataua", "uuauau", "uaaua", "uata", "uatauata", "suatauatata", "uatatauata", "susua",
    "uasaua", "ta", "tata", "tatata", "a", "aua", "auaua", "uuuuuuuu", "aaaaaaa", "uauatauata",
)  # fmt: skip


@cache
def engine(template: str) -> TemplateEngine:
    return TemplateEngine(template, special_tokens=TOKENS, variables={}, date=DATE, fast=False)


def rendered(template: str, messages: list[Message]) -> str | None:
    """The text, None where the template refuses the conversation."""
    try:
        return engine(template).plain(messages)
    except RowError:
        return None


def holed(number: int, message: Message) -> Message:
    """The message with placeholders for its words, and without what a local template does not read."""
    content = message["content"]
    made: Message = {"role": message["role"], "content": f"{SPACE}⟦{number}⟧{SPACE}" if content else content}
    if "tool_calls" in message:
        made["tool_calls"] = [
            {"type": "function", "function": {"name": f"⟦{number}n{k}⟧", "arguments": {f"⟦{number}a{k}⟧": 0}}}
            for k in range(len(message["tool_calls"]))
        ]
    return made


def filled(text: str, messages: list[Message]) -> str:
    """The text with the words in their places."""

    def fill(found: re.Match[str]) -> str:
        with_arguments, a, with_name, n, space, with_words = found.groups()
        if with_arguments:
            function = messages[int(with_arguments)]["tool_calls"][int(a)]["function"]
            return json.dumps(function["arguments"], ensure_ascii=False)
        if with_name:
            return str(messages[int(with_name)]["tool_calls"][int(n)]["function"]["name"])
        words = str(messages[int(with_words)]["content"])
        return words if space else words.strip()

    return HOLE.sub(fill, text)


def words_stay_where_they_are(template: str, messages: list[Message]) -> bool:
    text = rendered(template, [holed(number, message) for number, message in enumerate(messages)])
    return rendered(template, messages) == (None if text is None else filled(text, messages))


def facts(row: str, number: int) -> tuple[object, ...]:
    """All that a local template may know of a message, besides its words."""
    around = (row[:3], row[max(number - 1, 0) : number], row[number], row[number + 1 : number + 2])
    return *around, row[-1] if number < 3 else "", min(number, 3), number % 2


def facts_decide(template: str) -> bool:
    """Whether messages of the same facts have the same texts between them, and are accepted everywhere or nowhere."""
    texts: dict[object, str] = {}
    accepted, refused = set(), []
    for row in ROWS:
        known = [facts(row, number) for number in range(len(row))]
        text = rendered(template, [holed(n, {"role": ROLES[role], "content": "w"}) for n, role in enumerate(row)])
        if text is None:
            refused.append(known)
            continue
        accepted.update(known)
        holes = [(*found.span(), int(found[6])) for found in HOLE.finditer(text)]
        ends = [(0, 0, -1), *holes, (len(text), len(text), len(row))]
        for (_, start, left), (end, _, right) in pairwise(ends):
            between = (left < 0, right == len(row), *known[max(left, 0) : right + 1])
            if left < right and texts.setdefault(between, text[start:end]) != text[start:end]:
                return False
    return not any(accepted.issuperset(known) for known in refused)


def is_served(message: Message, found: Locality) -> bool:
    """Whether the promise is about such a message."""
    unread = {"role", "content", "tool_call_id", "name"} - found.read | ({"tool_calls"} if found.calls else set())
    content, made = message.get("content", 0), message.get("tool_calls", ())
    if not message.keys() <= unread or message.get("role") not in ROLES.values() or not isinstance(made, list | tuple):
        return False
    if any(type(call["function"]["arguments"]) is not dict for call in made) or ("tool_calls" in message and not made):
        return False
    return content is None or content == "" or (isinstance(content, str) and not content.isspace())


CHATS: Final[list[list[Message]]] = [
    *(chat.messages for chat in BATTERY if chat.messages and not chat.tools and not chat.variables),
    [user("q"), assistant("a"), user("r"), assistant("b")],
    [user("xabc, two words"), assistant("</think>abc"), user(" \n[/INST] "), assistant("long " * 99)],
    [user("q"), calls("abc", "look", "abc"), returns("r"), calls("look", text="abc"), returns("s", 1), assistant("a")],
]


def keeps_the_promise(template: str, found: Locality) -> bool:
    chats = [chat for chat in CHATS if all(is_served(message, found) for message in chat)]
    assert len(chats) >= 8
    return all(words_stay_where_they_are(template, chat) for chat in chats) and facts_decide(template)


SERVED: Final = {
    name: (template, found)
    for name, template in {**trl_templates(), **{template: template for template in LOCAL_AND_MORE}}.items()
    if (found := locality(template, documents=None)) is not None
}


def test_some_templates_of_trl_are_local() -> None:
    assert {"trl/llama3", "trl/qwen2_5", "trl/phi3", "trl/gemma", "trl/qwen3_instruct_2507"} <= SERVED.keys()


@pytest.mark.parametrize("name", SERVED)
def test_local_templates_keep_the_promise(name: str) -> None:
    assert keeps_the_promise(*SERVED[name])


@pytest.mark.parametrize("text", cases(HOLES))
def test_holes_break_the_promise(text: str) -> None:
    assert not keeps_the_promise(each(text), reading())


@pytest.mark.parametrize("text", cases(HOLES_WITH_CALLS))
def test_holes_break_the_promise_of_calls(text: str) -> None:
    assert not keeps_the_promise(each_call(text), reading())


WORDS = st.text(min_size=1, max_size=12).filter(lambda words: not words.isspace() and not set(words) & set("⟦⟧\u2003"))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SERVED)), st.sampled_from(ROWS), st.lists(WORDS, min_size=10, max_size=10))
def test_any_words_stay_where_they_are(name: str, row: str, words: list[str]) -> None:
    messages = [{"role": ROLES[role], "content": said} for role, said in zip(row, words, strict=False)]
    assert words_stay_where_they_are(SERVED[name][0], messages)


# ---- conditions known before any row is

TRUTHS: Final[dict[bool | None, tuple[str, ...]]] = {
    True: (
        "not tools", "tools is none", "tools is defined", "messages[-1].role == 'user' or not tools",
        "nothing is undefined", "mode", "mode == 'chat'", "off is defined and not off", "true",
    ),
    False: (
        "tools", "tools is defined and tools", "tools and messages[-1].role == 'user'",
        "messages[-1].role == 'user' and tools", "nothing", "nothing is defined", "nothing is none", "mode != 'chat'",
        "off", "false or none",
    ),
    None: (
        "messages[-1].role == 'user' or tools", "nothing == 'x'", "mode == 'chat' == true", "mode is string",
        "mode | length", "messages", "loop is defined", "assigned", "assigned is defined", "counted", "given",
        "named is defined", "within",
    ),
}  # fmt: skip
ASSIGNING = (
    "{% set assigned = 1 %}{% for counted in [] %}{% endfor %}{% macro named(given) %}{% endmacro %}"
    "{% with within = 1 %}{% endwith %}"
)


@pytest.mark.parametrize(("condition", "truth"), [(text, truth) for truth in TRUTHS for text in TRUTHS[truth]])
def test_truths(condition: str, truth: bool | None) -> None:
    tree = parse(f"{ASSIGNING}{{% if {condition} %}}{{% endif %}}")
    (test,) = (node.test for node in tree.find_all(nodes.If))
    variables = {"tools": None, "mode": "chat", "off": False, "assigned": 1, "counted": 1}
    assert Truths(tree, variables).of(test) is truth


def test_what_never_runs_does_not_count() -> None:
    dead = each("{% if x == 'a' %}{{ messages | length }}{% elif y %}{{ messages[-1] }}{% else %}+{% endif %}")
    assert locality(dead) is None
    assert locality(dead, x="a") is None
    assert locality(dead, x="b") == reading()
    assert locality(dead, x="b", y=1) is None
    assert locality("{% set x = 'b' %}" + dead, x="b") is None
    assert locality(each("{{ tools and messages | length }}")) == reading()
    assert locality(each("{{ tools or messages | length }}")) is None
