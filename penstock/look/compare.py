"""Compares two datasets row by row: rows added, removed and changed, and the effect on trained tokens.

Rows with equal content are matched first, wherever they are. Unmatched rows between the same matched neighbours on both
sides count as one row that was edited. Matched rows are compared by tokens and segments: another template or tokenizer
changes tokens, another regions mode changes only masks. The cost is a hash of each row's tokens and segments.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from penstock.arrays import Bool, Int64
from penstock.errors import UsageError
from penstock.load.example import Example, place_of
from penstock.load.options import LossMask, LossPolicy
from penstock.load.parts import PART_NAMES
from penstock.load.windows import Rows, row_hashes
from penstock.look.survey import survey, whole
from penstock.look.tokens import TokenBytes, example_of, safe_bytes, text_of
from penstock.prepare.chat.conversation import Part
from penstock.prepare.encode.columns import Columns
from penstock.store.dataset import Dataset

_FEW: Final = 20  # changed rows described in full
_CONTEXT: Final = 8  # tokens before the first difference

_DEFAULT: Final = LossMask(LossPolicy.ALL_ASSISTANT_MESSAGES)
UInt64 = npt.NDArray[np.uint64]


class RecipeChange(NamedTuple):
    """A part of the recipe that differs; for templates, `lines` is a unified diff."""

    name: str
    before: str
    after: str
    lines: tuple[str, ...] = ()


class Difference(NamedTuple):
    """The first difference between two versions of a row."""

    before: int | None  # number of the row in A
    after: int | None  # in B
    place: str
    side: str
    token: int  # the first that differs
    context: str  # the text before it
    was: str  # what A has there
    now: str  # what B has there
    was_id: int | None
    now_id: int | None
    tokens: tuple[int, int]
    trained: tuple[int, int]
    parts: tuple[str, str]  # of that token
    masks_only: bool = False


class Totals(NamedTuple):
    """Rows, tokens and trained tokens of one dataset."""

    rows: int
    tokens: int
    trained: int


@dataclass(frozen=True, slots=True)
class DatasetDiff:
    """All differences between A and B."""

    a: str
    b: str
    recipe: tuple[RecipeChange, ...]
    before: Totals
    after: Totals
    added: int
    removed: int
    changed: int
    masks_changed: int  # rows with equal tokens
    content_changed: int  # rows with equal tokens and masks, such as those with another unused column
    moved: bool  # matched rows are in another order
    added_rows: tuple[int, ...]  # the first of them, numbered in B
    removed_rows: tuple[int, ...]  # in A
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether there are no differences."""
        rows = self.added + self.removed + self.changed + self.masks_changed + self.content_changed
        return not (self.recipe or rows or self.moved)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(self)
        plain["recipe"] = [change._asdict() for change in self.recipe]
        plain["differences"] = [difference._asdict() for difference in self.differences]
        return {"equal": self.equal, **plain, "before": self.before._asdict(), "after": self.after._asdict()}


class _Fingerprints(NamedTuple):
    """Hashes of each row's content, tokens and segments."""

    content: UInt64
    tokens: UInt64
    segments: UInt64
    totals: Totals


class _Matching(NamedTuple):
    """Matched row numbers, and the unmatched rows on either side."""

    same: tuple[Int64, Int64]  # equal content
    edited: tuple[Int64, Int64]
    removed: Int64
    added: Int64


def compare(a: Dataset, b: Dataset, mask: LossMask = _DEFAULT) -> DatasetDiff:
    """Compare two datasets; the first few changed rows are described in full."""
    if a.is_preference != b.is_preference:
        raise UsageError(
            "one dataset holds preference pairs and the other single conversations; they can't be compared"
        )
    left, right = _fingerprints(a, mask), _fingerprints(b, mask)
    found = _match(left.content, right.content)
    first, second = (np.concatenate(sides) for sides in zip(found.same, found.edited, strict=True))
    order = np.argsort(second, kind="stable")
    first, second = first[order], second[order]
    other_tokens = left.tokens[first] != right.tokens[second]
    other_masks = ~other_tokens & (left.segments[first] != right.segments[second])
    other_content = ~other_tokens & ~other_masks & (left.content[first] != right.content[second])
    return DatasetDiff(
        a=a.key,
        b=b.key,
        recipe=tuple(_recipe_changes(a.recipe, b.recipe)),
        before=left.totals,
        after=right.totals,
        added=len(found.added),
        removed=len(found.removed),
        changed=int(np.count_nonzero(other_tokens)),
        masks_changed=int(np.count_nonzero(other_masks)),
        content_changed=int(np.count_nonzero(other_content)),
        moved=bool((np.diff(found.same[1]) < 0).any()),
        added_rows=tuple(found.added[:_FEW].tolist()),
        removed_rows=tuple(found.removed[:_FEW].tolist()),
        differences=(
            *_describe(a, b, first[other_tokens], second[other_tokens], mask),
            *_describe(a, b, first[other_masks], second[other_masks], mask, masks_only=True),
        ),
    )


