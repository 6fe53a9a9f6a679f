"""Expressions, statements and odd values: what templates do, on everything that a row may hold.

`v` is the odd value: `messages[0].v` of the conversation that is rendered.
"""

from __future__ import annotations

from typing import Any, Final

VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, 2, -3, 2**40, 999999999999999999, -999999999999999999),
    *(0.5, -0.0, 1e22, 1e-5, 123456.789, 1e16, 5e-324, 2.0**-44, 100.0),
    *("", " a b ", "abc", "Abc dEf", "éÀß", "\u00a0x\u3000", "a\nb\r\nc\x85d", "it's", 'say "hi"', "<b>&'"),
    *(
        "日本語😀x",
        "42",
        "aaaab",
        "\x00\x07\x7f\\",
        "\u2028\ue000\U000e0001",
        "ǆﬁİ",
        "\x1ca\x1f",
        "{}",
        "x{}y",
        "{{}}",
        "{0}",
    ),
    *([], [1, 2, 3], ["b", "A", "c", "a"], [[1, 2], [3, 4]], [{"type": "text", "text": "T"}, {"type": "image"}]),
    *([None, True, 1.5], ["", 0, "x"], [3, 1, 2], [True, 1, 0], [{"a": {"b": 2}}, {"a": {"b": 1}}], ["x", "X", "x"]),
    *({}, {"a": 1}, {"b": 1, "A": [2], "c": {"d": None}}, {"type": "x", "items": [1]}, {"get": 1, "a b": "é\n"}),
    *({"a": "<>", "é": 0.1}, {"a": {"b": {"c": 1}}}),
)

