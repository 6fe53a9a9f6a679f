"""What a template prints around reasoning and calls, learned from probes, and the parts of text that no field printed.

Such a *gap* lies between two fields of an answer, or between a field and the edge of the body. Its parts depend on its
text, on its neighbours, and on what the probes show to open and close reasoning and calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import reduce
from typing import Final, NamedTuple

from penstock.prepare.chat.conversation import Conversation, Message, Part
from penstock.prepare.regions.calibrate import CLOSE, OPEN, common_length
from penstock.prepare.regions.segments import TOOL

_ANY_BLOCK = rb"<think>\s*</think>"
_MARKERS = re.compile(rb"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,40}\]")
_QUOTES, _LITERALS = rb"[\"']|<\|\"\|>", rb"\b(?:true|false|null|True|False|None)\b"
_LITERAL = re.compile(_LITERALS)
_PUNCTUATION = re.compile(rb"(?:[\s{}\[\]:,=]|" + _QUOTES + rb"|" + _LITERALS + rb")*")
_OPENED = re.compile(rb"(?:[{\[]\s*)+(?:" + _QUOTES + rb")?\Z")
_LAST_VALUE = re.compile(rb"(?:" + _QUOTES + rb"|[:=]\s*(?:" + _LITERALS + rb"|\[\]|\{\}))?")
Divided = tuple[tuple[int, int], ...]  # the sizes and parts of a gap


class Kind(IntEnum):
    """What is next to a gap."""

    EDGE = 0  # the start or the end of the body
    REASONING = 1
    CONTENT = 2
    CALL = 3
    ARGUMENTS = 4
    TOOL = 5


_CALLS: Final = (Kind.CALL, Kind.ARGUMENTS)


class Gap(NamedTuple):
    """A text that no field printed."""

    text: bytes
    before: Kind
    after: Kind
    is_first: bool  # at the start of its message's body


class Markup:
    """What a template prints around reasoning and calls, learned from probes."""

    def __init__(self, gaps: Sequence[Gap], header_of: Callable[[bytes], bytes]) -> None:
        """`header_of` returns the header that opens a text, which a template's own tags may include in a body."""
        self._header_of = header_of
        around = [gap for gap in gaps if gap.text]
        before_calls = [g.text for g in around if g.after in _CALLS and g.before in (Kind.EDGE, Kind.CONTENT)]
        self._before_call = _common_suffix([self._without_header(text) for text in before_calls])
        after_calls = {g.text for g in around if g.before in _CALLS and g.after in (Kind.EDGE, Kind.CONTENT)}
        self._after_call = tuple(sorted(after_calls, key=len, reverse=True))
        self._ending = _common_suffix([g.text for g in around if g.before is Kind.CONTENT and g.after is Kind.EDGE])
        before_arguments = [g.text for g in around if g.before is Kind.CALL and g.after is Kind.ARGUMENTS]
        self._opens_arguments = bool(before_arguments) and all(_OPENED.search(text) for text in before_arguments)
        opening = [g.text for g in around if g.after is Kind.REASONING and g.before is not Kind.REASONING]
        self._opening = _common_suffix([self._without_header(text) for text in opening])
        closing = [g for g in around if g.before is Kind.REASONING and g.after is not Kind.REASONING]
        self._closing = _common_prefix([self._without_call(g) for g in closing])
        blocks = [_ANY_BLOCK]
        if self._opening.strip() and self._closing.strip():
            opened, closed = re.escape(self._opening.strip()), re.escape(self._closing.strip())
            blocks.append(opened + rb"\s*" + closed)
        self._block = re.compile(rb"(?:" + b"|".join(blocks) + rb")\s*")
        ends = [b"</think>", *([re.escape(self._closing.strip())] if self._closing.strip() else [])]
        self._rest_of_block = re.compile(rb"\s*(?:" + b"|".join(ends) + rb")\s*")

    def divide(self, gap: Gap) -> Divided:
        """The parts of a gap."""
        runs = [(len(text), part) for text, part in self._runs(gap) if text]
        joined: list[tuple[int, int]] = []
        for size, part in runs:
            if joined and joined[-1][1] == part:
                joined[-1] = joined[-1][0] + size, part
            else:
                joined.append((size, part))
        return tuple(joined)

    def _runs(self, gap: Gap) -> Iterator[tuple[bytes, int]]:
        text, before, after, is_first = gap
        if before is Kind.REASONING and after is Kind.REASONING:
            yield text, Part.REASONING_MARKUP
            return
        if before is Kind.REASONING:
            size = self._end_of_reasoning(text, after)
            yield text[:size], Part.REASONING_MARKUP
            yield text[size:], _outside(Kind.EDGE, after)
            return
        if is_first and (header := self._header_of(text)):
            yield header, Part.MARKUP
            text = text[len(header) :]
        if after is Kind.REASONING:
            start = self._start_of_reasoning(text)
            yield text[:start], _outside(before, Kind.EDGE)
            yield text[start:], Part.REASONING_MARKUP
            return
        block = self._block.search(text) or (self._rest_of_block.match(text) if is_first else None)
        if block and before is not Kind.TOOL and after is not Kind.TOOL:
            first, rest = text[: block.start()], text[block.end() :]
            yield first, _outside(before, Kind.EDGE)
            yield block[0], Part.EMPTY_REASONING
            yield rest, _outside(Kind.EDGE, after)
            return
        if after is Kind.TOOL and before in _CALLS:
            own = next((known for known in self._after_call if text.startswith(known)), b"") or _to_first_marker(text)
            yield from self._around_arguments(own, before, Kind.EDGE)
            yield text[len(own) :], TOOL
            return
        if before is Kind.TOOL and after in _CALLS and text.endswith(self._before_call):
            size = len(text) - len(self._before_call)
            yield text[:size], TOOL
            yield text[size:], Part.CALL_MARKUP
            return
        if before is Kind.TOOL and after is Kind.EDGE and text.endswith(self._ending):
            size = len(text) - len(self._ending)
            yield text[:size], TOOL
            yield text[size:], Part.MARKUP
            return
        if Kind.ARGUMENTS in (before, after):
            yield from self._around_arguments(text, before, after)
            return
        yield text, _outside(before, after)

    def _around_arguments(self, text: bytes, before: Kind, after: Kind) -> Iterator[tuple[bytes, int]]:
        if before is after and _PUNCTUATION.fullmatch(text):
            yield text, Part.CALL_ARGUMENTS
            return
        is_end = before is Kind.ARGUMENTS and after is not before
        start = self._end_of_arguments(text) if is_end else 0
        last = max(start, len(text) - 64)  # brackets that are opened
        opened = _OPENED.search(text, last) if after is not before and self._opens_arguments else None
        end = opened.start() if opened and after is Kind.ARGUMENTS else len(text)
        yield text[:start], Part.CALL_ARGUMENTS
        part = _outside(before, after)
        for found in _LITERAL.finditer(text, start, end) if before is Kind.ARGUMENTS else ():  # values without a field
            yield text[start : found.start()], part
            yield found[0], Part.CALL_ARGUMENTS
            start = found.end()
        yield text[start:end], part
        yield text[end:], Part.CALL_ARGUMENTS

    def _end_of_arguments(self, text: bytes) -> int:
        """Where brackets that the template opens before arguments are closed, or a last value ends that it prints."""
        found = (_PUNCTUATION if self._opens_arguments else _LAST_VALUE).match(text)
        return found.end() if found else 0

    def _end_of_reasoning(self, text: bytes, after: Kind) -> int:
        if self._closing and text.startswith(self._closing):
            size = len(self._closing)
        elif after in _CALLS and self._before_call and text.endswith(self._before_call):
            size = len(text) - len(self._before_call)
        else:
            size = len(_to_first_marker(text))
        return len(text) if not size or not text[size:].strip() else size

    def _start_of_reasoning(self, text: bytes) -> int:
        if self._opening and text.endswith(self._opening):
            start = len(text) - len(self._opening)
        else:
            start = max((found.start() for found in _MARKERS.finditer(text)), default=0)
        return 0 if not text[:start].strip() else start

    def _without_header(self, text: bytes) -> bytes:
        return text[len(self._header_of(text)) :]

    def _without_call(self, gap: Gap) -> bytes:
        """The text after reasoning, without what opens a call."""
        own = self._before_call
        is_call = gap.after in _CALLS
        if is_call and own and gap.text.endswith(own):
            return gap.text[: len(gap.text) - len(own)]
        return _to_first_marker(gap.text) or gap.text if is_call else gap.text


