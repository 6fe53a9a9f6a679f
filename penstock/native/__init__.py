"""The compiled core: the template machine and three loops over text, from the C beside this file.

`native` is None where Penstock was installed without a compiler. Then the jinja2 reference renders every row and the
loops run in numpy: the results are the same, at about a twentieth of the speed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["RenderedBatch", "native"]


class RenderedBatch(NamedTuple):
    """What `Program.render` gives. Arrays come as bytes; their element types are in parentheses."""

    data: bytes  # all texts, one after the other
    texts: list[bytes]
    reasons: list[str | None]  # why a row was not rendered; the template's own words where it refused the row
    ends: bytes  # (int64) of texts in `data`
    status: bytes  # (uint8) 0 rendered, 1 not read, 2 gave up, 3 refused by the template
    known: bytes  # (uint8) bit 0: regions are certain; 1: the row has template variables of its own; 2: a false label
    fresh: bytes  # (bool) whether a row took a branch of the template that no row had taken before
    needles: bytes  # (int32) number of the first needle found in a row's text, or -1
    counts: bytes  # (int32) messages of each row
    pieces: bytes  # (int32) row, message, start and end in the row's text
    spans: bytes  # (int32) row, start and end of `{% generation %}` blocks
    roles: bytes  # (uint8) of messages
    flags: bytes  # (uint8) of messages
    weights: bytes  # (float32) of messages; empty where none is given
    # of `render_turns`; see `penstock.template.turns.Turns`
    turns: bytes = b""  # (int32) nine numbers a turn
    turn_texts: bytes = b""
    turn_pieces: bytes = b""  # (int32) turn, message, start and end in the turn's text
    turn_spans: bytes = b""  # (int32) turn, start and end


class Program(Protocol):
    """A compiled template."""

    def render(self, rows: list[bytes], /) -> tuple[Any, ...]:
        """Render rows: the fields of a `RenderedBatch`."""

    def render_turns(self, rows: list[bytes], /) -> tuple[Any, ...]:
        """The same, with every assistant turn as inference sees it."""

    def branches(self) -> tuple[int, int]:
        """How many ways of the template's branches have been taken, and how many there are."""

    def forget(self) -> None:
        """Forget which ways have been taken, so that rows that take them are reported as fresh again."""


class Native(Protocol):
    """What is compiled."""

    METHODS: tuple[str, ...]
    FILTERS: tuple[str, ...]
    TESTS: tuple[str, ...]
    OPS: tuple[str, ...]

    def Program(  # noqa: N802
        self,
        code: bytes,
        constants: list[Any],
        macros: list[tuple[int, int, int, tuple[str, ...]]],
        global_count: int,
        branch_count: int,
        layout: dict[str, Any],
        /,
    ) -> Program: ...

    def count_tokens(
        self,
        texts: list[bytes],
        ids: npt.NDArray[Any],
        offsets: npt.NDArray[Any],
        lengths: npt.NDArray[Any],
        pieces: tuple[bytes, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], int],
        segment_offsets: npt.NDArray[Any],
        segment_ends: npt.NDArray[Any],
        inclusive: npt.NDArray[Any],
        counts: npt.NDArray[Any],
        /,
    ) -> bytes:
        """For each text whether its tokens account for all of it, by their lengths or their pieces; if so, the number
        of its tokens up to each segment's end goes to `counts`."""

    def kinds(self, texts: list[bytes], table: npt.NDArray[Any], /) -> bytes:
        """For each text the kinds of all its characters beyond ASCII, or-ed; the table has one for each code point."""

    def split_lines(self, text: bytes, /) -> list[bytes]:
        """`text.split(b"\\n")`, several times as fast."""


native: Native | None
try:
    native = cast(Native, importlib.import_module("penstock.native._native"))
except ImportError:
    native = None
