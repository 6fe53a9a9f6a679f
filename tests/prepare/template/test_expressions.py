"""The machine evaluates operators, filters, tests, methods and statements as jinja2 does, for every kind of value."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
from jinja2 import nodes

from penstock.native import native
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.template.bytecode import NotCompiled
from penstock.prepare.template.compiler import CompiledTemplate, conversation_layout, encoded
from penstock.prepare.template.reference import refusal
from penstock.prepare.template.sandbox import Sandbox
from tests.prepare.template.conversations import DATE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native is None, reason="installed without a compiler")]

VALUES: dict[str, Any] = {
    "nothing": None,
    "t": True,
    "f": False,
    "z": 0,
    "i": 3,
    "n": -7,
    "es": "",
    "s": "aXb",
    "sn": "12",
    "u": "äß日",
    "sp": " a b \n",
    "el": [],
    "l": ["a", "b"],
    "li": [3, 1, 2],
    "ed": {},
    "d": {"a": 1, "B": "x"},
    "dd": {"x": {"y": None, "items": [1]}, "title": "T"},
    "ld": [{"role": "user", "content": "x"}, {"role": "a", "content": None}],
    "mixed": [1, "a", None, True, [], {}],
    "x": 0.5,
    "big": 10**18 - 1,
}
NAMES = (*VALUES, "undef", "d.a", "d.q", "ld[0].role")
FILTERS = [
    "count", "d", "default(1,boolean=true)", "tojson(ensure_ascii=true)", "tojson(indent=1,separators=(',',':'))",
    "tojson(sort_keys=true)", "rejectattr('role','in',['a'])", "rejectattr('content')", "select('string')",
    "map('trim')|list", "reverse|list", "unique|list", "replace('a','')", "replace('a','b',1)",
    "join('-',attribute='role')", "indent(width=3,first=true)", "sort(reverse=true)", "sort(case_sensitive=true)",
    "int(7)", "length", "trim", "string", "first", "last", "abs", "default('q')", "default('q',true)",
    "replace('a','b')", "list", "join", "join('-')", "sum", "select", "reject('none')", "selectattr('role')",
    "selectattr('role','equalto','user')", "items", "reverse", "map(attribute='role')", "map('upper')",
    "map('tojson')", "tojson", "tojson(indent=2)", "dictsort", "sort", "indent", "indent(2,true)", "int", "title",
    "capitalize", "upper", "lower", "safe", "float", "round", "unique", "min", "max", "e", "trim('a')",
    "map(attribute='q')", "sort(attribute='role')", "first|upper", "list|length",
]  # fmt: skip
TESTS = [
    "gt(1)", "eq('aXb')", "equalto(3)", "ne(none)", "in(d)", "not none", "not defined", "not in('aXb')", "defined",
    "undefined", "none", "string", "number", "integer", "boolean", "true", "false", "mapping", "iterable",
    "sequence", "odd", "even", "divisibleby(2)", "eq(1)", "ne('a')", "in([1,'a'])", "in('abc')", "sameas(none)",
    "lt(2)", "ge(3)", "callable", "float", "lower",
]  # fmt: skip
METHODS = [
    "lstrip()", "rstrip('b ')", "endswith('b')", "startswith(('a','b'))", "values()", "lower()", "capitalize()",
    "removeprefix('a')", "removesuffix('b')", "split('X')|list", "get('x',{}).get('y')", "items()|list",
    "replace('a','b',1)", "lstrip('\\n')", "count('')", "find('')", "format(s)", "strip()", "strip('a')",
    "startswith('a')", "replace('a','Q')", "get('a')", "get('q','z')", "items()", "keys()", "split()", "split('a')",
    "split('X',1)", "split(none)", "split('')", "join(l)", "splitlines()", "find('X')", "index('a')", "count('a')",
    "rsplit('X',1)", "zfill(5)", "upper()", "title()", "isdigit()", "append(1)", "pop()", "format(1)", "copy()",
    "split('X')[-1]",
]  # fmt: skip
ITEMS = ["0", "-1", "5", "1:", ":1", "::-1", ":-1", "i", "s", "'a'", "'role'", "1:2", "::2", "nothing", "undef:", "-9:"]
OPERATORS = ["+", "-", "*", "//", "%", "~", "and", "or", "**", "/", "==", "!=", "<", "<=", ">", ">=", "in"]


def served(sources: Iterable[str]) -> int:
    """Checks that the machine agrees with jinja2, and returns how many of the templates it serves."""
    sandbox = Sandbox(DATE)
    count = 0
    differing = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about constants in the compiled template
        for source in dict.fromkeys(sources):
            answers = [by_machine(sandbox, source, constant) for constant in (False, True)]
            count += answers[0] is not None
            if any(answer is not None for answer in answers):
                reference = by_jinja2(sandbox, sandbox.parse_template(source))
                if any(answer not in (None, reference) for answer in answers):
                    differing[source] = (*answers, reference)
    assert not differing
    return count


def by_machine(sandbox: Sandbox, source: str, constant: bool) -> str | None:
    """The machine's text or refusal; None if it gives up. Values come from the row, or as constants."""
    row = encoded(Conversation([], variables=None if constant else VALUES))
    assert row is not None
    try:
        tree = sandbox.parse_template(source)
        machine = CompiledTemplate(tree, VALUES if constant else {}, DATE, conversation_layout(()))
    except NotCompiled:
        return None
    batch = machine.render([row])
    match batch.status[0]:
        case 0:
            return batch.texts[0].decode()
        case 3:
            return f"refused: {batch.reasons[0]}"
    return None


