"""Encodes with Unigram models (T5 and its kin) in C, several times as fast as `tokenizers`.

A Unigram tokenizer normalizes text, cuts it into words and finds the best pieces of each word. Most characters are
normalized by themselves, so the C core asks once what the reference makes of each and encodes words on its own
(`native/unigram.c`). Words in which characters may affect each other (combining marks, emoji of several code points)
are encoded by the reference, once each. Where such a character is beside a space, the whole text is left to it.

Which characters these are is decided here, on the safe side: whatever is not known to be a grapheme of its own, to be
stable beside any other character, and to be old enough for every version of Unicode in use.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from enum import IntFlag
from typing import Any, Final

import numpy as np

from penstock.native import native
from penstock.prepare.encode.engines import EngineOutput
from penstock.prepare.encode.unicode_checks import may_compose, unassigned
from penstock.prepare.tokenizer.reference import ReferenceEncoder, normalizer
from penstock.prepare.tokenizer.vocabulary import Vocabulary

NAME: Final = "penstock"
_UNK_PENALTY: Final = 10.0
_DEPENDS: Final = (1 << 32) - 1  # for the core, the id of an added token that it must not match
_LEFT_OUT: Final = (  # by `Outcome` of native/unigram.h
    "",
    "text with a joining or invisible character beside a space",
    "text with an added token that depends on its surroundings",
    "text whose first word has joining characters",
)
_WHITE_SPACE: Final = frozenset(
    map(chr, [*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000])
)
_BAR: Final = "▁"


class UnigramRule(IntFlag):
    """How a text becomes words. Shared with C."""

    DROPS_SPACE = 1  # white space separates words and is dropped
    SPLITS = 2  # a word begins at each ▁
    PREPENDS = 4  # a ▁ before the first word, or each if space is dropped, unless there is one
    ONLY_FIRST = 8  # with the rule above: only where the text begins
    PREPENDS_ALWAYS = 16  # even if there is one
    COLLAPSES = 32  # several spaces count as one
    STRIPS = 64  # white space at the end of a section is dropped
    CRLF_IS_ONE = 128  # \r\n is one space


class CharacterFlag(IntFlag):
    """What the core knows of a character. Shared with C."""

    KNOWN = 1
    SEPARATES = 2  # words
    INTERACTS = 4  # with other characters of its word
    STRIPPED = 8  # at the end of a section
    JOINS_LEFT = 16  # may affect what is before it, even a space
    JOINS_RIGHT = 32


# ---- engine ----------------------------------------------------------------------------------------------------------


class UnigramEngine:
    """The engine. `reference` encodes the words that it doesn't."""

    checks_texts: Final = True

    def __init__(self, reference: ReferenceEncoder, vocabulary: Vocabulary) -> None:
        from penstock import __version__

        if native is None:
            raise ImportError("installed without a compiler")
        self.name = f"{NAME} {__version__}"
        self._reference = reference
        rules, steps, marks_spaces = _configuration(vocabulary)
        normalize = normalizer(steps) if steps else str
        characters = Characters(normalize, steps, rules, marks_spaces=marks_spaces)
        self._rules = characters.rules
        pieces, ids, scores, unk, unk_score, byte_ids = _model(reference.model())
        added = _added(reference.added_tokens())
        self._core = native.Unigram(
            pieces, ids, scores, list(added), np.fromiter(added.values(), np.uint32, len(added)), byte_ids,
            unk, unk_score, int(self._rules), characters, self._word,
        )  # fmt: skip

    def encode(self, texts: list[bytes]) -> EngineOutput:
        """Encode texts, except those that only the reference can encode."""
        ids, offsets, ends, outcomes = self._core.encode(texts)
        left = np.flatnonzero(np.frombuffer(outcomes, np.uint8)).tolist()
        return EngineOutput(
            np.frombuffer(ids, np.uint32),
            np.frombuffer(offsets, np.int64),
            np.frombuffer(ends, np.uint32),
            {row: _LEFT_OUT[outcomes[row]] for row in left},
        )

    def clear_cache(self) -> None:
        """Forget all words."""
        self._core.forget()

    def _word(self, lead: int, word: bytes) -> tuple[bytes, bytes] | None:
        """The reference's ids of a word and where they end; None where the word alone would be encoded differently."""
        if lead == 0 and self._rules & (UnigramRule.PREPENDS | UnigramRule.PREPENDS_ALWAYS):
            return None
        before = lead == 1  # a space
        ids, ends = self._reference.encode_with_ends(b" " + word if before else word)
        return np.array(ids, np.uint32).tobytes(), (ends - before).clip(0).astype(np.uint32).tobytes()


