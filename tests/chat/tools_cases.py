"""Templates that do no more with tools than print them, templates that do: the tables of the tests of tools."""

from __future__ import annotations

from typing import Any, Final

from tests.chat.stencil_probes import PROMPT

TURN: Final = (
    "<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}<|end|>"
)


def printing(text: str) -> str:
    """A template with up to three texts between bars: before the messages, before each, after all. Whole ones stay."""
    before, each, after = (*text.split("¦"), "", "")[:3]
    loop = text if "for m in" in text else f"{before}{{% for m in messages %}}{each}{TURN}{{% endfor %}}{after}"
    return loop + PROMPT


def for_each(text: str) -> str:
    """This, printed for every tool, before the messages."""
    return f"{{% for t in tools or [] %}}{text}{{% endfor %}}"


BEFORE: Final = (
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
)
DECIDING: Final = (
    "{{ 'T' if tools }}¦{{ '+' if tools and m.role == 'user' }}",
    "{{ tools | length if tools }}",
    "{% if tools and tools | count == 2 %}two{% endif %}",
    "{{ tools is none }}{{ tools is defined }}{{ tools is iterable }}{{ tools is string }}{{ tools is mapping }}",
    "{{ tools == none }}{{ tools != '' }}{{ tools == false }}",
    for_each("{{ t is mapping }}{{ t is none }}{{ t is defined }}{{ t is string }}"),
    "{% if not tools %}{% set tools = [] %}{% endif %}{{ '+' if tools }}",
    "{{ 'N' if not (tools or false) }}{{ 'T' if tools and 1 }}",
    "{% set ns = namespace(n=0) %}{% for t in tools or [] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
)
BESIDE_MESSAGES: Final = (
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
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content ~ (tools | tojson if tools and loop.first else '') }}<|end|>"
    "{% endfor %}",
    "{% for m in messages %}<|{{ m.role }}|>{{ tools | tojson if tools }}{{ m.content | trim }}<|end|>{% endfor %}",
    "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}{% for t in tools or [] %}\n"
    "{{ t | tojson }}{% endfor %}<|end|>{% else %}" + TURN + "{% endif %}{% endfor %}",
)
LOCAL_WITH_TOOLS: Final = (*BEFORE, *DECIDING, *BESIDE_MESSAGES)

# Each prints what placeholders do not tell, on the conversations of the tests.
NOT_WITH_TOOLS: Final[dict[str, tuple[str, ...]]] = {
    "a look into a tool": (
        for_each("{{ t.name }}"), for_each("{{ t['name'] }}"), for_each("{{ t.get('name') }}"),
        for_each("{{ 'name' in t }}"), for_each("{{ t.function.name }}"), for_each("{{ t.name is defined }}"),
        for_each("{% for k, v in t.items() %}{{ k }}{% endfor %}"),
        for_each("{% for k, v in t | items %}{{ k }}{% endfor %}"), for_each("{% for k in t %}{{ k }}{% endfor %}"),
        for_each("{{ t.values() | list | length }}"),
        for_each("{{ t['na' ~ 'me'] }}"), for_each("{{ t.function | tojson }}"),
        for_each("{% set f = t.function %}{{ f.name }}"), for_each("{{ (t.function or t) | tojson }}"),
    ),
    "a look into the list": (
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
    "JSON of another kind": (
        for_each("{{ t | tojson(indent=4) }}"), "{{ tools | tojson(2) if tools }}",
        for_each("{{ t | tojson(ensure_ascii=true) }}"), for_each("{{ t | tojson(sort_keys=true) }}"),
        for_each("{{ t | tojson(separators=(',', ':')) }}"), for_each("{{ t | tojson(**{'indent': 1}) }}"),
    ),
    "more with JSON than to print it": (
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
    "tools are handed on": (
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
    "what tools say decides about messages": (
        "¦{% if tools and tools[0].name %}+{% endif %}", "¦{{ '+' if m.role in tools | string }}",
        "{% for m in (messages if tools and tools[0] else messages[1:]) %}" + TURN + "{% endfor %}",
    ),
}  # fmt: skip
# More of messages is read where there are tools, or an empty list of them: such rows would need other facts.
NOT_FOR_ROWS_WITH_TOOLS: Final = (
    "¦{% if tools %}{{ m.name }}{% endif %}", "¦{% if tools is not none %}{{ m.thinking }}{% endif %}",
    "¦{{ tools and m.name }}", "¦{% if tools %}{{ '+' if 'reasoning_content' in m }}{% endif %}",
    "¦{% if tools is none %}{% elif not tools %}{{ m.name }}{% endif %}",
    "¦{% if tools %}{{ m.content | length }}{% endif %}", "{% if tools %}{{ messages | length }}{% endif %}",
    "{{ messages[-1].role if tools is not none }}", "¦{% if tools %}{{ loop.index }}{% endif %}",
    "¦{% if tools %}{{ loop.previtem.content }}{% endif %}", "¦{{ (tools or [m])[0] | length if tools }}",
    "{% set ns = namespace(n=0) %}¦{% if tools %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endif %}",
    "¦{% if tools and m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}", "¦{{ m.name if tools == [] }}",
    "{% for m in tools or [] %}{{ m | tojson }}{% endfor %}{% for m in messages %}" + TURN + "{% endfor %}",
)  # fmt: skip
# These would do no harm; nobody has shown it, so they are refused all the same.
REFUSED_FOR_CAUTION: Final = (
    "{{ tools[0] | tojson if tools }}", "{{ tools | default([]) | tojson }}", "{{ [tools] | tojson }}",
    "{% macro f(x) %}{{ x | tojson }}{% endmacro %}{{ f(tools) if tools }}", "{{ tools | list | tojson if tools }}",
    "{% set block %}{{ tools | tojson }}{% endset %}{{ block }}", for_each("{{ t | tojson | trim }}"),
    "{% set ns = namespace(t=tools) %}{{ ns.t | tojson }}", "{{ tools | map('tojson') | join if tools }}",
    "{{ tools and 'T' }}", for_each("{{ t | attr('name') }}"), for_each("{{ (t | tojson) * 2 }}"),
    for_each("{{ t in tools }}"), for_each("{{ t == none }}"),
    "{% for t in tools | reverse %}{{ t | tojson }}{% endfor %}",
)  # fmt: skip

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
    list(HOSTILE_TOOLS),  # with marks of both alphabets
)
