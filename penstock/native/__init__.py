"""The compiled core: the template machine and loops over text, written in C.

In: a compiled template and the JSON bytes of rows. Out: rendered texts, and which message printed which bytes. The
loops count the tokens of segments (`align.c`), compose texts (`compose.c`), classify characters, split lines and find
markers (`scan.c`).

`native` is None if Penstock was installed without a compiler. The jinja2 reference then renders every row and the loops
run in numpy: the same results, at about a twentieth of the speed.

Files: `program.c` loads bytecode and renders batches, `verify.c` checks it, `interpreter.c` runs it, `rows.c` reads
rows, `values.c`, `numbers.c` and `operations.c` hold the value model, `text.c`, `methods.c`, `filters.c`, `lists.c` and
`json_*.c` implement str, filters and JSON, `python.c` delegates the rest to Python, `provenance.c` tracks which message
printed what, and `unigram*.c` encode with Unigram models. `constants.h` is generated from Python's enums.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["RenderedBatch", "RowFlag", "RowStatus", "native"]


class RowStatus(IntEnum):
    """The outcome of rendering a row."""

    RENDERED = 0
    UNREAD = 1  # the row must be read in Python
    GAVE_UP = 2  # the reference must render it
    REFUSED = 3  # the template raised an exception


class RowFlag(IntFlag):
    """Facts about a rendered row; those after the first two are the notes of the same name."""

    KNOWN = 1  # its regions are certain
    OWN_VARIABLES = 2  # it sets template variables
    LABEL_FALSE = 4
    ARGUMENTS_PARSED = 8
    ARGUMENTS_DUMPED = 16
    COLUMN_UNUSED = 32
    TOOLS_DROPPED = 64
    DOCUMENTS_DROPPED = 128


class RenderedBatch(NamedTuple):
    """The result of `Program.render`. Arrays are bytes; their element types are in parentheses."""

    data: bytes  # all texts, concatenated
    texts: list[bytes]
    reasons: list[str | None]  # why a row was not rendered; the template's own message if it raised
    ends: bytes  # (int64) of texts in `data`
    status: bytes  # (uint8) `RowStatus`
    row_flags: bytes  # (uint8) `RowFlag`
    fresh: bytes  # (bool) whether a row took a branch direction that no row had taken before
    needles: bytes  # (int32) index of the first needle found in a row's text, or -1
    counts: bytes  # (int32) number of messages of each row
    spans: bytes  # (int32) text that one message printed, `SpanColumn`
    tags: bytes  # (int32) `{% generation %}` blocks, `TagColumn`
    roles: bytes  # (uint8) of messages, `Role`
    flags: bytes  # (uint8) of messages, `MessageFlag`
    weights: bytes  # (float32) of messages; empty if no row has any
    fields: bytes  # (int32) text that one field of an assistant's message printed, `FieldColumn`
    # of `render_turns`; see `penstock.prepare.template.turns.Turns`
    turns: bytes = b""  # (int32) `TurnColumn`
    turn_texts: bytes = b""
    turn_spans: bytes = b""  # (int32) `SpanColumn`
    turn_tags: bytes = b""  # (int32) `TagColumn`
    turn_fields: bytes = b""  # (int32) `FieldColumn`


class Program(Protocol):
    """A compiled template."""

    def render(self, rows: list[bytes], /) -> tuple[Any, ...]:
        """Render rows; returns the fields of a `RenderedBatch`."""

    def render_turns(self, rows: list[bytes], /) -> tuple[Any, ...]:
        """The same, with every assistant turn as inference sees it."""

    def branches(self) -> tuple[int, int]:
        """The number of branch directions taken so far, and in total."""

    def forget(self) -> None:
        """Reset the branch directions taken, so that rows taking them are reported as fresh again."""


class Unigram(Protocol):
    """A Unigram model, with the words that it has encoded."""

    def encode(self, texts: list[bytes], /) -> tuple[bytes, bytes, bytes, bytes]:
        """The ids (uint32) of all texts, the offsets (int64) of texts in them, where each token ends in its text
        (uint32), and why a text is left out (uint8, 0 if it is not)."""

    def forget(self) -> None:
        """Free the memory of words."""


class Native(Protocol):
    """The compiled module."""

    METHODS: tuple[str, ...]
    FILTERS: tuple[str, ...]
    TESTS: tuple[str, ...]
    OPS: tuple[str, ...]
    COMPOSE_CACHE: int  # bytes

    def Program(  # noqa: N802
        self,
        code: bytes,
        constants: list[Any],
        macros: list[tuple[int, int, int, tuple[str, ...]]],
        global_count: int,
        branch_count: int,
        layout: dict[str, Any],
        delegate: tuple[Any, Any, type[str]] | None = None,
        /,
    ) -> Program:
        """`delegate`: a callable (kind, name, arguments) for what the machine leaves to Python, an undefined value, and
        the type Markup."""

    def Unigram(  # noqa: N802
        self,
        pieces: list[bytes],
        ids: npt.NDArray[Any],
        scores: npt.NDArray[Any],
        added: list[bytes],
        added_ids: npt.NDArray[Any],
        byte_ids: npt.NDArray[Any],
        unk: int,
        unk_score: float,
        rules: int,
        character: Callable[[int], tuple[int, bytes]],
        word: Callable[[int, bytes], tuple[bytes, bytes] | None],
        /,
    ) -> Unigram:
        """Pieces and added tokens are sorted; ids are uint32, scores float64, `byte_ids` int64 and -1 if there is none.
        `character` answers with flags and a replacement, `word` with ids and ends, or None."""

    def compose(
        self,
        texts: list[bytes],
        numbers: npt.NDArray[Any],
        table: npt.NDArray[Any],
        segment_offsets: npt.NDArray[Any],
        segment_ends: npt.NDArray[Any],
        moved: npt.NDArray[Any],
        cache: bytearray,
        normalize: Callable[[bytes], bytes | None],
        /,
    ) -> list[bytes | None]:
        """The normal forms of some of the texts. `moved` receives the ends of their segments. None if that is
        uncertain: `normalize` refused a run of characters, or a segment ends inside one that changes. `table` has the
        `CharacterKind` of each code point, and `cache`, of `COMPOSE_CACHE` bytes, what was asked of `normalize`."""

    def count_tokens(
        self,
        texts: list[bytes],
        ids: npt.NDArray[Any],
        offsets: npt.NDArray[Any],
        lengths: npt.NDArray[Any],
        pieces: tuple[bytes, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], int],
        segment_offsets: npt.NDArray[Any],
        segment_ends: npt.NDArray[Any],
        crossing: npt.NDArray[Any],
        counts: npt.NDArray[Any],
        crossed: npt.NDArray[Any],
        /,
    ) -> bytes:
        """For each text, whether its tokens account for all of it, by their lengths or pieces. If so, `counts` receives
        the number of tokens up to the end of each segment, and `crossed` 1 where a token crosses it (plus the flag
        `ON_SPAN` of `crossing`, which decides to which segment that token belongs). Instead of a table of lengths
        (uint8 or uint16), `lengths` may be the ends of all tokens (uint32), beyond the text where they are unknown."""

    def find_markers(
        self,
        data: bytes,
        starts: npt.NDArray[Any],
        ends: npt.NDArray[Any],
        opening: tuple[bytes, ...],
        inside: tuple[bytes, ...],
        /,
    ) -> bytes:
        """For each run of the data (int64 offsets), whether it starts with one of the texts in `opening`, after any
        white space, or contains one of those `inside`."""

    def kinds(self, texts: list[bytes], table: npt.NDArray[Any], /) -> bytes:
        """For each text, the or-ed kinds of its non-ASCII characters; `table` has the kind of each code point."""

    def last_markers(
        self, data: bytes, starts: npt.NDArray[Any], ends: npt.NDArray[Any], window: int, markers: tuple[bytes, ...], /
    ) -> bytes:
        """For each run of the data (int64 offsets), where its last marker starts (int64), or the run if it has none.
        Markers are found from left to right in the last `window` bytes, or if there are none, in the whole run."""

    def split_lines(self, text: bytes, /) -> list[bytes]:
        """`text.split(b"\\n")`, several times faster."""


native: Native | None
try:
    native = cast(Native, importlib.import_module("penstock.native._native"))
except ImportError:
    native = None
