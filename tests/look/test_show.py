"""`show` prints every token once, with its origin, and nothing that controls the terminal."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.look.terminal import show, stretches
from penstock.look.tokens import visible_lines
from penstock.prepare.chat.conversation import Part, Role
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import rows

TEXT = {1: b"Be brief.\n", 2: b"Hi \x1b[31mred\x1b[0m", 3: b"<|assistant|>\n", 4: b"Hello", 5: b"<|end|>", 6: b"\n"}
ROW = [
    Piece(0, Role.SYSTEM, Part.BODY, (1,)),
    Piece(1, Role.USER, Part.BODY, (2,)),
    Piece(2, Role.ASSISTANT, Part.HEADER, (3,)),
    Piece(2, Role.ASSISTANT, Part.BODY, (6, 4, 4), 0.5),
    Piece(2, Role.ASSISTANT, Part.STOP, (5,), 0.5),
    Piece(2, Role.ASSISTANT, Part.TAIL, (6,)),
]


def printed(dataset: MemoryDataset, console: dict[str, object] | None = None, parts: str = "") -> str:
    out = io.StringIO()
    show(dataset.view(parts=parts), 0, TEXT.__getitem__, Console(file=out, **console or {}))  # type: ignore[arg-type]
    return out.getvalue()


def test_without_colours_the_gutter_marks_trained_text() -> None:
    assert printed(MemoryDataset.of([ROW])) == (
        "row 0 of source 0 · 8 tokens, 4 trained (50%)\n"
        "   #  role       part     tokens  weight\n"
        "   0  system     body          1           │ Be brief.↵\n"
        "   1  user       body          1           │ Hi \\x1b[31mred\\x1b[0m\n"
        "   2  assistant  header        1           │ <|assistant|>↵\n"
        "   2  assistant  body          3     0.5  +│ ↵\n"
        "                                          +│ HelloHello\n"
        "   2  assistant  stop          1     0.5  +│ <|end|>\n"
        "   2  assistant  tail          1           │ ↵\n"
    )


def test_every_part_fits_its_column() -> None:
    out = printed(MemoryDataset.of([[Piece(0, Role.ASSISTANT, Part.CONTEXT, (3,)), *ROW]]))
    assert len({line.index("│") for line in out.splitlines()[2:]}) == 1


def test_parts_of_an_answer_are_named() -> None:
    parts = [Part.REASONING_MARKUP, Part.REASONING, Part.CONTENT, Part.STOP]
    dataset = MemoryDataset.of([[Piece(2, Role.ASSISTANT, part, (4,)) for part in parts]])
    lines = printed(dataset, parts="-=reasoning").splitlines()
    assert lines[1] == "   #  role       part              tokens  weight"
    assert lines[2] == "   2  assistant  reasoning_markup       1       1  +│ Hello"
    assert lines[3] == "   2  assistant  reasoning              1           │ Hello"
    out = printed(dataset, {"force_terminal": True, "color_system": "standard", "no_color": False})
    assert "\x1b[35mreasoning_markup\x1b[0m" in out


def test_with_colours_trained_text_is_green() -> None:
    out = printed(MemoryDataset.of([ROW]), {"force_terminal": True, "color_system": "standard", "no_color": False})
    assert "\x1b[32mHelloHello\x1b[0m" in out
    assert "\x1b[31m" not in out, "a colour in the data does not act"


def test_text_of_the_template_is_named_as_in_reports() -> None:
    out = printed(MemoryDataset.of([[Piece(-1, Role.NONE, Part.GLUE, (3,)), *ROW]]))
    assert out.splitlines()[2] == "      template                 1           │ <|assistant|>↵"


def test_both_sides_of_a_pair_are_shown() -> None:
    other = [*ROW[:3], Piece(2, Role.ASSISTANT, Part.BODY, (1,)), *ROW[4:]]
    out = printed(MemoryDataset.of([ROW, other], pairs=True))
    assert "chosen (after a common prompt of 3 tokens) · row 0 of source 0 · 8 tokens, 4 trained" in out
    assert "rejected (after a common prompt of 3 tokens) · row 0 of source 0 · 6 tokens, 2 trained" in out


@given(st.binary(max_size=60))
def test_any_bytes_print_as_printable_characters(data: bytes) -> None:
    lines = visible_lines(data)
    assert lines and all(line.isprintable() for line in lines)
    assert sum(line.endswith("↵") for line in lines) >= data.count(b"\n")


def test_unusual_characters_are_escaped() -> None:
    data = "a\tb\r \u202e \u200b\u00a0\U000e0001 \n ".encode() + b"\xff"
    assert visible_lines(data) == ["a⇥b\\r \\u202e \\u200b\\xa0\\U000e0001·↵", " \\xff"]
    assert visible_lines(b"end  ") == ["end··"]


@given(rows(unknown=False))
def test_stretches_hold_every_token_once(row: list[Piece]) -> None:
    view = MemoryDataset.of([row]).view(train_on="all_tokens")
    for index in range(len(view)):
        example = view.example(index)
        some = list(stretches(example))
        assert [token for stretch in some for token in stretch.ids] == example.input_ids.tolist()
        assert [stretch.weight for stretch in some for _ in stretch.ids] == example.loss_weights.tolist()
