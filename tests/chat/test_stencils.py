"""What stencils serve, as the engine and the splitter would have served it, and what they leave to these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.chat.adapt import Adapter
from penstock.chat.conversation import Conversation
from penstock.chat.parts import RegionsMode
from penstock.chat.rows import Normaliser
from penstock.chat.stencil import Table
from penstock.chat.stencils import Stencils
from tests.chat.splitting import assistant, calls, recipe, returns, user
from tests.chat.stencil_probes import (
    MAPPING,
    OWN,
    PROMPT,
    SAID,
    TEMPLATES,
    TURN,
    Made,
    added,
    chat,
    check,
    made,
    served,
)

pytestmark = pytest.mark.usefixtures("inner_loops")


@pytest.mark.parametrize("name", TEMPLATES)
def test_hostile_contents_one_by_one(name: str) -> None:
    parts, stencils = made(name), made(name).stencils()
    words = [said for said in SAID if said and not said.isspace()]
    chats = [chat(user(said), assistant(said), user(said), assistant(said)) for said in words]
    chats += [chat(user("q"), assistant(said, tool_calls=[]), user("r"), assistant(said)) for said in words]
    assert served(parts, chats, stencils)[: len(words)] in ([], list(range(len(words))))
    more = [chat(user("q"), calls("f", text=said), returns(said or ""), assistant("a")) for said in (*words, "", None)]
    served(parts, more, stencils)


@pytest.mark.parametrize("words", ["", " "])
def test_empty_words_of_rows_that_are_read_as_plain(words: str) -> None:
    row = json.dumps({"messages": [user("q"), assistant(words)]}).encode()
    served(made("trimmed"), Normaliser(MAPPING).conversations(row))


def test_marks_of_both_alphabets_in_one_row() -> None:
    """The engine has no marks left for such a row, so that its regions are unknown."""
    assert served(made("whole"), [chat(user("\U0010ff00"), assistant("a"))]) == [0]
    served(made("whole"), [chat(user("\U0010ff00\x06"), assistant("a"))])


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"a longer prompt"}))
def test_plain_conversations_are_served(name: str) -> None:
    turns = [user("q"), assistant("a"), user("r"), assistant("b")]
    assert served(made(name), [chat(*turns[:2]), chat(*turns), chat(*turns * 3)]) == [0, 1, 2]


@pytest.mark.parametrize("name", ["a longer header after a tool", "a longer prompt"])
def test_words_that_look_like_the_rest_of_a_header(name: str) -> None:
    after_tool = chat(user("q"), assistant("a"), returns("t"), assistant("<b>b"))
    chats = [chat(user("q"), assistant("<b>b")), after_tool, chat(user("q"), assistant("a"))]
    assert len(served(made(name), chats)) == (3 if name == "a longer header after a tool" else 0)


def test_rows_keep_their_order_and_others_are_left_out() -> None:
    parts = made("calls")
    plain, calling = chat(user("q"), assistant("a")), chat(user("q"), calls("f", "g"), returns("t"), assistant("a"))
    blank, missing = chat(user(" "), assistant("a")), chat(user("q"), {"role": "assistant"})
    tools, variables = plain._replace(tools=[{"name": "f"}] * 127), plain._replace(variables={"x": 1})
    developer = chat({"role": "developer", "content": "d"}, assistant("a"))
    ids = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}, "more": 1}}]
    unusual = chat(user("q"), assistant("", tool_calls=ids), assistant("a"))
    reasoning = chat(user("q"), assistant("a", reasoning_content="r"))
    given = [tools, calling, blank, plain, missing, variables, calling, developer, chat(), unusual, plain, reasoning]
    adapted = [parts.adapter.adapt(conversation) for conversation in given]
    stencils = parts.stencils()
    assert check(parts, stencils.fill(added(stencils.draft(), adapted)), adapted) == [1, 3, 6, 10, 11]
    assert stencils.fill(added(stencils.draft(), [tools, blank])) is None
    assert stencils.fill(stencils.draft()) is None


def test_nothing_is_learned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, renders = made("calls"), []
    stencils, render = parts.stencils(), parts.engine.render
    turns = [user("q"), assistant("a")]
    refused = chat(*turns, {"role": "tool", "content": None})  # drops nothing, but prints no stop of its own
    chats = [chat(*turns), chat(*turns * 2), chat(*turns * 4), chat(user("x"), assistant("y")), refused, refused]

    def counted(conversations: Sequence[Conversation]) -> Any:
        renders.append(len(conversations))
        return render(conversations)

    monkeypatch.setattr(parts.engine, "render", counted)
    first = stencils.fill(added(stencils.draft(), chats))
    learned = len(renders)
    assert 0 < learned <= 4 and first is not None
    again = stencils.fill(added(stencils.draft(), [*chats, chat(*turns * 6), chat(*turns * 5)]))
    assert again is not None and again.rows[:4] == first.rows[:4] and again.texts[:4] == first.texts[:4]
    assert len(renders) == learned  # longer conversations have no contexts of their own


def test_lone_surrogates_in_arguments_are_left_to_the_engine() -> None:
    message = assistant("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"a": "\ud800"}}}])
    stencils = made("calls").stencils()
    assert stencils.fill(added(stencils.draft(), [chat(user("q"), message)])) is None


@pytest.mark.parametrize("condition", ["m.role != 'assistant'", "m.content"])
def test_a_template_that_does_not_print_an_answer(condition: str) -> None:
    engine, splitter = recipe(
        f"{{% for m in messages %}}{{% if {condition} %}}{TURN}{{% endif %}}{{% endfor %}}{PROMPT}"
    )
    parts = Made(engine, splitter, Adapter(engine.plain))
    assert parts.stencils().active
    served(parts, [chat(user("q"), assistant(""))])


def test_a_template_with_an_empty_text() -> None:
    engine, splitter = recipe("{% for m in messages %}{% if m.role == 'x' %}{{ m.content }}{% endif %}{% endfor %}")
    parts = Made(engine, splitter, Adapter(engine.plain))
    chats = [chat(user("q")), chat(user("")), chat(user(""), user(""))]
    assert served(parts, chats) in ([], [1, 2])


@pytest.mark.parametrize("extra", ["\U0010fe000\U0010fe01", ["\U0010fe000\U0010fe01"], {"\U0010fe00t0\U0010fe01": 0}])
def test_placeholders_among_the_variables(extra: Any) -> None:
    engine, splitter = recipe(f"{{{{ extra }}}}{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}", extra=extra)
    assert not Stencils(engine, splitter, {}, Adapter(engine.plain)).active


def test_many_kinds_of_conversations_are_put_in_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times, index = [], Table.index
    monkeypatch.setattr(Table, "index", lambda table: (times.append(1), index(table))[1])
    rows = [chat(user("q"), assistant("a"))._replace(tools=[{}] * count) for count in range(50)]
    assert served(made("tools first"), rows) == list(range(50))
    assert len(times) == 2  # when there is none yet, and when all are there


def test_a_template_that_is_not_local_or_is_tagged_has_none() -> None:
    tagged = f"{{% for m in messages %}}{{% generation %}}{TURN}{{% endgeneration %}}{{% endfor %}}{PROMPT}"
    far = "{% for m in messages %}{{ m.content | length }}{% endfor %}"
    for template, active in ((tagged, False), (far, False), (OWN["whole"], True)):
        engine, splitter = recipe(template, RegionsMode.AUTO)
        assert Stencils(engine, splitter, {}, Adapter(engine.plain)).active is active
