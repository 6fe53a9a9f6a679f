"""Seams: the token boundaries between a prompt and its answer.

A server encodes the prompt alone, so the tokens before an answer must be those of the prompt. If both are encoded as
one text, the answer's first token may absorb the end of the prompt (a newline, if the answer starts with one). Such
turns are detected before encoding, and encoded in two parts; any others are found by comparing tokens, and are not
trained. A turn takes a few microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.literals import Literals
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.example_batch import ExampleBatch
from penstock.prepare.regions.segments import Segments

_MARKER_WINDOW = 64  # bytes before a seam that are searched first for the prompt's last marker
_HEAD = 200  # bytes of an answer that decide its first token
_MAX_CACHED = 4096


class Seams:
    """The tokens around the ends of prompts, for one tokenizer and the markers of a template."""

    def __init__(self, encoder: Encoder, cuts: Sequence[str]) -> None:
        self._encoder = encoder
        self._markers = Literals(token.encode() for token in cuts)
        self._known: dict[bytes, npt.NDArray[Any]] = {}

    def straddles(self, prompt: bytes, answer: bytes) -> bool:
        """Whether the first token of an answer would absorb the end of its prompt."""
        tail = self._tail(prompt)
        alone = self._ids(tail)
        joined = self._encoder.reference([(tail + answer[:_HEAD]).decode(errors="ignore").encode()]).ids
        return not np.array_equal(joined[: len(alone)], alone)

    def mismatches(
        self, texts: Sequence[bytes], segments: Segments, batch: ExampleBatch, seams: Sequence[int]
    ) -> list[tuple[int, int]]:
        """The (example, message) of answers that don't start right after the tokens of their prompt.

        After a seam, text before the answer (white space before a tag) was also encoded separately.
        """
        found: list[tuple[int, int]] = []
        examples, starts = _answer_starts(segments)
        for example, segment in zip(examples.tolist(), starts.tolist(), strict=True):
            first = segment == int(segments.offsets[example])
            end = 0 if first else int(segments.ends[segment - 1])
            tokens = 0 if first else int(batch.ends[segment - 1])
            is_apart = 0 < seams[example] < end
            tail = texts[example][seams[example] : end] if is_apart else self._tail(texts[example][:end])
            expected = self._ids(tail)
            start = int(batch.offsets[example])
            if tokens < len(expected) or not np.array_equal(
                batch.ids[start + tokens - len(expected) : start + tokens], expected
            ):
                found.append((example, int(segments.messages[segment])))
        return found

    def _tail(self, prompt: bytes) -> bytes:
        """The prompt from its last marker to its end, or all of it if it has none."""
        if not self._markers:
            return prompt
        for text in (prompt[-_MARKER_WINDOW:], prompt):
            starts = [start for start, _ in self._markers.spans(text)]
            if starts:
                return text[starts[-1] :]
        return prompt

    def _ids(self, tail: bytes) -> npt.NDArray[Any]:
        known = self._known.get(tail)
        if known is None:
            known = self._encoder.reference([tail]).ids
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[tail] = known
        return known


def _answer_starts(segments: Segments) -> tuple[Int64, Int64]:
    """The example and the number of each segment that starts the trained part of an assistant message."""
    examples = np.repeat(np.arange(len(segments.offsets) - 1), np.diff(segments.offsets))
    is_trained = (segments.roles == Role.ASSISTANT) & ((segments.parts == Part.BODY) | (segments.parts == Part.STOP))
    trained = np.flatnonzero(is_trained)
    is_first = np.ones(len(trained), np.bool_)
    if len(trained) > 1:
        same = (examples[trained[1:]] == examples[trained[:-1]]) & (
            segments.messages[trained[1:]] == segments.messages[trained[:-1]]
        )
        is_first[1:] = ~same
    return examples[trained[is_first]], trained[is_first]


def split_at_seams(
    texts: list[bytes], segments: Segments, seams: Sequence[int]
) -> tuple[list[bytes], Segments, list[int]]:
    """Splits texts at their seams (0 for none), which are ends of segments. Returns the parts, their segments, and the
    number of parts per text."""
    if not any(seams):
        return texts, segments, [1] * len(texts)
    parts: list[bytes] = []
    offsets, ends = [0], segments.ends.copy()
    for example, (text, seam) in enumerate(zip(texts, seams, strict=True)):
        last = int(segments.offsets[example + 1])
        if seam:
            first = int(segments.offsets[example])
            middle = first + int(np.searchsorted(segments.ends[first:last], seam, side="right"))
            ends[middle:last] -= seam
            parts += [text[:seam], text[seam:]]
            offsets += [middle, last]
        else:
            parts.append(text)
            offsets.append(last)
    counts = [2 if seam else 1 for seam in seams]
    known = np.repeat(segments.known, counts)
    return parts, replace(segments, offsets=np.array(offsets, np.int64), ends=ends, known=known), counts


def cut_at_seams(segments: Segments, seams: Sequence[int]) -> Segments:
    """Cuts each segment that a seam (0 for none) crosses, because text before the seam is encoded separately."""
    places, examples = [], []
    for example in np.flatnonzero(seams).tolist():
        first, last = segments.offsets[example : example + 2].tolist()
        at = first + int(np.searchsorted(segments.ends[first:last], seams[example]))
        if at < last and segments.ends[at] != seams[example]:
            places.append(at)
            examples.append(example)
    if not places:
        return segments
    chosen = np.sort(np.concatenate((np.arange(len(segments.ends)), places)))
    added = np.cumsum(np.bincount(examples, minlength=len(seams)))
    cut = segments.picked(chosen, segments.offsets + np.concatenate(([0], added)))
    ends = cut.ends.copy()
    ends[np.array(places) + np.arange(len(places))] = [seams[example] for example in examples]
    return replace(cut, ends=ends)


def merge_parts(batch: ExampleBatch, counts: list[int]) -> ExampleBatch:
    """Merges the parts of each text back into one example."""
    if max(counts, default=1) == 1:
        return batch
    last = np.cumsum(counts)
    firsts = last - counts
    part_starts = batch.offsets[:-1]
    shift = part_starts - np.repeat(part_starts[firsts], counts)
    batch.ends = batch.ends + np.repeat(shift, np.diff(batch.segment_offsets))
    batch.offsets = np.concatenate(([0], batch.offsets[last]))
    batch.segment_offsets = np.concatenate(([0], batch.segment_offsets[last]))
    return batch