# The machine must render these on every value that jinja2 renders them on, unless EXCUSED names the pair.
USUAL: Final = (
    *("v", "v|string", "v|trim", "v|tojson", "v|tojson(indent=2)", "v|tojson(ensure_ascii=true)", "v|safe"),
    *("v|tojson(indent=0)", "v|tojson(sort_keys=true)", "v|tojson(separators=(',', ':'))", "v|tojson(true, 1, ('', ''))"),
    *("v|tojson(indent='\\t', sort_keys=true)", "v|default('D')", "v|default('D', true)", "v|d('D', boolean=true)"),
    *("v|length", "v|count", "v|list", "v|first", "v|join", "v|join(', ')", "v|upper", "v|lower", "v|capitalize"),
    *("v|dictsort", "v|items|list", "v|list|last", "v|replace('a', 'X')", "v|trim('ab ')", "v|select|list"),
    *("v|reject('equalto', 'b')|list", "v|map('string')|list", "v|map('tojson')|join", "v|reverse|list"),
    *("v.strip()", "v.lstrip()", "v.rstrip()", "v.rstrip('c ')", "v.lstrip('a')", "v.strip('éß')", "v.split()"),
    *("v.split('b')", "v.split('b')[0]", "v.split('b')[-1]", "v.split('b', 1)", "v.split('b')[1]", "v.split('a', 2)|length"),
    *("v.startswith('a')", "v.endswith(('c', 'x'))", "v.endswith('c')", "v.startswith(('x', 'a'))", "v.startswith('')"),
    *("v.replace('b', '')", "v.replace('a', 'bb', 2)", "v.upper()", "v.lower()", "v.capitalize()", "v.removeprefix('a')"),
    *("v.removesuffix('c')", "v.get('a')", "v.get('zz', 5)", "v.items()|list", "v.keys()|list", "v.values()|list"),
    *("v.find('b')", "v.count('a')", "'-'.join(v)", "v[0]", "v[-1]", "v[5]", "v['a']", "v['zz']", "v.a", "v.type"),
    *("v[1:]", "v[:-1]", "v[-2:]", "v[0:2]", "v[1:1]", "v[5:]", "v[:99]", "v['a']['b']", "v.a.b", "v['a b']"),
    *("v ~ v", "v ~ '|' ~ 1 ~ none", "not v", "v and 'y'", "v or 'n'", "v == 1", "v == 'abc'", "v != none", "v == v"),
    *("v != 'abc'", "v in [1, 'abc', none]", "v not in ['abc']", "'y' if v else 'n'", "'y' if v", "'a' in v"),
    *("'b' not in v", "v == [1, 2, 3]", "v == {'a': 1}", "v != [3]", "v == true", "v == 0.5", "[v] == [v]"),
    *("v is string", "v is mapping", "v is iterable", "v is sequence", "v is number", "v is boolean", "v is none"),
    *("v is defined", "v is true", "v is false", "v is integer", "v is float", "v is in [1, 2]", "v is not none"),
    *("v.zz is defined", "v.zz is undefined", "v['items'] is defined", "v is eq 1", "v is ne 'abc'", "v is not string"),
    *("nope is iterable", "nope|length", "nope", "nope ~ v", "nope == nope", "nope|default(v)", "nope is mapping"),
    *("nope in [v]", "v in nope", "nope|list", "nope|join", "nope|items|list", "nope|first", "nope|last", "nope|trim"),
    *("[v, v]", "(v,)", "(v, 1)", "()", "{'k': v}", "{'k': v, 'k': 1}", "[v]|tojson", "{'k': v}|tojson", "{0: v}[0]"),
    *("{'k': v}['k']", "{'k': v}.k", "dict(k=v).k", "range(3)|list", "range(1, 7, 2)|list", "range(5, 0, -2)|join(',')"),
    *("v|string|length", "(v|string)[1:3]", "v|tojson|length", "v|list|length", "v if v is string else v|tojson"),
    *("v|string + 'x'", "'<' + v|string + '>' + v|string", "v|trim|upper", "v|string|first", "[v]|first", "[v, 1]|last"),
    *("(v|tojson).split(',')", "7 // 2", "-7 // 2", "-7 % 3", "7 % 3", "3 - 5", "-(3)", "2 * 3", "'ab' * 2", "1 + 2 + 3"),
    *("[1] + [2] + [v]", "(1,) + (v,)", "1 < 2", "'a' < 'b'", "'a' >= 'ab'", "2 <= 2", "1 > true", "'é' > 'z'"),
    *("5 is odd", "4 is even", "-3 is odd", "'%' in 'a%b'", "messages|length", "messages[0].v is defined", "tools is none"),
    *("bos_token", "add_generation_prompt", "documents is none", "row_variable", "strftime_now('%Y-%m-%d')", "3|int"),
    *("'42'|int", "true|int", "[3, 1, 2]|max", "[3, 1]|min", "[]|max", "['b', 'A', 'c']|sort", "[2, 1]|sort|join"),
    *("['b', 'B', 'a']|unique|list", "[{'a': 2}, {'a': 1}]|sort(attribute='a')", "[{'a': {'b': v}}]|map(attribute='a.b')|list"),
    *("[{'a': v}, {}]|selectattr('a', 'defined')|list|length", "[{'t': 'x'}, {'t': 'y'}]|selectattr('t', 'equalto', 'x')|list"),
    *("[{'t': 'x'}, {'t': 'y'}]|rejectattr('t', 'in', ['x'])|list", "[1, 2, 3]|select('gt', 1)|list", "[1, 2]|reject('odd')|list"),
    *("'a\\nb\\n\\nc'|indent(2)", "'a\\nb'|indent(2, first=true)", "'a\\nb'|indent('>')", "'a\\nb'|indent", "'{} {}'.format(v, 1)"),
    *("'a' + ('b' if v else 'c')", "(v is none) ~ ''", "messages[0]['v'] == v", "messages[-1].v is string", "[[1, [2]], (3,)]"),
    *("'ß'.upper()", "'ǆx'|capitalize", "'a,b'.split(',')|join('+')", "[v][0:1]", "[1, 2, 3, 4][::2]", "[1, 2, 3][::-1]"),
    *("'日本語'[1]", "'日本語'[-2:]", "'日本語'|length", "'日本語'.find('語')", "1 in {'a': 1}", "'a' in {'a': 1}"),
)  # fmt: skip

