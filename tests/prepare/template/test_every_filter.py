"""Every filter, test and method of jinja2 gives the same text, owners and refusals in the machine as in the reference."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.filters import FILTERS, do_indent, do_title
from jinja2.tests import TESTS
from markupsafe import Markup

from penstock.native import native
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.template.compiler import CompiledTemplate, Compiler, conversation_layout, encoded
from penstock.prepare.template.printed import used_keys
from penstock.prepare.template.reference import Reference
from penstock.prepare.template.sandbox import Sandbox
from tests.prepare.template.conversations import DATE, TOKENS
from tests.prepare.template.test_snippets import by_machine, by_reference

pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")

VALUES: Final[tuple[Any, ...]] = (
    *(
        "",
        "a b",
        " Ab-cD (eF) [g] <h>{i}\n j ",
        "ΑΣ ΟΔΥΣΣΕΥΣ Σ",
        "straße ǆx ŉ ﬁ İi",
        "a,b,,a",
        "a\r\nb\x0bc\u2028d\r",
        "%s %% {0} {}",
    ),
    *(
        "<b>x & \"y\" 'z'</b>",
        "12",
        "-3.5e2",
        " 0x1F ",
        "日本😀 e\u0301",
        "\x1fa\x1c b\t",
        "aaaa",
        "https://a.b/c?d=e f",
        "1" * 30,
    ),
    *(None, True, False, 0, 3, -7, 2**62, 10**20, -(10**30), 0.5, -2.5, 1e22, 2.0**70, 1234.5678),
    *([], [3, 1, 2], ["b", "A", "a", "B"], [1.5, 1, True], [[1, "a"], [0, "b"]], [10**20, 5], [None, None]),
    *(
        [{"a": "x", "b": 2}, {"a": "X", "b": 1}, {"a": "y", "b": 2}],
        [{"a": {"c": [7, 8]}}, {}],
        ["m", "n", "o", "p", "q"],
    ),
    *({}, {"a": 1, "B": "x", "b": None}, {"title": "T", "copy": "C"}, {f"k{i}": i for i in range(70)}),
)
# `v` is a value of the message `m`.
EXPRESSIONS: Final = (
    *("v|abs", "v|attr('x')", "v|batch(2)|list", "v|batch(3, 'f')|map('join', '+')|join", "v|capitalize", "v|center", "v|center(12)", "v|count"),
    *("v|d('z', true)", "v|default", "v|dictsort(reverse=true)", "v|dictsort(true)", "v|dictsort(by='value')", "v|e", "v|escape", "v|e|upper"),
    *("v|filesizeformat", "v|filesizeformat(true)", "v|first", "v|float", "v|float(1.5)", "v|forceescape", "v|format(1, 'b')", "v|format(a=1)"),
    *("'%s|%d' | format(v, 3)", "'%(x)s' | format(x=v)", "v|groupby('a')", "v|groupby('a', default='d')", "v|groupby('b', case_sensitive=true)|length"),
    *("[10000000000000000, 1, -10000000000000000]|sum(start=0.5)", "(('<'|e) + (v|string))|e"),
    *("v|indent(2, true, true)", "v|indent(width='> ', blank=true)", "v|int", "v|int(9)", "v|int(9, 16)", "v|items|list", "v|join('-', attribute='a')", "v|join('-', 'a.c.0')"),
    *("v|last", "v|length", "v|list", "v|lower", "v|map('title')|list", "v|map(attribute='a', default='d')|list", "v|map('default', 'q', true)|join", "v|map('replace', 'a', 'b')|list"),
    *("v|map('int')|sum", "v|max", "v|max(attribute='b')", "v|min", "v|min(true)", "v|pprint", "v|reject('odd')|list", "v|rejectattr('b', 'le', 1)|list", "v|replace('a', 'Q', 1)"),
    *("v|replace('', '-')", "v|replace(1, 2)", "v|reverse|list", "v|reverse", "v|round", "v|round(2)", "v|round(1, 'floor')", "v|safe|title", "v|safe|replace('a', '<')"),
    *("v|select('ge', 2)|list", "v|selectattr('b', '>=', 2)|list", "v|select('<=', 2)|list", "v|slice(2)|list", "v|slice(3, 'f')|map('list')|list", "v|sort(reverse=true)", "v|sort(case_sensitive=true)"),
    *("v|sort(attribute='a,b')", "v|sort(attribute='b', reverse=true)", "v|sort(attribute=0)", "v|string|e", "v|striptags", "v|sum", "v|sum(attribute='b')", "v|sum(start=0.5)"),
    *("v|title", "v|tojson(indent=1)", "v|tojson(sort_keys=true)", "v|trim('a ')", "v|truncate(5)", "v|truncate(5, true, '…', 0)", "v|unique|list", "v|unique(attribute='a')|list"),
    *("v|unique(true)|list", "v|upper", "v|urlencode", "v|urlize", "v|wordcount", "v|wordwrap(4)", "v|wordwrap(3, false, '|')", "{'k': v}|xmlattr", "v|tojson|length"),
    *("v is boolean", "v is callable", "v is defined", "v is divisibleby 3", "v is divisibleby(num)", "v is eq 3", "v is escaped", "v|e is escaped", "v is even", "v is false", "'upper' is filter"),
    *("v is float", "v is ge 1", "v is gt 1", "v is in [3, 'a b', none]", "v is integer", "v is iterable", "v is le 1", "v is lower", "v is lt 1", "v is mapping", "v is ne 3", "v is none"),
    *("v is number", "v is odd", "v is sameas none", "v is sameas true", "v is sequence", "v is string", "'in' is test", "v is true", "v is undefined", "v is upper"),
    *("v.capitalize()", "v.casefold()", "v.center(9, '*')", "v.count('a')", "v.count('a', 1)", "v.count('')", "v.endswith(('b', 'd'))", "v.endswith('a', 0, 1)", "v.expandtabs(3)"),
    *("v.expandtabs(tabsize=2)", "v.find('b', 1)", "v.find('')", "v.format(1, 'b')", "'{0}{1!r:>5}{0}'.format(v, 'x')", "'{a}{}'.format(1, a=v)", "'{:,}'.format(v)", "'{0[a]}'.format(v)", "v.index('a')"),
    *("v.isalnum()", "v.isalpha()", "v.isascii()", "v.isdecimal()", "v.isdigit()", "v.isidentifier()", "v.islower()", "v.isnumeric()", "v.isprintable()", "v.isspace()", "v.istitle()", "v.isupper()"),
    *("'-'.join(v)", "v.join('abc')", "v.ljust(6) + '|'", "v.lower()", "v.lstrip(' <')", "v.partition('b')", "v.partition('b')[2]", "v.removeprefix('a')", "v.removesuffix('b')"),
    *("v.replace('', '.')", "v.replace('', '.', 2)", "v.replace('a', v, 1)", "v.rfind('a')", "v.rindex('a')", "v.rjust(6, '0')", "v.rpartition('b')", "v.rsplit()", "v.rsplit('a')", "v.rsplit('aa')"),
    *("v.rsplit(none, 1)", "v.rsplit(',', maxsplit=1)", "v.rsplit(maxsplit=2)", "v.split(none, 1)", "v.split(maxsplit=1)", "v.split(sep='a')", "v.split(',', 2)", "v.splitlines()", "v.splitlines(true)"),
    *("v.splitlines(keepends=true)", "v.startswith('b', 1)", "v.swapcase()", "v.title()", "v.upper()", "v.zfill(6)", "(v|safe).upper()", "(v|safe).center(9)", "v.split('a')|join('-')"),
    *("v.copy()", "v.copy() is sameas v", "v.get('a')", "v.get(1, 'd')", "v.items()|list", "v.keys()|list", "v.values()|list", "v.count(3)", "v.index('b')", "v.is_integer()", "v.bit_length()"),
    *("v + 1", "v + 0.1", "v - 1", "v * 2", "2 * v", "v / 2", "v // 2", "v // -2", "v % 3", "v % -3", "v % (1, 2)", "'%s' % v", "'%5.1f|' % v", "'%x' % v", "v ** 2", "v ** 0.5", "v ** -1", "2 ** v"),
    *("-v", "+v", "1 < v < 4", "0 <= v <= 3 < 9", "'a' <= v != 'b'", "1 == v in [1, 2]", "v < 2.5", "v >= 3", "v == 0.5", "v == 100000000000000000000", "v < [2]", "v in v", "v not in [v]"),
    *("v[::-1]", "v[::2]", "v[1::2]", "v[-2::-1]", "v[4:1:-2]", "v ~ 1.5", "v * 0", "[v] * 2", "v + v", "(v, 1) < (v, 2)", "v[1:][::-1]", "v|string|length", "v.a", "v['k69']", "'k3' in v"),
    *("loop.cycle('a', 'b')", "'a'|from_json", "v|from_json(1)", "v is nothing_known", "strftime_now('%Y' ~ v)", "num|string + v|string", "v|list|batch(2)|map('first')|list", "9223372036854775807 + v"),
    *("(v|groupby('a'))[0].grouper", "(v|groupby('a')|first).list", "v|map('trim')|map('length')|list", "v|dictsort|map('first')|list", "v|tojson == v|tojson", "v|float|round(1)", "v|int + 1", "v|string|list|sort|join"),
)  # fmt: skip
# Expressions that the machine may give up: attributes of text, identity, complex numbers, iterators and odd types.
MAY_GIVE_UP: Final = (
    *("v|groupby('a', default='d')", "v|join('-', attribute='a')", "v|map(attribute='a', default='d')|list"),
    *("v|sort(attribute='a,b')", "v|sort(attribute='b', reverse=true)", "v|unique(attribute='a')|list", "v|reverse"),
    *("v|truncate(5)", "v|truncate(5, true, '…', 0)", "v is divisibleby 3", "v is divisibleby(num)", "v is even"),
    *("v is odd", "v.copy() is sameas v", "v ** 0.5"),
)


def template_of(expression: str) -> str:
    condition = "{% if true %}{{ " + expression + " }}{% endif %}"  # inside a condition unknown filters are allowed
    body = "{% set v = m.v %}{% set num = 3 %}[" + condition + "]{{ m.content }}"
    return "{% for m in messages %}<{{ m.role }}>" + body + "</s>{% endfor %}{{ messages[0].v }}"


CONVERSATIONS: Final = [
    Conversation([{"role": "user", "content": "q", "v": value}, {"role": "assistant", "content": "a", "v": value}])
    for value in VALUES
]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_engines_agree(expression: str) -> None:
    template = template_of(expression)
    reference = Reference(template, special_tokens=TOKENS, variables={}, date=DATE)
    served = by_machine(template, reference, CONVERSATIONS)
    expected = by_reference(reference, CONVERSATIONS)
    assert [pair for pair in zip(served, expected, strict=True) if pair[0] not in (None, pair[1])] == []
    rendered = [own is not None for own, theirs in zip(served, expected, strict=True) if theirs[4] is None]
    assert all(rendered) or expression in MAY_GIVE_UP


def test_every_filter_and_test_is_here() -> None:
    named = {word for expression in EXPRESSIONS for word in re.findall(r"\w+", expression)}
    assert {name for name in (*FILTERS, *TESTS) if name.isidentifier()} - named == {
        "random",
        "equalto",
        "greaterthan",
        "lessthan",
    }


TEXT_EXPRESSIONS: Final[dict[str, Callable[[str], str]]] = {
    "v|title": do_title,
    "v.title()": str.title,
    "v.capitalize()": str.capitalize,
    "v.swapcase()": str.swapcase,
    "v.split(none, 2)|join('|')": lambda text: "|".join(text.split(None, 2)),
    "v.rsplit(none, 2)|join('|')": lambda text: "|".join(text.rsplit(None, 2)),
    "v.rsplit('ab', 2)|join('|')": lambda text: "|".join(text.rsplit("ab", 2)),
    "v.splitlines(true)|join('|')": lambda text: "|".join(text.splitlines(True)),
    "v.rpartition('ab')|join('|')": lambda text: "|".join(text.rpartition("ab")),
    "v[::-2]": lambda text: text[::-2],
    "v|indent(2, blank=true)": lambda text: do_indent(text, 2, blank=True),
    "v.replace('', '-', 3)": lambda text: text.replace("", "-", 3),
}


@given(st.lists(st.text(st.characters(codec="utf-8") | st.sampled_from("ab \n\r\u2028ΣσǅİŉE'-")), max_size=20))
@settings(max_examples=60)
def test_text_is_treated_as_in_python(texts: list[str]) -> None:
    rows = [encoded(Conversation([{"role": "user", "content": text}])) or b"" for text in texts]
    for expression, function in TEXT_EXPRESSIONS.items():
        batch = machine("{% set v = messages[0].content %}{{ " + expression + " }}").render(rows)
        assert [text.decode() for text in batch.texts] == list(map(function, texts))


@functools.cache
def machine(template: str) -> CompiledTemplate:
    return CompiledTemplate(Sandbox(DATE).parse_template(template), TOKENS, DATE, conversation_layout(()))


def test_objects_of_many_keys_keep_their_order_and_their_last_values() -> None:
    keys = [f"key {number % 3000}" for number in range(5000)]
    value = "{" + ", ".join(f'"{key}": {number}' for number, key in enumerate(keys)) + "}"
    row = b'{"messages": [{"role": "user", "v": ' + value.encode() + b'}], "tools": null, "variables": null}'
    template = (
        "{% set v = messages[0].v %}{{ v|length }} {{ v['key 7'] }} {{ 'key 2999' in v }} {{ v.nope }} {{ v|tojson }}"
    )
    expected = {key: number for number, key in enumerate(keys)}
    batch = machine(template + "{{ v|dictsort|length }}{{ (v|tojson(sort_keys=true))[:40] }}").render([row])
    text = f"3000 3007 True  {json.dumps(expected)}3000{json.dumps(expected, sort_keys=True)[:40]}"
    assert batch.texts[0].decode() == text


def test_errors_of_python_other_than_exceptions_reach_the_caller() -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    tree = Sandbox(DATE).parse_template("{{ messages[0].v|wordcount }}")
    assert native is not None
    layout = {**conversation_layout(()), "used_keys": used_keys(tree)}
    program = native.Program(*Compiler({}, str).compile(tree).assemble(), layout, (interrupted, None, Markup))
    with pytest.raises(KeyboardInterrupt):
        program.render([encoded(conversation) or b"" for conversation in CONVERSATIONS])