def _model(model: Mapping[str, Any]) -> tuple[list[bytes], Any, Any, int, float, Any]:
    """The model's pieces, sorted, with their ids and scores; the unknown token, its score, and the ids of bytes.

    `model` is as the reference understood it, whose scores may differ from the file's in the last bit.
    """
    if model.get("alpha"):
        raise ValueError("the model samples")
    unk = model.get("unk_id")
    if unk is None:
        raise ValueError("the model has no unknown token")
    vocabulary = model["vocab"]
    numbers = {text.encode(): number for number, (text, _) in enumerate(vocabulary) if text}  # the last one counts
    pieces = sorted(numbers)
    ids = np.fromiter((numbers[piece] for piece in pieces), np.uint32, len(pieces))
    scores = np.array([score for _, score in vocabulary], np.float64)
    byte_ids = np.full(256, -1, np.int64)
    if model.get("byte_fallback"):
        byte_ids[:] = [numbers.get(b"<0x%02X>" % byte, -1) for byte in range(256)]
    return pieces, ids, scores[ids], unk, float(scores.min()) - _UNK_PENALTY, byte_ids


def _added(tokens: Mapping[int, Any]) -> dict[bytes, int]:
    """The ids of added tokens, sorted by content."""
    added: dict[bytes, int] = {}
    for number, token in tokens.items():
        if token.normalized:
            raise ValueError("an added token is matched in normalized text")
        depends = token.lstrip or token.rstrip or token.single_word
        added[token.content.encode()] = _DEPENDS if depends else number
    return dict(sorted(added.items()))


# ---- configuration ---------------------------------------------------------------------------------------------------

_ONE_BY_ONE: Final = ("Lowercase", "Nmt", "StripAccents", "Replace")  # normalizers without regard to neighbours
_IN_CONTEXT: Final = ("Precompiled", "NFC", "NFD", "NFKC", "NFKD")
_PREPENDED: Final = [
    {"type": "Prepend", "prepend": _BAR},
    {"type": "Replace", "pattern": {"String": " "}, "content": _BAR},
]
Steps = list[dict[str, Any]]


def _configuration(vocabulary: Vocabulary) -> tuple[UnigramRule, Steps, bool]:
    """The rules, the normalizers of characters, and whether spaces are marked with ▁ afterwards. Raises ValueError for
    configurations that are not known to be followed exactly."""
    steps, rules, marks_spaces = vocabulary.normalizer_steps.copy(), UnigramRule(0), False
    if steps == _PREPENDED:
        rules, steps = UnigramRule.PREPENDS_ALWAYS, steps[1:]
    if steps and steps[-1] in [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": c} for c in (" ", _BAR)]:
        steps, rules = steps[:-1], rules | UnigramRule.COLLAPSES
    if steps and steps[-1] == {"type": "Strip", "strip_left": False, "strip_right": True}:
        steps, rules = steps[:-1], rules | UnigramRule.STRIPS
    for step in steps:
        kind, pattern = step.get("type"), step.get("pattern") or {}
        if kind not in (*_IN_CONTEXT, *_ONE_BY_ONE) or (kind == "Replace" and len(pattern.get("String", "")) != 1):
            raise ValueError(f"it normalizes with {kind}")
    splitting = vocabulary.pre_tokenizer_steps
    types = [step.get("type") for step in splitting]
    if types not in ([], ["Metaspace"], ["WhitespaceSplit"], ["WhitespaceSplit", "Metaspace"]):
        raise ValueError(f"it splits text with {', '.join(map(str, types))}")
    if "Metaspace" in types:
        marks_spaces = True
        rules |= _metaspace_rules(splitting[-1])
    if "WhitespaceSplit" in types:
        rules |= UnigramRule.DROPS_SPACE
    separated = rules & (UnigramRule.DROPS_SPACE | UnigramRule.SPLITS)
    if not separated and rules & UnigramRule.COLLAPSES:
        raise ValueError("it collapses spaces, but does not split text at them")
    if rules & UnigramRule.PREPENDS_ALWAYS and types:
        raise ValueError("its normalizer and pre-tokenizer both mark spaces")
    return rules, steps, marks_spaces


def _metaspace_rules(step: Mapping[str, Any]) -> UnigramRule:
    if step.get("replacement") != _BAR:
        raise ValueError("it marks spaces with another character than ▁")
    rules = UnigramRule.SPLITS if step.get("split", True) else UnigramRule(0)
    match "never" if step.get("add_prefix_space") is False else step.get("prepend_scheme", "always"):
        case "always":
            return rules | UnigramRule.PREPENDS
        case "first":
            return rules | UnigramRule.PREPENDS | UnigramRule.ONLY_FIRST
        case "never":
            return rules
    raise ValueError("it prepends ▁ in an unknown way")


# ---- characters ------------------------------------------------------------------------------------------------------

# Letters and symbols that share a grapheme with a neighbour, or compose with it.
_BACKWARD: Final = {0xE33, 0xEB3, *range(0x1160, 0x1200), *range(0xD7B0, 0xD800), 0xFF9E, 0xFF9F} | {
    *range(0x1F3FB, 0x1F400)
}
_FORWARD: Final = {0xD4E, 0x111C2, 0x111C3, 0x1193F, 0x11941, 0x11A3A, *range(0x11A84, 0x11A8A), 0x11D46}
_LEADING: Final = {*range(0x1100, 0x1160), *range(0xA960, 0xA980)}  # consonants that begin a Hangul syllable
_CONTROLS: Final = {  # invisible, but not part of any grapheme
    0xAD, 0x61C, 0x180E, 0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2060, 0x2065), *range(0x2066, 0x2070),
    0xFEFF, *range(0xFFF9, 0xFFFC),
}  # fmt: skip
_FLAGS: Final = {*range(0x1F1E6, 0x1F200)}
_RESERVED: Final = (range(0x1F000, 0x1F1E6), range(0x1F200, 0x1F3FB), range(0x1F400, 0x1FB00), range(0x20000, 0x3FFFE))


