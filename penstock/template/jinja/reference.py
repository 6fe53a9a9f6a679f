"""The reference renderer: transformers' own jinja2 environment, bounded, one row at a time.

It serves every row that no faster engine serves, and is what faster engines are compared with. A row is rendered twice:
plainly, which gives its text, and traced, which tells the messages apart. Where the two texts differ, the row keeps its
text with `known` False. Cost: a few hundred microseconds per row.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes

from penstock.chat.conversation import Conversation, Message
from penstock.chat.formats import REASONING_KEYS
from penstock.errors import RowError, TemplateError
from penstock.template.batch import BatchCollector
from penstock.template.jinja.sandbox import Sandbox
from penstock.template.jinja.tracer import Trace, Tracer
from penstock.template.jinja.vocabulary import is_generation
from penstock.template.rendered import Rendered
from penstock.template.turns import TracedText, Turns, reference_turns


class Reference:
    """One chat template with its special tokens, variables and date."""

    def __init__(
        self,
        template: str,
        *,
        special_tokens: Mapping[str, str | list[str]],
        variables: Mapping[str, Any],
        date: datetime.date,
    ) -> None:
        self._source, self._date = template, date
        self._base = {"documents": None, "add_generation_prompt": False, **special_tokens, **variables}
        self._sandbox = Sandbox(date)
        tree = self._sandbox.parse_template(template)
        self.has_generation = any(map(is_generation, tree.find_all(nodes.CallBlock)))
        self._template = self._sandbox.build(tree)

    def parse(self, template: str) -> nodes.Template:
        """A syntax tree, as transformers parses it."""
        return self._sandbox.parse_template(template)

    def plain(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """transformers' text of one conversation; a RowError where the template refuses it."""
        own = {"add_generation_prompt": add_generation_prompt, **(variables or {})}
        try:
            return self._sandbox.render(self._template, self._context(messages, tools, own))
        except Exception as error:
            refused = refusal(error)
        try:
            raise refused  # here, so that it does not hold the error, and through its frames the row
        finally:
            del refused  # which would hold this frame

    def render(self, conversations: Sequence[Conversation], why: str = "the reference was asked for") -> Rendered:
        """The texts of a batch, and which message printed which bytes. `why` counts each row that was rendered."""
        batch = BatchCollector(conversations)
        for conversation in conversations:
            if conversation.pieces is not None:
                batch.add_pieces(conversation.pieces)
                continue
            try:
                context = self._context(conversation.messages, conversation.tools, conversation.variables)
                text = self._sandbox.render(self._template, context)
                data = text.encode()
            except Exception as error:
                batch.add_error(conversation, refusal(error))
                continue
            batch.reference[why] += 1
            batch.add(conversation, text, data, self._trace(context, text))
        return batch.rendered()

    def turns(self, conversations: Sequence[Conversation | None]) -> Turns:
        """Each assistant turn as inference sees it; None for conversations that were refused."""

        def plain(conversation: Conversation, count: int, prompt: bool) -> bytes | None:
            try:
                text = self.plain(conversation.messages[:count], conversation.tools, conversation.variables, prompt)
                return text.encode()
            except (RowError, UnicodeEncodeError):
                return None

        def traced(conversation: Conversation, count: int) -> TracedText:
            part = conversation._replace(messages=conversation.messages[:count], weights=None)
            found = self.render([part])
            pieces = zip(
                *(a.tolist() for a in (found.piece_messages, found.piece_starts, found.piece_ends)), strict=True
            )
            spans = zip(found.span_starts.tolist(), found.span_ends.tolist(), strict=True)
            return TracedText(found.data, list(pieces) if found.known[0] else None, list(spans))

        return reference_turns(conversations, plain, traced)

    def _context(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, own: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        check_types(messages, tools)
        return {**self._base, **(own or {}), "messages": with_reasoning(messages), "tools": tools}

    @cached_property
    def _traced(self) -> tuple[Tracer, jinja2.Template] | None:
        """The template that traces messages, compiled when it is first needed."""
        tracer = Tracer(self._date)
        try:
            return tracer, tracer.build(tracer.parse_template(self._source))
        except TemplateError:
            return None

    def _trace(self, context: Mapping[str, Any], text: str) -> Trace | None:
        """Who printed the text; None where that is not certain."""
        if self._traced is None:
            return None
        tracer, template = self._traced
        try:
            trace = tracer.trace(template, context)
        except Exception:
            return None  # the plain render succeeded, so the row is fine
        return trace if trace.known and trace.text == text else None


def check_types(messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
    """transformers' own checks before it renders."""
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError(f"Chat messages should be dicts, but got {message!r}")
    for tool in tools or ():
        if not isinstance(tool, dict):
            raise ValueError(f"Tools should be JSON schemas, but got {tool!r}")


def with_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Reasoning under all the names that templates read, as transformers does it."""
    aliased = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        aliased.append(message)
    return aliased


def refusal(error: Exception) -> RowError:
    """What a template's error says to the user."""
    name = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
    return template_refusal(f"{name}{error}")


def template_refusal(words: str) -> RowError:
    """A row that the template refuses, in its own words."""
    return RowError(
        "template",
        f"the chat template refused the conversation: {words}",
        "Change the row, or choose a template that accepts it",
    )