def by_jinja2(sandbox: Sandbox, tree: nodes.Template) -> str:
    try:
        context = {**copy.deepcopy(VALUES), "messages": [], "tools": None}
        return sandbox.render(sandbox.build(tree), context)
    except Exception as error:
        return f"refused: {refusal(error).reason.partition(': ')[2]}"


def printed(expressions: Iterable[str]) -> list[str]:
    return ["{{ " + expression + " }}" for expression in expressions]


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators(operator: str) -> None:
    served(printed([f"{a} {operator} {b}" for a in NAMES for b in NAMES]))


@pytest.mark.parametrize("filter_", FILTERS)
def test_filters(filter_: str) -> None:
    served(printed([f"{name} | {filter_}" for name in NAMES]))


def test_the_machine_serves_most_filters() -> None:
    assert served(printed([f"{name} | {filter_}" for name in ("s", "l", "d", "i") for filter_ in FILTERS])) > 100


def test_tests() -> None:
    assert served(printed([f"{name} is {test}" for name in NAMES for test in TESTS])) > 300


def test_methods_and_items() -> None:
    assert served(printed([f"{name}.{method}" for name in NAMES for method in METHODS])) > 50
    assert served(printed([f"{name}[{item}]" for name in NAMES for item in ITEMS])) > 100


@pytest.mark.parametrize(
    "statement",
    [
        "{% for q in EXPR %}{{ q }},{{ loop.index }},{{ loop.last }},{{ loop.length }};{% endfor %}",
        "{% for k, v in EXPR.items() %}{{ k }}={{ v }};{% endfor %}",
        "{% if EXPR %}Y{% else %}N{% endif %}",
        "{% set x = EXPR %}{{ x }}{{ x is defined }}",
        "{% set y %}{{ EXPR }}{% set x = 5 %}{% endset %}{{ y }}{{ x }}",
        "{% set y | trim | upper %} {{ EXPR }} {% endset %}{{ y }}",
        "{% filter upper %}{{ EXPR }}{% set x = 1 %}{% endfilter %}{{ x }}",
        "{% set ns = namespace(a=EXPR) %}{% for q in [1] %}{% set ns.a = [ns.a, q] %}{% endfor %}{{ ns.a }}",
        "{% macro m(a, b='B') %}<{{ a }}{{ b }}>{% endmacro %}{{ m(EXPR) }}{{ m(1, b=EXPR) }}",
        "{% macro m(a) %}<{{ a }}{% if a and a is string %}{{ m(a[1:]) }}{% endif %}>{% endmacro %}{{ m(EXPR) }}",
        "{% for q in [EXPR, 1] if q %}{{ q }}{{ loop.first }}{% if q is odd %}{% continue %}{% endif %}|{% endfor %}",
        "{% for q in EXPR %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.revindex }}{% break %}{% endfor %}",
        "{{ raise_exception('No ' ~ EXPR) if EXPR else 'nothing' }}",
        "{{ 'p' + EXPR + 'q' }}",
        "{{ EXPR ~ 'q' ~ (EXPR | safe) }}{{ [EXPR, {'k': EXPR}] | tojson }}",
        "{% generation %}{% set x = EXPR %}{{ x }}{% endgeneration %}{{ x }}",
    ],
)
def test_statements(statement: str) -> None:
    assert served(statement.replace("EXPR", name) for name in NAMES) > 2


def test_nested_expressions() -> None:
    choose = random.Random(7)

    def expression(depth: int) -> str:
        if depth == 0:
            return choose.choice([*NAMES, "'lit'", "1", "-1", "[1, 'a']", "{'k': s}", "range(3)", "('a', 'b')"])
        inner = expression(depth - 1)
        forms = (
            f"({inner} {choose.choice(OPERATORS)} {expression(depth - 1)})",
            f"({inner} | {choose.choice(FILTERS)})",
            f"({inner} is {choose.choice(TESTS)})",
            f"({inner}).{choose.choice(METHODS)}",
            f"({inner})[{choose.choice(ITEMS)}]",
            f"({inner} if {expression(depth - 1)} else {expression(0)})",
            f"(not {inner})",
        )
        return choose.choice(forms)

    assert served(printed([expression(choose.randint(1, 3)) for _ in range(1200)])) > 200
