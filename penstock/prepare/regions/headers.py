"""Finds headers: the start of an assistant's region that the generation prompt would have supplied.

Observations of a template (`calibrate`) become a table from the previous message's role to header candidates. A region
gets a header if all generation prompts observed in that context lead to the same one; otherwise the row's own prompt
must be rendered. The header is None if it is uncertain. A look-up takes one or two calls of `bytes.startswith`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from penstock.arrays import Bool, Int64, UInt8
from penstock.literals import Literals
from penstock.prepare.chat.conversation import Role
from penstock.prepare.regions.calibrate import Observation, common_length
from penstock.prepare.regions.markers import TurnMarkers

_MARKERS = re.compile(rb"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,40}\]")  # <|im_start|>, <think>, [INST], …


class Boundaries:
    """Finds where a prompt may be cut: before and after markers, and at line ends."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._special = Literals(token.encode() for token in special_tokens)

    def shared(self, prompt: bytes, region: bytes) -> bytes | None:
        """The prefix that a region shares with a prompt, up to a boundary.

        None if the rest of the prompt holds more than markers and white space: the region then shares only a part of
        the role's header (`<|im_start|>` of `<|im_start|>assistant`), and is some other text.
        """
        common = common_length(prompt, region)
        edges = [edge for marker in self.markers(prompt) for edge in marker]
        edges += [line.end() for line in re.finditer(b"\n", prompt)]
        cut = max((edge for edge in edges if edge <= common), default=0)
        return prompt[:cut] if not cut or not self._without_markers(prompt[cut:]).strip() else None

    def markers(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Yields where markers begin and end. Where both fit, a special token wins."""
        end = 0
        while True:
            usual, special = _MARKERS.search(text, end), self._special.find(text, end)
            found = [span for span in (special, usual and usual.span()) if span]
            if not found:
                return
            start, end = min(found, key=lambda span: span[0])
            yield start, end

    def _without_markers(self, text: bytes) -> bytes:
        edges = [0, *(edge for marker in self.markers(text) for edge in marker), len(text)]
        return b"".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A generation prompt observed in some context, with the headers of the regions after it, longest first."""

    text: bytes
    headers: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Headers:
    """The header candidates of a recipe, for one set of template variables."""

    prompts: dict[Role, tuple[Prompt, ...]]
    openings: tuple[bytes, ...]  # all headers that are not blank, longest first
    bare: bool  # some context was observed to have no header
    boundaries: Boundaries
    markers: TurnMarkers

    def candidates(self, previous: Role) -> tuple[bytes, ...]:
        """Headers that need no further check, longest first: those that aren't blank, if the context has one prompt."""
        prompts = self.prompts.get(previous, ())
        headers = prompts[0].headers if len(prompts) == 1 else ()
        return tuple(header for header in headers if header.strip() or not self.openings)

    def prompts_unlike_headers(self, previous: Role) -> tuple[bytes, ...]:
        """All beginnings of an answer at inference, if the template prints others too in this context; else none."""
        pairs = [(p.text, header) for p in self.prompts.get(previous, ()) for header in (p.text, *p.headers)]
        if all(header.startswith(text) or header.endswith(text) for text, header in pairs):
            return ()
        return _longest_first(header for text, header in pairs if header.endswith(text))

    def agreed(self, previous: Role, region: bytes) -> bytes | None:
        """The header on which all prompts observed in this context agree."""
        found = {self._header(prompt, region) for prompt in self.prompts.get(previous, ())} - {None}
        return found.pop() if len(found) == 1 else None

    def for_prompt(self, prompt: bytes, region: bytes) -> bytes | None:
        """The header of a region of which the row's own generation prompt supplies `prompt`."""
        if not prompt.strip():
            return self.for_empty_prompt(region)
        return self._header(Prompt(prompt, self._by_prompt().get(prompt, (prompt,))), region)

    def for_prompt_suffix(self, prompt: bytes, region: bytes) -> bytes | None:
        """The header if the row's prompt differs before the region, so that only its end can be used."""
        seen = self._by_prompt()
        match = max((text for text in seen if text.strip() and prompt.endswith(text)), key=len, default=b"")
        return self._header(Prompt(match, seen[match]), region) if match else None

    def for_empty_prompt(self, region: bytes) -> bytes | None:
        """The header if the row's prompt supplies nothing: a known one that is printed anyway, or an empty one."""
        return self.opening(region) or (b"" if self.bare and not self.markers.opens(region) else None)

    def opening(self, region: bytes) -> bytes:
        """The header, other than a blank one, that opens a region; empty if there is none."""
        return _longest(self.openings, region) or b""

    def for_any_context(self, region: bytes) -> bytes | None:
        """The header if this context has no prompt, but all others have the same one."""
        seen = [Prompt(text, headers) for text, headers in self._by_prompt().items()]
        header = self._header(seen[0], region) if len(seen) == 1 else None
        return header if header and header.strip() else None

    def _header(self, prompt: Prompt, region: bytes) -> bytes | None:
        header = _longest(prompt.headers, region)
        if header is None:
            shared = self.boundaries.shared(prompt.text, region) or None
            return None if shared and not shared.strip() and self.markers.opens(region) else shared
        if header.strip():
            return header
        opening = self.opening(region)  # printed although the prompt has none
        return opening or (None if self.markers.opens(region) else header)

    def _by_prompt(self) -> dict[bytes, tuple[bytes, ...]]:
        headers: dict[bytes, set[bytes]] = {}
        for prompt in chain.from_iterable(self.prompts.values()):
            headers.setdefault(prompt.text, set()).update(prompt.headers)
        return {text: _longest_first(texts) for text, texts in headers.items()}


def _longest_first(texts: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(sorted(set(texts), key=len, reverse=True))


def _longest(headers: Sequence[bytes], region: bytes) -> bytes | None:
    return next((header for header in headers if region.startswith(header)), None)


def learn_headers(observations: Sequence[Observation], boundaries: Boundaries, markers: TurnMarkers) -> Headers:
    """Builds the table of headers from observations."""
    found: dict[tuple[Role, bytes], set[bytes]] = {}
    visible: list[tuple[Observation, bytes, bytes]] = []
    blank: list[tuple[Observation, bytes, bytes]] = []
    for seen in observations:
        prompt = seen.supplied
        header = None if prompt is None else _observed(seen, prompt, boundaries)
        if prompt is None or header is None:
            continue
        if header.strip():
            found.setdefault((seen.previous, prompt), {prompt}).add(header)
            visible.append((seen, prompt, header))
        else:
            blank.append((seen, prompt, header))
    _extend(found, visible)
    openings = _longest_first(chain.from_iterable(found.values()))
    for seen, prompt, header in sorted(blank, key=lambda item: not item[0].plain):
        key = seen.previous, prompt
        printed = _longest(openings, seen.literal)
        # Only a plain answer shows that there is no header: calls and reasoning begin with the model's own markers.
        if printed is None and (not seen.literal.strip() if seen.plain else key in found):
            printed = None if markers.opens(seen.literal) else header
        if printed is not None:
            found.setdefault(key, {prompt} if prompt.strip() else set()).add(printed)
    return _table(found, openings, boundaries, markers)


def _extend(found: dict[tuple[Role, bytes], set[bytes]], visible: list[tuple[Observation, bytes, bytes]]) -> None:
    """Adds headers that are followed by another context's prompt, such as an assistant header after tool results."""
    prompts = _longest_first(prompt for _, prompt in found if prompt.strip())
    for seen, prompt, header in visible:
        further = _longest(prompts, seen.literal[len(header) :])
        if further is not None:
            found[seen.previous, prompt].add(header + further)


def _observed(seen: Observation, prompt: bytes, boundaries: Boundaries) -> bytes | None:
    """The header of an observed region; a blank one is ambiguous, None is undetermined."""
    if seen.literal.startswith(prompt):
        return prompt
    if prompt.strip() and seen.literal.endswith(prompt):
        return seen.literal  # the prompt is preceded by, for example, a default system prompt
    if prompt in seen.literal:
        return None
    if common_length(prompt, seen.region) >= len(seen.literal):
        return seen.literal  # the region follows the prompt up to its content
    return boundaries.shared(prompt, seen.region)


def _table(
    found: dict[tuple[Role, bytes], set[bytes]],
    openings: tuple[bytes, ...],
    boundaries: Boundaries,
    markers: TurnMarkers,
) -> Headers:
    prompts: dict[Role, tuple[Prompt, ...]] = {}
    for (role, prompt), texts in found.items():
        prompts[role] = (*prompts.get(role, ()), Prompt(prompt, _longest_first(texts)))
    bare = any(b"" in texts for (_, prompt), texts in found.items() if not prompt)
    return Headers(prompts, openings, bare, boundaries, markers)


# ---- stops: the end-of-turn tokens that close an assistant's region, before any trailing white space
#
# The end tokens of a recipe are learned from observations of its template and the tokenizer's special tokens. Only the
# very end of a region is searched, so that markers inside messages have no effect. A region takes one or two
# comparisons.
#
# Two other rules end a turn: `--stop next_marker` (`structure.py`), for templates that print the stop with the next
# turn, and `--eos` for plain text (`prepare/pipeline.py`).


def learn_end_tokens(
    observations: Sequence[Observation], special_tokens: frozenset[str], eos_token: str | None
) -> tuple[bytes, ...]:
    """The special tokens with which a template ends an assistant's turn, and the end-of-sequence token."""
    special = {token.encode() for token in special_tokens if token}
    ends = {(eos_token or "").encode()} & special
    lengths = sorted({len(token) for token in special}, reverse=True)
    for seen in observations:
        ending = seen.ending.rstrip()
        fitting = (ending[-length:] for length in lengths if ending[-length:] in special)
        ends |= {next(fitting, b"")} - {b""}
    return tuple(sorted(ends, key=lambda token: (-len(token), token)))


def stops_answers(observations: Sequence[Observation], end_tokens: tuple[bytes, ...]) -> bool:
    """Whether an end token was observed after a plain answer."""
    return any(seen.plain and seen.ending.rstrip().endswith(end_tokens) for seen in observations)


class StopFinder:
    """Finds the stops of regions; end tokens are given longest first."""

    def __init__(self, end_tokens: Sequence[bytes]) -> None:
        self.end_tokens = tuple(end_tokens)
        self._usual = [(token + tail, len(tail)) for token in end_tokens for tail in (b"\n", b"")]

    def find(self, data: bytes, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
        """Where the stop of each region starts and ends; both are the end of the region if it has none."""
        text = np.frombuffer(data, np.uint8)
        stop_starts, stop_ends = ends.copy(), ends.copy()
        left = np.arange(len(ends))
        for ending, tail in self._usual:
            if not len(left):
                break
            ended = ends_with(text, starts[left], ends[left], ending)
            found, left = left[ended], left[~ended]
            stop_starts[found] = ends[found] - len(ending)
            stop_ends[found] = ends[found] - tail
        for number in left.tolist():
            stop_starts[number], stop_ends[number] = self._before_blanks(data, int(starts[number]), int(ends[number]))
        return stop_starts, stop_ends

    def _before_blanks(self, data: bytes, start: int, end: int) -> tuple[int, int]:
        """Finds the stop of one region before any amount of white space."""
        if end > start and data[end - 1] in b" \t\n\r\x0b\x0c":
            last = start + len(data[start:end].rstrip())
            for token in self.end_tokens:
                if data.endswith(token, start, last):
                    return last - len(token), last
        return end, end


def ends_with(text: UInt8, starts: Int64, ends: Int64, ending: bytes) -> Bool:
    """Whether each region ends with these bytes."""
    return _matches(text, ends - len(ending), ends - starts >= len(ending), ending)


def begins_with(text: UInt8, starts: Int64, ends: Int64, beginning: bytes) -> Bool:
    """Whether each region begins with these bytes."""
    return _matches(text, starts, ends - starts >= len(beginning), beginning)


def _matches(text: UInt8, at: Int64, fits: Bool, wanted: bytes) -> Bool:
    """Compares byte by byte over all regions at once; mismatching regions drop out early."""
    result = fits.copy()
    candidates = np.flatnonzero(fits)
    for offset, byte in enumerate(wanted):
        same = text[at[candidates] + offset] == byte
        if not same.all():
            candidates = candidates[same]
    result[:] = False
    result[candidates] = True
    return result
