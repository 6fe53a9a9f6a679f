"""The sandbox gives the same text or refusal as transformers, and stops any template within its limits."""

# ruff: noqa: E501 (templates are easier to read in one line)

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import transformers.utils.chat_template_utils as hf

from benchmarks.clock import StoppedClock
from penstock.errors import RowError, TemplateError
from penstock.prepare.chat.conversation import Conversation, Message
from penstock.prepare.template.budget import MAX_FUEL, Budget, LimitExceeded
from penstock.prepare.template.probes import PROBES, assistant, system, user
from penstock.prepare.template.reference import Reference
from penstock.prepare.template.sandbox import Sandbox
from tests.prepare.template.conversations import BATTERY, DATE, TEMPLATES, TOKENS
from tests.prepare.template.hostile import HOSTILE

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "datetime", StoppedClock)


def by_transformers(template: str, chat: Conversation, prompt: bool) -> str:
    """The text from transformers, or the name of the error."""
    values = {**TOKENS, **(chat.variables or {}), "add_generation_prompt": prompt}
    try:
        return hf.render_jinja_template([chat.messages], tools=chat.tools, chat_template=template, **values)[0][0]
    except Exception as error:
        return f"refused: {type(error).__name__}"


def by_reference(reference: Reference, chat: Conversation, prompt: bool) -> str:
    try:
        return reference.plain(chat.messages, chat.tools, chat.variables, prompt)
    except RowError as error:
        words = error.reason.removeprefix("the chat template refused the conversation: ")
        name = words.partition(":")[0]
        return f"refused: {name if name.endswith('Error') else 'TemplateError'}"


def new(template: str) -> Reference:
    return Reference(template, special_tokens=TOKENS, variables={}, date=DATE)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_real_templates_render_as_in_transformers(path: Any) -> None:
    template = path.read_text()
    reference = new(template)
    for number, chat in enumerate(BATTERY):
        prompt = number % 2 == 0
        expected = by_transformers(template, chat, prompt)
        found = by_reference(reference, chat, prompt)
        assert found.startswith("refused") if expected.startswith("refused") else found == expected


