"""Small templates that read messages, calls and tools in many ways, and conversations for them."""

from __future__ import annotations

from typing import Any, Final

PROMPT: Final = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PRINTED: Final = "<{{ m.role }}>{{ m.content }}</>"
CALL: Final = "[{{ c.function.name }}{{ c.function.arguments | tojson }}]"
TURN: Final = (
    "<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}<|end|>"
)


def each(text: str) -> str:
    """Expands a snippet to a template that prints it before each message; text before a bar is printed once.

    A complete template is returned as it is.
    """
    before, _, body = text.rpartition("¦")
    return text if "for m in" in text else f"{before}{{% for m in messages %}}{body}{PRINTED}{{% endfor %}}"


def each_call(text: str) -> str:
    """A template that prints the snippet before each call."""
    return f"{{% for m in messages %}}{PRINTED}{{% for c in m.tool_calls %}}{text}{CALL}{{% endfor %}}{{% endfor %}}"


def printing(text: str) -> str:
    """Expands up to three snippets, separated by bars: before all messages, before each message, after all messages.

    A complete template is returned as it is.
    """
    before, each, after = (*text.split("¦"), "", "")[:3]
    loop = text if "for m in" in text else f"{before}{{% for m in messages %}}{each}{TURN}{{% endfor %}}{after}"
    return loop + PROMPT


def for_each(text: str) -> str:
    """A snippet that is printed for each tool."""
    return f"{{% for t in tools or [] %}}{text}{{% endfor %}}"


