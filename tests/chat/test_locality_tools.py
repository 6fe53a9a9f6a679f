"""Which templates are called local for rows with tools: those that print them as JSON, and do no more with them."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pytest

from benchmarks.conformance import trl_templates
from penstock.chat.conversation import Message
from penstock.errors import RowError
from tests.chat.locality_cases import cases, reading
from tests.chat.splitting import assistant, calls, returns, user
from tests.chat.test_locality import SERVED, engine, filled, holed, locality
from tests.chat.tools_cases import (
    LOCAL_WITH_TOOLS,
    NOT_FOR_ROWS_WITH_TOOLS,
    NOT_WITH_TOOLS,
    REFUSED_FOR_CAUTION,
    TOOL_LISTS,
    printing,
)


@pytest.mark.parametrize("text", LOCAL_WITH_TOOLS)
def test_local_with_tools(text: str) -> None:
    assert locality(printing(text)) == reading()


@pytest.mark.parametrize("text", [*cases(NOT_WITH_TOOLS), *NOT_FOR_ROWS_WITH_TOOLS, *REFUSED_FOR_CAUTION])
def test_not_local_with_tools(text: str) -> None:
    found = locality(printing(text))
    assert found is None or not found.tools


@pytest.mark.parametrize("text", NOT_FOR_ROWS_WITH_TOOLS[:7])
def test_rows_without_tools_are_served_all_the_same(text: str) -> None:
    assert locality(printing(text)) == reading(tools=False)


def test_what_is_read_without_tools_may_be_read_with_them() -> None:
    assert locality(printing("{{ tools | tojson if tools }}¦{{ m.name if not tools }}")) == reading("name")
    assert locality(printing("{{ tools | tojson if tools }}¦{{ m.name }}")) == reading("name")


def test_a_variable_named_tools_says_nothing_about_rows() -> None:
    assert locality(printing("¦{% if not tools %}{{ m.content | length }}{% endif %}"), tools=[{"name": "f"}]) is None
    assert locality(printing("¦{% if tools %}{{ m.content | length }}{% endif %}"), tools=1) == reading(tools=False)


# ---- the promise: where there are tools, only their number counts

TOOL: Final = re.compile('{"⟦t(\\d+)⟧": 0}')
CHATS: Final[list[list[Message]]] = [
    [user("q"), assistant("a")],
    [{"role": "system", "content": "f"}, user("q"), calls("f", "g"), returns("r"), assistant("a"), user("r")],
]


def rendered(template: str, messages: list[Message], tools: list[Any] | None) -> str | None:
    try:
        return engine(template).plain(messages, tools)
    except RowError:
        return None


def keeps_the_promise(template: str) -> bool:
    for chat in CHATS:
        for tools in TOOL_LISTS:
            marked = tools and [{f"⟦t{number}⟧": 0} for number in range(len(tools))]
            text = rendered(template, [holed(number, message) for number, message in enumerate(chat)], marked)
            if text is not None:
                text = TOOL.sub(lambda found: _json(tools, int(found[1])), filled(text, chat))  # noqa: B023
            if text != rendered(template, chat, tools):
                return False
    return True


def _json(tools: list[Any] | None, number: int) -> str:
    assert tools is not None
    return json.dumps(tools[number], ensure_ascii=False)


WITH_TOOLS: Final = {
    **{text: printing(text) for text in LOCAL_WITH_TOOLS},
    **{name: template for name, (template, found) in SERVED.items() if found.tools and not found.read},
}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_local_templates_keep_the_promise(name: str) -> None:
    assert keeps_the_promise(WITH_TOOLS[name])


@pytest.mark.parametrize("text", cases(NOT_WITH_TOOLS))
def test_the_others_break_it(text: str) -> None:
    assert not keeps_the_promise(printing(text))


@pytest.mark.parametrize("text", REFUSED_FOR_CAUTION)
def test_those_refused_for_caution_would_keep_it(text: str) -> None:
    assert keeps_the_promise(printing(text))


def test_which_templates_of_trl_are_local_with_tools() -> None:
    local = {name for name in trl_templates() if name in SERVED}
    assert {name for name in local if SERVED[name][1].tools} >= {"trl/qwen2_5", "trl/qwen3_instruct_2507"}
