"""The examples in docs/formats.md are correct."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.chat.formats import Format, detect
from penstock.prepare.chat.rows import RowReader
from penstock.prepare.slice_record import straddled

PAGE = (Path(__file__).parents[3] / "docs" / "formats.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"<!-- example -->\n```json\n(.+)\n```\n```json\n((?:.+\n)+?)```\n", PAGE)


def shown(conversation: Conversation) -> list[Any]:
    if conversation.texts is not None:
        return [[role.name.lower(), text] for role, text in conversation.texts]
    return conversation.messages


@pytest.mark.parametrize(("row", "expected"), EXAMPLES)
def test_examples_read_as_shown(row: str, expected: str) -> None:
    conversations = RowReader(detect([json.loads(row)])).conversations(row.encode())
    assert [shown(conversation) for conversation in conversations] == [
        json.loads(line) for line in expected.splitlines()
    ]


def test_every_format_has_an_example() -> None:
    assert len(EXAMPLES) == PAGE.count("<!-- example -->")
    assert {detect([json.loads(row)]).format for row, _ in EXAMPLES} == set(Format)


def test_every_kind_of_refusal_is_listed() -> None:
    sources = (Path(__file__).parents[3] / "penstock" / "prepare" / "chat").glob("*.py")
    raised = {
        kind for path in sources for kind in re.findall(r'RowError\(\s*"(\w+)"', path.read_text(encoding="utf-8"))
    }
    raised.add(straddled().kind)  # once there are tokens
    listed = re.findall(r"`(\w+)`", PAGE.split("## Rows that are refused")[1])
    assert raised <= set(listed)
    assert set(listed) - {"system"} <= raised