# -- which row is which ---------------------------------------------------------------------------------------------


def _match(a: UInt64, b: UInt64) -> _Matching:
    """Match rows of equal content in order, the k-th with the k-th, then rows between the same neighbours."""
    keys_a, keys_b = _occurrences(a), _occurrences(b)
    _, first, second = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    order = np.argsort(first)
    first, second = first[order].astype(np.int64), second[order].astype(np.int64)
    free_a, free_b = _free(len(a), first), _free(len(b), second)
    gaps_a = _gaps(free_a, first, np.arange(len(first)))
    by_b = np.argsort(second)
    gaps_b = _gaps(free_b, second[by_b], by_b)
    _, at_a, at_b = np.intersect1d(gaps_a, gaps_b, assume_unique=True, return_indices=True)
    edited = free_a[at_a], free_b[at_b]
    removed, added = np.delete(free_a, at_a), np.delete(free_b, at_b)
    return _Matching((first, second), edited, removed, added)


def _occurrences(hashes: UInt64) -> np.ndarray[Any, Any]:
    """Each hash combined with its number of earlier occurrences, as one comparable value."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    starts = np.concatenate(([True], ordered[1:] != ordered[:-1])) if len(ordered) else np.empty(0, np.bool_)
    positions = np.arange(len(ordered))
    counts = positions - np.maximum.accumulate(np.where(starts, positions, 0)) if len(ordered) else positions
    keys = np.empty(len(hashes), [("hash", np.uint64), ("count", np.int64)])
    keys["hash"][order], keys["count"][order] = ordered, counts
    return keys


def _free(count: int, matched: Int64) -> Int64:
    free = np.ones(count, np.bool_)
    free[matched] = False
    return np.flatnonzero(free)


def _gaps(free: Int64, matched: Int64, names: Int64) -> np.ndarray[Any, Any]:
    """For each unmatched row: the matched row before it, and its distance from that row."""
    at = np.searchsorted(matched, free)
    gap = np.where(at > 0, names[np.maximum(at - 1, 0)] if len(names) else -1, -1)
    previous = np.where(at > 0, matched[np.maximum(at - 1, 0)] if len(matched) else -1, -1)
    keys = np.empty(len(free), [("gap", np.int64), ("number", np.int64)])
    keys["gap"], keys["number"] = gap, free - previous
    return keys


# -- what a row is --------------------------------------------------------------------------------------------------


def _fingerprints(dataset: Dataset, mask: LossMask) -> _Fingerprints:
    content, tokens, segments, trained = [_NONE], [_NONE], [_NONE], 0
    sides = 2 if dataset.is_preference else 1
    for shard in range(len(dataset.shards)):
        rows = Rows.of(dataset.shards.read(shard))
        content.append(row_hashes(rows.columns).copy())
        ids, parts = _hashes(rows.columns)
        tokens.append(_joined(ids, sides))
        segments.append(_joined(parts, sides))
        trained += int(survey(rows, whole(rows), mask).trained.sum())
    totals = Totals(len(dataset), dataset.tokens, trained)
    return _Fingerprints(np.concatenate(content), np.concatenate(tokens), np.concatenate(segments), totals)


_NONE: Final = np.empty(0, np.uint64)


def _hashes(columns: Columns) -> tuple[UInt64, UInt64]:
    """A hash of each sequence's tokens, and one of its segments."""
    digest = xxhash.xxh3_64_intdigest
    ids = np.ascontiguousarray(columns.ids, np.uint32).data.cast("B")
    bounds = (4 * columns.id_offsets.astype(np.int64)).tolist()
    tokens = [digest(ids[start:end]) for start, end in pairwise(bounds)]
    weights = columns.segment_weights
    table = np.zeros(
        len(columns.segment_ends), [("end", "u4"), ("role", "u1"), ("part", "u1"), ("no", "i4"), ("w", "f4")]
    )
    table["end"], table["role"], table["part"] = columns.segment_ends, columns.segment_roles, columns.segment_parts
    table["no"] = columns.segment_messages
    if weights is not None:
        table["w"] = np.where(np.isnan(weights), -1, weights)
    else:
        table["w"] = -1
    parts, size = memoryview(table.tobytes()), table.itemsize
    edges = (size * columns.segment_offsets.astype(np.int64)).tolist()
    segments = [digest(parts[start:end]) for start, end in pairwise(edges)]
    return np.array(tokens, np.uint64), np.array(segments, np.uint64)