ODD = (
    # containers of contents
    "{% for m in messages %}{{ [m.content] }}{{ (m.content, 1) }}{{ {'k': m.content} }}{{ m.content|list }}{% endfor %}",
    "{{ messages }}{{ messages[0].items() }}{{ messages[0].keys() }}{{ messages|length }}",
    "{{ messages[0]|dictsort }}{{ messages[0]|items|list }}{{ dict(a=messages[0].content) }}",
    "{{ namespace(a=messages[0].content) }}",
    "{% for m in messages %}{{ m|tojson }}{{ m|tojson(indent=2) }}{{ m|string }}{{ m|pprint }}{% endfor %}",
    "{{ messages|groupby('role') }}{{ messages|map(attribute='role')|list }}{{ messages|map(attribute='role')|join }}",
    # attributes and keys
    "{% for m in messages %}{{ m.content|attr('upper') is defined }}{{ (m.content|attr('upper'))() }}{% endfor %}",
    "{% set d = {'get': 1, 'items': 2} %}{{ d.get is callable }}{{ d['get'] }}{{ d.items is callable }}{{ d['items'] }}",
    "{{ messages[0].get('content') }}{{ messages[0].missing }}{{ messages[0]['keys'] is callable }}",
    "{{ messages[0].__class__ }}",
    "{{ messages[0].missing.more }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ namespace(_a=1) }}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ dict.fromkeys('ab', 1) }}{{ dict.mro is defined }}",
    # operators
    "{{ 1 + 2 * 3 - 4 / 5 // 6 % 7 ** 2 }}{{ -3 // 2 }}{{ -3 % 2 }}{{ 2 ** 100 }}{{ 2 ** -1 }}{{ 7 % 2.5 }}",
    "{{ 'a' * 3 }}{{ 3 * 'a' }}{{ [1] * 2 }}{{ 'a' * -1 }}{{ [1] + [2] }}{{ (1,) + (2,) }}{{ 'a' + 'b' }}",
    "{{ 'a' + 1 }}",
    "{{ none + 1 }}",
    "{{ 'a%sb%dc' % ('x', 3) }}{{ '%(k)s' % {'k': 1} }}{{ '%05.1f' % 2.25 }}{{ '%%' % () }}",
    "{{ '%d' % 'a' }}",
    "{{ 'a' ~ 1 ~ none ~ [1] ~ missing ~ 1.0 ~ true }}",
    "{{ 1 < 2 < 3 }}{{ 3 > 2 >= 2 != 1 }}{{ 'a' in 'abc' }}{{ 1 in [1, 2] }}{{ 'x' not in {'x': 1} }}{{ (1, 2) in {} }}",
    "{{ messages[0] == messages[-1] }}{{ messages == messages[0:] }}{{ [1, [2]] == [1, [2]] }}{{ {'a': 1} != {'a': 2} }}",
    "{{ none < 1 }}",
    "{{ messages[0]['content'][1:3] }}{{ messages[-1:][0].role }}{{ 'abc'[::-1] }}{{ 'abcdef'[1:5:2] }}{{ [1, 2][5:] }}",
    "{{ none[1:] }}",
    "{{ missing[1:] }}",
    "{{ {(1, 2): 3}[(1, 2)] }}{{ {1: 2}.get(1) }}{{ {'a': 1}.get(('b', 'c'), 5) }}",
    # filters
    "{{ [3, 1, 2]|sort }}{{ 'bAc'|sort }}{{ [1, 2, 3]|sum }}{{ [[1], [2]]|sum(start=[]) }}{{ [1, 2]|max }}{{ []|min }}",
    "{{ 'a b'|title }}{{ 'a'|center(5) }}|{{ 'a\nb'|indent(2) }}{{ 'a\nb'|indent('>', true, true) }}{{ 'abc'|truncate(3) }}",
    "{{ [1]|indent }}",
    "{{ 'a b c'|wordcount }}{{ 'a b c'|wordwrap(2) }}{{ '<b>x</b>'|striptags }}{{ 'see www.a.com'|urlize }}{{ 'a b'|urlencode }}",
    "{{ [1, 2, 3, 4, 5]|batch(2, 'x')|list }}{{ [1, 2, 3, 4, 5]|slice(3, 'x')|list }}{{ 'abc'|reverse }}{{ [1, 2]|reverse|list }}",
    "{{ ['a', 'A', 'b']|unique|list }}{{ [1, 2, 3]|select('odd')|list }}{{ [1, 2]|reject('eq', 1)|list }}{{ none|map('upper')|list }}",
    "{{ [1, '2', none]|join('-') }}{{ messages|join(',', attribute='role') }}{{ 'abc'|join('.') }}{{ range(3)|join }}",
    "{{ 'aXbX'|replace('X', 'y', 1) }}{{ 'ab'|replace('', '-') }}{{ 5|replace(5, 6) }}{{ 'a'.replace('a', 'b') }}",
    "{{ '5'|int }}{{ 'x'|int(7) }}{{ 'ff'|int(0, 16) }}{{ '1.5'|float }}{{ 2.567|round(1) }}{{ 2.5|round(0, 'floor') }}",
    "{{ 5|round(-1) }}{{ 1234567|filesizeformat }}{{ '%s-%s'|format(1, 'a') }}{{ '%(a)s'|format(a=2) }}{{ -3|abs }}",
    "{{ '<a>'|e }}{{ '<a>'|safe ~ '<b>' }}{{ '<a>'|safe + '<b>' }}{{ '<a>'|forceescape }}{{ {'a': 1}|xmlattr }}",
    "{{ 5|map('upper') is defined }}{{ [1, 2]|first }}{{ []|first }}{{ [1, 2]|last }}{{ 'ab'|list }}{{ x|default('d') }}",
    "{{ [1]|map('nonexistent')|list }}",
    "{{ 5|map('upper')|list }}",
    "{{ 5|nonexistent if false else 'fine' }}",
    # tests
    "{{ 3 is odd }}{{ 4 is divisibleby(2) }}{{ 4 is divisibleby(num=3) }}{{ 'a' is lower }}{{ 1 is in [1] }}{{ 1 is eq(1) }}",
    "{{ [] is sequence }}{{ {} is mapping }}{{ 'a' is iterable }}{{ none is none }}{{ x is undefined }}{{ 1 is sameas 1 }}",
    # calls, loops, captures
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}{{ f(1, 2, 3, c=4) }}{{ f }}",
    "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}x{{ messages[0].content }}{% endcall %}",
    "{% set x %}a{{ messages[0].role }}{% endset %}{{ x|upper }}{% filter upper %}b{% endfilter %}{% set y|upper %}c{% endset %}{{ y }}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
    "{% for x in range(5) if x is odd %}{{ x }}{{ loop.index }}{{ loop.length }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% for x in [] %}{{ x }}{% else %}none{% endfor %}{% for a, b in {'x': 1}|items %}{{ a }}{{ b }}{% endfor %}",
    "{% for x in 'abc' %}{{ loop.cycle('o', 'e') }}{{ loop.changed(x) }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
    "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% elif x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in none %}{% endfor %}",
    "{% set j = joiner(',') %}{% for x in 'abc' %}{{ j() }}{{ x }}{% endfor %}{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.current }}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{% set a, b = 1, 2 %}{{ b }}{% set ns = namespace(x=1) %}{% set ns.x = 3 %}{{ ns.x }}",
    "{% generation %}{% set a = 1 %}{{ messages[0].content }}{% endgeneration %}{{ a is defined }}",
    "{% autoescape true %}{{ '<a>' }}{{ messages[0].content ~ '<' }}{{ '<'|safe ~ '<' }}{{ [1, '<'] }}{% endautoescape %}",
    "{% block a %}x{{ messages[0].role }}{% endblock %}{{ self.a() }}",
    "{% include 'x' %}",
    "{{ range(100001) }}",
    "{{ '{} {a} {0!r:>5}'.format(1, a='b') }}{{ '{a[b]}'.format_map({'a': {'b': 1}}) }}{{ ('{}<'|safe).format('<') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ 'a'.format_map() }}",
    "{{ 'a,b'.split(',') }}{{ ' a '.strip() }}{{ 'a'.ljust(3) }}|{{ '-'.join(['a', 'b']) }}{{ 'ab'.translate({97: 'x'}) }}",
    "{{ 'a\tb'.expandtabs(4) }}{{ 'a'.zfill(3) }}{{ 'aab'.count('a') }}{{ 'abc'.find('c') }}{{ 'a\nb'.splitlines() }}{{ 'é'.encode() }}",
    "{{ 'a'.join(5) }}",
    "{{ 'a'.center('x') }}",
    "{{ strftime_now('%d %b %Y %H:%M') }}{{ raise_exception('no') }}",
    "{{ strftime_now('%d %b %Y %H:%M') }}",
)
CHATS = (
    *PROBES[:4],
    *PROBES[9:14],
    Conversation([{"role": "user", "content": "x", "get": "y", "items": ["z"]}, assistant(1)]),
)


