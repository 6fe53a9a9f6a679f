"""The examples in docs/views.md run and print the output shown on the page."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import SimpleNamespace

from penstock.load.view import Count, mix
from penstock.prepare.chat.conversation import Part, Role
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import chat, tool_chat

PAGE = Path(__file__).parents[2] / "docs" / "views.md"
SHORT = chat((Role.USER, 3), (Role.ASSISTANT, 2))


def _preferences() -> MemoryDataset:
    prompt = [Piece(0, Role.USER, Part.BODY, (10, 11, 12)), Piece(1, Role.ASSISTANT, Part.HEADER, (7, 8))]
    stop = Piece(1, Role.ASSISTANT, Part.STOP, (9,))
    sides = [[*prompt, Piece(1, Role.ASSISTANT, Part.BODY, ids), stop] for ids in ((50, 51), (50, 60, 61))]
    return MemoryDataset.of(sides, pairs=True)


def _thinking() -> MemoryDataset:
    parts = ((Part.HEADER, 6), (Part.REASONING_MARKUP, 7), (Part.REASONING, 20), (Part.REASONING, 21))
    parts += ((Part.REASONING_MARKUP, 8), (Part.CONTENT, 22), (Part.CONTENT, 23), (Part.STOP, 9), (Part.TAIL, 10))
    answer = [Piece(1, Role.ASSISTANT, part, (token,)) for part, token in parts]
    return MemoryDataset.of([[Piece(0, Role.USER, Part.BODY, (11,)), *answer]])


def _numbered(rows: int, first: int) -> MemoryDataset:
    return MemoryDataset.of(
        [chat((Role.USER, 1), (Role.ASSISTANT, 1), first_id=first + 10 * row) for row in range(rows)]
    )


def test_the_examples_of_the_page_run() -> None:
    names = {
        "ps": SimpleNamespace(mix=mix, Count=Count),
        "ds": MemoryDataset.of([tool_chat(), SHORT]),
        "weighted": MemoryDataset.of([chat((Role.USER, 1), (Role.ASSISTANT, 1), weights={0: 2.0, 1: 0.5})]),
        "uncertain": MemoryDataset.of([tool_chat(), SHORT, [Piece(-1, Role.NONE, Part.GLUE, (1, 2))]]),
        "thinking": _thinking(),
        "preferences": _preferences(),
        "many": _numbered(400, 0),
        "others": _numbered(100, 5),
    }
    test = doctest.DocTestParser().get_doctest(PAGE.read_text(), names, PAGE.name, str(PAGE), 0)
    assert len(test.examples) > 20
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not result.failed, "".join(report)