MESSAGES: Final[dict[str, tuple[str, ...]]] = {
    "content, complete or trimmed": (
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
    "position and neighbours": (
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}",
        "{% if loop.previtem and loop.previtem.role == m.role %}+{% endif %}",
        "{{ loop.nextitem.role if not loop.last }}",
        "{% if loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}+{% endif %}",
        "{{ messages[loop.index0 - 1].role }}", "{{ bos_token if loop.index == 1 }}{{ '.' if loop.last }}",
        "{% if m.role == 'system' %}{% continue %}{% endif %}",
    ),
    "variables and scopes": (
        "{% with x = m %}{{ x.content }}{% endwith %}", "{{ m.role is in(['user']) }}",
        "{% set l = loop %}{% for c in [1] %}{{ l.previtem.role }}{% endfor %}",
        "{{ (m if loop.first else (messages[0] if loop.last else m)).role }}",
        "{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a + 1 %}{% endfor %} ¦ {{ ns.a }}",
        "{% macro head(r) %}<{{ r | upper }}>{% endmacro %} ¦ {{ head(m.role) }}",
        "{% set head %}<{{ m.role }}>{% endset %}{{ head }}",
    ),
    "conditions on content": (
        "{% if '</think>' in m.content %}+{% endif %}", "{% if m.content == 'hi' %}+{% endif %}",
        "{% set c = m.content %}{{ '+' if c > 'hi' }}", "{{ m.content == m.role }}", "{{ m.content | length }}",
        "{{ ('' ~ m.content) | length }}", "{{ m.content is upper }}", "{{ {'a': 1}[m.content] }}",
        "{{ raise_exception(m.content) }}", "{{ m.role in m.content }}",
        "{% if m.content | trim | length > 3 %}+{% endif %}",
    ),
    "content is rewritten": (
        "{{ m.content[:5] }}", "{{ m.content[0] }}", "{{ m.content.split('</think>')[-1] }}",
        "{% set c = m.content %}{{ c.split('x') | first }}", "{{ m.content | replace('a', 'b') }}",
        "{{ m.content | upper }}", "{{ m.content.upper() }}", "{{ m.content.lstrip() }}",
        "{{ m.content.strip('x') }}", "{{ m.content | trim('x') }}", "{{ m.content | tojson }}",
        "{{ '%s' % m.content }}", "{{ '%s' | format(m.content) }}", "{{ m.content * 2 }}",
        "{% for part in m.content %}{{ part }}{% endfor %}",
    ),
    "content is captured or passed on": (
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
    "number of messages": (
        "{{ messages | length }}", "{{ messages | count }} ¦ ",
        "{{ messages | selectattr('role', 'eq', 'user') | list | length }}", "{{ loop.length }}",
        "{% if loop.revindex0 == 1 %}+{% endif %}", "{% set outer = loop %}{{ outer.length }}",
        "{% for x in [] %}{% else %}{{ loop.length }}{% endfor %}",
        "{% macro f() %}{{ loop.length }}{% endmacro %}{{ f() }}", "{{ loop | length }}",
    ),
    "loop index": (
        "{{ loop.index }}", "{% if loop.index0 == 1 %}+{% endif %}", "{{ 1 < loop.index0 < 5 }}",
        "{{ loop.index0 % 3 }}", "{{ loop.index0 // 2 }}", "{% for x in range(loop.index0) %}+{% endfor %}",
        "{{ loop.cycle('a', 'b', 'c') }}", "{% set messages = 'abcdef' %}{{ messages[loop.index0] is defined }}",
    ),
    "messages at other indices": (
        "{% if messages[-1].role == 'user' %}+{% endif %} ¦ ", "{{ (messages | last).role }}",
        "{{ messages[1].role }}", "{% set k = 5 %} ¦ {{ messages[k].role }}", "{{ messages[loop.index0 + 2].role }}",
        "{{ messages[loop.index0 - 2].role }}", "{% set rest = messages[1:][1:] %} ¦ {{ rest[1:][0].role }}",
        "{% for m in messages[1:] %}{{ m.content }}{{ messages[loop.index0 + 1].role }}{% endfor %}",
        "{% set messages = messages[1:] %}{{ messages[loop.index0 + 1].role }}",
        "{% with messages = messages[1:] %}{{ messages[loop.index0 + 1].role }}{% endwith %}",
        "{% set messages, x = messages[1:], 1 %}{{ messages[loop.index0 + 1].role }}",
    ),
    "other fields of neighbours": (
        "{{ loop.previtem.content if not loop.first }}",
        "{% if loop.nextitem and loop.nextitem.content %}+{% endif %}", "{{ messages[loop.index0 + 1].content }}",
        "{% if loop.previtem and loop.previtem.tool_calls %}+{% endif %}",
        "{% if loop.previtem and 'tool_calls' in loop.previtem %}+{% endif %}", "{{ loop.previtem == m }}",
    ),
    "other fields of the first message": (
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
    "state and randomness": (
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
    "a namespace under another name": (
        "{% set ns = namespace() %}{% set ns.x = messages[0].content %} ¦ {{ '+' if 'abc' in ns['x'] }}",
        "{% set ns = namespace() %}{% set ns.x = messages[0].content %} ¦ {{ ns | attr('x') | length }}",
        "{% set ns = namespace() %}{% set ns.x = messages[0].content %}{% set o = ns %} ¦ {{ o.x | length }}",
        "{% macro f(p) %}{{ p.x | length }}{% endmacro %}{% set ns = namespace() %}"
        "{% set ns.x = messages[0].content %} ¦ {{ f(ns) }}",
        "{% set m = namespace() %}{% set m.content = messages %}{% for m in messages %}{{ m.role }}"
        "{{ '+' if m.content[1:] }}{% endfor %}",
    ),
    "state in a tuple or macro": (
        "{% set ns = namespace(n=0) %} ¦ {% set ns.n, x = ns.n + 1, 0 %}{{ ns.n }}",
        "{% set ns = namespace(n=0) %} ¦ {% set ns.n, x = [ns.n + 1, 0] %}{{ ns.n }}",
        "{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = ns.n + 1 %}{% endmacro %} ¦ {{ f() }}{{ ns.n }}",
        "{% set ns = namespace(n=0) %}{% set ns.m = messages %}{% for i in range(4) %}{% set ns.m = ns.m[1:] %}"
        "{% endfor %}{{ ns.m[0].role }} ¦ ",
    ),
    "an exhausted iterator": (
        "{% set g = range(99) | map('string') %} ¦ {{ g | first }}",
        "{% set g = [1, 2] | reverse %} ¦ {% if m.role == 'tool' %}{% for x in g %}{{ x }}{% endfor %}{% endif %}",
    ),
    "defaults": (
        "{% macro f(n=messages | length) %}{{ n }}{% endmacro %} ¦ {{ f() }}",
        "{% macro f(n=messages[-1].content) %}{{ n | length }}{% endmacro %} ¦ {{ f() }}",
        "{{ m.get('x', messages | length) }}",
    ),
    "unpacked arguments": (
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
    "random through map": ("{{ [range(9999)] | map('random') | first }}",),
    "a variable named loop": (
        "{% with loop = {'index0': 5} %}{{ messages[loop.index0].role }}{% endwith %}",
        "{% macro f(loop) %}{{ messages[loop.index0].role }}{% endmacro %}{{ f({'index0': 5}) }}",
    ),
    "an iterator inside a list": (
        "{% set g = [range(99) | map('string')] | list %} ¦ {{ g[0] | first }}",
        "{% set g = [range(99) | map('string')] | first %} ¦ {{ g | first }}",
        "{% set g = [range(99)] | map('map', 'string') | list %} ¦ {{ g[0] | first }}",
        "{% set g = [] | sum(start=range(99) | map('string')) %} ¦ {{ g | first }}",
    ),
    "state from an earlier loop": (
        "{% set ns = namespace() %}{% for g in [range(99) | map('string')] %}{% set ns.g = g %}{% endfor %}"
        " ¦ {{ ns.g | first }}",
        "{% set ns = namespace() %}{% for x in [1] %}{% set ns.l = loop %}{% endfor %}"
        " ¦ {% if m.role == 'tool' %}{{ ns.l.changed(m.role) }}{% endif %}",
    ),
    "random by a computed name": (
        "{{ [range(9999)] | map('ran' ~ 'dom') | first }}", "{{ [range(9999)] | map(dict(random=1) | first) | first }}",
    ),
    "an address in memory": ("{{ [1] | map('string') }}",),
}  # fmt: skip
CALLS: Final[dict[str, tuple[str, ...]]] = {
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
    "methods of a call": (
        "{% for k, v in c.function.items() %}{{ v | length }}{% endfor %}", "{{ c.values() | list | length }}",
    ),
    "a call unpacked": ("{% for a, b in m.tool_calls %}+{% endfor %}",),
    "other calls, by loop": (
        "{% if not loop.first and loop.previtem.function.name == 'abc' %}+{% endif %}",
        "{% for d in loop %}{{ d[0].function.name | length }}{% endfor %}",
    ),
}  # fmt: skip
TOOLS: Final[dict[str, tuple[str, ...]]] = {
    "printed before the messages": (
        "{% if tools %}{{ tools | tojson }}{% endif %}",
        "{% if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}</tools>{% endif %}",
        "{% if tools is defined and tools is not none %}[{% for tool in tools %}{{ tool | tojson }}"
        "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}",
        "{% if tools %}{{ '# Tools\n' + tools | tojson + '\n' }}{% endif %}",
        for_each("{{ loop.index }}{{ loop.first }}. {{ t | tojson }} of {{ loop.length }}\n"),
        "{% set given = tools or [] %}{% for t in given %}{{ t | tojson }}{% endfor %}",
        "{% if tools %}{% set text = 'T ' ~ tools | tojson %}{{ text }}{{ text }}{% endif %}",
        "{% with all = tools %}{% if all %}{{ all | tojson }}{% endif %}{% endwith %}",
        "{% if tools != none %}{{ tools | tojson }}{% else %}no tools{% endif %}",
        "{{ (tools or none) | tojson }}{{ 1 if tools | tojson }}",
    ),
    "conditions on tools": (
        "{{ 'T' if tools }}¦{{ '+' if tools and m.role == 'user' }}",
        "{{ tools | length if tools }}",
        "{% if tools and tools | count == 2 %}two{% endif %}",
        "{{ tools is none }}{{ tools is defined }}{{ tools is iterable }}{{ tools is string }}{{ tools is mapping }}",
        "{{ tools == none }}{{ tools != '' }}{{ tools == false }}",
        for_each("{{ t is mapping }}{{ t is none }}{{ t is defined }}{{ t is string }}"),
        "{% if not tools %}{% set tools = [] %}{% endif %}{{ '+' if tools }}",
        "{{ 'N' if not (tools or false) }}{{ 'T' if tools and 1 }}",
        "{% set ns = namespace(n=0) %}{% for t in tools or [] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ),
    "printed among messages": (
        "{% if messages[0].role == 'system' %}^{{ messages[0].content }}^{% endif %}{{ tools | tojson if tools }}",
        "{% if messages[0].role == 'system' %}{{ messages[0].content + (tools | tojson if tools else '') }}{% endif %}",
        "{% for t in tools or [] %}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{{ t | tojson }}{% endfor %}",
        "¦{% if loop.first and tools %}{{ tools | tojson }}{% endif %}",
        "¦{% if loop.first %}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% endif %}",
        "¦{% if tools and m.role == 'user' %}{{ tools | tojson }}{% endif %}",
        "¦{% if loop.last and tools %}{{ tools | tojson }}{% endif %}",
        "¦¦{% if tools %}{{ tools | tojson }}{% endif %}",
        "{{ tools | tojson if tools }}¦{{ tools | tojson if tools }}¦{{ tools | tojson if tools }}",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content ~ (tools | tojson if tools and loop.first else '') }}"
        "<|end|>{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{{ tools | tojson if tools }}{{ m.content | trim }}<|end|>{% endfor %}",
        "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}{% for t in tools or [] %}\n"
        "{{ t | tojson }}{% endfor %}<|end|>{% else %}" + TURN + "{% endif %}{% endfor %}",
    ),
    "fields of a tool": (
        for_each("{{ t.name }}"), for_each("{{ t['name'] }}"), for_each("{{ t.get('name') }}"),
        for_each("{{ 'name' in t }}"), for_each("{{ t.function.name }}"), for_each("{{ t.name is defined }}"),
        for_each("{% for k, v in t.items() %}{{ k }}{% endfor %}"),
        for_each("{% for k, v in t | items %}{{ k }}{% endfor %}"), for_each("{% for k in t %}{{ k }}{% endfor %}"),
        for_each("{{ t.values() | list | length }}"),
        for_each("{{ t['na' ~ 'me'] }}"), for_each("{{ t.function | tojson }}"),
        for_each("{% set f = t.function %}{{ f.name }}"), for_each("{{ (t.function or t) | tojson }}"),
    ),
    "elements of the list": (
        "{{ tools[0].name if tools }}", "{{ tools[-1].name if tools }}", "{{ (tools | first).name if tools }}",
        "{{ tools | map(attribute='name') | join if tools }}", "{{ (tools | last) | length if tools }}",
        "{{ tools | selectattr('name') | list | length if tools }}", "{{ tools | join if tools }}",
        "{% for t in tools[:1] if tools %}{{ t.name }}{% endfor %}", "{{ tools[0] == tools[1] if tools }}",
        "{% if tools %}{{ '+' if {} in tools }}{% endif %}", "{% if tools == [{}] %}+{% endif %}",
        "{{ tools | groupby('name') | list | length if tools }}", "{% for t in tools | list if t %}+{% endfor %}",
        "{{ tools | sum(attribute='x') if tools }}", "{% for a, b in tools or [] %}{{ a }}{% endfor %}",
    ),
    "a tool as a whole": (
        for_each("{{ t }}"), "{{ tools }}", for_each("{{ t | string }}"), "{{ tools | string }}",
        for_each("{{ t | length }}"), for_each("{{ t ~ '' }}"), for_each("{{ '%s' % t }}"), for_each("{{ t | list }}"),
        for_each("{{ '{0}'.format(t) }}"), for_each("{{ t | pprint }}"), "{{ [tools] | string }}",
    ),
    "JSON with options": (
        for_each("{{ t | tojson(indent=4) }}"), "{{ tools | tojson(2) if tools }}",
        for_each("{{ t | tojson(ensure_ascii=true) }}"), for_each("{{ t | tojson(sort_keys=true) }}"),
        for_each("{{ t | tojson(separators=(',', ':')) }}"), for_each("{{ t | tojson(**{'indent': 1}) }}"),
    ),
    "JSON that is processed": (
        for_each("{{ t | tojson | length }}"), for_each("{{ t | tojson | upper }}"), for_each("{{ (t | tojson)[:5] }}"),
        for_each("{{ '+' if 'name' in t | tojson }}"), for_each("{{ t | tojson | replace('a', 'b') }}"),
        for_each("{{ t | tojson | tojson }}"), for_each("{{ t | tojson == '{}' }}"),
        for_each("{{ '%5s' % (t | tojson) }}"), for_each("{{ t | tojson >= '{}' }}"),
        for_each("{% set j = 'T' ~ t | tojson %}{{ j | length }}"), for_each("{{ t | tojson is lower }}"),
        for_each("{{ {'{}': 1}[t | tojson] }}"), for_each("{{ raise_exception('no') if t | tojson == '{}' }}"),
        for_each("{{ t | tojson | indent }}"), for_each("{{ (t | tojson).split('name') | length }}"),
    ),
    "whether a tool is empty": (
        for_each("{{ '+' if t }}"), for_each("{% if not t %}+{% endif %}"), for_each("{{ t or 1 }}"),
        for_each("{{ t and 1 }}"), "{% for t in tools or [] if t %}+{% endfor %}", for_each("{{ t == {} }}"),
        for_each("{{ (t or none) | tojson }}"), "{{ tools | select | list | length if tools }}",
        "{{ tools | reject | list | length if tools }}", for_each("{{ t | default('no', true) | tojson }}"),
    ),
    "conditions of loops": (
        "{% for t in tools or [] if t.name == 'f' %}+{% endfor %}",
        "{% for t in tools or [] if 'name' in t %}{{ t | tojson }}{% endfor %}",
        "{% for t in tools or [] if t | length %}{{ loop.index }}{% endfor %}",
        "¦{% for t in tools or [] if t.name == m.role %}+{% endfor %}",
    ),
    "other tools, by loop": (
        for_each("{{ loop.previtem.name if not loop.first }}"), for_each("{{ '+' if loop.nextitem }}"),
        for_each("{{ loop.changed(t.name) }}"), for_each("{% set l = loop %}{{ l.nextitem | string }}"),
        "{% for t in tools or [] recursive %}{{ loop([]) }}{{ t | length }}{% endfor %}",
    ),
    "tools are captured or passed on": (
        "{% macro f(x) %}{{ x | length }}{% endmacro %}" + for_each("{{ f(t) }}"),
        "{% macro f(x) %}{{ x[0].name }}{% endmacro %}{{ f(tools) if tools }}",
        "{% macro f(x=tools) %}{{ x }}{% endmacro %}{{ f() }}", "{% macro f() %}{{ tools }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{% for t in tools or [] %}{{ t.name }}{% endfor %}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ varargs }}{% endmacro %}{{ f(tools) }}",
        "{% macro f() %}{{ caller() | length }}{% endmacro %}{% call f() %}{{ tools | tojson }}{% endcall %}",
        "{% set block %}{{ tools | tojson }}{% endset %}{{ block | length }}",
        "{% set block | upper %}{{ tools | tojson }}{% endset %}{{ block }}",
        "{% filter upper %}{{ tools | tojson }}{% endfilter %}",
        "{{ dict(a=tools).a | string }}", for_each("{{ {'a': t}.a.name }}"), for_each("{{ [t][0].name }}"),
        "{% set a, b = tools, 1 %}{{ a }}", "{% set a = (tools, 1) %}{{ a[0] }}",
    ),
    "a state": (
        "{% set ns = namespace(t=tools) %}{{ ns.t }}", "{% set ns = namespace() %}{% set ns.t = tools %}{{ ns.t }}",
        "{% set ns = namespace(n=0) %}" + for_each("{% set ns.n = ns.n + t | length %}") + "{{ ns.n }}",
        "{% set ns = namespace(n='') %}" + for_each("{% set ns.n = ns.n ~ t | tojson %}") + "{{ ns.n | length }}",
        "{% set ns = namespace(n=0) %}" + for_each("{% if t.x %}{% set ns.n = ns.n + 1 %}{% endif %}") + "{{ ns.n }}",
        "{% set ns = namespace(n=none) %}" + for_each("{% set ns.n = t %}") + "¦{{ '+' if ns.n }}",
    ),
    "tools under other names": (
        "{% set tools = tools | selectattr('name') | list if tools %}{{ tools | length if tools }}",
        "{% set given = tools %}{{ given }}", "{% with given = tools %}{{ given }}{% endwith %}",
        "{% set given = tools or messages %}{{ given[0].name }}", "{% for t in [tools] %}{{ t }}{% endfor %}",
        "{% for t in [tools] %}{% for s in t or [] %}{{ s.name }}{% endfor %}{% endfor %}",
        "{% for t in tools or [] %}{% for t in t %}{{ t }}{% endfor %}{% endfor %}",
        for_each("{% set x = t %}{{ x.name }}"), "{% set tools = [tools] %}{{ tools | string }}",
    ),
    "messages depend on tools": (
        "¦{% if tools and tools[0].name %}+{% endif %}", "¦{{ '+' if m.role in tools | string }}",
        "{% for m in (messages if tools and tools[0] else messages[1:]) %}" + TURN + "{% endfor %}",
    ),
    "other fields of messages": (
        "¦{% if tools %}{{ m.name }}{% endif %}", "¦{% if tools is not none %}{{ m.thinking }}{% endif %}",
        "¦{{ tools and m.name }}", "¦{% if tools %}{{ '+' if 'reasoning_content' in m }}{% endif %}",
        "¦{% if tools is none %}{% elif not tools %}{{ m.name }}{% endif %}",
        "¦{% if tools %}{{ m.content | length }}{% endif %}", "{% if tools %}{{ messages | length }}{% endif %}",
        "{{ messages[-1].role if tools is not none }}", "¦{% if tools %}{{ loop.index }}{% endif %}",
        "¦{% if tools %}{{ loop.previtem.content }}{% endif %}", "¦{{ (tools or [m])[0] | length if tools }}",
        "{% set ns = namespace(n=0) %}¦{% if tools %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endif %}",
        "¦{% if tools and m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}", "¦{{ m.name if tools == [] }}",
        "{% for m in tools or [] %}{{ m | tojson }}{% endfor %}{% for m in messages %}" + TURN + "{% endfor %}",
    ),
    "roundabout": (
        "{{ tools[0] | tojson if tools }}", "{{ tools | default([]) | tojson }}", "{{ [tools] | tojson }}",
        "{% macro f(x) %}{{ x | tojson }}{% endmacro %}{{ f(tools) if tools }}", "{{ tools | list | tojson if tools }}",
        "{% set block %}{{ tools | tojson }}{% endset %}{{ block }}", for_each("{{ t | tojson | trim }}"),
        "{% set ns = namespace(t=tools) %}{{ ns.t | tojson }}", "{{ tools | map('tojson') | join if tools }}",
        "{{ tools and 'T' }}", for_each("{{ t | attr('name') }}"), for_each("{{ (t | tojson) * 2 }}"),
        for_each("{{ t in tools }}"), for_each("{{ t == none }}"),
        "{% for t in tools | reverse %}{{ t | tojson }}{% endfor %}",
    ),
}  # fmt: skip

SCHEMA: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Says "sunny"\n\tor \\ not; costs 5€',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Zürich", "東京", "\U0001f600"]}},
        },
    },
}
HOSTILE_TOOLS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"": ""},
    {"name": None, "x": [True, False, None, [], {}]},
    {"floats": [0.1, 1.0, -0.0, 1e-7, 1e22, 1.7976931348623157e308], "integers": [0, -1, 2**53 + 1, 2**64, -(10**300)]},
    {"said": "<|end|><|im_end|></s><|assistant|>", "<|end|>": "<|im_start|>assistant\n"},
    {"\U0010fe00t0\U0010fe01": 0},
    {"\U0010fe00t1\U0010fe01": 0, "\U0010fe000a0\U0010fe01": 0},
    {"a": "\u2003\U0010fe000\U0010fe01\u2003", "b": "\U0010fe001n0\U0010fe01", "c": "\U0010fe00"},
    {"a": '{"\U0010fe00t0\U0010fe01": 0}', "b": "\\", "c": '"'},
    {"\x01": "\x10\x1f\x7f", "\x00": "\u2028\u2029\x85\ufeff"},
    {"a": "\U0010ff00\U0010ff10"},
    {"{{ x }}": "{% if %}", "role": "user", "content": "q"},
    {"deep": [[[[[{"a": [{"b": [{}]}]}]]]]]},
    {"e\u0301": "é", "x" * 300: "y" * 3000},
    SCHEMA,
)
TOOL_LISTS: Final[tuple[list[Any] | None, ...]] = (
    None,
    [],
    *([tool] for tool in HOSTILE_TOOLS),
    [{"name": "user", "x": 1}],
    [{"name": "f"}, {}],
    [{"name": "g", "x": 1, "function": {"name": "h"}}, {"name": "f"}],
    list(HOSTILE_TOOLS[:3]),
    [SCHEMA] * 20,
    list(HOSTILE_TOOLS),
)