class Characters:
    """Tells the core about characters. `normalize` applies the tokenizer's normalizers of characters, `steps`."""

    def __init__(
        self, normalize: Callable[[str], str], steps: Steps, rules: UnigramRule, *, marks_spaces: bool
    ) -> None:
        self._normalize, self._marks_spaces = normalize, marks_spaces
        self._in_context = any(step["type"] in _IN_CONTEXT for step in steps)
        self._drops = bool(rules & UnigramRule.DROPS_SPACE)
        self._splits = marks_spaces and bool(rules & UnigramRule.SPLITS)
        one, pair = normalize("\r") + normalize("\n"), normalize("\r\n")
        self._pairs = pair != one and not (self._drops and not pair.strip("".join(_WHITE_SPACE)))
        if self._pairs and self._splits and one == "  " and pair == " ":
            rules |= UnigramRule.CRLF_IS_ONE
            self._pairs = False
        self.rules = rules

    def __call__(self, code_point: int) -> tuple[int, bytes]:
        """The flags of a character, and what is written for it."""
        character = chr(code_point)
        written = self._normalize(character)
        flags = CharacterFlag.KNOWN
        if written and self.rules & UnigramRule.STRIPS and _WHITE_SPACE.issuperset(written):
            flags |= CharacterFlag.STRIPPED
        if self._is_separator(written) and _is_inert(character) and not (self._pairs and character == "\r"):
            return int(flags | CharacterFlag.SEPARATES), b""
        if self._interacts(character, written):
            flags |= CharacterFlag.INTERACTS
            spaced = self._has_space(written[:1]) or self._has_space(written[-1:])
            if not written or spaced or character == "\r":
                flags |= CharacterFlag.JOINS_LEFT | CharacterFlag.JOINS_RIGHT
            if not _starts_anew(character) or not all(map(_starts_anew, written[:1])):
                flags |= CharacterFlag.JOINS_LEFT
            if code_point in _FORWARD or unicodedata.category(character) == "Cf" or not _is_settled(code_point):
                flags |= CharacterFlag.JOINS_RIGHT
        return int(flags), (written.replace(" ", _BAR) if self._marks_spaces else written).encode()

    def _is_separator(self, written: str) -> bool:
        if self._drops:
            return bool(written) and _WHITE_SPACE.issuperset(written)
        return self._splits and written == " "

    def _has_space(self, written: str) -> bool:
        """Whether words may end within what is written for a character."""
        if self._drops:
            return not _WHITE_SPACE.isdisjoint(written)
        return self._splits and " " in written

    def _interacts(self, character: str, written: str) -> bool:
        if not written or self._has_space(written) or (self._pairs and character == "\r"):
            return True
        return self._in_context and not all(map(_is_inert, character + written))


def _is_settled(code_point: int) -> bool:
    """Whether all versions of Unicode agree on what a character is to its neighbours."""
    return not unassigned()[code_point] or any(code_point in reserved for reserved in _RESERVED)


def _is_inert(character: str) -> bool:
    """Whether a character is a grapheme of its own beside any other such one, and composes with none of them."""
    code_point = ord(character)
    if code_point < 0x80:
        return True
    if code_point in _CONTROLS:
        return True
    if code_point in _BACKWARD or code_point in _FORWARD or code_point in _LEADING or code_point in _FLAGS:
        return False
    if unassigned()[code_point]:
        return _is_settled(code_point)
    return unicodedata.category(character) not in ("Mn", "Mc", "Me", "Cf", "Cs") and not may_compose(character)


def _starts_anew(character: str) -> bool:
    """Whether a character, after a space, leaves the space as it is."""
    code_point = ord(character)
    if code_point in _LEADING or code_point in _FLAGS or code_point in _FORWARD:
        return True
    return _is_inert(character) or (_is_settled(code_point) and _composes_alone(character))


def _composes_alone(character: str) -> bool:
    """Whether a character is not in NFC by itself, but has nothing to do with what is before it."""
    parts = unicodedata.normalize("NFD", character)
    return len(parts) > 0 and parts != character and _is_inert(parts[0])
