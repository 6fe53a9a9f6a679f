"""Marked texts in, clean texts with pieces and spans out.

A batch of texts in the first alphabet is split in one pass: numpy finds the marks, `bytes.translate` removes them, and
templates with an ordered loop need no Python per mark. Guarantees: deleting the marks is all that happens to the text;
a text whose marks don't match up is reported as unknown, without pieces.

Who owns text inside several regions: the innermost message that is not an assistant's, else the outermost
assistant; so text of tools or users quoted inside an assistant's turn is never taken for the assistant's.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np

from penstock.chat.regions import Int64
from penstock.chat.sentinels import CONTROL, PRIVATE, Mark

MARK_BYTES: Final = CONTROL.characters.encode()
ROW_BYTE: Final = CONTROL.mark(Mark.ROW).encode()
# byte -> mark or 8 + digit; 255 for text
_CODE = np.full(256, 255, np.uint8)
for _code, _byte in enumerate(MARK_BYTES):
    _CODE[_byte] = _code
DIGIT_ZERO: Final = len(Mark)
_PRIVATE_MARK = re.compile(f"[{PRIVATE.characters}]")


class Split(NamedTuple):
    """One text's pieces (message, start, end) and generation spans (start, end), sorted."""

    pieces: list[tuple[int, int, int]]
    spans: list[tuple[int, int]]
    sound: bool


class Marks(NamedTuple):
    """The marks of a batch: the clean bytes, where each mark stands in them, and what it is."""

    clean: bytes
    positions: Int64
    codes: np.ndarray[tuple[int], np.dtype[np.uint8]]


def find_marks(data: bytes) -> Marks:
    """All marks of the first alphabet in a buffer, and the buffer without them."""
    raw = np.frombuffer(data, np.uint8)
    candidates = np.flatnonzero(raw < 0x18)
    codes = _CODE[raw[candidates]]
    real = codes != 255
    positions = candidates[real].astype(np.int64, copy=False)
    return Marks(data.translate(None, MARK_BYTES), positions - np.arange(len(positions)), codes[real])


def split_private(marked: str) -> tuple[bytes, list[int], list[int]]:
    """One text in the second alphabet: its clean bytes, the marks' positions in them, their codes."""
    parts: list[bytes] = []
    positions: list[int] = []
    codes: list[int] = []
    last = size = 0
    for match in _PRIVATE_MARK.finditer(marked):
        part = marked[last : match.start()].encode()
        parts.append(part)
        size += len(part)
        last = match.end()
        positions.append(size)
        codes.append(PRIVATE.characters.index(match.group()))
    parts.append(marked[last:].encode())
    return b"".join(parts), positions, codes


class _Reader:
    """Follows the marks of one text."""

    def __init__(self, assistant: list[bool], first_of_loop: int, start: int) -> None:
        self.assistant = assistant
        self.stack: list[tuple[int, bool]] = []  # (message or -1, printed outside of the loop)
        self.pieces: list[tuple[int, bool, int, int]] = []
        self.spans: list[tuple[int, int]] = []
        self.generations: list[int] = []
        self.sound = first_of_loop >= 0
        self.next = first_of_loop
        self.in_loop = False
        self.start = start  # where the current piece began

    def owner(self) -> tuple[int, bool]:
        known = [entry for entry in self.stack if entry[0] >= 0]
        for entry in reversed(known):
            if not self.assistant[entry[0]]:
                return entry
        return next((entry for entry in known if not entry[1]), known[0] if known else (-1, False))

    def flush(self, position: int) -> None:
        if self.stack and position > self.start:
            self.pieces.append((*self.owner(), self.start, position))
        self.start = position

    def enter(self, number: int, outside: bool) -> None:
        if number >= len(self.assistant):
            self.sound, number = False, -1
        self.stack.append((number, outside))

    def leave(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.sound = False

    def read(self, mark: Mark, number: int, position: int) -> None:
        match mark:
            case Mark.OPEN | Mark.OUTSIDE:
                self.flush(position)
                self.enter(number, mark is Mark.OUTSIDE)
            case Mark.CLOSE:
                self.flush(position)
                self.leave()
            case Mark.GENERATION:
                self.generations.append(position)
            case Mark.END_GENERATION:
                if self.generations:
                    self.spans.append((self.generations.pop(), position))
                else:
                    self.sound = False
            case Mark.NEXT | Mark.END:
                self.flush(position)
                if self.in_loop:
                    self.leave()
                self.in_loop = mark is Mark.NEXT
                if self.in_loop:
                    self.enter(self.next, False)
                    self.next += 1
            case Mark.ROW:
                self.sound = False

    def result(self) -> Split:
        if self.stack or self.generations or not self.sound:
            return Split([], [], False)
        in_loop = {message for message, outside, _, _ in self.pieces if not outside}
        merged: list[tuple[int, int, int]] = []
        for message, outside, start, end in self.pieces:
            if message < 0 or (outside and message in in_loop and self.assistant[message]):
                continue  # an assistant's text repeated outside of its turn is not its turn
            if merged and merged[-1][0] == message and merged[-1][2] == start:
                merged[-1] = (message, merged[-1][1], end)
            else:
                merged.append((message, start, end))
        return Split(merged, sorted(self.spans), True)


def split_marks(codes: list[int], positions: list[int], assistant: list[bool], start: int = 0) -> Split:
    """Pieces and spans from the marks of the text at `start`; `assistant` tells which messages are an assistant's."""
    reader = _Reader(assistant, len(assistant) - codes.count(Mark.NEXT), start)
    index, count = 0, len(codes)
    while index < count:
        mark, position = Mark(codes[index]), positions[index]
        index += 1
        number = -1
        if mark <= Mark.OUTSIDE:
            while index < count and codes[index] >= DIGIT_ZERO and positions[index] == position:
                number = max(number, 0) * 8 + codes[index] - DIGIT_ZERO
                index += 1
        reader.read(mark, number, position)
    return reader.result()
