"""Turn markers: what a template prints to open a turn (`<|im_start|>`, `[INST]`, `ASSISTANT:`). None is ever trained.

The markers of a template are learned from probes. Whatever headers were found, a body that holds a marker which the
template printed makes its row uncertain: the header is longer than it was taken for, or the text belongs to another
turn. Markers that the message itself contains don't count, nor do those that the template prints between the fields of
one message (gpt-oss opens a new channel with its turn marker). The check is one pass over the bodies in C; only the
rows in which a marker occurs are looked at in Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.arrays import Int64
from penstock.native import native
from penstock.prepare.chat.conversation import Role
from penstock.prepare.regions.calibrate import CLOSE, OPEN, Observation
from penstock.prepare.regions.segments import Spans
from penstock.prepare.template.rendered import FieldRuns, Rendered
from penstock.prepare.template.turns import FIELD_BITS, Field

FindMarkers = Callable[[bytes], Iterable[tuple[int, int]]]  # where the markers of a text begin and end


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """The markers that no body may start with, and those that none may contain."""

    opening: tuple[bytes, ...] = ()
    inside: tuple[bytes, ...] = ()
    foreign: frozenset[bytes] = frozenset()  # those that open a tool's text; at the end of a body, they are its stop

    def opens(self, text: bytes) -> bool:
        """Whether a text starts with a marker, after any white space."""
        return text.lstrip().startswith(self.opening)

    def uncertain_rows(self, regions: Rendered, spans: Spans, trained: Int64, bodies: Int64, ends: Int64) -> set[int]:
        """The rows in which the body of a trained span, from `bodies` to `ends`, holds a marker of the template."""
        if not self.opening and not self.inside:
            return set()
        own = trained[bodies[trained] < ends[trained]]
        found: set[int] = set()
        for index in own[self._find(regions.data, bodies[own], ends[own])].tolist():
            row = int(spans.rows[index])
            if row not in found:
                message = regions.conversation(row).messages[int(spans.messages[index])]
                if self._prints(regions, int(bodies[index]), int(ends[index]), message):
                    found.add(row)
        return found

    def _find(self, data: bytes, starts: Int64, ends: Int64) -> Any:
        """Whether each run of the data holds a marker, whoever printed it."""
        if native is not None:
            found = native.find_markers(
                data, np.ascontiguousarray(starts), np.ascontiguousarray(ends), self.opening, self.inside
            )
            return np.frombuffer(found, np.bool_)
        inside = re.compile(b"|".join(map(re.escape, self.inside)) or b"(?!)")
        runs = [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        return np.array([self.opens(run) or inside.search(run) is not None for run in runs], np.bool_)

    def _prints(self, regions: Rendered, start: int, end: int, message: Any) -> bool:
        """Whether a body holds more markers than the message itself, other than around the results that it carries."""
        body = regions.data[start:end]
        texts = [text.encode(errors="replace") for text in _strings(message)]
        found = {marker for marker in self.inside if marker in body}
        found |= {marker for marker in self.opening if body.lstrip().startswith(marker)}
        for marker in found:
            is_stop = marker in self.foreign and body.rstrip().endswith(marker)
            places = [start + found.start() for found in re.finditer(re.escape(marker), body)]
            around = _next_to_results(regions.fields, start, end, places) if marker in self.foreign else 0
            if len(places) - around - is_stop > sum(text.count(marker) for text in texts):
                return True
        return False


def _next_to_results(fields: FieldRuns, start: int, end: int, places: Sequence[int]) -> int:
    """How many places of a body have a tool's result as the field before or after them in that body."""
    own = slice(*np.searchsorted(fields.starts, (start, end)).tolist())
    after = np.searchsorted(fields.starts[own], places)
    labels = np.concatenate(([0], fields.labels[own] & FIELD_BITS, [0]))
    return int(((labels[after] == Field.TOOL_RESPONSE) | (labels[after + 1] == Field.TOOL_RESPONSE)).sum())


def learn_markers(
    observations: Sequence[Observation],
    literals: Sequence[tuple[Role, bytes]],
    foreign: Sequence[bytes],
    find: FindMarkers,
) -> TurnMarkers:
    """The turn markers of a template, from its generation prompts and from what it prints before other messages.

    `find` finds markers. A turn without any is opened by the last line of text before its content. What opens
    `foreign` text within an assistant's turn counts as well.
    """
    stops = b"".join(seen.ending for seen in observations if seen.plain)
    prompts = [seen.supplied for seen in observations if seen.previous is Role.USER and seen.supplied]
    first, found = set[bytes](), set[bytes]()
    for role, literal in [*((Role.ASSISTANT, prompt) for prompt in prompts), *literals]:
        if role is Role.TOOL and not _all(find, literal):
            continue  # only text, such as the start of a JSON object
        markers = _markers(literal, find, stops)
        first |= set(markers[:1])
        found |= set(markers[:1])
        if role is Role.USER:  # the others may belong to any turn
            found |= {m for m in markers[1:] if not any(m in seen.region for seen in observations)}
    later = [seen.region.partition(CLOSE.encode())[2] for seen in observations]  # after the first field of a message
    inside = {marker for marker in found if not any(marker in text for text in later)}
    others = {marker for literal in foreign for marker in _foreign(literal, observations, find)}
    others |= {marker for role, literal in literals if role is Role.TOOL for marker in _all(find, literal)} & inside
    return TurnMarkers(tuple(sorted(first)), tuple(sorted(inside | others)), frozenset(others))


def _foreign(literal: bytes, observations: Sequence[Observation], find: FindMarkers) -> set[bytes]:
    """What opens foreign text in an assistant's turn: markers that other turns don't have, or else lines of text."""
    markers = {m for m in _all(find, literal) if not any(m in seen.region for seen in observations)}
    if markers:
        return markers
    contents = OPEN.encode() + b".*?" + CLOSE.encode()
    lines = [line.strip() for line in re.split(rb"\n|get_weather|" + contents, literal)]
    return {line for line in lines if len(line) >= 8 and not any(line in seen.region for seen in observations)}


def _markers(literal: bytes, find: FindMarkers, stops: bytes) -> list[bytes]:
    """The markers before a content, without those that end the previous turn or open a block of reasoning."""
    places = [(a, b) for a, b in find(literal) if literal[a:b] not in stops and b"think" not in literal[a:b]]
    found = [literal[start:end] for start, end in places]
    text = literal[: places[0][0]] if places else literal
    for marker in _all(find, text):
        text = text.replace(marker, b"\n")
    line = text.strip().rpartition(b"\n")[2].strip()
    if len(line) < 2 or not re.search(rb"[A-Za-z]", line):
        return found
    joined = literal[literal.rfind(line, 0, places[0][0]) : places[0][1]] if places else line  # assistant<|role_sep|>
    return [joined, *found]


def _all(find: FindMarkers, text: bytes) -> list[bytes]:
    return [text[start:end] for start, end in find(text)]


def _strings(value: Any) -> Iterator[str]:
    """All strings in a message, names of keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