def _joined(hashes: UInt64, sides: int) -> UInt64:
    """One hash per row; for a pair, over both sides in order."""
    if sides == 1:
        return hashes
    pairs = hashes.reshape(-1, 2)
    return pairs[:, 0] * np.uint64(0x9E3779B97F4A7C15) + pairs[:, 1]


# -- what differs ---------------------------------------------------------------------------------------------------


def _describe(
    a: Dataset, b: Dataset, rows_a: Int64, rows_b: Int64, mask: LossMask, masks_only: bool = False
) -> Iterator[Difference]:
    """The first few of these rows, each with its first differing token."""
    tables = safe_bytes(a), safe_bytes(b)
    sides = 2 if a.is_preference else 1
    for row_a, row_b in zip(rows_a[:_FEW].tolist(), rows_b[:_FEW].tolist(), strict=True):
        for side in range(sides):
            left = example_of(a, sides * row_a + side, mask)
            right = example_of(b, sides * row_b + side, mask)
            at = _first_difference(left, right, masks_only)
            if at is None:
                continue
            place = place_of(b, row_b)
            yield Difference(
                row_a,
                row_b,
                f"source {place.source}, row {place.row}",
                ("chosen", "rejected")[side] if sides == 2 else "",
                at,
                text_of(left.input_ids[max(0, at - _CONTEXT) : at].tolist(), tables[0]),
                _text_at(left, at, tables[0]),
                _text_at(right, at, tables[1]),
                int(left.input_ids[at]) if at < len(left) else None,
                int(right.input_ids[at]) if at < len(right) else None,
                (len(left), len(right)),
                (int(left.loss_mask.sum()), int(right.loss_mask.sum())),
                (_part_at(left, at), _part_at(right, at)),
                masks_only,
            )


def _first_difference(left: Example, right: Example, masks_only: bool) -> int | None:
    """The first token that differs in its id or, if only masks are compared, in its weight, or else in its part."""
    length = min(len(left), len(right))
    if masks_only:
        differ: Bool = left.loss_weights[:length] != right.loss_weights[:length]
        if not differ.any():
            differ = np.not_equal(*(example.runs.parts.repeat(example.runs.lengths) for example in (left, right)))
        return int(np.argmax(differ))
    differ = left.input_ids[:length] != right.input_ids[:length]
    return int(np.argmax(differ)) if differ.any() else None if len(left) == len(right) else length


def _part_at(example: Example, at: int) -> str:
    run = int(np.searchsorted(example.runs.ends, at, side="right"))
    return PART_NAMES[Part(int(example.runs.parts[run]))] if run < len(example.runs.parts) else "end"


def _text_at(example: Example, at: int, table: TokenBytes) -> str:
    return text_of(example.input_ids[at : at + _CONTEXT].tolist(), table)


def _recipe_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[RecipeChange]:
    for name in sorted({*a, *b}):
        before, after = a.get(name), b.get(name)
        if before == after:
            continue
        if name == "templates" and isinstance(before, Mapping) and isinstance(after, Mapping):
            for key in sorted({*before, *after}):
                old, new = str(before.get(key, "")), str(after.get(key, ""))
                if old != new:
                    yield RecipeChange(f"template {key}", *_first_line(old, new), _unified(old, new))
        else:
            yield RecipeChange(name, _shown(before), _shown(after))


def _unified(old: str, new: str) -> tuple[str, ...]:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "a", "b", lineterm="", n=1)
    return tuple(lines)[2:]


def _first_line(old: str, new: str) -> tuple[str, str]:
    """The first line that differs, with its number."""
    left, right = old.splitlines(), new.splitlines()
    same = next((n for n, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), None)
    at = min(len(left), len(right)) if same is None else same
    lines = (side[at] if at < len(side) else "" for side in (left, right))
    before, after = (f"line {at + 1}: {line}" for line in lines)
    return before, after


def _shown(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
