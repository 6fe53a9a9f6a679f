"""Control flow of Jinja that templates use or might use, and templates in the manner of real ones that rely on it."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

from typing import Final

_TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
_BOX = "{% macro box(title) %}<{{ title }}>{{ caller() }}</{{ title }}>{% endmacro %}"

CONTROL: Final = (
    # loops with else: it runs unless an iteration reaches the end of the body
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c }}{% else %}no calls {{ messages[0].content }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}<{{ m.content }}>{% else %}[{{ messages[0].content }}]{% endfor %}",
    "{% for m in messages %}<{{ m.content }}{% if true %}{% break %}{% endif %}>{% else %}[{{ messages[-1].content }}]{% endfor %}",
    "{% for m in messages %}{% for x in [] %}{% else %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for x in [] %}{% else %}{{ m.content }}{% break %}{% endfor %}!{% endfor %}{{ messages[0].content }}",
    "{% for x in messages if x.role == 'nobody' %}{{ loop.index }}{% else %}{{ messages[0].content }}{% set y = 1 %}{{ y }}{% endfor %}{{ y }}",
    # recursive loops
    "{% for x in [[1, [2, [3]]], 4] recursive %}{{ loop.depth }}{{ loop.index }}{% if x is iterable %}[{{ loop(x) }}]{% else %}{{ x }}{% endif %}{% endfor %}",
    "{% for m in messages recursive %}<{{ m.content }}{{ loop.depth0 }}{% if loop.depth < 3 %}{{ loop(messages[:2]) }}{% endif %}>{% endfor %}",
    "{% for m in messages recursive %}{{ m.content }}{% if loop.first and loop.depth < 3 %}{% set x = loop(messages[1:]) %}({{ x }}){% endif %}{% else %}none {{ messages[0].content }}{% endfor %}",
    "{% for m in messages if m.role != 'system' recursive %}{{ loop.length }}{{ m.role }}{% for y in [1] %}{{ y }}{% endfor %}{% if loop.depth == 1 %}{% set outer = loop %}{% for z in [1] %}{{ outer(messages[:1]) }}{% endfor %}{% endif %}{% endfor %}",
    "{% for x in messages recursive %}{% for y in [[1], []] recursive %}{{ x.role }}{{ loop(y) if y is iterable else y }}{% endfor %}{% break %}{% endfor %}",
    "{% for x in [1, 2] recursive %}{{ loop([]) }}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endfor %}",
    # call blocks and caller
    _BOX + "{% for m in messages %}{% call box(m.role) %}{{ m.content }}{% endcall %}{% endfor %}",
    _BOX + "{% call box('a') %}{{ messages[0].content }}{% call box('b') %}{% for m in messages %}{{ m.content }}{% endfor %}{% endcall %}{% endcall %}",
    _BOX + "{% for m in messages %}{% generation %}{% call box(m.role) %}{{ m.content }}{% endcall %}{% endgeneration %}{% endfor %}",
    _BOX + "{% for m in messages %}{% call box(m.role) %}{% generation %}{{ m.content }}{% endgeneration %}{% endcall %}{% endfor %}",
    "{% macro rows(items) %}{% for i in items %}{{ caller(i, loop.index, last=loop.last) }};{% endfor %}{% endmacro %}{% call(m, n, last=false, more='x') rows(messages) %}{{ n }}{{ m.content }}{{ last }}{{ more }}{% endcall %}",
    "{% macro maybe() %}{{ caller() if caller else 'alone' }}{{ caller is defined }}{% endmacro %}{{ maybe() }}{% call maybe() %}{{ messages[0].content }}{% endcall %}{{ maybe(caller=none) }}",
    "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}{% macro four() %}{% set body = caller %}{% call twice() %}{% call twice() %}{{ body() }}{% endcall %}{% endcall %}{% endmacro %}{% call four() %}{{ messages[0].content }}{% endcall %}",
    # arguments
    "{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% for k, v in kwargs.items() %}{{ k }}{{ v }}{% endfor %}{% endmacro %}{{ f(1) }}{{ f(1, 2, messages[0].content, k='x') }}{{ f(k=1, a=2) }}",
    "{% macro f(a, b=2, c=3) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(*[1, messages[0].content]) }}{{ f(*'xyz') }}{{ f(0, **{'c': messages[0].content}) }}{{ f(*[7], b=8, **{'c': 9}) }}{{ f(*nope) }}",
    "{% macro f(a, b=a, c=b ~ a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(messages[0].content) }}{{ f(1, c=2) }}{{ f() }}",
    "{% macro f(a=b, b=a) %}{{ a }}|{{ b }};{% endmacro %}{{ f() }}{{ f(1) }}{{ f(b=2) }}{% set b = 5 %}{{ f() }}",
    "{% macro count() %}{{ varargs|length }}{{ kwargs|length }}{{ varargs[0] }}{{ kwargs.x }}{% endmacro %}{{ count() }}{{ count(messages[0].content, x=messages[-1].content) }}",
    # macros in macros
    "{% macro outer(m, n) %}{% macro inner(x) %}{{ x }}{{ m.content }}{{ n }}{{ w }}{% endmacro %}{{ inner(1) }}{% set n = 5 %}{{ inner(2) ~ '' }}{% endmacro %}{% set w = 'w' %}{% for m in messages %}{{ outer(m) }}{% endfor %}",
    "{% macro a() %}{% set x = messages[0].content %}{% macro b() %}{% macro c() %}{{ x }}{{ y }}{% endmacro %}{% set y = 2 %}{{ c() }}{% endmacro %}{{ b() }}{% set x = 3 %}{{ b() }}{% endmacro %}{{ a() }}",
    "{% macro fact(n) %}{% macro step(k) %}{{ k }}{% if k > 1 %}{{ step(k - 1) }}{{ n }}{% endif %}{% endmacro %}{{ step(n) }}{% if n > 1 %}{{ fact(n - 1) }}{% endif %}{% endmacro %}{{ fact(3) }}",
    "{% for m in messages %}{% macro said() %}{{ m.content }}{{ loop.index }}{% endmacro %}{{ said() }}{% endfor %}",
    "{% macro f(x) %}{{ x }}{% for i in [1, 2] %}{% call g() %}{{ i }}{{ x }}{{ loop.index }}{% endcall %}{% endfor %}{% endmacro %}{% macro g() %}({{ caller() }}){% endmacro %}{{ f(messages[0].content) }}",
    # callables as values
    "{% macro g(x) %}({{ x }}){% endmacro %}{% set ns = namespace(g=g) %}{{ ns.g(messages[0].content) }}{{ {'k': g}.k(2) }}{{ {'k': g}['k'](3) }}{{ [g][0](4) }}{{ (g or 1)(messages[-1].content) ~ '' }}",
    "{% macro one(m) %}1{{ m.content }}{% endmacro %}{% macro two(m) %}2{{ m.content }}{% endmacro %}{% for m in messages %}{{ (one if loop.first else two)(m) }}{% endfor %}",
    "{% macro apply(f, x) %}{{ f(x) }}{{ f(x) ~ x }}{% endmacro %}{% macro bold(x) %}*{{ x }}*{% endmacro %}{{ apply(bold, messages[0].content) }}",
    "{% macro range(x) %}r{{ x }}{% endmacro %}{{ range(3) }}",
    # filters of loops
    "{% macro ok(m) %}{{ 'y' if m.role == 'user' }}{% endmacro %}{% for m in messages if ok(m) %}{{ m.content }}{% endfor %}{% for m in messages if ok(m) %}{{ loop.index }}{{ m.content }}{{ loop.last }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages if ns.n < 2 %}{% set ns.n = ns.n + 1 %}{{ m.content }}{% else %}{{ ns.n }}{% endfor %}",
    "{% set ns = namespace(seen='') %}{% for m in messages if m.role not in ns.seen %}{% set ns.seen = ns.seen ~ m.role %}{{ m.role }}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for i in range(messages|length) if messages[i].role == 'user' %}{{ i }}{{ messages[i].content }}!{% endfor %}",
    "{% for i in range(messages|length) if messages[i].role == 'user' %}{{ i }}{% endfor %}{{ messages[0].content }}",
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'system' and ns.n < 3 %}{% set ns.n = ns.n + loop.index %}{{ loop.index }}{{ m.content }}{{ loop.previtem.content if not loop.first }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for a, b in [(1, 2), (3, 4)] if a > 1 and nope is undefined %}{% set nope = 5 %}{{ a }}{{ b }}{{ nope }}{% endfor %}",
    # attributes of loops
    "{% for m in messages %}{{ loop.cycle('a', m.content, messages[0].content) }}{{ loop.changed(m.role) }}{{ loop.changed() }}{{ loop.nope is defined }}{{ loop['index'] }}{{ loop.depth }}{% endfor %}",
    "{% for m in messages %}{% if loop.changed(m.role, loop.index // 2) %}{{ m.content }}{% endif %}{% set again = loop.changed %}{{ again(1) }}{{ again(1) }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.length }}{% for c in 'ab' %}{{ loop.cycle(1, 2) }}{{ c }}{% endfor %}{{ loop.cycle(1, 2) }}{% endfor %}",
    # blocks with names of their own
    "{% with a = messages[0].content, b = 2 %}{{ a }}{{ b }}{% with a = b, b = a %}{{ a }}{{ b }}{% endwith %}{{ a }}{% endwith %}{{ a }}",
    "{% for m in messages %}{% with (x, y) = (m.content, 1) %}{% if loop.first %}{% continue %}{% endif %}{{ x }}{{ y }}{% endwith %}{{ x }}{% endfor %}",
    "{% set ns = namespace({'a': 1}, b=messages[0].content) %}{% set ns.a, ns.c = ns.b, 3 %}{{ ns.a }}{{ ns['c'] }}{% set ns.d %}<{{ ns.a }}>{% endset %}{{ ns.d }}{{ namespace(**{'q': 4}).q }}{{ namespace().x is defined }}",
    "{% for m in messages %}{% filter trim %} {{ m.content }}{% if loop.last %}{% break %}{% endif %}{% endfilter %}{% set x %}{{ m.role }}{% if loop.first %}{% continue %}{% endif %}{% endset %}{{ x }}{% endfor %}",
    "{% set a, (b, c) = messages[0].content, 'xy' %}{{ a }}{{ b }}{{ c }}{% for k, (p, q) in [(1, (2, messages[0].content))] %}{{ k }}{{ p }}{{ q }}{% endfor %}{% set (d) = 1 %}{{ d }}",
)  # fmt: skip

_JSON_SCHEMA = """\
{%- macro type_of(schema, depth=0) -%}
  {%- if schema is not mapping -%}any
  {%- elif schema.enum -%}{% for e in schema.enum %}{{ e|tojson }}{{ " | " if not loop.last }}{% endfor %}
  {%- elif schema.anyOf -%}{% for s in schema.anyOf %}{{ type_of(s, depth) }}{{ " | " if not loop.last }}{% endfor %}
  {%- elif schema.type == "array" -%}{{ type_of(schema["items"], depth) }}[]
  {%- elif schema.type == "object" -%}{ {%- for k, s in (schema.properties or {}).items() %}
{{ "  " * (depth + 1) }}{{ k }}{{ "?" if k not in (schema.required or []) }}: {{ type_of(s, depth + 1) }},
  {%- else %} [key: string]: any {% endfor %}}
  {%- else -%}{{ schema.type or "any" }}{%- endif -%}
{%- endmacro -%}
"""

REAL: Final = {
    "typed tools": _JSON_SCHEMA
    + "{% if tools %}<|tools|>{% for t in tools %}{% with f = t.function or t %}\n// {{ f.description or 'no description' }}\ntype {{ f.name }} = ({{ type_of(f.parameters) }})\n{% endwith %}{% else %}none{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}" + _TURN + "{% endfor %}",
    "turns by a call block": "{% macro turn(role, end='<|end|>') %}{{ '<|' ~ role ~ '|>' }}{{ caller() }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{% call turn(m.role) %}{% if m.content is string %}{{ m.content|trim }}{% else %}{% for p in m.content or [] if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}{% endcall %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "tags by keyword": "{% macro tag(name) %}<{{ name }}{% for k, v in kwargs|dictsort %} {{ k }}={{ v|tojson }}{% endfor %}>{{ varargs|join('\\n') }}</{{ name }}>{% endmacro %}"
    "{% for m in messages %}{{ tag('turn', m.content or '', role=m.role, number=loop.index) }}{% for c in m.tool_calls or [] %}{{ tag('call', **c.function) }}{% endfor %}\n{% endfor %}",
    "arguments as a tree": "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% if c.function.arguments is mapping %}"
    "{% for k, v in c.function.arguments.items() recursive %}\n{{ '  ' * loop.depth }}{{ k }}:{% if v is mapping %}{{ loop(v.items()) }}{% else %} {{ v|tojson }}{% endif %}{% else %} none{% endfor %}"
    "{% else %}{{ c.function.arguments }}{% endif %}{% endfor %}<|end|>{% endfor %}",
    "the last user turn": "{% set ns = namespace(last=-1, found=false) %}{% for m in messages[::-1] if not ns.found %}{% if m.role == 'user' %}{% set ns.found = true %}{% set ns.last = messages|length - loop.index %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}",
    "the first system message": "{% set ns = namespace(system=none) %}{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% break %}{% else %}{% set ns.system = 'You help.' %}{% endfor %}"
    "<|system|>{{ ns.system }}<|end|>{% for m in messages if m.role != 'system' %}" + _TURN + "{% endfor %}",
    "roles that alternate": "{% for m in messages %}{% if loop.changed(m.role) %}{{ '<|end|>' if not loop.first }}<|{{ m.role }}|>{% else %}\n\n{% endif %}{{ m.content }}{% else %}{{ raise_exception('empty') }}{% endfor %}<|end|>",
    "renderers by role": "{% macro user(m) %}[INST] {{ m.content }} [/INST]{% endmacro %}{% macro assistant(m) %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% endmacro %}{% macro other(m) %}({{ m.role }}) {{ m.content }}\n{% endmacro %}"
    "{% set render = {'user': user, 'assistant': assistant} %}{% for m in messages %}{{ render.get(m.role, other)(m) }}{% endfor %}",
    "thoughts split off": "{% macro parts(text) %}{% if '</think>' in text %}{{ caller(text.split('</think>')[0].split('<think>')[-1], text.split('</think>')[-1]) }}{% else %}{{ caller('', text) }}{% endif %}{% endmacro %}"
    "{% for m in messages %}<|{{ m.role }}|>{% call(thought, answer) parts(m.content|string) %}{% if thought %}<think>{{ thought }}</think>{% endif %}{{ answer }}{% endcall %}<|end|>{% endfor %}",
    "instructions in pairs": "{% macro pair(ask, say='', system='') %}<s>[INST] {{ system ~ '\n\n' if system }}{{ ask }} [/INST]{{ ' ' ~ say ~ '</s>' if say }}{% endmacro %}"
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% elif m.role == 'user' %}{{ pair(m.content, system=ns.system, **({'say': loop.nextitem.content} if loop.nextitem and loop.nextitem.role == 'assistant' else {})) }}"
    "{% set ns.system = '' %}{% elif m.role == 'assistant' and not loop.previtem %}{{ m.content }}{% else %}{% continue %}{% endif %}{% endfor %}",
}  # fmt: skip