@pytest.mark.parametrize("template", ODD)
def test_unusual_templates_render_as_in_transformers(template: str) -> None:
    reference = new(template)
    for chat in CHATS:
        assert by_reference(reference, chat, False) == by_transformers(template, chat, False)


@pytest.mark.parametrize("call", ["[1, 2]|random", "lipsum()", "'ab'|random if messages"])
def test_random_functions_are_refused(call: str) -> None:
    with pytest.raises(RowError, match="print something else each time"):
        new(f"{{{{ {call} }}}}").plain([user(0)])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{% if %}", "line 2"),
        ("a\n\n{{ 1|nothing }}", "line 3: No filter named 'nothing'"),
        ("{% for m in messages %}\n{% generation %}\n{% break %}{% endgeneration %}{% endfor %}", "can't be compiled"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "deeply|not valid"),
    ],
)
def test_an_invalid_template_is_an_error_with_its_line(template: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        new(template)


# ---- bounds

MEMORY = 1500 << 20
SECONDS = 20.0  # of CPU: two to five on a busy machine, and hours without limits
CHILD = """
import json, resource, sys, time
from penstock.errors import RowError
from tests.prepare.template.test_sandbox import new, user
from tests.prepare.template.hostile import HOSTILE
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
for name in json.load(sys.stdin):
    start, words = time.process_time(), ""
    try:
        new(HOSTILE[name]).plain([user(0)])
    except RowError as error:
        words = error.reason
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps([name, words, time.process_time() - start, peak]), flush=True)
"""


def test_hostile_templates_stay_within_time_and_memory() -> None:
    names = list(HOSTILE)
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(memory=MEMORY)],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ".", "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    found = [json.loads(line) for line in child.stdout.splitlines()]
    assert [name for name, *_ in found] == names, child.stderr
    for name, words, seconds, _ in found:
        assert any(limit in words for limit in ("more than", "Range too big", "each time")), (name, words)
        assert "MemoryError" not in words, name
        assert seconds < SECONDS, (name, seconds)


