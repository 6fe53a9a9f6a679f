"""What the fast engine answers, jinja2 answers too: operators, filters, tests, methods, statements, value by value."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
from jinja2 import nodes

from penstock.chat.emit import emit
from penstock.chat.fast import FastRenderer
from penstock.chat.sandbox import Sandbox
from penstock.chat.sentinels import CONTROL
from tests.chat.engine_probes import DATE

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
}
NAMES = (*VALUES, "undef", "d.a", "d.q", "ld[0].role")
FILTERS = [
    "length",
    "trim",
    "string",
    "first",
    "last",
    "abs",
    "default('q')",
    "default('q',true)",
    "replace('a','b')",
    "list",
    "join",
    "join('-')",
    "sum",
    "select",
    "reject('none')",
    "selectattr('role')",
    "selectattr('role','equalto','user')",
    "items",
    "reverse",
    "map(attribute='role')",
    "map('upper')",
    "map('tojson')",
    "tojson",
    "tojson(indent=2)",
    "dictsort",
    "sort",
    "indent",
    "indent(2,true)",
    "int",
    "title",
    "capitalize",
    "upper",
    "lower",
    "safe",
    "float",
    "round",
    "unique",
    "min",
    "max",
    "e",
    "trim('a')",
    "map(attribute='q')",
    "sort(attribute='role')",
    "first|upper",
    "list|length",
]
TESTS = [
    "defined",
    "undefined",
    "none",
    "string",
    "number",
    "integer",
    "boolean",
    "true",
    "false",
    "mapping",
    "iterable",
    "sequence",
    "odd",
    "even",
    "divisibleby(2)",
    "eq(1)",
    "ne('a')",
    "in([1,'a'])",
    "in('abc')",
    "sameas(none)",
    "lt(2)",
    "ge(3)",
    "callable",
    "float",
    "lower",
]
METHODS = [
    "strip()",
    "strip('a')",
    "startswith('a')",
    "replace('a','Q')",
    "get('a')",
    "get('q','z')",
    "items()",
    "keys()",
    "split()",
    "split('a')",
    "split('X',1)",
    "split(none)",
    "split('')",
    "join(l)",
    "splitlines()",
    "find('X')",
    "index('a')",
    "count('a')",
    "rsplit('X',1)",
    "zfill(5)",
    "upper()",
    "title()",
    "isdigit()",
    "append(1)",
    "pop()",
    "format(1)",
    "copy()",
    "split('X')[-1]",
]
ITEMS = ["0", "-1", "5", "1:", ":1", "::-1", ":-1", "i", "s", "'a'", "'role'", "1:2", "::2", "nothing", "undef:", "-9:"]
OPERATORS = ["+", "-", "*", "//", "%", "~", "and", "or", "**", "/", "==", "!=", "<", "<=", ">", ">=", "in"]


def served(sources: Iterable[str]) -> int:
    """How many of these templates the fast engine serves; on all of them it must agree with jinja2."""
    sandbox = Sandbox(DATE, CONTROL)
    trees = {source: sandbox.parse_template(source) for source in sources}
    fast = FastRenderer({source: emit(tree).source for source, tree in trees.items()}, DATE)
    answers = {source: fast.render(source, copy.deepcopy(VALUES)) for source in trees}
    differing = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own, about constants in the compiled template
        for source, answer in answers.items():
            if answer is not None and (reference := render(sandbox, trees[source])) != answer:
                differing[source] = (answer, reference)
    assert not differing
    return sum(answer is not None for answer in answers.values())


def render(sandbox: Sandbox, tree: nodes.Template) -> str | Exception:
    try:
        return sandbox.build(tree)(copy.deepcopy(VALUES))
    except Exception as error:
        return error


def printed(expressions: Iterable[str]) -> list[str]:
    return ["{{ " + expression + " }}" for expression in expressions]


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators(operator: str) -> None:
    served(printed([f"{a} {operator} {b}" for a in NAMES for b in NAMES]))


def test_filters() -> None:
    assert served(printed([f"{name} | {filter_}" for name in NAMES for filter_ in FILTERS])) > 200


def test_tests() -> None:
    assert served(printed([f"{name} is {test}" for name in NAMES for test in TESTS])) > 200


def test_methods_and_items() -> None:
    assert served(printed([f"{name}.{method}" for name in NAMES for method in METHODS])) > 50
    assert served(printed([f"{name}[{item}]" for name in NAMES for item in ITEMS])) > 100


@pytest.mark.parametrize(
    "statement",
    [
        "{% for q in EXPR %}{{ q }},{{ loop.index }},{{ loop.last }},{{ loop.length }};{% else %}E{% endfor %}",
        "{% for k, v in EXPR.items() %}{{ k }}={{ v }};{% endfor %}",
        "{% if EXPR %}Y{% else %}N{% endif %}",
        "{% set x = EXPR %}{{ x }}{{ x is defined }}",
        "{% set y %}{{ EXPR }}{% set x = 5 %}{% endset %}{{ y }}{{ x }}",
        "{% set y | trim | upper %} {{ EXPR }} {% endset %}{{ y }}",
        "{% filter upper %}{{ EXPR }}{% set x = 1 %}{% endfilter %}{{ x }}",
        "{% with x = EXPR %}{{ x }}{% endwith %}{{ x }}",
        "{% set ns = namespace(a=EXPR) %}{% for q in [1] %}{% set ns.a = [ns.a, q] %}{% endfor %}{{ ns.a }}",
        "{% macro m(a, b='B') %}<{{ a }}{{ b }}{{ caller() if caller }}>{% endmacro %}{{ m(EXPR) }}{{ m(1, b=EXPR) }}",
        "{% macro m(a) %}<{{ a }}{{ caller() }}>{% endmacro %}{% call m(1) %}{{ EXPR }}{% endcall %}",
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

    assert served(printed([expression(choose.randint(1, 3)) for _ in range(600)])) > 50
