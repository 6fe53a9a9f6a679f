"""Seams: where a prompt ends and an answer begins, in tokens.

A server encodes the prompt by itself, so the tokens before an answer must be those of the prompt alone. Encoded as one
text with it, the answer's first token may take in the end of the prompt (a newline, where the answer begins with one).
Such turns are found before they are encoded, and encoded in two parts; whatever is left is found by comparing the
tokens, and not trained. Costs some microseconds a turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.build.slices.batch import ExampleBatch
from penstock.chat.conversation import Part, Role
from penstock.encode.encoder import Encoder
from penstock.regions.segments import Segments

_LOOK = 64  # bytes before a seam in which a prompt's last marker is looked for first
_HEAD = 200  # bytes of an answer that decide about its first token
_KEPT = 4096


class Seams:
    """The tokens around the ends of prompts, for one tokenizer and the markers of a template."""

    def __init__(self, encoder: Encoder, cuts: Sequence[str]) -> None:
        self._encoder = encoder
        markers = sorted((token.encode() for token in cuts), key=len, reverse=True)
        self._markers = re.compile(b"|".join(map(re.escape, markers))) if markers else None
        self._known: dict[bytes, npt.NDArray[Any]] = {}

    def straddles(self, prompt: bytes, answer: bytes) -> bool:
        """Whether the first token of an answer would take in the end of its prompt."""
        tail = self._tail(prompt)
        alone = self._ids(tail)
        joined = self._encoder.reference([(tail + answer[:_HEAD]).decode(errors="ignore").encode()]).ids
        return not np.array_equal(joined[: len(alone)], alone)

    def torn(self, texts: Sequence[bytes], segments: Segments, batch: ExampleBatch) -> list[tuple[int, int]]:
        """Examples and messages whose answer does not begin behind the tokens of its prompt."""
        found: list[tuple[int, int]] = []
        examples, places = _openings(segments)
        for example, place in zip(examples.tolist(), places.tolist(), strict=True):
            first = place == int(segments.offsets[example])
            end = 0 if first else int(segments.ends[place - 1])
            tokens = 0 if first else int(batch.ends[place - 1])
            expected = self._ids(self._tail(texts[example][:end]))
            start = int(batch.offsets[example])
            if tokens < len(expected) or not np.array_equal(
                batch.ids[start + tokens - len(expected) : start + tokens], expected
            ):
                found.append((example, int(segments.messages[place])))
        return found

    def _tail(self, prompt: bytes) -> bytes:
        """A prompt from its last marker on, or all of it."""
        if self._markers is None:
            return prompt
        for text in (prompt[-_LOOK:], prompt):
            starts = [found.start() for found in self._markers.finditer(text)]
            if starts:
                return text[starts[-1] :]
        return prompt

    def _ids(self, tail: bytes) -> npt.NDArray[Any]:
        known = self._known.get(tail)
        if known is None:
            known = self._encoder.reference([tail]).ids
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[tail] = known
        return known


def _openings(segments: Segments) -> tuple[Int64, Int64]:
    """Examples and segments with which the trained words of assistants begin."""
    examples = np.repeat(np.arange(len(segments.offsets) - 1), np.diff(segments.offsets))
    words = (segments.roles == Role.ASSISTANT) & ((segments.parts == Part.BODY) | (segments.parts == Part.STOP))
    places = np.flatnonzero(words)
    fresh = np.ones(len(places), np.bool_)
    if len(places) > 1:
        same = (examples[places[1:]] == examples[places[:-1]]) & (
            segments.messages[places[1:]] == segments.messages[places[:-1]]
        )
        fresh[1:] = ~same
    return examples[places[fresh]], places[fresh]


def unseamed(texts: list[bytes], segments: Segments, seams: Sequence[int]) -> tuple[list[bytes], Segments, list[int]]:
    """The texts cut at their seams (0: none), the segments of the parts, and how many parts each text has."""
    if not any(seams):
        return texts, segments, [1] * len(texts)
    parts: list[bytes] = []
    offsets, ends = [0], segments.ends.copy()
    for example, (text, seam) in enumerate(zip(texts, seams, strict=True)):
        last = int(segments.offsets[example + 1])
        if seam:
            first = int(segments.offsets[example])
            middle = first + int(np.searchsorted(segments.ends[first:last], seam, side="right"))
            assert ends[middle - 1] == seam, "a seam lies inside a segment"
            ends[middle:last] -= seam
            parts += [text[:seam], text[seam:]]
            offsets += [middle, last]
        else:
            parts.append(text)
            offsets.append(last)
    counts = [2 if seam else 1 for seam in seams]
    known = np.repeat(segments.known, counts)
    cut = Segments(
        offsets=np.array(offsets, np.int64), ends=ends, roles=segments.roles, parts=segments.parts,
        messages=segments.messages, inclusive=segments.inclusive, known=known, weights=segments.weights,
        notes=segments.notes,
    )  # fmt: skip
    return parts, cut, counts


def reseamed(batch: ExampleBatch, counts: list[int]) -> ExampleBatch:
    """The examples of texts that were encoded in parts."""
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
