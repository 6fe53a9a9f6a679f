"""On small templates the machine gives the same text, owners and refusals as the reference, or gives up."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.errors import TemplateError
from penstock.native import RowFlag, RowStatus, native
from penstock.prepare.chat.conversation import Conversation, Message
from penstock.prepare.template.bytecode import NotCompiled
from penstock.prepare.template.compiler import CompiledTemplate, conversation_layout, encoded
from penstock.prepare.template.probes import rows
from penstock.prepare.template.reference import Reference
from tests.prepare.template.conversations import DATE, TOKENS
from tests.prepare.template.snippets import CALLS, MESSAGES, TOOL_LISTS, TOOLS, each, each_call, printing
from tests.support.splitting import assistant, calls, returns, user

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native is None, reason="installed without a compiler")]

SYSTEM: Message = {"role": "system", "content": "Be kind."}
TURNS = [user("q"), assistant("abc")]
CALLING = [user("q"), calls("f", "abc"), returns("r"), returns("s", 1), assistant("a")]
CHATS: tuple[list[Message], ...] = (
    TURNS,
    [SYSTEM, *TURNS * 4],
    [SYSTEM, *CALLING, *TURNS],
    [user("q"), calls("f", text=None), returns("r"), assistant("a", reasoning_content="because")],
    [user("q"), assistant("a", thinking="because"), user("r"), assistant("b", reasoning="why", name="n")],
    [assistant("a"), *TURNS],
    [user(""), assistant(" \n")],
    [user("<think>a</think>b"), assistant("a</think>b"), assistant("x" * 9), user("é日本😀"), user("{{ x }}")],
    [{"role": "user"}, {"content": "a"}, {"role": "assistant", "content": 1}],
    [user("same")] * 3,
)
CONVERSATIONS = [Conversation(messages) for messages in CHATS]
WITH_TOOLS = [Conversation(messages, tools) for tools in TOOL_LISTS for messages in CHATS[:3]]
TEMPLATES = (
    [(each(text), CONVERSATIONS) for texts in MESSAGES.values() for text in texts]
    + [(each_call(text), CONVERSATIONS) for texts in CALLS.values() for text in texts]
    + [(printing(text), WITH_TOOLS) for texts in TOOLS.values() for text in texts]
)


def by_machine(template: str, reference: Reference, conversations: Sequence[Conversation]) -> list[Any]:
    """Each row as `probe_checks.rows` yields it, with its refusal; None if the machine gives up."""
    base = {"documents": None, "add_generation_prompt": False, **TOKENS}
    try:
        machine = CompiledTemplate(reference.parse(template), base, DATE, conversation_layout(()))
    except NotCompiled:
        return [None] * len(conversations)
    given = [encoded(conversation) for conversation in conversations]
    batch = machine.render([row or b"" for row in given])
    spans, tags = (np.frombuffer(array, np.int32).tolist() for array in (batch.spans, batch.tags))
    found: list[Any] = []
    for number, status in enumerate(batch.status):
        own = [tuple(spans[k + 1 : k + 4]) for k in range(0, len(spans), 4) if spans[k] == number]
        tagged = [tuple(tags[k + 1 : k + 3]) for k in range(0, len(tags), 3) if tags[k] == number]
        served = given[number] is not None and status in (RowStatus.RENDERED, RowStatus.REFUSED)
        refused = batch.reasons[number] if status == RowStatus.REFUSED else None
        row = (batch.texts[number], bool(batch.row_flags[number] & RowFlag.KNOWN), own, tagged, refused)
        found.append(row if served else None)
    return found


def by_reference(reference: Reference, conversations: Sequence[Conversation]) -> list[Any]:
    rendered = reference.render(conversations)
    words = {row: error.reason.partition(": ")[2] for row, error in rendered.errors.items()}
    return [(*row[:4], words.get(number)) for number, row in enumerate(rows(rendered))]


def differences(template: str, conversations: Sequence[Conversation]) -> tuple[list[Any], int]:
    """The rows where the engines differ, and how many rows the machine served."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about constants in the compiled template
        try:
            reference = Reference(template, special_tokens=TOKENS, variables={}, date=DATE)
        except TemplateError:
            return [], 0
        served = by_machine(template, reference, conversations)
        if not any(served):
            return [], 0
        expected = by_reference(reference, conversations)
    pairs = zip(served, expected, strict=True)
    return [pair for pair in pairs if pair[0] not in (None, pair[1])], sum(map(bool, served))


@pytest.mark.parametrize("template", [template for template, _ in TEMPLATES])
def test_the_machine_matches_the_reference(template: str) -> None:
    assert differences(template, dict(TEMPLATES)[template])[0] == []


def test_the_machine_serves_most_snippets() -> None:
    served = [differences(template, conversations[:3])[1] for template, conversations in TEMPLATES]
    assert sum(map(bool, served)) > len(TEMPLATES) * 0.6
