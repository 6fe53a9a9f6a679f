"""Labels of chains: a turn that an example trains lies between its prompt's end and its own; what is not its own is
context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int64, UInt8
from penstock.chat.conversation import Part, Role
from penstock.regions.chains import Chains
from penstock.regions.cuts import Pieces
from penstock.regions.segments import Segments
from penstock.template.rendered import Rendered


class Repeats(Protocol):
    """Finds headers that a message prints once more."""

    def find_repeated(self, data: bytes, later: Pieces) -> Int64: ...


class PromptEnds:
    """Headers that end where the prompt does."""

    def __init__(self, chains: Chains, repeats: Repeats) -> None:
        starts = np.concatenate(([0], chains.rendered.text_ends))[:-1]
        counts = np.diff(chains.rendered.message_offsets)
        self._ends = np.where(chains.prompt_ends >= 0, chains.prompt_ends + np.repeat(starts, counts), -1)
        self._repeats = repeats

    def find(self, regions: Rendered, opening: Pieces, previous: UInt8) -> tuple[Int64, set[int]]:
        """For the first pieces of assistant messages: where headers end."""
        return np.clip(self._ends[opening.numbers], opening.starts, opening.ends), set()

    def find_repeated(self, data: bytes, later: Pieces) -> Int64:
        """For further pieces of messages: behind the prompt, where a header ends that is printed once more."""
        found = self._repeats.find_repeated(data, later)
        return np.clip(np.maximum(found, self._ends[later.numbers]), later.starts, later.ends)


def with_answers(pieces: Pieces, chains: Chains) -> Pieces:
    """Let turns have all that the template prints for them: an end token behind all messages, or a marker that the next
    message prints as soon as there is one. White space is nobody's."""
    rendered = chains.rendered
    text_starts = np.concatenate(([0], rendered.text_ends))[:-1]
    answers = chains.answer_ends[pieces.numbers]
    answers = np.where(answers >= 0, answers + text_starts[pieces.rows], -1)
    last = np.zeros(len(chains.own), np.int64)
    last[pieces.numbers] = np.arange(len(pieces.rows))
    short = (answers > pieces.ends) & (last[pieces.numbers] == np.arange(len(pieces.rows)))
    short &= pieces.roles == Role.ASSISTANT
    if not short.any():
        return pieces
    starts, ends = pieces.starts.copy(), pieces.ends.copy()
    for index in np.flatnonzero(short).tolist():
        end = int(answers[index])
        more = rendered.data[int(ends[index]) : end].strip()
        start, number = int(text_starts[pieces.rows[index]]), int(pieces.numbers[index])
        prompt = rendered.data[start : start + int(chains.prompt_ends[number])]
        if not more or prompt.rstrip().endswith(more):  # some templates end every text like a prompt (Hunyuan)
            continue
        ends[index] = end
        behind = index + 1
        while behind < len(starts) and pieces.rows[behind] == pieces.rows[index] and starts[behind] < end:
            starts[behind], ends[behind] = end, max(int(ends[behind]), end)
            behind += 1
    return pieces._replace(starts=starts, ends=ends)


def labelled(segments: Segments, chains: Chains) -> Segments:
    """Mark what is context; nothing is trained before the prompt's end, nor behind the answer."""
    for ends in (chains.prompt_ends, chains.answer_ends):
        segments = _split(segments, chains, ends)
    numbers, _, starts = _places(segments, chains)
    has_message = numbers >= 0
    at = np.maximum(numbers, 0)
    own = has_message & chains.own[at]
    trained = own & (segments.roles == Role.ASSISTANT) & np.isin(segments.parts, (Part.BODY, Part.STOP))
    parts = segments.parts.copy()
    parts[trained & (starts < chains.prompt_ends[at])] = Part.HEADER
    parts[trained & (starts >= chains.answer_ends[at]) & (starts >= chains.prompt_ends[at])] = Part.TAIL
    parts[has_message & ~own] = Part.CONTEXT
    return replace(segments, parts=parts)


def _places(segments: Segments, chains: Chains) -> tuple[Int64, Int64, Int64]:
    """Of each segment: the number of its message in the batch (-1: none), its example, where it starts."""
    counts = np.diff(segments.offsets)
    examples = np.repeat(np.arange(len(counts)), counts)
    numbers = np.where(segments.messages >= 0, chains.rendered.message_offsets[examples] + segments.messages, -1)
    starts = np.concatenate(([0], segments.ends))[:-1] if len(segments.ends) else segments.ends
    starts = starts.copy()
    starts[segments.offsets[:-1][counts > 0]] = 0
    return numbers, examples, starts


def _split(segments: Segments, chains: Chains, bounds: Int64) -> Segments:
    """Cut assistants' words where a bound of their message lies inside."""
    numbers, examples, starts = _places(segments, chains)
    bound = np.where(numbers >= 0, bounds[np.maximum(numbers, 0)], -1)
    words: Bool = (segments.roles == Role.ASSISTANT) & np.isin(segments.parts, (Part.BODY, Part.STOP))
    inside = np.flatnonzero(words & (starts < bound) & (bound < segments.ends))
    if not len(inside):
        return segments

    def inserted(values: npt.NDArray[Any], new: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.insert(values, inside, new)

    more = np.concatenate(([0], np.cumsum(np.bincount(examples[inside], minlength=len(segments.offsets) - 1))))
    return replace(
        segments,
        offsets=segments.offsets + more,
        ends=inserted(segments.ends, bound[inside]),
        roles=inserted(segments.roles, segments.roles[inside]),
        parts=inserted(segments.parts, segments.parts[inside]),
        messages=inserted(segments.messages, segments.messages[inside]),
        inclusive=inserted(segments.inclusive, np.zeros(len(inside), np.bool_)),
        weights=None if segments.weights is None else inserted(segments.weights, segments.weights[inside]),
    )
