"""Conversations in, `Regions` out: each conversation is rendered once, and the render tells who printed what.

The text is byte-identical to transformers' `apply_chat_template(tokenize=False)`. The fast engine serves a row only
where it is known to be equal; the reference serves all others, and both give the same record. Where it is not certain
which message printed what, the row keeps its exact text with `known` False. Cost: linear in the text, one render per row
(two where a template captures what its loop prints).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes

from penstock.chat.annotate import Annotation, annotate
from penstock.chat.assemble import Rendered, assemble, assistants
from penstock.chat.conversation import Conversation, Message
from penstock.chat.guards import Suspect, examine, suspects
from penstock.chat.regions import Regions
from penstock.chat.sandbox import NumberedMessage, Render, Sandbox
from penstock.chat.sentinels import CONTROL, PRIVATE, Alphabet
from penstock.chat.split import MARK_BYTES, Split, split_marks, split_private
from penstock.chat.syntax import find
from penstock.errors import RowError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
UNKNOWN = Split([], [], False)
NOTHING_SUSPECT = Suspect(False, False, False)


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
        self._base: dict[str, Any] = {
            "documents": None,
            "add_generation_prompt": False,
            **special_tokens,
            **variables,
        }
        sandbox = Sandbox(date, CONTROL)
        tree = sandbox.parse_template(template)
        self._suspect = examine((literals(tree), self._base))
        self._plain = sandbox.build(tree)
        self._private: Render | None = None  # compiled when a row first needs it
        self._annotation, self._annotated = self._annotate(CONTROL)
        self.has_generation = self._annotation.generations
        self.why_reference = "the fast engine is switched off"

    def _annotate(self, alphabet: Alphabet) -> tuple[Annotation, Render]:
        sandbox = Sandbox(self._date, alphabet)
        tree = sandbox.parse_template(self._template)
        annotation = annotate(tree, alphabet)
        tree.set_environment(sandbox)
        return annotation, sandbox.build(tree)

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
            own = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
            return self._plain(self._context(with_reasoning(messages), tools, own))
        except Exception as error:
            raise refusal(error) from error

    def render(self, conversations: Sequence[Conversation]) -> Regions:
        """The texts of a batch and who printed them, each row by the fastest engine that is exact for it."""
        return self.reference(conversations)

    def reference(self, conversations: Sequence[Conversation]) -> Regions:
        """The same record, every row rendered by the reference."""
        rendered = Rendered([""] * len(conversations))
        found = suspects(conversations)
        for row, conversation in enumerate(conversations):
            self._render_reference(rendered, row, conversation, found.get(row, NOTHING_SUSPECT))
        return assemble(rendered, conversations, self._annotation.nested)

    def _context(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, own: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        return {**self._base, **(own or {}), "messages": messages, "tools": tools}

    def _render_reference(self, rendered: Rendered, row: int, conversation: Conversation, suspect: Suspect) -> None:
        if conversation.pieces is not None:
            rendered.apart[row] = split_pieces(conversation)
            return
        try:
            check_types(conversation.messages, conversation.tools)
            messages = with_reasoning(conversation.messages)
            context = self._context(messages, conversation.tools, conversation.variables)
            alphabet = self._alphabet(suspect)
            marked = self._marked(context, alphabet) if alphabet is not None else None
            if marked is None or self._annotation.captured:
                plain = self._plain(context)
        except Exception as error:
            rendered.errors[row] = refusal(error)
            return
        if marked is None or (self._annotation.captured and without_marks(marked, alphabet) != plain.encode()):
            rendered.apart[row] = (plain.encode(), UNKNOWN)
        elif alphabet is CONTROL:
            rendered.marked[row] = marked
        else:
            clean, positions, codes = split_private(marked)
            rendered.apart[row] = (clean, split_marks(codes, positions, assistants(conversation)))

    def _alphabet(self, suspect: Suspect) -> Alphabet | None:
        """The marks that neither the row nor the recipe contains."""
        if not (suspect.control or self._suspect.control):
            return CONTROL
        return None if suspect.private or self._suspect.private else PRIVATE

    def _marked(self, context: dict[str, Any], alphabet: Alphabet) -> str | None:
        """The annotated render; None where only the annotation makes it fail."""
        if alphabet is CONTROL:
            render = self._annotated
        else:
            self._private = render = self._private or self._annotate(PRIVATE)[1]
        messages = numbered(context["messages"]) if self._annotation.numbered else context["messages"]
        try:
            return render({**context, "messages": messages})
        except Exception:
            return None  # the plain render decides, and words the error


def literals(tree: nodes.Template) -> list[str]:
    """All text a template brings along."""
    constants = [constant.value for constant in find(tree, nodes.Const) if isinstance(constant.value, str)]
    return constants + [data.data for data in find(tree, nodes.TemplateData)]


def check_types(messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
    """transformers' own checks before it renders."""
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError(f"Chat messages should be dicts, but got {message!r}")
    for tool in tools or ():
        if not isinstance(tool, dict):
            raise ValueError("Tools should be JSON schemas")


def with_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Reasoning under all the names that templates read, as transformers does it."""
    aliased = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING_FIELDS if message.get(key) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        aliased.append(message)
    return aliased


def numbered(messages: Sequence[Message]) -> list[NumberedMessage]:
    result = []
    for number, message in enumerate(messages):
        copy = NumberedMessage(message)
        copy.number = number
        result.append(copy)
    return result


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


def refusal(error: Exception) -> RowError:
    """What a template's error tells the user."""
    name = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
    return RowError(
        "template",
        f"the chat template refused the conversation: {name}{error}",
        "Change the row, or choose a template that accepts it",
    )