# These need not be rendered, but where they are they must be right.
ODD: Final = (
    *("v|last", "v|int", "v|unique|list", "v|sort", "v|min", "v|max", "v|indent(2)", "v|indent(2, first=true)"),
    *("v|map('upper')|list", "v|map('length')|list", "v|map(attribute='type')|list", "v|map(attribute='a.b')|list"),
    *("v|selectattr('type')|list", "v|selectattr('type', 'equalto', 'text')|list", "v|rejectattr('type', 'defined')|list"),
    *("v|sort(attribute='a.b')", "v|sort(attribute='type')", "v|sort(attribute='a,b')", "v|select('string')|list"),
    *("v|safe + '<x>'", "'<x>' + v|safe", "(v|safe) ~ '<x>'", "(v|safe)|upper", "[v|safe]", "(v|safe)[1:]", "v|safe == v"),
    *("v.format(1)", "v.format(v, 2, 3)", "v['items']", "v.items", "v.get", "v.count", "v[::-1]", "v[::2]", "v[2:0:-1]"),
    *("v + v", "v + 1", "v - 1", "v * 2", "v % 2", "v // 2", "-v", "v > 0", "v >= 'a'", "v < 2", "1 in v", "v in v"),
    *("v is odd", "v is even", "v is lt 2", "v is gt 'a'", "v is in v", "v is string(1)", "v is defined(1)", "v is none(1)"),
    *("v is odd(1)", "v|select('defined', 1)|list", "v|select('string', v)|list", "range(1, v)|list", "range(v)|length"),
    *("v|items|length", "v|map('upper')", "v|items", "v|first|string", "nope.x", "nope[0]", "nope['a']", "nope + 'a'"),
    *("self is defined", "self", "loop is defined", "loop", "caller is defined", "varargs", "range", "namespace", "dict"),
    *("range is defined", "range == 1", "v.items()", "v.keys()", "v.items()|length", "v.items()|first", "'a' in v.keys()"),
    *("v.items() == v.items()", "range(3) == range(3)", "range(3)", "range(3)[1]", "range(0)|first", "range(3)[1:]"),
    *("9223372036854775807 + 1", "-9223372036854775807 - 1", "(-9223372036854775807 - 1) // 3", "(-9223372036854775807 - 1) % 3"),
    *("9223372036854775807 * 2", "2 ** 3", "7 / 2", "v == v|string", "{v: 1}", "{1: v, true: 2}", "{1: v}[true]", "[v][true]"),
    *("v.append(1)", "v.update(a=1)", "v.pop('a')", "v|attr('upper')", "v.__class__", "v['__class__']", "v|title"),
    *("v|string|replace('', '-')", "v|replace('a', 'b', 1)", "v|join(1)", "v|join(v)", "v|default", "v.get(1)", "v.get(v)"),
    *("v.startswith(v)", "v.startswith('c', 2)", "v.split(v)", "v.split('')", "v.split(none, 1)", "v.split(none)", "v.strip(none)"),
    *("v.count('')", "v.find('')", "v.find('a', 1)", "v.title()", "v.join(['a', 'b'])", "v.join('ab')", "v['a', 'b']", "v[none]"),
    *("v[v]", "{'a': 5}[v]", "[5, 6][v]", "'abc'[v]", "v[0.5]", "[1, 2, 3][v:]", "'abc'[:v]", "v|tojson(indent=v)"),
    *("v|tojson(separators=v)", "v|tojson(ensure_ascii=v)", "v|tojson(separators=('<'|safe, v))", "raise_exception(v)"),
    *("raise_exception('no ' ~ v)", "v|trim(v)", "v|replace(v, 'q')", "v|replace('a', v)", "v|dictsort|first", "v|string|safe|string"),
)  # fmt: skip

