"""Templates that are local, templates that only look so, and conditions: the tables of the tests of locality."""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

import pytest

from penstock.chat.locality import Locality
from tests.chat.test_parts import CHATML, NO_PROMPT

PRINTED = "<{{ m.role }}>{{ m.content }}</>"
CALL = "[{{ c.function.name }}{{ c.function.arguments | tojson }}]"


def each(text: str) -> str:
    """A template that prints this before each message; what precedes a bar is printed once. Whole ones stay."""
    before, _, body = text.rpartition("¦")
    return text if "for m in" in text else f"{before}{{% for m in messages %}}{body}{PRINTED}{{% endfor %}}"


def each_call(text: str) -> str:
    """A template that prints this before each call."""
    return f"{{% for m in messages %}}{PRINTED}{{% for c in m.tool_calls %}}{text}{CALL}{{% endfor %}}{{% endfor %}}"


def reading(*keys: str, calls: bool = True, tools: bool = True) -> Locality:
    return Locality(frozenset(keys), calls, tools)


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
        "{% with x = m %}{{ x.content }}{% endwith %}", "{{ m.role is in(['user']) }}",
        "{% set l = loop %}{% for c in [1] %}{{ l.previtem.role }}{% endfor %}",
        "{{ (m if loop.first else (messages[0] if loop.last else m)).role }}",
        "{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a + 1 %}{% endfor %} ¦ {{ ns.a }}",
        "{% macro head(r) %}<{{ r | upper }}>{% endmacro %} ¦ {{ head(m.role) }}",
        "{% set head %}<{{ m.role }}>{% endset %}{{ head }}",
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
    "roundabout": (
        "{{ '%(content)s' % m }}", "{{ '{0}'.format(m.content) }}", "{{ '{m[content]}'.format(m=m) }}",
        "{{ m[m.role] }}", "{{ m.role in m }}", "{{ m.get('con' ~ 'tent') }}", "{{ dict(m).content | length }}",
        "{% set x | upper %}{{ m.content }}{% endset %}{{ x }}", "{{ m.content is eq 'q' }}",
        "{% with x = m %}{{ x.content | length }}{% endwith %}", "{{ 'x' is in(m.content) }}",
        "{{ (m if loop.first else (messages[0] if loop.last else m)).content | length }}",
        "{% if m.tool_calls %}{% set t = m.tool_calls %}{% else %}{% set t = m.content %}{% endif %}{{ t[0] }}",
        "{{ (loop.previtem or m).content }}", "{% set l = loop %}{{ l.index0 }}",
        "{% set i = loop.index0 %}{{ messages[i].role }}", "{% set a = b %}{% set b = messages %} ¦ {{ a | length }}",
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

# The same, better hidden: each breaks the promise on the conversations of the tests, which holds the tests themselves.
HIDDEN: Final[dict[str, tuple[str, ...]]] = {
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
    "another thing named loop": (
        "{% with loop = {'index0': 5} %}{{ messages[loop.index0].role }}{% endwith %}",
        "{% macro f(loop) %}{{ messages[loop.index0].role }}{% endmacro %}{{ f({'index0': 5}) }}",
    ),
    "an iterator inside what is read whole": (
        "{% set g = [range(99) | map('string')] | list %} ¦ {{ g[0] | first }}",
        "{% set g = [range(99) | map('string')] | first %} ¦ {{ g | first }}",
        "{% set g = [range(99)] | map('map', 'string') | list %} ¦ {{ g[0] | first }}",
        "{% set g = [] | sum(start=range(99) | map('string')) %} ¦ {{ g | first }}",
    ),
    "a state, out of an earlier loop": (
        "{% set ns = namespace() %}{% for g in [range(99) | map('string')] %}{% set ns.g = g %}{% endfor %}"
        " ¦ {{ ns.g | first }}",
        "{% set ns = namespace() %}{% for x in [1] %}{% set ns.l = loop %}{% endfor %}"
        " ¦ {% if m.role == 'tool' %}{{ ns.l.changed(m.role) }}{% endif %}",
    ),
    "chance, by a name that is put together": (
        "{{ [range(9999)] | map('ran' ~ 'dom') | first }}", "{{ [range(9999)] | map(dict(random=1) | first) | first }}",
    ),
    "an address in memory": ("{{ [1] | map('string') }}",),
}  # fmt: skip
HIDDEN_WITH_CALLS: Final[dict[str, tuple[str, ...]]] = {
    "methods of a call": (
        "{% for k, v in c.function.items() %}{{ v | length }}{% endfor %}", "{{ c.values() | list | length }}",
    ),
    "a call unpacked": ("{% for a, b in m.tool_calls %}+{% endfor %}",),
}  # fmt: skip
# What an inner loop's own `loop` gives out is not followed, whatever it runs over: messages without calls have no
# stencils either.
HIDDEN_IN_INNER_LOOPS: Final[dict[str, tuple[str, ...]]] = {
    "other calls, by loop": (
        "{% if not loop.first and loop.previtem.function.name == 'abc' %}+{% endif %}",
        "{% for d in loop %}{{ d[0].function.name | length }}{% endfor %}",
    ),
}  # fmt: skip

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
