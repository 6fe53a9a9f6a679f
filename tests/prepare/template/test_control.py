"""Control flow compiles completely and equals jinja2's; what is not compiled costs only the rows that reach it."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import json
from collections import Counter

import pytest

from benchmarks.clock import DATE
from benchmarks.models import trl_templates
from penstock.native import native
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.template.compiler import CompiledTemplate, conversation_layout
from penstock.prepare.template.probes import PROBES, assistant, user
from penstock.prepare.template.renderer import TemplateRenderer
from penstock.prepare.template.sandbox import Sandbox
from tests.prepare.template.control import CONTROL, REAL
from tests.prepare.template.conversations import TOKENS
from tests.prepare.template.printing import CHATS
from tools.fuzz import TemplateCheck

pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")

WHOLE = {**{f"trl {name}": text for name, text in trl_templates().items()}, **REAL}
BLOCKS = {f"control {number}": text for number, text in enumerate(CONTROL)}


def machine(template: str) -> CompiledTemplate:
    return CompiledTemplate(Sandbox(DATE).parse_template(template), {}, DATE, conversation_layout([]))


def reasons(template: str, values: list[object]) -> list[str | None]:
    """Why the machine gives up on rows with these values, or None."""
    rows = [{"messages": [{"role": "user", "v": value}], "tools": None, "variables": None} for value in values]
    batch = machine(template).render([json.dumps(row).encode() for row in rows])
    return [str(why) if status else None for why, status in zip(batch.reasons, batch.status, strict=True)]


@pytest.mark.parametrize("name", [*WHOLE, *BLOCKS])
def test_no_part_of_a_template_is_left_to_the_reference(name: str) -> None:
    assert machine({**WHOLE, **BLOCKS}[name]).given_up == ()


@pytest.mark.parametrize("name", [*BLOCKS, *REAL])
def test_control_flow_equals_jinja2(name: str) -> None:
    counts: Counter[str] = Counter()
    chats = [*CHATS, *PROBES]
    assert list(TemplateCheck({**BLOCKS, **REAL}[name]).differences(chats, counts)) == []
    assert counts["equal"] + counts["refused"] > 0.7 * len(chats)


# ---- what is not compiled


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("{% include 'x' %}", "the statement include"),
        ("{% import 'x' as y %}{{ y.z }}", "the statement import"),
        ("{% block b %}{{ messages }}{% endblock %}", "the statement block"),
        ("{% autoescape true %}{{ v }}{% endautoescape %}", "autoescape"),
        ("{{ self }}", "self"),
        ("{{ v|random }}", "the filter random"),
        ("{% set x | random %}{% if not v %}{% break %}{% endif %}{% endset %}", "the filter random"),
        ("{% filter random %}{% if not v %}{% continue %}{% endif %}{% endfilter %}", "the filter random"),
        ("{% macro f(caller=1) %}{{ caller }}{% endmacro %}{{ f() }}", "a parameter with the name caller"),
        ("{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{{ v|random }}{% endcall %}", "the filter random"),
    ],
)
def test_what_is_not_compiled_costs_the_rows_that_reach_it(statement: str, why: str) -> None:
    template = (
        "{% set v = messages[0].v %}{% for i in [1, 2] %}{% if v and i == 2 %}"
        + statement
        + "{% endif %}{{ i }}{% endfor %}"
    )
    reached, *others, last = reasons(template, [1, 0, [], "x"])
    assert reached is not None and reached.startswith(f"the template uses {why}")
    assert others == [None, None]
    assert last == reached
    assert list(TemplateCheck(template).differences([Conversation([user(0), assistant(1)])], Counter())) == []


def test_a_template_that_serves_no_probe_is_not_tried_on_rows() -> None:
    template = (
        "{% for m in messages %}{% autoescape true %}<{{ m.role }}>{{ m.content }}{% endautoescape %}{% endfor %}"
    )
    subject = TemplateRenderer(template, special_tokens=TOKENS, variables={}, date=DATE)
    assert subject.why_reference == "the template uses autoescape"
    assert subject.paths == (0, 0)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% set ns = namespace() %}{% macro f() %}{% macro g() %}{% endmacro %}{% set ns.g = g %}{% endmacro %}{{ f() }}{{ ns.g() }}", "a macro of a call that has ended"),
        ("{% set ns = namespace() %}{% for m in messages %}{% macro g() %}{{ m }}{% endmacro %}{% set ns.g = g %}{% endfor %}{{ ns.g() }}", "a macro that reads a variable of a block that has ended"),
        ("{% set ns = namespace() %}{% for m in messages recursive %}{% set ns.l = loop %}{% endfor %}{{ ns.l([1]) }}", "a loop that has ended"),
        ("{% set ns = namespace(g=none) %}{% macro f(x) %}{{ ns.g() if ns.g }}{% macro g() %}{{ x }}{% endmacro %}{% set ns.g = g %}{% endmacro %}{{ f(1) }}{{ f(2) }}", "a macro of a call that has ended"),
        ("{% for m in messages %}{{ loop([1]) }}{% endfor %}", "a call of a loop that is not recursive"),
        ("{% for m in messages recursive %}{{ loop([m]) }}{% endfor %}", "calls nested too deeply"),
        ("{% macro f() %}{{ caller() }}{% endmacro %}{{ f() }}", "a call of something else than a macro"),
        ("{% macro f(a) %}{% endmacro %}{{ f(1, **{'a': 2}) }}", "an unknown argument of a macro"),
        ("{% macro f(a) %}{% endmacro %}{{ f(a=1, **{'a': 2}) }}", "an argument that is given twice"),
        ("{% macro f(a) %}{% endmacro %}{{ f(*[1, 2]) }}", "too many arguments of a macro"),
        ("{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = 1 %}{% endmacro %}{% for x in [1] if f() == '' %}{{ loop.last }}{% endfor %}", "a loop's filter that changes a namespace"),
        ("{% for x in [1, 0] if x or raise_exception('no') %}{{ loop.index }}{{ loop.first }}{% break %}{% endfor %}{% for x in [1, 0] if x or raise_exception('no') %}{{ loop.last }}{% endfor %}", "an error in a loop's filter"),
        ("{% for x in [1] %}{% for y in [1] if loop.changed(y) %}{% macro f() %}{% endmacro %}{% endfor %}{% endfor %}", "a loop's filter that calls loop.changed"),
        ("{% for i in range(2) if i == 0 or messages[0] %}{{ i }}{% endfor %}", "a loop's filter that reads the message before"),
        ("{% for m in messages %}{{ loop.cycle() }}{% endfor %}", "the arguments of a method of loop"),
        ("{% set a, b = [1] %}", "unpacking of another number of items"),
        ("{% set a, b = {'x': 1, 'y': 2} %}", "unpacking of another type"),
        ("{{ namespace([('a', 1)]).a }}", "a namespace of other values"),
    ],
)  # fmt: skip
def test_the_machine_gives_up_by_name(template: str, why: str) -> None:
    assert reasons(template, [1]) == [why]