def _outside(before: Kind, after: Kind) -> int:
    """The part of a text that is not about reasoning."""
    if Kind.TOOL in (before, after):
        return TOOL
    return Part.CALL_MARKUP if before in _CALLS or after in _CALLS else Part.MARKUP


def _to_first_marker(text: bytes) -> bytes:
    """A text up to the end of its first marker and the white space after it; empty if it has none."""
    found = _MARKERS.search(text)
    end = found.end() if found else 0
    return text[: len(text) - len(text[end:].lstrip())] if found else b""


def _common_suffix(texts: Iterable[bytes]) -> bytes:
    return _common_prefix([text[::-1] for text in texts])[::-1]


def _common_prefix(texts: Sequence[bytes]) -> bytes:
    return reduce(lambda one, other: one[: common_length(one, other)], texts) if texts else b""


# ---- probes


def markup_probes() -> list[Conversation]:
    """Answers with and without reasoning, content and calls, each as the last answer of its conversation."""
    ask: Message = {"role": "user", "content": f"{OPEN}q{CLOSE}"}
    function = {"name": "get_weather", "arguments": {"city": f"{OPEN}city{CLOSE}"}}
    calls = {"tool_calls": [{"id": "call00001", "type": "function", "function": function}]}
    tool = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {}}}
    result: Message = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": f"{OPEN}t{CLOSE}"}

    def says(content: str, **more: object) -> Message:
        return {"role": "assistant", "content": content and f"{OPEN}{content}{CLOSE}", **more}

    reasoning = {"reasoning_content": f"{OPEN}r{CLOSE}"}
    thought: Message = {"role": "assistant", "content": f"<think>\n{OPEN}r{CLOSE}\n</think>\n\n{OPEN}a{CLOSE}"}
    answers = [says("a", **reasoning), says("", **reasoning), thought]
    calling = [says(text, **calls, **more) for text in ("", "c") for more in ({}, reasoning)]
    return [
        *(Conversation([ask, answer]) for answer in answers),
        *(Conversation([ask, answer], tools=[tool]) for answer in calling),
        *(Conversation([ask, answer, result, says("a", **reasoning)], tools=[tool]) for answer in calling),
    ]
