"""The compiled loops and programs: exact on any bytes, and safe with any arguments."""

from __future__ import annotations

import array
import gc
import random
import tracemalloc
from collections.abc import Callable
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.clock import DATE
from benchmarks.models import trl_templates
from penstock.literals import Literals
from penstock.native import native
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.encode.unicode_checks import CharacterKind
from penstock.prepare.faithful.arrange import _Turn
from penstock.prepare.template.compiler import CompiledTemplate, Compiler, conversation_layout, encoded
from penstock.prepare.template.probes import PROBES
from penstock.prepare.template.sandbox import Sandbox
from penstock.prepare.template.turns import TurnColumn
from tools import constants, fuzz_bytecode

TABLE = np.arange(0x110000).astype(np.uint8)

pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")


# ---- bytes and characters


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=4))
def test_kinds(texts: list[str]) -> None:
    assert native is not None
    found = native.kinds([text.encode() for text in texts], TABLE)
    for text, kinds in zip(texts, found, strict=True):
        assert kinds == reduce(or_, (int(TABLE[ord(c)]) for c in text if not c.isascii()), 0)


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xc3", b"aaaaaaaaa\xe6\x97", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf"]
)
def test_kinds_of_invalid_utf8(text: bytes) -> None:
    assert native is not None
    with pytest.raises(ValueError, match="not UTF-8"):
        native.kinds([text], TABLE)


def test_wrong_arguments_of_kinds() -> None:
    assert native is not None
    for texts, table in (([b""], TABLE[1:]), (["a"], TABLE)):
        with pytest.raises(ValueError):
            native.kinds(texts, table)  # type: ignore[arg-type]


def first_byte(run: bytes) -> bytes:
    return run[:1]


def composing(text: str = "e\u0301 x") -> list[Any]:
    """The arguments of `compose` for one text of two segments."""
    assert native is not None
    size, table = len(text.encode()), np.where(TABLE == 1, CharacterKind.COMPOSES, 0).astype(np.uint8)
    ends = np.array([size - 1, size])
    cache = bytearray(native.COMPOSE_CACHE)
    return [
        [text.encode()],
        np.zeros(1, np.int64),
        table,
        np.array([0, 2]),
        ends,
        ends.copy(),
        cache,
        lambda run: run[:1],
    ]


def test_compose() -> None:
    assert native is not None
    given = composing("e\u0301 x" * 3)
    for _ in range(2):  # the second time from the cache
        assert native.compose(*given) == [b"e xe xe x"]
        assert given[5].tolist() == [8, 9] and given[4].tolist() == [14, 15]
        given[7] = None
    assert native.compose(*composing("ex")) == [b"ex"]
    inside = composing("\u0301")  # a segment ends inside the run
    assert native.compose(*inside) == [None] and inside[5].tolist() == [1, 2]


def test_wrong_arguments_of_compose() -> None:
    assert native is not None
    wrong: dict[int, Any] = {0: [b"\xff\x81"], 1: np.array([1]), 2: TABLE[1:], 3: np.array([0, 3]), 6: bytearray(9)}
    for number, value in (*wrong.items(), (3, np.array([2, 0])), (5, np.zeros(1, np.int64)), (0, ["a"])):
        given = composing()
        given[number] = value
        with pytest.raises(ValueError):
            native.compose(*given)
    for answer in (lambda run: run.decode(), lambda run: 1 / 0):
        with pytest.raises((TypeError, ZeroDivisionError)):
            native.compose(*composing()[:7], answer)
    given = composing()
    given[0] *= 2
    given[1], given[3] = np.array([0, 1]), np.array([0, 2, 2])
    with pytest.raises(IndexError):
        native.compose(*given[:7], lambda _: given[0].clear())


@given(st.binary(max_size=30) | st.text("a\n\r", max_size=12).map(str.encode))
def test_split_lines(text: bytes) -> None:
    assert native is not None
    assert native.split_lines(text) == text.split(b"\n")


def test_split_lines_takes_only_bytes() -> None:
    assert native is not None
    with pytest.raises(TypeError):
        native.split_lines(bytearray(b"a"))  # type: ignore[arg-type]


@given(st.lists(st.text("<|a \n", max_size=12).map(str.encode), max_size=5), st.sets(st.text("<|a", min_size=1)))
def test_find_markers(texts: list[bytes], markers: set[str]) -> None:
    assert native is not None
    opening, inside = (tuple(m.encode() for m in sorted(markers)[k::2]) for k in range(2))
    ends = np.cumsum([0, *map(len, texts)])
    found = native.find_markers(b"".join(texts), ends[:-1].copy(), ends[1:].copy(), opening, inside)
    assert list(found) == [t.lstrip().startswith(opening) or any(m in t for m in inside) for t in texts]


