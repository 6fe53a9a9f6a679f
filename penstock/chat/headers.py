"""Headers: which start of an assistant's region the generation prompt would have supplied.

Enters: observations of a template (`calibrate`). Leaves: a table from the previous message's role to header
candidates, and for one region its header, or None where it is not certain. A header is accepted where every
generation prompt seen in that context leads to the same one; all else is asked of the row itself. A look-up costs
one or two `bytes.startswith`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.chat.calibrate import Observation, common_length
from penstock.chat.conversation import Role

_MARKERS = r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,40}\]"  # <|im_start|>, <think>, [INST], …


class _Boundaries:
    """Where a prompt may be cut: at the ends of markers and of lines, never inside them."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        special = sorted(map(re.escape, special_tokens), key=len, reverse=True)
        self._markers = re.compile("|".join([*special, _MARKERS]))

    def cut(self, prompt: str, common: int) -> int:
        """The last boundary of `prompt` that is not beyond `common`."""
        ends = [edge for marker in self._markers.finditer(prompt) for edge in marker.span()]
        ends += [line.end() for line in re.finditer("\n", prompt)]
        return max((end for end in ends if end <= common), default=0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One generation prompt seen in a context, with the headers that regions had under it, longest first."""

    text: bytes
    headers: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Headers:
    """Header candidates of a recipe, for one setting of the template variables."""

    prompts: dict[Role, tuple[Prompt, ...]]
    openings: tuple[bytes, ...]  # all headers with a visible text, longest first
    bare: bool  # some context was seen to need no header at all

    def candidates(self, previous: Role) -> tuple[bytes, ...] | None:
        """Candidates, longest first, where one prompt serves this context; None where the row must be asked."""
        prompts = self.prompts.get(previous, ())
        return prompts[0].headers if len(prompts) == 1 else None

    def agreed(self, previous: Role, region: bytes) -> bytes | None:
        """The header on which all prompts seen in this context agree."""
        found = {_longest(prompt.headers, region) for prompt in self.prompts.get(previous, ())} - {None}
        return found.pop() if len(found) == 1 else None

    def under(self, prompt: bytes, region: bytes) -> bytes | None:
        """The header of a region for which the row's own prompt supplies `prompt`."""
        if region.startswith(prompt):
            return prompt if prompt.strip() else self.without(region)
        return _longest(self._by_prompt().get(prompt, ()), region)

    def ended_by(self, prompt: bytes, region: bytes) -> bytes | None:
        """The same where the row's prompt differs before the region, so that only its end can be trusted."""
        seen = self._by_prompt()
        match = max((text for text in seen if text.strip() and prompt.endswith(text)), key=len, default=b"")
        return _longest(seen.get(match, ()), region)

    def without(self, region: bytes) -> bytes | None:
        """The header where the prompt supplies nothing: a known one that is printed all the same, or none."""
        return _longest(self.openings, region) or (b"" if self.bare else None)

    def everywhere(self, region: bytes) -> bytes | None:
        """The header where this context has no prompt, but all others have the same one."""
        texts = list(self._by_prompt())
        return texts[0] if len(texts) == 1 and texts[0].strip() and region.startswith(texts[0]) else None

    def _by_prompt(self) -> dict[bytes, tuple[bytes, ...]]:
        return {prompt.text: prompt.headers for prompts in self.prompts.values() for prompt in prompts}


def _longest(headers: Sequence[bytes], region: bytes) -> bytes | None:
    return next((header for header in headers if region.startswith(header)), None)


def learn_headers(observations: Sequence[Observation], special_tokens: Iterable[str]) -> Headers:
    """Draw the table of headers from what was observed."""
    boundaries = _Boundaries(special_tokens)
    found: dict[tuple[Role, str], set[str]] = {}
    blank: list[tuple[Observation, str]] = []
    for seen in observations:
        if seen.supplied is None:
            continue
        header = _header(seen, seen.supplied, boundaries)
        if header is None:
            continue
        if header.strip():
            found.setdefault((seen.previous, seen.supplied), {seen.supplied}).add(header)
        else:
            blank.append((seen, header))
    openings = sorted({text for texts in found.values() for text in texts}, key=len, reverse=True)
    for seen, header in sorted(blank, key=lambda pair: not pair[0].plain):
        assert seen.supplied is not None
        key = seen.previous, seen.supplied
        printed = next((text for text in openings if seen.literal.startswith(text)), None)
        # Only a plain answer shows that there is no header: before calls and reasoning the model's own markers stand.
        if printed is None and (not seen.literal.strip() if seen.plain else key in found):
            printed = header
        if printed is not None:
            found.setdefault(key, {seen.supplied}).add(printed)
    return _table(found, openings)


def _header(seen: Observation, prompt: str, boundaries: _Boundaries) -> str | None:
    """The header of one observed region; a blank one asks for a second look, None: it can't be told."""
    if seen.literal.startswith(prompt):
        return prompt
    if prompt.strip() and seen.literal.endswith(prompt):
        return seen.literal  # something precedes it, such as a default system prompt
    if prompt in seen.literal:
        return None
    common = common_length(prompt, seen.literal + seen.rest)
    if common >= len(seen.literal):
        return seen.literal  # the prompt leads right up to the content
    return prompt[: boundaries.cut(prompt, common)]


def _table(found: dict[tuple[Role, str], set[str]], openings: Sequence[str]) -> Headers:
    prompts: dict[Role, tuple[Prompt, ...]] = {}
    for (role, prompt), texts in found.items():
        headers = tuple(text.encode() for text in sorted(texts, key=len, reverse=True))
        prompts[role] = (*prompts.get(role, ()), Prompt(prompt.encode(), headers))
    bare = any("" in texts for (_, prompt), texts in found.items() if not prompt)
    return Headers(prompts, tuple(text.encode() for text in openings), bare)
