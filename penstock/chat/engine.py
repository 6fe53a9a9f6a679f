"""Conversations in, `Regions` out: each conversation is rendered once, and the render tells who printed what.

The text is byte-identical to transformers' `apply_chat_template(tokenize=False)`. The fast engine serves a row only
where it is known to be equal; the reference serves all others, and both give the same record. Where it is not
certain which message printed what, the row keeps its exact text with `known` False. Cost: linear in the text, one
render per row (two where a template captures what its loop prints).
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from penstock.chat.annotate import Annotation, annotate
from penstock.chat.assemble import Rendered, assemble, assistants
from penstock.chat.context import ODD_SPACE, check_types, refusal, reserved, with_reasoning
from penstock.chat.conversation import Conversation, Message
from penstock.chat.emit import emit
from penstock.chat.emit_rules import NotServed
from penstock.chat.guards import Suspect, examine, has_float, has_odd_space, strings, suspects
from penstock.chat.locality import Locality, find_locality
from penstock.chat.probes import PROBES
from penstock.chat.regions import Regions
from penstock.chat.sandbox import Numbers, Render, Sandbox
from penstock.chat.sentinels import CONTROL, HOLE_END, HOLE_SPACE, HOLE_START, PRIVATE, Alphabet
from penstock.chat.sorts import NotLocal
from penstock.chat.split import MARK_BYTES, Split, split_marks, split_private
from penstock.chat.syntax import find
from penstock.chat.trial import disagreement, doubt
from penstock.errors import RowError

UNKNOWN = Split([], [], False)
NOTHING_SUSPECT = Suspect(False, False, False, False)
FAST_FAILED = "the fast engine failed on it"


class Fast(Protocol):
    """The fast engine; a protocol, since it may not be installed."""

    numbers: Numbers

    def render(self, name: str, context: Mapping[str, Any]) -> str | None: ...


class TemplateEngine:
    """One chat template with its special tokens, variables and date."""

    def __init__(
        self,
        template: str,
        *,
        special_tokens: Mapping[str, str | list[str]],
        variables: Mapping[str, Any],
        date: datetime.date,
        fast: bool = True,
    ) -> None:
        self._template, self._date = template, date
        self._base = {"documents": None, "add_generation_prompt": False, **special_tokens, **variables}
        sandbox = Sandbox(date, CONTROL)
        plain, (marked, self._annotation) = sandbox.parse_template(template), self._annotate(sandbox, CONTROL)
        self._suspect = examine((literals(plain), self._base))
        self.locality, self.why_not_local = self._find_locality(plain)
        self._fast: Fast | None = None
        self._refused: tuple[str, ...] = ()
        self.why_reference = self._start_fast(marked, plain) if fast else "the fast engine is switched off"
        self._plain, self._annotated = sandbox.build(plain), (sandbox, sandbox.build(marked))  # which changes the trees
        self._private: tuple[Sandbox, Render] | None = None
        self.has_generation = self._annotation.generations
        self.why_unknown = ""  # why no row of this template has regions
        self._try_out()

    def _annotate(self, sandbox: Sandbox, alphabet: Alphabet) -> tuple[nodes.Template, Annotation]:
        tree = sandbox.parse_template(self._template)
        annotation = annotate(tree, alphabet)
        tree.set_environment(sandbox)
        return tree, annotation

    def _find_locality(self, plain: nodes.Template) -> tuple[Locality | None, str]:
        """What the template reads of messages, where it treats them locally; and why it does not."""
        if self._suspect.control:
            return None, "it contains control characters"
        known = [*literals(plain), *strings(self._base)]
        if any(character in text for character in (HOLE_START, HOLE_END, HOLE_SPACE) for text in known):
            return None, "it contains the marks of placeholders"
        try:
            return find_locality(plain, self._base), ""
        except NotLocal as reason:
            return None, str(reason)

    def _start_fast(self, marked: nodes.Template, plain: nodes.Template) -> str:
        """Set the fast engine up; what prevents it is the answer."""
        if self._suspect.control or self._suspect.odd_space or self._suspect.odd_value or has_float(self._base):
            return "the template or its variables contain floats or unusual characters"
        try:
            from penstock.chat.fast import FastRenderer
        except ImportError:
            return "minijinja is not installed"
        try:
            emitted = emit(marked)
            sources = {"marked": emitted.source, "plain": emit(plain).source if self._annotation.captured else ""}
        except NotServed as reason:
            return f"the template uses {reason}"
        self._fast = FastRenderer(sources, self._date)
        self._refused = emitted.refused
        return ""

    def _try_out(self) -> None:
        """Let the probes decide whether the fast engine and the regions can be trusted."""
        reference = self.reference(PROBES)
        if self._fast is not None:
            served = self.render(PROBES)
            self.why_reference = disagreement(served, reference)
            if served.reference[FAST_FAILED] > (len(PROBES) - len(served.errors)) // 2:
                self.why_reference = f"the template uses {(*self._refused, 'what the fast engine refuses')[0]}"
            if self.why_reference:
                self._fast = None
        plain = [self._probe(probe) for probe in PROBES]
        self.why_unknown = doubt(reference, plain, PROBES)

    def _probe(self, probe: Conversation) -> bytes | None:
        try:
            return self.plain(probe.messages, probe.tools, probe.variables).encode()
        except RowError:
            return None

    def plain(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The reference's text of one conversation; a RowError where the template refuses it."""
        try:
            check_types(messages, tools)
            own = {"add_generation_prompt": add_generation_prompt, **(variables or {})}
            return self._plain(self._context(with_reasoning(messages), tools, own))
        except Exception as error:
            raise refusal(error) from error

    def render(self, conversations: Sequence[Conversation]) -> Regions:
        """The texts of a batch and who printed them, each row by the fastest engine that is exact for it."""
        if self._fast is None:
            return self.reference(conversations)
        rendered = Rendered([""] * len(conversations))
        found = suspects(conversations)
        for row, conversation in enumerate(conversations):
            if conversation.pieces is not None:
                rendered.apart[row] = split_pieces(conversation)
                continue
            suspect = found.get(row)
            reason = reserved(conversation, suspect)
            if not reason:
                reason = self._render_fast(self._fast, rendered, row, conversation)
            if reason:
                self._render_reference(rendered, row, conversation, suspect or NOTHING_SUSPECT, reason)
        self._redo_odd_space(rendered, conversations)
        return self._assemble(rendered, conversations)

    def reference(self, conversations: Sequence[Conversation]) -> Regions:
        """The same record, every row rendered by the reference."""
        rendered = Rendered([""] * len(conversations))
        found = suspects(conversations)
        for row, conversation in enumerate(conversations):
            if conversation.pieces is not None:
                rendered.apart[row] = split_pieces(conversation)
                continue
            reason = self.why_reference or "asked for"
            self._render_reference(rendered, row, conversation, found.get(row, NOTHING_SUSPECT), reason)
        return self._assemble(rendered, conversations)

    def _assemble(self, rendered: Rendered, conversations: Sequence[Conversation]) -> Regions:
        regions = assemble(rendered, conversations)
        return without_pieces(regions) if self.why_unknown else regions

    def _render_fast(self, fast: Fast, rendered: Rendered, row: int, conversation: Conversation) -> str:
        """Render one row; what prevents it is the answer."""
        messages = conversation.messages if conversation.plain else with_reasoning(conversation.messages)
        if self._annotation.numbered:
            messages = fast.numbers.load(messages)
        context = self._context(messages, conversation.tools, conversation.variables)
        marked = fast.render("marked", context)
        if marked is None:
            return FAST_FAILED
        if self._annotation.captured:
            plain = fast.render("plain", context)
            if plain is None:
                return FAST_FAILED
            if marked.encode().translate(None, MARK_BYTES) != plain.encode():
                rendered.apart[row] = (plain.encode(), UNKNOWN)
                return ""
        rendered.marked[row] = marked
        return ""

    def _redo_odd_space(self, rendered: Rendered, conversations: Sequence[Conversation]) -> None:
        """Text with white space that the engines treat differently is left to the reference."""
        if not has_odd_space("".join(rendered.marked)):
            return
        for row, text in enumerate(rendered.marked):
            if has_odd_space(text):
                rendered.marked[row] = ""
                self._render_reference(rendered, row, conversations[row], NOTHING_SUSPECT, ODD_SPACE)

    def _context(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, own: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        return {**self._base, **(own or {}), "messages": messages, "tools": tools}

    def _render_reference(
        self, rendered: Rendered, row: int, conversation: Conversation, suspect: Suspect, reason: str
    ) -> None:
        if self._suspect.control:  # then rows must be searched for the second alphabet, too
            suspect = examine((conversation.messages, conversation.tools, conversation.variables))
        try:
            check_types(conversation.messages, conversation.tools)
            messages = with_reasoning(conversation.messages)
            context = self._context(messages, conversation.tools, conversation.variables)
            alphabet = self._alphabet(suspect)
            marked = self._marked(context, alphabet) if alphabet is not None else None
            if marked is None or self._annotation.captured:
                plain = self._plain(context)
            if suspect.odd_value or self._suspect.odd_value:
                (plain if marked is None else marked).encode()  # lone surrogates are no text
        except Exception as error:
            rendered.errors[row] = refusal(error)
            return
        rendered.reference[reason] += 1
        if marked is None or (self._annotation.captured and without_marks(marked, alphabet) != plain.encode()):
            rendered.apart[row] = (plain.encode(), UNKNOWN)
        elif alphabet is CONTROL:
            rendered.marked[row] = marked
        else:
            clean, positions, codes = split_private(marked)
            rendered.apart[row] = (clean, split_marks(codes, positions, assistants(conversation)))

    def _in_private(self) -> tuple[Sandbox, Render]:
        """The annotated template in the second alphabet, compiled when a row first needs it."""
        if self._private is None:
            sandbox = Sandbox(self._date, PRIVATE)
            self._private = sandbox, sandbox.build(self._annotate(sandbox, PRIVATE)[0])
        return self._private

    def _alphabet(self, suspect: Suspect) -> Alphabet | None:
        """The marks that neither the row nor the recipe contains."""
        if not (suspect.control or self._suspect.control):
            return CONTROL
        return None if suspect.private or self._suspect.private else PRIVATE

    def _marked(self, context: dict[str, Any], alphabet: Alphabet) -> str | None:
        """The annotated render; None where only the annotation makes it fail."""
        sandbox, render = self._annotated if alphabet is CONTROL else self._in_private()
        try:
            return render({**context, "messages": sandbox.numbers.load(context["messages"])})
        except SecurityError:
            raise  # a limit; the plain render would only reach it again
        except Exception:
            return None  # the plain render decides, and words the error


def without_pieces(regions: Regions) -> Regions:
    """The same texts, nothing known about them."""
    none = np.empty(0, np.int64)
    rows = np.empty(0, np.int32)
    return dataclasses.replace(
        regions,
        known=np.zeros_like(regions.known),
        piece_rows=rows,
        piece_messages=rows,
        piece_starts=none,
        piece_ends=none,
        span_rows=rows,
        span_starts=none,
        span_ends=none,
    )


def literals(tree: nodes.Template) -> list[str]:
    """All text a template brings along."""
    constants = [constant.value for constant in find(tree, nodes.Const) if isinstance(constant.value, str)]
    return constants + [data.data for data in find(tree, nodes.TemplateData)]


def without_marks(marked: str, alphabet: Alphabet | None) -> bytes:
    return marked.encode().translate(None, MARK_BYTES) if alphabet is CONTROL else split_private(marked)[0]


def split_pieces(conversation: Conversation) -> tuple[bytes, Split]:
    """A row without a template: its text is its pieces, one after the other."""
    parts, pieces, size = [], [], 0
    for number, (_, piece) in enumerate(conversation.pieces or ()):
        parts.append(piece.encode())
        if piece:
            pieces.append((number, size, size + len(parts[-1])))
        size += len(parts[-1])
    return b"".join(parts), Split(pieces, [], True)