def test_wrong_arguments_of_find_markers() -> None:
    assert native is not None
    places = np.array([0, 2, 4])
    for starts, ends, markers in (
        (places[:2], places, (b"a",)), (places, places[::-1].copy(), (b"a",)), (places + 9, places + 9, (b"a",)),
        (places - 1, places, (b"a",)), (places, places, (b"",)), (places, places, ("a",)),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            native.find_markers(b"abcd", starts, ends, markers, ())  # type: ignore[arg-type]


@given(st.text("<|a> ", max_size=40), st.sets(st.text("<|a>", min_size=1, max_size=4)), st.integers(0, 20))
def test_last_markers(text: str, markers: set[str], window: int) -> None:
    assert native is not None
    data, ends = text.encode(), np.arange(len(text) + 1)
    starts, wanted = ends // 2, Literals(marker.encode() for marker in markers)
    found = native.last_markers(data, starts, ends, window, tuple(marker.encode() for marker in markers))
    for start, end, place in zip(starts.tolist(), ends.tolist(), np.frombuffer(found, np.int64).tolist(), strict=True):
        firsts = (max(start, end - window), start)
        places = (first + at for first in firsts for at, _ in [*wanted.spans(data[first:end])][-1:])
        assert place == next(places, start)


def test_wrong_arguments_of_last_markers() -> None:
    assert native is not None
    places = np.array([0, 2, 4])
    for starts, ends, window, markers in (
        (places[:2], places, 1, (b"a",)), (places, places[::-1].copy(), 1, (b"a",)), (places + 9, places + 9, 1, ()),
        (places - 1, places, 1, ()), (places, places, -1, ()), (places, places, 1, (b"",)), (places, places, 1, ("a",)),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            native.last_markers(b"abcd", starts, ends, window, markers)  # type: ignore[arg-type]


def test_the_constants_of_c_are_those_of_python() -> None:
    header = Path(constants.__file__).parents[1] / "penstock" / "native" / "constants.h"
    assert header.read_text() == constants.generated(), f"run: python -m tools.constants > {header}"


def test_a_turn_has_the_columns_of_its_table() -> None:
    columns = [column.name.lower() for column in TurnColumn if column is not TurnColumn.ROW]
    assert list(_Turn._fields[1 : 1 + len(columns)]) == columns


# ---- programs

TEMPLATE = (
    "{% macro f(x, y='z') %}<{{ x }}{{ y }}>{% endmacro %}{% for m in messages %}{{ f(m.role) }}"
    "{% if m.content is string and '</think>' in m.content %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
)
LAYOUT = conversation_layout(["</s>"])
ROWS = [row for conversation in PROBES if (row := encoded(conversation)) is not None]


def assembled() -> list[Any]:
    tree = Sandbox(DATE).parse_template(TEMPLATE)
    return list(Compiler({}, DATE.strftime).compile(tree).assemble())


Change = Callable[[list[Any]], object]
CHANGES: dict[str, Change] = {
    "no code": lambda given: given.__setitem__(0, b""),
    "code that is no bytes": lambda given: given.__setitem__(0, "x"),
    "cut code": lambda given: given.__setitem__(0, given[0][:-1]),
    "cut instructions": lambda given: given.__setitem__(0, given[0][: len(given[0]) // 8 * 4]),
    "no constants": lambda given: given.__setitem__(1, []),
    "constants that are no list": lambda given: given.__setitem__(1, None),
    "a constant of another type": lambda given: given[1].__setitem__(0, object()),
    "no macros": lambda given: given.__setitem__(2, []),
    "a macro beyond the code": lambda given: given[2].__setitem__(0, (10**6, 0, 0, ())),
    "a macro before the code": lambda given: given[2].__setitem__(0, (-1, 0, 0, ())),
    "a macro at the start": lambda given: given[2].__setitem__(0, (0, *given[2][0][1:])),
    "a macro without its locals": lambda given: given[2].__setitem__(0, (given[2][0][0], 0, 0, ())),
    "a macro with names that are no text": lambda given: given[2].__setitem__(0, (*given[2][0][:3], (1, 2))),
    "no globals": lambda given: given.__setitem__(3, 0),
    "too many globals": lambda given: given.__setitem__(3, -1),
    "no branches": lambda given: given.__setitem__(4, 0),
    "no layout": lambda given: given.__setitem__(5, {}),
    "a layout of other types": lambda given: given.__setitem__(5, dict.fromkeys(LAYOUT, 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_arguments_of_a_program(name: str) -> None:
    assert native is not None
    given = [*assembled(), dict(LAYOUT)]
    assert native.Program(*given)
    CHANGES[name](given)
    with pytest.raises((TypeError, ValueError, KeyError, OverflowError)):
        native.Program(*given)


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_code_is_refused_or_runs(at: int, byte: int) -> None:
    program = assembled()
    code = bytearray(program[0])
    code[at % len(code)] = byte
    program[0] = bytes(code)
    fuzz_bytecode.runs(program)


@given(st.sampled_from(sorted(trl_templates().values())), st.randoms(use_true_random=False))
def test_damaged_programs_of_templates_are_refused_or_run(template: str, rnd: random.Random) -> None:
    """`tools.fuzz --part sanitizer` does the same where a wrong access is seen."""
    fuzz_bytecode.runs(fuzz_bytecode.damaged(fuzz_bytecode.program_of(template), rnd))


@pytest.mark.parametrize("template", trl_templates().values(), ids=trl_templates())
def test_programs_of_templates_pass_the_verifier(template: str) -> None:
    assert fuzz_bytecode.runs(fuzz_bytecode.program_of(template))


def program(*code: str | int) -> list[Any]:
    """A program without variables; constants: 0 a text, 1 no names, 2 an empty text."""
    assert native is not None
    words = [native.OPS.index(word) if isinstance(word, str) else word for word in code]
    return [array.array("i", words).tobytes(), ["x", [], ""], [], 0, 2]


SAFE: dict[str, list[Any]] = {
    "nothing": program("HALT"),
    "a loop": program("CONST", 0, "LOOP_BEGIN", "LOOP_NEXT", 8, "PRINT", "JUMP", 3, "LOOP_END", "HALT"),
    "a break in a capture": program(
        "CONST", 0, "LOOP_BEGIN", "LOOP_NEXT", 9, "POP", "CAPTURE", "JUMP", 9, "LOOP_END", "HALT"
    ),
    "both branches": program("CONST", 0, "JUMP_FALSE", 7, 0, "PRINT_CONST", 0, "HALT"),
}
UNSAFE: dict[str, list[Any]] = {
    "a pop of nothing": program("POP", "HALT"),
    "more operands than values": program("CONST", 0, "SUM", 2, "PRINT", "HALT"),
    "a value that is left": program("CONST", 0, "HALT"),
    "no end": program("CONST", 0, "POP"),
    "a return from nothing": program("RETURN"),
    "branches that disagree": program("CONST", 0, "JUMP_FALSE", 7, 0, "CONST", 0, "HALT"),
    "a jump into an operand": program("JUMP", 1, "HALT"),
    "a jump beyond the code": program("JUMP", 9, "HALT"),
    "a jump to itself": program("JUMP", 0, "HALT"),
    "a jump back": program("CONST", 0, "POP", "JUMP", 0, "HALT"),
    "a loop that comes back after its end": program(
        "CONST", 0, "LOOP_BEGIN", "LOOP_NEXT", 6, "POP", "JUMP", 3, "LOOP_END", "HALT"
    ),
    "a loop that is left open": program("CONST", 0, "LOOP_BEGIN", "HALT"),
    "an end of no loop": program("LOOP_END", "HALT"),
    "a filter outside a loop": program("CONST", 0, "FILTER_KEEP", "HALT"),
    "an end of no capture": program("CAPTURE_END", "POP", "HALT"),
    "blocks that cross": program("CAPTURE", "GENERATION", "CAPTURE_END", "POP", "GENERATION_END", "HALT"),
    "a local outside a macro": program("LOAD_LOCAL", 0, "POP", "HALT"),
    "a global that does not exist": program("LOAD_GLOBAL", 0, "POP", "HALT"),
    "a constant that does not exist": program("CONST", 3, "POP", "HALT"),
    "a constant of another type": program("PRINT_CONST", 1, "HALT"),
    "a sum of nothing": program("SUM", 0, "POP", "HALT"),
    "names of fewer arguments": program("CONST", 0, "CONST", 0, "CALL", 0, 1, 1, "POP", "HALT"),
    "a split at nothing": program("CONST", 0, "SPLIT_AT", 2, 0, "POP", "HALT"),
    "a stack beyond its size": program("CONST", 0, *("CONST", 0) * 8192, *("POP",) * 8193, "HALT"),
}


@pytest.mark.parametrize("name", [*SAFE, *UNSAFE])
def test_the_verifier(name: str) -> None:
    assert fuzz_bytecode.runs((SAFE | UNSAFE)[name]) == (name in SAFE)


@pytest.mark.parametrize("rows", [None, (), [None], ["{}"], [b"{}", 1]])
def test_wrong_rows(rows: Any) -> None:
    assert native is not None
    program = native.Program(*assembled(), dict(LAYOUT))
    with pytest.raises((TypeError, ValueError)):
        program.render(rows)


def test_no_rows() -> None:
    assert machine().render([]).texts == []


def test_very_deep_nesting() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    rows = [b'{"messages": ' + deep + b', "tools": null, "variables": null}', deep, deep[:100_000], b"{" * 9]
    assert set(machine().render(rows).status) == {1}


def machine() -> CompiledTemplate:
    return CompiledTemplate(Sandbox(DATE).parse_template(TEMPLATE), {}, DATE, LAYOUT)


def counting() -> list[Any]:
    """Arguments of `count_tokens`: two texts, four tokens, three segments."""
    pieces = (
        b"ab\xe2\x96\x81",
        np.array([0, 1, 2, 5], np.uint32),
        np.array([1, 1, 1], np.uint8),
        np.zeros(128, bool),
        1,
    )
    return [
        [b"ab", b"a "],
        np.array([0, 1, 0, 2], np.uint32),
        np.array([0, 2, 4]),
        np.array([1, 1, 1], np.uint8),
        pieces,
        np.array([0, 2, 3]),
        np.array([1, 2, 2]),
        np.zeros(3, np.uint8),
        np.zeros(3, np.int64),
        np.zeros(3, np.uint8),
    ]


def test_count_tokens() -> None:
    assert native is not None
    for rule in (0, 1):
        given = counting()
        given[4] = (*given[4][:4], rule)
        assert native.count_tokens(*given) == b"\1\1"
        assert given[-2].tolist() == [1, 2, 2]
    given = counting()
    given[1][1] = 99  # there is no such token
    assert native.count_tokens(*given) == b"\0\1"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, [b"ab"]), (0, ["ab", "a "]), (1, np.zeros(4, np.int64)), (1, np.zeros(3, np.uint32)), (2, np.array([0, 4])),
        (2, np.array([1, 2, 4])), (2, np.array([0, 5, 4])), (5, np.array([0, 2, 4])), (6, np.zeros(2, np.int64)),
        (7, np.zeros(2, bool)), (8, np.zeros(2, np.int64)), (8, b"12345678" * 3),
        (9, np.zeros(2, np.uint8)), (9, b"123"),
        (4, (b"ab", np.array([0, 1, 2, 5], np.uint32), np.zeros(3, np.uint8), np.zeros(128, bool), 1)),
        (4, (b"abcde", np.array([0, 3, 2, 5], np.uint32), np.zeros(3, np.uint8), np.zeros(128, bool), 1)),
        (4, (b"abcde", np.array([0, 1, 2, 5], np.uint32), np.zeros(3, np.uint8), np.zeros(5, bool), 1)),
        (4, (b"abcde", np.array([0, 5], np.uint32), np.zeros(3, np.uint8), np.zeros(128, bool), 1)),
    ],
)  # fmt: skip
def test_wrong_arguments_of_count_tokens(place: int, value: Any) -> None:
    assert native is not None
    given = counting()
    given[place] = value
    with pytest.raises((TypeError, ValueError, BufferError)):
        native.count_tokens(*given)


def test_nothing_leaks() -> None:
    assert native is not None
    refuses = CompiledTemplate(
        Sandbox(DATE).parse_template("{{ raise_exception(messages[0].content) }}"), {}, DATE, LAYOUT
    )
    subject, chat = machine(), encoded(Conversation([{"role": "user", "content": "é" * 1000}]))
    assert chat is not None
    assembly = assembled()

    def work() -> None:
        subject.render([*ROWS, b"{", b"\xff", chat])
        refuses.render([chat] * 5)
        native.kinds(ROWS, TABLE)
        native.compose(*composing())
        native.count_tokens(*counting())
        native.split_lines(b"a\nb" * 100)
        with pytest.raises(TypeError):
            subject.render([b"", None])  # type: ignore[list-item]
        native.Program(*assembly, dict(LAYOUT))

    for _ in range(3):
        work()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(30):
        work()
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 40_000
