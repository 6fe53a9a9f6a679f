"""The machine's characters are those of the running interpreter's `str`, for every code point."""

from __future__ import annotations

import datetime
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.native import native
from penstock.prepare.template.compiler import CompiledTemplate, conversation_layout
from penstock.prepare.template.sandbox import Sandbox

pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")

TODAY = datetime.date(2025, 6, 1)
EVERY = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CONTEXTUAL = "\u03a3"  # a capital sigma's lower case depends on its neighbours: left to the reference


def printed(expression: str, text: str) -> str:
    """What the machine prints for an expression on the content of one message."""
    template = "{% set v = messages[0].content %}{{ " + expression + " }}"
    base = {"documents": None, "add_generation_prompt": False}
    machine = CompiledTemplate(Sandbox(TODAY).parse_template(template), base, TODAY, conversation_layout([]))
    row = {"messages": [{"role": "user", "content": text}], "tools": None, "variables": None}
    batch = machine.render([json.dumps(row).encode()])
    assert batch.status[0] == 0, batch.reasons[0]
    return batch.texts[0].decode()


def test_changes_of_case() -> None:
    text = " ".join(EVERY).replace(CONTEXTUAL, "")
    assert printed("v.lower()", text) == text.lower()
    assert printed("v.upper()", text) == text.upper()


def test_capitalized_first_letters() -> None:
    cased = [c for c in EVERY if c.title() != c and c != CONTEXTUAL]
    assert len(cased) > 1000
    for c in cased[::7]:
        assert printed("v.capitalize()", c + "Ab") == (c + "Ab").capitalize()


def test_printable_characters() -> None:
    text = "".join(EVERY)
    assert printed("[v]", text) == repr([text])


def test_white_space_and_line_breaks() -> None:
    spaces = "".join(c for c in EVERY if c.isspace())
    assert printed("v.strip()", spaces + "a" + spaces) == "a"
    others = [c for c in EVERY if not c.isspace()]
    assert printed("v.strip()", "".join(others)) == "".join(others)
    text = "a".join(EVERY)
    assert printed("v | indent(1)", text) == "\n".join(
        " " + line if line and k else line for k, line in enumerate(text.splitlines())
    )


def test_threads_that_meet_a_character_first_agree() -> None:
    texts = ["".join(map(chr, range(page, page + 256))) for page in range(0x20000, 0x22000, 256)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda text: printed("[v.upper()]", text), texts * 4))
    assert answers == [repr([text.upper()]) for text in texts * 4]
