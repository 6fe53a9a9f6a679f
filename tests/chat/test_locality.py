"""Which templates are called local, which never may be, and the promise itself, held against rendered text."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import nodes

from benchmarks.conformance import trl_templates
from penstock.chat.conversation import Message
from penstock.chat.engine import TemplateEngine
from penstock.chat.locality import Locality, find_locality
from penstock.chat.sandbox import Sandbox
from penstock.chat.sentinels import CONTROL
from penstock.chat.sorts import NotLocal, Sort, Sorts
from penstock.chat.truths import Truths
from penstock.errors import RowError
from tests.chat.engine_probes import BATTERY, DATE, TOKENS
from tests.chat.locality_cases import (
    ASSIGNING,
    HIDDEN,
    HIDDEN_IN_INNER_LOOPS,
    HIDDEN_WITH_CALLS,
    LOCAL_AND_MORE,
    NOT_LOCAL,
    NOT_WITH_CALLS,
    TRUTHS,
    WITHOUT_CALLS,
    cases,
    each,
    each_call,
    reading,
)
from tests.chat.splitting import assistant, calls, returns, user
from tests.chat.test_parts import THINKS


def parse(template: str) -> nodes.Template:
    return Sandbox(DATE, CONTROL).parse_template(template)


def locality(template: str, **variables: Any) -> Locality | None:
    try:
        return find_locality(parse(template), {"add_generation_prompt": False, **TOKENS, **variables})
    except NotLocal:
        return None


@pytest.mark.parametrize("template", LOCAL_AND_MORE)
def test_local(template: str) -> None:
    assert locality(template) == LOCAL_AND_MORE[template]


@pytest.mark.parametrize("text", [*cases(NOT_LOCAL), *cases(HIDDEN), THINKS])
def test_not_local(text: str) -> None:
    assert locality(each(text)) is None


@pytest.mark.parametrize("text", [*cases(NOT_WITH_CALLS), *cases(HIDDEN_WITH_CALLS)])
def test_not_local_where_there_are_calls(text: str) -> None:
    assert locality(each_call(text)) == WITHOUT_CALLS


@pytest.mark.parametrize("text", cases(HIDDEN_IN_INNER_LOOPS))
def test_not_local_even_without_calls(text: str) -> None:
    assert locality(each_call(text)) is None


def test_a_set_that_can_only_fail() -> None:
    assert locality(each("{% if m.role == 'x' %}{% set a, b = 1, 2, 3 %}{% endif %}")) == reading()


LONG: Final = {
    "or": "{% if " + " or ".join(f"m.role == '{number}'" for number in range(12)) + " %}+{% endif %}",
    "and": "{% if " + " and ".join(f"m.role != '{number}'" for number in range(12)) + " %}+{% endif %}",
    "items": "{{ x" + "[0]" * 12 + " }}",
    "calls": "{{ m.role" + ".strip()" * 12 + " }}",
}


@pytest.mark.parametrize("name", LONG)
def test_long_expressions_take_no_longer_than_their_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, sort = [], Sorts.sort

    def counted(self: Sorts, node: nodes.Node) -> Sort:
        looks.append(node)
        return sort(self, node)

    monkeypatch.setattr(Sorts, "sort", counted)
    locality(each(LONG[name]))
    assert len(looks) < 1000


# ---- the promise: texts around words hang on facts alone

SPACE, HOLE = "\u2003", re.compile('{"⟦(\\d+)a(\\d+)⟧": 0}|⟦(\\d+)n(\\d+)⟧|(\u2003?)⟦(\\d+)⟧\u2003?')
ROLES: Final = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
ROWS: Final = (
    "ua", "uau", "uaua", "uauaua", "uauauaua", "uauauauaua", "sua", "suaua", "suauaua", "suauauaua", "suauauauau",
    "uauata", "uauauata", "uauataua", "uuauau", "uaaua", "uata", "uatauata", "suatauatata", "uatatauata", "susua",
    "uasaua", "ta", "tata", "tatata", "a", "aua", "auaua", "uuuuuuuu", "aaaaaaa", "uauatauata",
)  # fmt: skip


@cache
def engine(template: str) -> TemplateEngine:
    return TemplateEngine(template, special_tokens=TOKENS, variables={}, date=DATE, fast=False)


def rendered(template: str, messages: list[Message]) -> str | None:
    """The text, None where the template refuses the conversation."""
    try:
        return engine(template).plain(messages)
    except RowError:
        return None


def holed(number: int, message: Message) -> Message:
    """The message with placeholders for its words, and without what a local template does not read."""
    content = message["content"]
    made: Message = {"role": message["role"], "content": f"{SPACE}⟦{number}⟧{SPACE}" if content else content}
    if "tool_calls" in message:
        made["tool_calls"] = [
            {"type": "function", "function": {"name": f"⟦{number}n{k}⟧", "arguments": {f"⟦{number}a{k}⟧": 0}}}
            for k in range(len(message["tool_calls"]))
        ]
    return made


def filled(text: str, messages: list[Message]) -> str:
    """The text with the words in their places."""

    def fill(found: re.Match[str]) -> str:
        with_arguments, a, with_name, n, space, with_words = found.groups()
        if with_arguments:
            function = messages[int(with_arguments)]["tool_calls"][int(a)]["function"]
            return json.dumps(function["arguments"], ensure_ascii=False)
        if with_name:
            return str(messages[int(with_name)]["tool_calls"][int(n)]["function"]["name"])
        words = str(messages[int(with_words)]["content"])
        return words if space else words.strip()

    return HOLE.sub(fill, text)


def words_stay_where_they_are(template: str, messages: list[Message]) -> bool:
    text = rendered(template, [holed(number, message) for number, message in enumerate(messages)])
    return rendered(template, messages) == (None if text is None else filled(text, messages))


def facts(row: str, number: int) -> tuple[object, ...]:
    """All that a local template may know of a message, besides its words."""
    around = (row[:3], row[max(number - 1, 0) : number], row[number], row[number + 1 : number + 2])
    return *around, row[-1] if number < 3 else "", min(number, 3), number % 2


def facts_decide(template: str) -> bool:
    """Whether messages of the same facts have the same texts between them, and are accepted everywhere or nowhere."""
    texts: dict[object, str] = {}
    accepted, refused = set(), []
    for row in ROWS:
        known = [facts(row, number) for number in range(len(row))]
        text = rendered(template, [holed(n, {"role": ROLES[role], "content": "w"}) for n, role in enumerate(row)])
        if text is None:
            refused.append(known)
            continue
        accepted.update(known)
        holes = [(*found.span(), int(found[6])) for found in HOLE.finditer(text)]
        ends = [(0, 0, -1), *holes, (len(text), len(text), len(row))]
        for (_, start, left), (end, _, right) in pairwise(ends):
            between = (left < 0, right == len(row), *known[max(left, 0) : right + 1])
            if left < right and texts.setdefault(between, text[start:end]) != text[start:end]:
                return False
    return not any(accepted.issuperset(known) for known in refused)


def is_served(message: Message, found: Locality) -> bool:
    """Whether the promise is about such a message."""
    unread = {"role", "content", "tool_call_id", "name"} - found.read | ({"tool_calls"} if found.calls else set())
    content, made = message.get("content", 0), message.get("tool_calls", ())
    if not message.keys() <= unread or message.get("role") not in ROLES.values() or not isinstance(made, list | tuple):
        return False
    if any(type(call["function"]["arguments"]) is not dict for call in made) or ("tool_calls" in message and not made):
        return False
    return content is None or content == "" or (isinstance(content, str) and not content.isspace())


CHATS: Final[list[list[Message]]] = [
    *(chat.messages for chat in BATTERY if chat.messages and not chat.tools and not chat.variables),
    [user("q"), assistant("a"), user("r"), assistant("b")],
    [user("xabc, two words"), assistant("</think>abc"), user(" \n[/INST] "), assistant("long " * 99)],
    [user("q"), calls("abc", "look", "abc"), returns("r"), calls("look", text="abc"), returns("s", 1), assistant("a")],
]


def keeps_the_promise(template: str, found: Locality) -> bool:
    chats = [chat for chat in CHATS if all(is_served(message, found) for message in chat)]
    assert len(chats) >= 8
    return all(words_stay_where_they_are(template, chat) for chat in chats) and facts_decide(template)


SERVED: Final = {
    name: (template, found)
    for name, template in {**trl_templates(), **{template: template for template in LOCAL_AND_MORE}}.items()
    if (found := locality(template, documents=None)) is not None
}


def test_some_templates_of_trl_are_local() -> None:
    assert {"trl/llama3", "trl/qwen2_5", "trl/phi3", "trl/gemma", "trl/qwen3_instruct_2507"} <= SERVED.keys()


@pytest.mark.parametrize("name", SERVED)
def test_local_templates_keep_the_promise(name: str) -> None:
    assert keeps_the_promise(*SERVED[name])


@pytest.mark.parametrize("text", cases(HIDDEN))
def test_what_is_hidden_breaks_the_promise(text: str) -> None:
    assert not keeps_the_promise(each(text), reading())


@pytest.mark.parametrize("text", [*cases(HIDDEN_WITH_CALLS), *cases(HIDDEN_IN_INNER_LOOPS)])
def test_what_is_hidden_breaks_the_promise_of_calls(text: str) -> None:
    assert not keeps_the_promise(each_call(text), reading())


WORDS = st.text(min_size=1, max_size=12).filter(lambda words: not words.isspace() and not set(words) & set("⟦⟧\u2003"))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SERVED)), st.sampled_from(ROWS), st.lists(WORDS, min_size=10, max_size=10))
def test_any_words_stay_where_they_are(name: str, row: str, words: list[str]) -> None:
    messages = [{"role": ROLES[role], "content": said} for role, said in zip(row, words, strict=False)]
    assert words_stay_where_they_are(SERVED[name][0], messages)


# ---- conditions known before any row is


@pytest.mark.parametrize(("condition", "truth"), [(text, truth) for truth in TRUTHS for text in TRUTHS[truth]])
def test_truths(condition: str, truth: bool | None) -> None:
    tree = parse(f"{ASSIGNING}{{% if {condition} %}}{{% endif %}}")
    (test,) = (node.test for node in tree.find_all(nodes.If))
    variables = {"tools": None, "mode": "chat", "off": False, "assigned": 1, "counted": 1}
    assert Truths(tree, variables).of(test) is truth


def test_what_never_runs_does_not_count() -> None:
    dead = each("{% if x == 'a' %}{{ messages | length }}{% elif y %}{{ messages[-1] }}{% else %}+{% endif %}")
    assert locality(dead) is None
    assert locality(dead, x="a") is None
    assert locality(dead, x="b") == reading()
    assert locality(dead, x="b", y=1) is None
    assert locality("{% set x = 'b' %}" + dead, x="b") is None
    assert locality(each("{% if tools %}{{ messages | length }}{% endif %}")) == reading(tools=False)
    assert locality(each("{{ tools and messages | length }}")) == reading(tools=False)
    assert locality(each("{{ tools or messages | length }}")) is None
