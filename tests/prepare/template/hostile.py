"""Templates that would run forever or exhaust memory, named by the trick they use. Each must be refused."""

from __future__ import annotations

from typing import Final

_GROW = "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x|length }}"
_BIG = "{% set big = 'a b' * 3000000 %}"
_OFTEN = "{% for i in range(99999) %}{% for j in range(99) %}BODY{% endfor %}{% endfor %}"


def _grow(start: str, step: str) -> str:
    return _GROW.replace("START", start).replace("STEP", step)


def _often(body: str, before: str = _BIG) -> str:
    return before + _OFTEN.replace("BODY", body)


HOSTILE: Final = {
    # calls and loops
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursion twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "recursion that prints": "{% macro f(n) %}{% if n %}{{ f(n-1) }}x{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "recursion by caller": (
        "{% macro f(n) %}{{ caller() }}{% if n %}{% call f(n - 1) %}x{% endcall %}{% call f(n - 1) %}x{% endcall %}"
        "{% endif %}{% endmacro %}{% call f(90) %}x{% endcall %}"
    ),
    "recursive block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "loops": _often("", ""),
    "long bodies": _often("{{ messages[0].content.x.y|default(1) if messages[0].role == 'x' }}" * 50, ""),
    "loop filter": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loop filter that calls": "{% for a in range(999) %}{% for b in range(99999) if b|string|int < 0 %}{% endfor %}"
    "{% endfor %}",
    "select": _often("{% set x = range(99999)|select('none')|list %}", ""),
    "map": "{% for i in range(99999) %}{% set x = range(99999)|map('string')|list %}{% endfor %}",
    "map attribute": "{% set l = [{'a': {'b': {'c': 1}}}] * 9999 %}"
    "{% for i in range(99999) %}{% set x = l|map(attribute='a.b.c')|list %}{% endfor %}",
    "sum of a map": "{% for i in range(99999) %}{{ range(99999)|map('int')|sum }}{% endfor %}",
    "filters": _often("{{ i|string|upper|lower|trim|capitalize|title|length }}", ""),
    "methods": _often("{{ 'a'.upper().lower().strip().title() }}", ""),
    "loop length": "{% for i in range(99999) %}{% for j in range(99999)|map('string') %}{{ loop.length }}{% break %}"
    "{% endfor %}{% endfor %}",
    "output": _BIG + "{% for i in range(99999) %}{{ big }}{% endfor %}",
    "output of literals": "{% for i in range(99999) %}{% for j in range(99999) %}"
    + "x" * 999
    + "{% endfor %}{% endfor %}",
    "captured output": _BIG + "{% set x %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endset %}",
    # text that doubles each time
    "tilde": _grow("'a'", "ns.x ~ ns.x"),
    "plus": _grow("'a'", "ns.x + ns.x"),
    "tilde of many": _BIG + "{{ " + " ~ ".join(["big"] * 999) + " }}",
    "lists": _grow("[1]", "ns.x + ns.x"),
    "tuples": _grow("(1,)", "ns.x + ns.x"),
    "replace filter": _grow("'a'", "ns.x|replace('a', 'aaaaaaaaaa')"),
    "replace method": _grow("'a'", "ns.x.replace('a', 'aaaaaaaaaa')"),
    "replace of nothing": _BIG + "{{ big|replace('', big) }}",
    "join filter": _BIG + "{{ range(99999)|join(big) }}",
    "join method": _BIG + "{{ big.join('aaaaaaaaaaaaaaaaaaaaaaaaaaaaa') }}",
    "join of a generator": _BIG + "{{ ','.join(range(99999)|map('replace', '', big)) }}",
    "set block": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "macros that double": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}"
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = d(ns.x) %}{% endfor %}",
    "kept prefixes": "{% set ns = namespace(x='', l=[]) %}{% for i in range(99999) %}{% set ns.x = ns.x ~ 'a' * 999 %}"
    "{% set ns.l = ns.l + [ns.x] %}{% endfor %}",
    "autoescape": "{% autoescape true %}" + _grow("'<'", "ns.x ~ ns.x|e") + "{% endautoescape %}",
    # widths, counts and numbers
    "times": "{{ 'a' * 3000000000 }}",
    "times of a list": "{{ ([0] * 3000000000)|length }}",
    "power": "{{ 10 ** 100000000 }}",
    "squares": _grow("9", "ns.x * ns.x"),
    "division": "{% set x = ('f' * 30000000)|int(0, 16) %}{{ x % (x // 3) }}",
    "bytes to integer": "{% set x = (1).from_bytes(('f' * 30000000).encode(), 'big') %}{{ x % 3 }}",
    "round": "{{ 1|round(100000000, 'floor') }}",
    "round an integer": "{{ 1|round(-100000000) }}",
    "percent": "{{ '%3000000000d' % 1 }}",
    "percent precision": "{{ '%.3000000000f' % 1 }}",
    "percent star": "{{ '%*d' % (3000000000, 1) }}",
    "percent names": _BIG + "{{ '%(a)s' * 999 % {'a': big} }}",
    "percent nested name": "{{ '%(a(b))3000000000s' % {'a(b)': 1} }}",
    "format filter": "{{ '%3000000000d'|format(1) }}",
    "format filter by name": "{{ '%(budget)3000000000d'|format(budget=1) }}",
    "format": "{{ '{:3000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 3000000000) }}",
    "format many": _BIG + "{{ ('{0}' * 999).format(big) }}",
    "format_map": "{{ '{a:3000000000}'.format_map({'a': 1}) }}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "rjust": "{{ 'a'.rjust(3000000000) }}",
    "center": "{{ 'a'.center(3000000000) }}",
    "zfill": "{{ 'a'.zfill(3000000000) }}",
    "attr": "{{ ('a'|attr('ljust'))(3000000000) }}",
    "bytes": "{{ 'a'.encode().ljust(3000000000) }}",
    "to_bytes": "{{ (1).to_bytes(3000000000, 'big') }}",
    "expandtabs": "{{ ('\\t' * 9999).expandtabs(999999) }}",
    "translate": "{{ ('a' * 9999).translate({97: 'b' * 999999}) }}",
    "center filter": "{{ 'a'|center(3000000000) }}",
    "indent": "{{ ('\\n' * 9999)|indent(999999, blank=true) }}",
    "indent by text": "{{ ('\\na' * 9999)|indent('b' * 999999) }}",
    "slice": "{{ 'a'|slice(3000000000)|list|length }}",
    "batch": "{{ 'a'|batch(3000000000, 'b')|list|length }}",
    "tojson": "{{ [1]|tojson(indent=3000000000) }}",
    "tojson deep": _grow("[1]", "[ns.x]") + "{{ ns.x|tojson(indent=9999999) }}",
    "tojson separators": "{{ ([1] * 9999)|tojson(separators=('b' * 999999, ':')) }}",
    "wordwrap": "{{ ('a' * 3000000)|wordwrap(1) }}",
    "wordwrap text": "{{ ('a ' * 99999)|wordwrap(1, true, 'b' * 99999) }}",
    "truncate": "{% for i in range(99999) %}{% set x = ('ab ' * 3000000)|truncate(8000000) %}{% endfor %}",
    "strftime": "{{ strftime_now('%9999999Y' * 999999) }}",
    "range": "{{ range(3000000000)|list }}",
    "ranges": "{% for i in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
    "random": "{{ [1, 2]|random }}",
    "lipsum": "{{ lipsum(1000000000) }}",
    # shared values that print or compare exponentially
    "shared lists": _grow("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "shared lists as JSON": _grow("[1]", "[ns.x, ns.x]") + "{{ ns.x|tojson }}",
    "shared dicts": _grow("{}", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x }}",
    "shared namespaces": _grow("[1]", "[namespace(a=ns.x, b=ns.x)]") + "{{ ns.x }}",
    "shared tuples hashed": _grow("(1,)", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "shared tuples looked up": _grow("(1,)", "(ns.x, ns.x)") + "{{ {}.get(ns.x) }}{{ {}[ns.x] }}",
    "shared tuples found": _grow("(1,)", "(ns.x, ns.x)") + "{{ ns.x in {} }}",
    "shared lists compared": _grow("[1]", "[ns.x, ns.x]")
    + "{% set a = ns.x %}"
    + _grow("[1]", "[ns.x, ns.x]")
    + "{{ a == ns.x }}",
    "shared lists tested": _grow("[1]", "[ns.x, ns.x]")
    + "{% set a = ns.x %}"
    + _grow("[1]", "[ns.x, ns.x]")
    + "{{ a is eq ns.x }}",
    "shared lists joined": _grow("[1]", "[ns.x, ns.x]") + "{{ ns.x|join }}",
    "shared lists formatted": _grow("[1]", "[ns.x, ns.x]") + "{{ '%s' % (ns.x,) }}",
    "shared lists pretty": _grow("[1]", "[ns.x, ns.x]") + "{{ ns.x|pprint }}",
    "changed": _grow("[1]", "[ns.x, ns.x]")
    + "{% set a = ns.x %}"
    + _grow("[1]", "[ns.x, ns.x]")
    + "{% for x in [a, ns.x] %}{{ loop.changed(x) }}{% endfor %}",
    # repeated work on large texts
    "compare": _often("{{ 1 if big == other }}", _BIG + "{% set other = big[1:] + big[0] %}"),
    "compare equal": _often("{{ 1 if big == other }}", _BIG + "{% set other = big[:-1] + 'b' %}"),
    "order": _often("{{ 1 if big < other }}", _BIG + "{% set other = big + 'b' %}"),
    "in": _often("{{ 1 if 'zzz' in big }}"),
    "in by test": _often("{{ 1 if 'zzz' is in big }}"),
    "in a list": _often("{{ 1 if 'zzz' in l }}", "{% set l = range(99999)|map('string')|list %}"),
    "count": _often("{{ big.count('ab') }}"),
    "find": _often("{{ big.find('zzz') }}"),
    "slices": _often("{% set x = big[1:] %}"),
    "slices of lists": _often("{% set x = l[1:] %}", "{% set l = [1] * 99999 %}"),
    "strip": _often("{% set x = big.strip('a') %}"),
    "trim": _often("{% set x = big|trim('a') %}"),
    "upper": _often("{% set x = big|upper %}"),
    "split": "{% set x = ('a ' * 20000000).split() %}",
    "split again": _often("{% set x = big.split('b') %}"),
    "splitlines": "{% set x = ('é\\n' * 20000000).splitlines() %}",
    "list": "{% set x = ('é中' * 10000000)|list %}",
    "sort": _often("{% set x = l|sort %}", "{% set l = range(99999)|map('string')|list %}"),
    "unique": _often("{% set x = l|unique|list %}", "{% set l = range(99999)|map('string')|list %}"),
    "groupby": _often("{% set x = l|groupby(0)|list %}", "{% set l = range(99999)|map('string')|list %}"),
    "sum of lists": "{{ ([[1]] * 99999)|sum(start=[])|length }}",
    "urlize": "{{ ('(' * 999999 ~ 'www.a.com' ~ ')' * 999999)|urlize }}",
    "urlize rel": "{{ ('www.a.com ' * 99999)|urlize(rel='a' * 99999) }}",
    "striptags": _often("{{ big|striptags|length }}"),
    "wordcount": _often("{{ big|wordcount }}"),
    "title": _often("{{ big|title|length }}"),
    "escape": _often("{{ big|e|length }}"),
    "urlencode": _often("{{ big|urlencode|length }}"),
    "fromkeys": _often("{{ dict.fromkeys(big)|length }}"),
    "lower test": _often("{{ big is lower }}"),
    "startswith": _often("{{ big.startswith(big) }}"),
}
