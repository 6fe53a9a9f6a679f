"""The marks an annotated template prints between the text, and their two alphabets.

A mark is one character of an alphabet. OPEN and OUTSIDE are followed by the message's number in octal digits,
which are characters of the alphabet too: deleting every character of the alphabet leaves exactly the text.
A row whose own strings contain a character of the first alphabet is rendered with the second one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple


class Mark(IntEnum):
    """What a mark says; its value is its place in the alphabet."""

    OPEN = 0  # a message's region begins; its number follows
    OUTSIDE = 1  # the same, printed outside of the loop over the messages
    CLOSE = 2  # the innermost open region ends
    GENERATION = 3  # {% generation %}
    END_GENERATION = 4  # {% endgeneration %}
    NEXT = 5  # the next message of the one loop over all messages begins (and the one before it ends)
    END = 6  # that loop has ended
    ROW = 7  # a text ends; only between the texts of a batch


class Alphabet(NamedTuple):
    """One character per mark, then the eight octal digits."""

    marks: str
    digits: str

    def mark(self, mark: Mark) -> str:
        return self.marks[mark]

    def number(self, number: int) -> str:
        """The message number as this alphabet's digits."""
        return "".join(self.digits[int(digit)] for digit in f"{number:o}")

    @property
    def characters(self) -> str:
        return self.marks + self.digits


# ASCII control characters that JSON writes as \u00XX, rare in text, none of which any renderer treats as white space;
# one byte each, so that ASCII text stays one byte per character inside the engines.
CONTROL: Final = Alphabet("\x01\x02\x03\x04\x05\x06\x0e\x0f", "\x10\x11\x12\x13\x14\x15\x16\x17")

# Around the placeholders that stand for a message's words, and the white space that tells whether they were trimmed.
HOLE_START: Final = "\U0010fe00"
HOLE_END: Final = "\U0010fe01"
HOLE_SPACE: Final = "\u2003"

# The end of the last private-use plane: for the rare rows that contain the characters above.
PRIVATE: Final = Alphabet("".join(chr(0x10FF00 + k) for k in range(8)), "".join(chr(0x10FF10 + k) for k in range(8)))