STATEMENTS: Final = (
    "{% for x in v %}{{ loop.index }}{{ x }}{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.revindex }}"
    "{{ loop.length }}{{ loop.first }}{{ loop.index0 }}{{ loop.revindex0 }};{% endfor %}",
    "{% for k, x in v.items() %}{{ k }}={{ x }};{% endfor %}",
    "{% for k, x in v|items %}{{ k }}{% endfor %}",
    "{% for k, x in v %}{{ k }}{% endfor %}",
    "{% for x in v if x %}{{ loop.index0 }}{{ x }}{% endfor %}",
    "{% for x in v if x is string %}{{ x }}{{ loop.length }}{% endfor %}{{ x }}",
    "{% set g = v|map('upper') %}{{ g|join }}{{ g|join }}",
    "{% set g = v|items %}{% for a in g %}{{ a }}{% endfor %}{% for a in g %}{{ a }}{% endfor %}",
    "{% set ns = namespace(a=v) %}{% for i in [1, 2] %}{% set ns.a = i %}{% set ns.b = v %}{% endfor %}"
    "{{ ns.a }}{{ ns.b }}{{ ns.c }}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}",
    "{% macro m(a, b=v, c='q') %}{{ a }}|{{ b }}|{{ c }}{% endmacro %}{{ m(1) }}{{ m(v, c=2) }}{{ m() }}"
    "{{ m(nope, nope) }}{% set r = m(3, 4) %}{{ r|upper }}",
    "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(v) }}{{ m(b=v) }}{{ m(1, v) }}",
    "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
    "{% for i in v %}{% if loop.index > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% set z %}a{{ v }}b{% endset %}{{ z|upper }}",
    "{% set z | upper | trim %} a{{ v }}b {% endset %}{{ z }}",
    "{% filter upper %}x{{ v }}{% endfilter %}",
    "{% filter replace('a', 'b')|trim %} a{{ v }} {% endfilter %}",
    "{% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(3) }}",
    "{% if v is defined and v %}1{% elif v is none %}2{% else %}3{% endif %}",
    "{% if not v or v == 1 %}1{% endif %}{% if v and not nope or v is none %}2{% endif %}",
    "{% set a, b = v, 2 %}{{ a }}{{ b }}",
    "{% set a, b = v %}{{ a }}{{ b }}",
    "{% for a in v %}{% for b in v %}{{ loop.index }}{{ b }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% for i in [1, 2] %}{% set z %}{% if i == 1 %}{% break %}{% endif %}x{% endset %}{{ z }}{% endfor %}end",
    "{% for i in [1, 2] %}{% set z %}y{% if i == 1 %}{% continue %}{% endif %}x{% endset %}{{ z }}{% endfor %}end",
    "{% if v %}{% set q = 1 %}{% endif %}{{ q }}{% for i in [1] %}{% set q = 5 %}{{ q }}{% endfor %}{{ q }}",
    "{% macro f() %}{{ w }}{% endmacro %}{% set w = v %}{{ f() }}{% set w = 2 %}{{ f() }}",
    "{% for m in messages[1:] %}{{ m }}{% endfor %}{{ loop }}",
    "{{ v }}{%- generation %}{% set y = v %}{{ y }}{% endgeneration %}{{ y }}",
    "{% for x in v %}{% set l = loop %}{% for y in [1] %}{{ l.index }}{{ loop.index }}{% endfor %}{% endfor %}",
    "{% for x in [1, 2] %}{% set ns = namespace(l=loop) %}{% endfor %}{{ ns }}",
    "{% set ns = namespace(l=1) %}{% for x in [1, 2] %}{% set ns.l = loop %}{% endfor %}{{ ns.l.index }}",
    "{% set ns = namespace(n=0) %}{% set other = ns %}{% for x in [1, 2, 3] if other.n < 2 %}{% set ns.n = ns.n + 1 %}"
    "{{ x }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% macro more() %}{% set ns.n = ns.n + 1 %}{% endmacro %}"
    "{% for x in [1, 2, 3] if ns.n < 2 %}{{ more() }}{{ x }}{% endfor %}",
    "{% set ns = namespace(n=1) %}{% for n in [ns, ns] if n.n < 2 %}{% set ns.n = 5 %}{{ n.n }}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for x in v %}{% set ns.x = ns.x + [x] %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x='') %}{% for x in v|list %}{% set ns.x = x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% for x in v %}{% else %}none{% endfor %}",
    "{% for x in v recursive %}{{ x }}{% endfor %}",
    "{% with a = v %}{{ a }}{% endwith %}",
    "{% macro m(x) %}{% if x is string %}{% set y = x %}{% endif %}{{ y }}{% endmacro %}{{ m(v) }}{{ m(1) }}{{ y }}",
    "{% macro outer(x) %}{% macro inner(y) %}{{ y }}{{ x }}{% endmacro %}{{ inner(x) }}{% endmacro %}{{ outer(v) }}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{{ v }}{% endcall %}",
    "{% macro m(x) %}{% for i in x %}{{ i }}{{ loop.index }}{{ m([]) }}{% endfor %}{% endmacro %}{{ m(v) }}",
    "{% if v %}{{ v }}{% endif %}{{ 'x' if v is mapping else v }}{{ v.a if v is mapping and v.a is defined }}",
    "{%- for x in v -%}  {{ x }}  {%- endfor -%}  z",
    "{# comment #}{% raw %}{{ v }}{% endraw %}{{ v }}\n",
    "{% set m = namespace() %}{% set m.items = v %}{{ m.items }}{{ m['items'] }}",
    "{% set d = {'a': v, 'b': {'c': v}} %}{% for k in d %}{{ k }}{{ d[k] }}{% endfor %}{{ d.b.c }}{{ d['b']['c'] }}",
    "{% set x = v %}{% if x is string %}{% set x = x|trim %}{% endif %}{{ x }}",
    "{% if messages[0].v is defined %}{% for m in messages %}{{ m.v }}{{ m.role }}{% endfor %}{% endif %}",
    "{% set messages = [1] %}{{ messages }}{{ v }}",
    "{% set tools = v %}{{ tools }}",
    "{% set range = 5 %}{{ range }}",
    "{{ v }}{% set v = 1 %}{{ v }}",
    "{% for v in [1] %}{{ v }}{% endfor %}{{ v }}",
    "{% for x in v|sort %}{{ x }}{% endfor %}{% for x in v|reverse %}{{ x }}{% endfor %}",
    "{% if raise_exception is defined %}{{ v }}{% endif %}{% if v is none %}{{ raise_exception('none') }}{% endif %}",
    "{% for i in range(v) %}{{ i }}{% endfor %}",
    "{% for x in v %}{{ x.a }}{{ x['a'] }}{{ x[0] }}{% endfor %}",
    "{% for x in v if x.type is defined and x.type == 'text' %}{{ x.text }}{% endfor %}",
)

# What the machine gives up on by design, though jinja2 renders it: (expression, the reasons).
EXCUSED: Final = frozenset(
    (
        "an integer of more than 18 digits",
        "Markup",
    )
)
