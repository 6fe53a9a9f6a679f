"""Which conversations contain characters that marks or engines can't be trusted with.

Control characters are rare, so a batch is serialised once (orjson, over 1 GB/s), where they show up as escapes;
only rows that show one are searched string by string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import orjson

from penstock.chat.conversation import Conversation
from penstock.chat.sentinels import CONTROL, PRIVATE

_ESCAPE: Final = b"\\u00"
_CONTROL: Final = re.compile(f"[{CONTROL.characters}]")
_PRIVATE: Final = re.compile(f"[{PRIVATE.characters}]")
# Python's str methods take these for white space or line ends, other engines do not.
_ODD_SPACE: Final = re.compile("[\x0b\x0c\x1c-\x1f\x85\u2028\u2029]")


class Suspect(NamedTuple):
    """What a conversation's own strings contain."""

    control: bool  # characters of the first alphabet of marks
    private: bool  # characters of the second one
    odd_space: bool  # white space that engines disagree about
    odd_value: bool  # something that orjson can't write: integers beyond 64 bits, lone surrogates


def suspects(conversations: Sequence[Conversation]) -> dict[int, Suspect]:
    """The rows with such characters. White space beyond ASCII is found in the rendered text, which is cheaper."""
    if _clean(c for c in conversations if not c.plain):
        return {}
    found: dict[int, Suspect] = {}
    for row, conversation in enumerate(conversations):
        if not conversation.plain and not _clean([conversation]):
            suspect = examine((conversation.messages, conversation.tools, conversation.variables))
            if any(suspect):
                found[row] = suspect
    return found


def examine(value: Any) -> Suspect:
    """The same for any value made of JSON types."""
    control = private = odd_space = False
    for string in strings(value):
        control = control or _CONTROL.search(string) is not None
        private = private or _PRIVATE.search(string) is not None
        odd_space = odd_space or _ODD_SPACE.search(string) is not None
    return Suspect(control, private, odd_space, _serialised(value) is None)


def _clean(conversations: Iterable[Conversation]) -> bool:
    """Whether no control character beyond tab, newline, form feed and the like can be inside."""
    data = _serialised([(c.messages, c.tools, c.variables) for c in conversations])
    return data is not None and _ESCAPE not in data


def _serialised(value: Any) -> bytes | None:
    try:
        return orjson.dumps(value)
    except TypeError:
        return None


def has_odd_space(text: str) -> bool:
    """Whether a rendered text contains white space that engines disagree about (the rest was found in the row)."""
    return any(character in text for character in "\x0b\x0c\x85\u2028\u2029")


def has_float(value: Any) -> bool:
    """Whether a value made of JSON types contains a float."""
    if isinstance(value, dict):
        return any(map(has_float, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_float, value))
    return isinstance(value, float)


def strings(value: Any) -> Iterator[str]:
    """All strings in a value made of JSON types, keys included."""
    todo = [value]
    for item in todo:  # grows while it is walked: a row may be nested more deeply than calls can be
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            todo += item
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
