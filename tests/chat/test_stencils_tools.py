"""Rows with tools: stencils serve them as the engine and the splitter would, or leave them to these."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import pytest

from penstock.chat.adapt import Adapter
from penstock.chat.conversation import Conversation, Message
from penstock.chat.shapes import MOST_TOOLS
from tests.chat.splitting import assistant, calls, recipe, returns, user
from tests.chat.stencil_probes import SAID, Made, added, chat, check, made, served
from tests.chat.tools_cases import (
    BEFORE,
    DECIDING,
    HOSTILE_TOOLS,
    LOCAL_WITH_TOOLS,
    NOT_FOR_ROWS_WITH_TOOLS,
    SCHEMA,
    TOOL_LISTS,
    for_each,
    printing,
)

pytestmark = pytest.mark.usefixtures("inner_loops")

SYSTEM: Final[Message] = {"role": "system", "content": "Be kind."}
TURNS: Final = [user("q"), assistant("a")]
CALLING: Final = [user("q"), calls("f", "g"), returns("r"), returns("s", 1), assistant("a")]
CHATS: Final[tuple[list[Message], ...]] = (
    TURNS,
    TURNS * 4,
    [SYSTEM, *TURNS],
    [SYSTEM, *TURNS * 3, user("r")],
    CALLING,
    [SYSTEM, *CALLING, *TURNS],
    [user("q"), calls("f", text=None), returns("r"), assistant("a", reasoning_content="because")],
    [user("q"), assistant("a", thinking="because"), user("r"), assistant("b", reasoning="why")],
    [assistant("a"), *TURNS],
    [user(""), assistant("a")],
    [user("q"), assistant("a"), assistant("b"), user("r"), user("s")],
)
ROWS: Final = [Conversation(messages, tools) for tools in TOOL_LISTS for messages in CHATS]
USUAL: Final = [row for row in ROWS if row.messages[0]["role"] != "assistant" and row.messages[0]["content"]]


@cache
def parts_of(text: str) -> Made:
    engine, splitter = recipe(printing(text))
    return Made(engine, splitter, Adapter(engine.plain))


@pytest.mark.parametrize("text", LOCAL_WITH_TOOLS)
def test_any_tools(text: str) -> None:
    parts, stencils = parts_of(text), parts_of(text).stencils()
    found = served(parts, ROWS, stencils)
    assert served(parts, ROWS[::-1], stencils) == sorted(len(ROWS) - 1 - row for row in found)


@pytest.mark.parametrize("text", [*BEFORE, *DECIDING])
def test_usual_rows_are_served_where_tools_come_first(text: str) -> None:
    rows = [row for row in USUAL if row.messages[-1]["role"] == "assistant" and row.tools != TOOL_LISTS[-1]]
    assert len(served(parts_of(text), rows)) == len(rows)


@pytest.mark.parametrize("text", NOT_FOR_ROWS_WITH_TOOLS[:5])
def test_rows_with_tools_are_left_where_the_template_reads_more_with_them(text: str) -> None:
    rows = [Conversation(TURNS), Conversation(TURNS, []), Conversation(TURNS, [SCHEMA])]
    parts, stencils = parts_of(text), parts_of(text).stencils()
    draft = added(stencils.draft(), rows)
    assert check(parts, stencils.fill(draft), rows) == [0]
    assert set(draft.left.values()) == {"tools, with which the template does more than print them, or very many"}


@pytest.mark.parametrize(
    "name",
    ["trl/cohere", "trl/gemma", "trl/llama3", "trl/phi3", "trl/phi3_5", "trl/qwen2_5", "trl/qwen3_instruct_2507"],
)
def test_templates_of_trl(name: str) -> None:
    parts = made(name)
    rows = [row for row in ROWS if not parts.engine.render([parts.adapter.adapt(row)]).errors]
    found = served(parts, rows)
    assert any(rows[row].tools and len(rows[row].messages) > 4 for row in found)
    if name in ("trl/qwen2_5", "trl/qwen3_instruct_2507"):
        plain = [row for row in rows if row in USUAL and not any("tool_calls" in message for message in row.messages)]
        assert len(served(parts, [row for row in plain if row.messages[-1]["role"] == "assistant"])) > 50


@pytest.mark.parametrize("said", [said for said in SAID if said])
def test_hostile_words_beside_hostile_tools(said: str) -> None:
    rows = [Conversation([user(said), assistant(said)], [tool, {"said": said, said: 1}]) for tool in HOSTILE_TOOLS]
    for text in ("{{ tools | tojson if tools }}", "¦{{ tools | tojson if tools and loop.first }}"):
        served(parts_of(text), rows)


# ---- how many, and what


def test_up_to_a_number_of_tools() -> None:
    rows = [Conversation(TURNS, [{"name": str(k)} for k in range(count)]) for count in range(MOST_TOOLS + 3)]
    for text in (BEFORE[0], BEFORE[1], for_each("{{ loop.index }}")):
        assert served(parts_of(text), rows) == list(range(MOST_TOOLS + 1))


def test_the_number_of_tools_is_told_apart_from_all_else() -> None:
    """Contexts have no room for more."""
    rows = [Conversation([SYSTEM, *TURNS], [{}] * count) for count in (0, 1, 2, 63, 64, 125, 126)] + [
        Conversation([SYSTEM, *TURNS])
    ]
    parts, stencils = parts_of(DECIDING[1]), parts_of(DECIDING[1]).stencils()
    assert served(parts, rows * 2, stencils) == list(range(16))


@pytest.mark.parametrize("tool", [None, "f", 7, [], [("name", "f")], True])
def test_tools_that_are_no_objects_are_left(tool: Any) -> None:
    stencils = parts_of(BEFORE[0]).stencils()
    assert stencils.fill(added(stencils.draft(), [Conversation(TURNS, [SCHEMA, tool])])) is None


def test_subtypes_of_objects_are_left() -> None:
    class Tool(dict[str, Any]):
        pass

    stencils = parts_of(BEFORE[0]).stencils()
    assert stencils.fill(added(stencils.draft(), [Conversation(TURNS, [Tool(name="f")])])) is None


def test_lone_surrogates_in_a_tool_are_left_to_the_engine() -> None:
    rows = [Conversation(TURNS, [{"a": "\ud800"}]), Conversation(TURNS, [SCHEMA])]
    stencils = parts_of(BEFORE[0]).stencils()
    draft = added(stencils.draft(), rows)
    assert stencils.fill(draft) is None
    assert draft.left.keys() == {0, 1}
    assert served(parts_of(DECIDING[1]), rows) == [0, 1]  # not printed


@pytest.mark.parametrize("depth", [200, 300, 2000])
def test_deep_tools_are_served_or_left(depth: int) -> None:
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    row = Conversation(TURNS, [{"a": deep}])
    parts, stencils = parts_of(BEFORE[0]), parts_of(BEFORE[0]).stencils()
    filled = stencils.fill(added(stencils.draft(), [row]))
    assert (filled is None) == (depth == 2000)
    assert check(parts, filled, [row]) == ([] if filled is None else [0])
    assert (parts.engine.render([row]).errors != {}) == (depth == 2000)


def test_marks_of_both_alphabets() -> None:
    rows = [Conversation([user("\U0010ff00"), assistant("a")], [{"a": "\x06"}]), Conversation(TURNS, [{"a": "\x06"}])]
    assert served(parts_of(BEFORE[0]), rows) == [1]


# ---- messages beside tools


def test_segments_that_end_between_tools_and_words() -> None:
    """The system prompt's own region ends between two things that are filled in."""
    text = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}|{{ tools | tojson if tools }}|"
    whole = f"{text}{{% for m in messages[1:] %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}<|end|>{{% endfor %}}"
    parts, stencils = parts_of(whole), parts_of(whole).stencils()
    rows = [
        Conversation([{**SYSTEM, "content": said}, *TURNS], [tool]) for said in ("é", "long") for tool in HOSTILE_TOOLS
    ]
    assert served(parts, rows, stencils) == list(range(len(rows)))
    assert any(run.inside for stencil in stencils._table._ordered for run in stencil.runs)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_watched_where_the_template_reads_some_of_it(key: str) -> None:
    rows = [chat(user("q"), assistant("a", **{key: value})) for value in ("r", "", None)]
    with_tools = [row._replace(tools=[SCHEMA]) for row in rows]
    assert served(parts_of(BEFORE[0]), [*rows, *with_tools]) == list(range(6))
    for other in ("reasoning_content", "thinking", "reasoning"):
        assert served(parts_of(f"{BEFORE[0]}¦{{{{ m.{other} }}}}"), [*rows, *with_tools]) == []


def test_an_unread_key_may_hold_anything() -> None:
    odd: Any = {"name": "\ud800", "x": [{"\ud800": 10**400}], "reasoning": "\x01\U0010fe00", "tool_call_id": 5}
    rows = [Conversation([user("q") | odd, assistant("a", **odd)], tools) for tools in (None, [SCHEMA])]
    assert served(parts_of(BEFORE[0]), rows) == [0, 1]
