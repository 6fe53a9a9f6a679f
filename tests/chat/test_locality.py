"""Which templates are called local, which never may be, and the promise itself, held against rendered text."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import pairwise
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
CALLS = "{% for c in m.tool_calls %}"
PRINTED_CALL = "[{{ c.function.name }}{{ c.function.arguments | tojson }}]"


def each(body: str, before: str = "", after: str = "", over: str = "messages") -> str:
    """A template whose loop prints each message after this."""
    return f"{before}{{% for m in {over} %}}{body}{PRINTED}{{% endfor %}}{after}"


def each_call(body: str) -> str:
    """A template that prints each call after this."""
    return f"{{% for m in messages %}}{PRINTED}{CALLS}{body}{PRINTED_CALL}{{% endfor %}}{{% endfor %}}"


def parse(template: str) -> nodes.Template:
    return Sandbox(DATE, CONTROL).parse_template(template)


def locality(template: str, **variables: Any) -> Locality | None:
    try:
        return find_locality(parse(template), {"add_generation_prompt": False, **TOKENS, **variables})
    except NotLocal:
        return None


def reading(*keys: str, calls: bool = True) -> Locality:
    return Locality(frozenset(keys), calls)


# ---- what is local

REST: Final = "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"  # noqa: E501 # fmt: skip
LOCAL: Final = {
    "ChatML": (CHATML, reading()),
    "no prompt": (NO_PROMPT, reading()),
    "trimmed": ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] | trim + eos_token }}{% endfor %}", reading()),
    "stripped": ("{% for m in messages %}{{ m.role ~ m.content.strip() }}|{% endfor %}", reading()),
    "content by a name": (each("{% set content = m.content | trim %}{{ content }}|"), reading()),
    "system in the head": (each("", before="{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"), reading()),
    "a default system": (each("{% if loop.first and messages[0].role != 'system' %}<system>Be kind.{% endif %}"), reading()),
    "all but the first": (each("", over="messages[1:]"), reading()),
    "all but the system": (each("", before=REST, over="rest"), reading()),
    "parity": (each("{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"), reading()),
    "neighbours": (each("{% if loop.previtem and loop.previtem.role == m.role %}+{% endif %}{{ loop.nextitem.role if not loop.last }}"), reading()),
    "neighbours by number": (each("{% if loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}+{% endif %}"), reading()),
    "the last by number": (each("{{ messages[loop.index0 - 1].role }}"), reading()),
    "first and last": (each("{{ bos_token if loop.index == 1 }}{{ '.' if loop.last }}"), reading()),
    "empty or not": (each("{% if m.content is string and m.content != '' %}+{% endif %}{{ '-' if not m.content }}"), reading()),
    "calls": (each_call("{{ ', ' if not loop.first }}"), reading()),
    "the only call": (each("{% if m.tool_calls | length == 1 %}{{ m.tool_calls[0].function.name }}{% endif %}"), reading()),
    "arguments in many ways": (each_call("{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}"), reading("tool_calls", calls=False)),
    "other keys": (each("{% if 'name' in m %}{{ m.name }}{% endif %}{{ m.get('thinking') or '' }}"), reading("name", "thinking")),
    "macros of facts": (each("{{ head(m.role) }}", before="{% macro head(r) %}<{{ r | upper }}>{% endmacro %}"), reading()),
    "blocks of facts": (each("{% set head %}<{{ m.role }}>{% endset %}{{ head }}"), reading()),
    "left out": (each("{% if m.role == 'system' %}{% continue %}{% endif %}"), reading()),
    "generation": ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", reading()),
    "a state before the loop": (each("{{ ns.k }}", before="{% set ns = namespace() %}{% set ns.k = messages[0].role %}"), reading()),
    "far away, for tools": (each("{% if tools %}{{ messages | length }}{% endif %}"), reading()),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
def test_local(name: str) -> None:
    template, expected = LOCAL[name]
    assert find_locality(parse(template), {"add_generation_prompt": False, **TOKENS}) == expected


# ---- what is not

NS = "{% set ns = namespace(n=0) %}"
NOT_LOCAL: Final = {
    "words in a condition": each("{% if '</think>' in m.content %}+{% endif %}"),
    "words compared": each("{% if m.content == 'hi' %}+{% endif %}"),
    "words of a name compared": each("{% set c = m.content %}{{ '+' if c > 'hi' }}"),
    "words compared with a role": each("{{ m.content == m.role }}"),
    "how many words": each("{{ m.content | length }}"),
    "how many words, joined": each("{{ ('' ~ m.content) | length }}"),
    "words cut": each("{{ m.content[:5] }}"),
    "a letter": each("{{ m.content[0] }}"),
    "words split": each("{{ m.content.split('</think>')[-1] }}"),
    "words split by a name": each("{% set c = m.content %}{{ c.split('x') | first }}"),
    "words replaced": each("{{ m.content | replace('a', 'b') }}"),
    "words in capitals": each("{{ m.content | upper }}{{ m.content.upper() }}"),
    "one side stripped": each("{{ m.content.lstrip() }}"),
    "some characters stripped": each("{{ m.content.strip('x') }}{{ m.content | trim('x') }}"),
    "words as JSON": each("{{ m.content | tojson }}"),
    "words tested": each("{{ m.content is upper }}"),
    "words formatted": each("{{ '%s' % m.content }}{{ '%s' | format(m.content) }}"),
    "words repeated": each("{{ m.content * 2 }}"),
    "words iterated": each("{% for part in m.content %}{{ part }}{% endfor %}"),
    "words as a key": each("{{ {'a': 1}[m.content] }}"),
    "words in an error": each("{{ raise_exception(m.content) }}"),
    "words in a block": each("{% set block %}{{ m.content }}{% endset %}{{ block | length }}"),
    "words in a filter block": each("{% filter upper %}{{ m.content }}{% endfilter %}"),
    "words to a macro": each("{{ f(m.content) }}", before="{% macro f(x) %}{{ x | length }}{% endmacro %}"),
    "words to a macro, unnamed": each("{{ f(m.content) }}", before="{% macro f() %}{{ varargs }}{% endmacro %}"),
    "a message to a macro": each("{{ f(m) }}", before="{% macro f(x) %}{{ x.content }}{% endmacro %}"),
    "a message to a call block": each("{% call f() %}{{ m.content }}{% endcall %}", before="{% macro f() %}{{ caller() | length }}{% endmacro %}"),
    "a message in a list": each("{{ [m] | map(attribute='content') | join }}"),
    "a message in a dict": each("{{ {'a': m}.a.content | length }}"),
    "a message as JSON": each("{{ m | tojson }}"),
    "a message as it is": each("{{ m }}"),
    "a message's items": each("{% for k, v in m | items %}{{ v }}{% endfor %}{% for k in m %}{{ m[k] }}{% endfor %}"),
    "a key made up": each("{{ m['con' ~ 'tent'] | length }}{{ m | attr('content') }}"),
    "how many messages": each("{{ messages | length }}"),
    "how many, after the loop": each("", after="{{ messages | count }}"),
    "the last message": each("", after="{% if messages[-1].role == 'user' %}+{% endif %}"),
    "the last by a filter": each("{{ (messages | last).role }}"),
    "the second message": each("{{ messages[1].role }}"),
    "a message by a name": each("{{ messages[k].role }}", before="{% set k = 5 %}"),
    "messages selected": each("{{ messages | selectattr('role', 'eq', 'user') | list | length }}"),
    "messages left out at the end": each("", over="messages[:-1]"),
    "every other message": each("", over="messages[::2]"),
    "many left out": each("{{ rest[1:][0].role }}", before="{% set rest = messages[1:][1:] %}"),
    "messages backwards": each("", over="messages | reverse"),
    "two loops": each("", after="{% for m in messages %}{{ m.role }}{% endfor %}"),
    "a silent loop": each("{{ ns.n }}", before=NS + "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"),
    "a loop in a loop": each("{% for k in messages %}{% set x = k.role %}{% endfor %}"),
    "a loop with a condition": "{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ loop.index0 % 2 }}{% endfor %}",
    "a loop over numbers": "{% for i in range(messages | length) %}{{ messages[i].content }}{% endfor %}",
    "a loop that ends early": each("{% if m.role == 'tool' %}{% break %}{% endif %}"),
    "the messages changed": each("{% set messages = messages[1:] %}{{ messages[loop.index0 + 1].role }}"),
    "the messages changed by with": each("{% with messages = messages[1:] %}{{ messages[loop.index0 + 1].role }}{% endwith %}"),
    "the messages changed with more": each("{% set messages, x = messages[1:], 1 %}{{ messages[loop.index0 + 1].role }}"),
    "the messages hidden": each("{% set messages = 'abcdef' %}{{ messages[loop.index0] is defined }}"),
    "loop.length": each("{{ loop.length }}"),
    "loop.revindex": each("{% if loop.revindex0 == 1 %}+{% endif %}"),
    "loop.index": each("{{ loop.index }}"),
    "loop.index0 == 1": each("{% if loop.index0 == 1 %}+{% endif %}"),
    "loop.index0 by a chain": each("{{ 1 < loop.index0 < 5 }}"),
    "loop.index0 % 3": each("{{ loop.index0 % 3 }}"),
    "loop.index0 // 2": each("{{ loop.index0 // 2 }}"),
    "loop.cycle": each("{{ loop.cycle('a', 'b', 'c') }}"),
    "loop.changed": each("{{ loop.changed(m.role) }}"),
    "loop by a name": each("{% set outer = loop %}{{ outer.length }}"),
    "loop of the outer loop": each("{% for x in [] %}{% else %}{{ loop.length }}{% endfor %}"),
    "loop in a macro": each("{% macro f() %}{{ loop.length }}{% endmacro %}{{ f() }}"),
    "loop itself": each("{{ loop | length }}"),
    "a neighbour's words": each("{{ loop.previtem.content if not loop.first }}"),
    "a neighbour's words tested": each("{% if loop.nextitem and loop.nextitem.content %}+{% endif %}"),
    "a neighbour's words by number": each("{{ messages[loop.index0 + 1].content }}"),
    "a neighbour's calls": each("{% if loop.previtem and loop.previtem.tool_calls %}+{% endif %}"),
    "a neighbour's keys": each("{% if loop.previtem and 'tool_calls' in loop.previtem %}+{% endif %}"),
    "two away": each("{{ messages[loop.index0 + 2].role }}{{ messages[loop.index0 - 2].role }}"),
    "a neighbour, itself": each("{{ loop.previtem == m }}"),
    "a neighbour in another list": each("{{ messages[loop.index0 + 1].role }}", over="messages[1:]"),
    "the first one's words": each("{{ messages[0].content }}"),
    "the first one's words, by a name": each("{{ first }}", before="{% set first = messages[0].content %}"),
    "the first one's words, joined": each("{{ first ~ m.role }}", before="{% set first = messages[0].content %}"),
    "the first one's words, tested": each("", before="{% if 'x' in messages[0].content %}+{% endif %}"),
    "the first one's calls": each("", before="{% if messages[0].tool_calls %}+{% endif %}"),
    "the first one, itself": each("{{ m == messages[0] }}"),
    "a state": each("{% set ns.n = ns.n + 1 %}{{ ns.n }}", before=NS),
    "a state of words": each("{% set ns.n = m.content %}", before=NS),
    "a state with words from the start": each("", before="{% set ns = namespace(x=messages[0].content) %}{{ ns.x }}"),
    "a cycler": each("{{ c.next() }}", before="{% set c = cycler('a', 'b', 'c') %}"),
    "a joiner": each("{% if m.role == 'user' %}{{ j() }}{% endif %}", before="{% set j = joiner() %}"),
    "chance": each("{{ [1, 2, 3] | random }}"),
    "chance in words": each("{{ lipsum() }}"),
    "the id of a call": each_call("{{ c.id }}"),
    "the id of a call, asked for": each_call("{{ 'id' in c }}{{ c.get('id') }}"),
    "a call as JSON": each_call("{{ c | tojson }}"),
    "a call's function as JSON": each_call("{{ c.function | tojson }}"),
    "the name of a call compared": each_call("{% if c.function.name == 'x' %}+{% endif %}"),
    "the name of a call changed": each_call("{{ c.function.name | upper }}"),
    "calls selected": each("{% for c in m.tool_calls if c.function.name == 'x' %}+{% endfor %}"),
    "the second call": each("{{ m.tool_calls[1].function.name }}"),
    "all calls as JSON": each("{{ m.tool_calls | tojson }}"),
    "the names of all calls": each("{{ m.tool_calls | map(attribute='function.name') | join }}"),
    "arguments iterated": each_call("{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}"),
    "arguments iterated by a filter": each_call("{% for k, v in c.function.arguments | items %}{{ k }}{% endfor %}"),
    "arguments' truth": each_call("{% if c.function.arguments %}+{% endif %}"),
    "an argument": each_call("{{ c.function.arguments.city }}"),
    "how many arguments": each_call("{{ c.function.arguments | length }}"),
    "arguments indented": each_call("{{ c.function.arguments | tojson(indent=2) }}"),
    "arguments' letters": each_call("{{ c.function.arguments | tojson | length }}"),
    "include": each("{% include 'x' %}"),
    "import": each("{{ x.f() }}", before="{% import 'x' as x %}"),
    "a block": "{% block b %}" + each("") + "{% endblock %}",
    "a template that others extend": "{% extends 'x' %}" + each(""),
    "no loop": "{{ messages[0].content }}",
    "thinks": THINKS,
}  # fmt: skip
WITH_CALLS_ONLY = {name for name in NOT_LOCAL if NOT_LOCAL[name].find(".tool_calls") >= 0}


@pytest.mark.parametrize("name", NOT_LOCAL)
def test_not_local(name: str) -> None:
    found = locality(NOT_LOCAL[name])
    if name in WITH_CALLS_ONLY:  # messages with calls are not served then
        assert found is None or found == reading("tool_calls", calls=False)
    else:
        assert found is None


# ---- holes: called local, though they are not

FIRST_WORDS = "{% set ns = namespace() %}{% set ns.x = messages[0].content %}"
FAR = "{{ messages | length }}"
HOLES: Final = {
    "an item of a namespace": each("{{ '+' if 'abc' in ns['x'] }}", before=FIRST_WORDS),
    "an attribute by a filter": each("{{ ns | attr('x') | length }}", before=FIRST_WORDS),
    "a namespace by another name": each("{{ o.x | length }}", before=FIRST_WORDS + "{% set o = ns %}"),
    "a namespace to a macro": each("{{ f(ns) }}", before="{% macro f(p) %}{{ p.x | length }}{% endmacro %}" + FIRST_WORDS),
    "a namespace of the loop's name": each("{{ '+' if m.content[1:] }}", before="{% set m = namespace() %}{% set m.content = messages %}"),
    "a state set with more": each("{% set ns.n, x = ns.n + 1, 0 %}{{ ns.n }}", before=NS),
    "a state set from a list": each("{% set ns.n, x = [ns.n + 1, 0] %}{{ ns.n }}", before=NS),
    "a state set by a macro": each("{{ f() }}{{ ns.n }}", before=NS + "{% macro f() %}{% set ns.n = ns.n + 1 %}{% endmacro %}"),
    "messages left out again and again": each("", before=NS + "{% set ns.m = messages %}{% for i in range(4) %}{% set ns.m = ns.m[1:] %}{% endfor %}{{ ns.m[0].role }}"),
    "an iterator, used up one by one": each("{{ g | first }}", before="{% set g = range(99) | map('string') %}"),
    "an iterator, used up at once": each("{% if m.role == 'tool' %}{% for x in g %}{{ x }}{% endfor %}{% endif %}", before="{% set g = [1, 2] | reverse %}"),
    "a macro's default": each("{{ f() }}", before="{% macro f(n=messages | length) %}{{ n }}{% endmacro %}"),
    "a macro's default, words": each("{{ f() }}", before="{% macro f(n=messages[-1].content) %}{{ n | length }}{% endmacro %}"),
    "the default of get": each("{{ m.get('x', messages | length) }}"),
    "get with a list of arguments": each("{{ '+' if 'abc' in m.get(*['content']) }}"),
    "strip with a list of arguments": "{% for m in messages %}{{ m.content.strip(*['abc']) }}{% endfor %}",
    "items()": each("{% for k, v in m.items() %}{{ v | length }}{% endfor %}"),
    "values()": each("{{ m.values() | list | last | length }}"),
    "copy()": each("{{ m.copy().content | length }}"),
    "values() of the first": each("{{ f[1] | length }}", before="{% set f = messages[0].values() | list %}"),
    "items() of a call's function": each_call("{% for k, v in c.function.items() %}{{ v | length }}{% endfor %}"),
    "values() of a call": each_call("{{ c.values() | list | length }}"),
    "a call unpacked": each("{% for a, b in m.tool_calls %}+{% endfor %}"),
    "the call before": each_call("{% if loop.previtem.function.name == 'abc' %}+{% endif %}" ),
    "the calls to come": each_call("{% for d in loop %}{{ d.function.name | length }}{% endfor %}"),
    "loop in the condition of an inner loop": each("{% for x in [1] if loop.index0 > 4 %}+{% endfor %}"),
    "a global that is defined": each("{% if strftime_now is defined %}" + FAR + "{% endif %}"),
    "a global's truth": each("{% if range %}" + FAR + "{% endif %}"),
    "a global's truth, inside": each("{{ range and messages | length }}"),
    "self": each("{% if self %}" + FAR + "{% endif %}"),
    "varargs": each("{{ f(1) }}", before="{% macro f() %}{% if varargs %}" + FAR + "{% endif %}{% endmacro %}"),
    "kwargs": each("{{ f(a=1) }}", before="{% macro f() %}{% if kwargs %}" + FAR + "{% endif %}{% endmacro %}"),
    "an error in a condition that is never true": each("{% if (raise_exception('x') if m.content | length > 9 else 1) and tools %}{% endif %}"),
    "chance by name": each("{{ [range(1000000)] | map('random') | first }}"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLES)
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a hole of find_locality")
def test_holes(name: str) -> None:
    assert locality(HOLES[name]) in (None, reading("tool_calls", calls=False))


@pytest.mark.xfail(strict=True, raises=ValueError, reason="tuples of different lengths")
def test_a_set_that_can_only_fail() -> None:
    locality(each("{% if m.role == 'x' %}{% set a, b = 1, 2, 3 %}{% endif %}"))