def test_a_limit_is_named_and_the_next_row_is_served() -> None:
    reference = new("{% if messages[0].role == 'bomb' %}{{ 'x' * 100000000000 }}{% endif %}ok")
    rendered = reference.render([Conversation([{"role": "bomb"}]), Conversation([user(0)])])
    assert f"LimitExceeded: the template makes more than {MAX_FUEL} characters" in str(rendered.errors[0])
    assert rendered.texts == [b"", b"ok"]


def test_errors_keep_no_frames_alive() -> None:
    with pytest.raises(RowError) as caught:
        new("{{ none.x.y }}").plain([user(0)])
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def long_chat(messages: int, words: int) -> list[Message]:
    turns = [[user, assistant][number % 2](number, content="word " * words) for number in range(messages)]
    return [system(0), *turns]


APPEND = (
    "{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out + '<' + m.role + '>' + m.content %}"
    "{% endfor %}{{ ns.out }}"
)
LOOK_BACK = (
    "{% for m in messages %}{{ m.content if m != messages[-1] }}{{ messages[loop.index0:][0].role }}"
    "{{ '!' if 'x' in messages[0].content }}{% for n in messages[loop.index0:] %}{% if n %}{% break %}{% endif %}"
    "{% endfor %}{% endfor %}"
)
CHARACTERS = "{% for m in messages %}{% for c in m.content %}{% if c['type'] == 'x' %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [(APPEND, 500, 400), (LOOK_BACK, 2000, 20), (CHARACTERS, 4, 20_000)],
    ids=["append", "look back", "characters"],
)
def test_long_rows_are_not_refused(template: str, messages: int, words: int) -> None:
    chat = Conversation(long_chat(messages, words))
    assert by_reference(new(template), chat, False) == by_transformers(template, chat, False)


@pytest.mark.parametrize("name", ["qwen3_6", "gemma4_v5", "muse_glimmer", "gptoss", "smolvlm"])
def test_a_row_of_32_mb_is_not_refused(name: str) -> None:
    template = next(path for path in TEMPLATES if path.stem == name).read_text()
    row = [user(0, content=[{"type": "text", "text": "word " * 6_400_000}]) if name == "smolvlm" else user(0)]
    row += [assistant(1, content="word " * 6_400_000)] if name != "smolvlm" else []
    chat = Conversation(row)
    assert by_reference(new(template), chat, False) == by_transformers(template, chat, False)


def test_the_limits_grow_with_the_row_once() -> None:
    budget = Budget()
    budget.start({"text": "x" * 1000})
    budget.allocate(MAX_FUEL)
    budget.allocate(64_000)
    with pytest.raises(LimitExceeded, match="characters"):
        budget.allocate(64_000)
    with pytest.raises(LimitExceeded):
        budget.allocate(1)


def test_a_list_in_the_row_is_not_modified() -> None:
    messages = [{"role": "user", "content": ["a"]}]
    with pytest.raises(RowError):
        new("{{ messages[0].content|indent }}").plain(messages)
    assert messages == [{"role": "user", "content": ["a"]}]


def test_charging_does_not_change_what_the_compiler_folds() -> None:
    sandbox = Sandbox(DATE)
    template = sandbox.build(sandbox.parse_template("{{ 'a' ~ 'b' }}{{ ['x', 'y'][0] }}{{ 'ab'|upper }}"))
    assert sandbox.render(template, {"messages": []}) == "abxAB"
