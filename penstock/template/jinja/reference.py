"""The reference renderer: transformers' own jinja2 environment with bounded work, one row at a time.

It serves every row that the machine does not, and the machine is compared with it. Each row is rendered twice: once
plainly, for its text, and once traced, to find out which message printed what. If the two texts differ, the row keeps
its plain text with `known` False. A row takes a few hundred microseconds.
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
from penstock.template.flags import used_keys
from penstock.template.jinja.extensions import is_generation
from penstock.template.jinja.sandbox import Sandbox
from penstock.template.jinja.tracer import Trace, Tracer
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
        self._used_keys = used_keys(tree)
        self._template = self._sandbox.build(tree)

    def parse(self, template: str) -> nodes.Template:
        """Parses a template as transformers does."""
        return self._sandbox.parse_template(template)

    def plain(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Renders one conversation as transformers does; raises a `RowError` if the template refuses it."""
        own = {"add_generation_prompt": add_generation_prompt, **(variables or {})}
        try:
            return self._sandbox.render(self._template, self._context(messages, tools, own))
        except Exception as error:
            refused = refusal(error)
        try:
            raise refused  # raised outside the handler, so that no reference to the error's frames keeps the row alive
        finally:
            del refused  # or it would keep this frame alive

    def render(self, conversations: Sequence[Conversation], why: str = "the reference was asked for") -> Rendered:
        """Renders a batch and records which message printed which bytes. `why` is the reason to count for each row."""
        batch = BatchCollector(conversations, self._used_keys)
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
        """Renders each assistant turn as inference sees it; conversations that were refused are None."""

        def prompt(conversation: Conversation, count: int) -> bytes | None:
            try:
                text = self.plain(conversation.messages[:count], conversation.tools, conversation.variables, True)
                return text.encode()
            except (RowError, UnicodeEncodeError):
                return None

        def traced(conversation: Conversation, count: int) -> TracedText | None:
            part = conversation._replace(messages=conversation.messages[:count], weights=None)
            found = self.render([part])
            if found.errors:
                return None
            pieces = zip(
                *(a.tolist() for a in (found.piece_messages, found.piece_starts, found.piece_ends)), strict=True
            )
            spans = zip(found.span_starts.tolist(), found.span_ends.tolist(), strict=True)
            return TracedText(found.data, list(pieces) if found.known[0] else None, list(spans))

        return reference_turns(conversations, prompt, traced, self._used_keys)

    def _context(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, own: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        check_types(messages, tools)
        return {**self._base, **(own or {}), "messages": with_reasoning(messages), "tools": tools}

    @cached_property
    def _traced(self) -> tuple[Tracer, jinja2.Template] | None:
        """The tracing environment and template, compiled on first use."""
        tracer = Tracer(self._date)
        try:
            return tracer, tracer.build(tracer.parse_template(self._source))
        except TemplateError:
            return None

    def _trace(self, context: Mapping[str, Any], text: str) -> Trace | None:
        """Which message printed what; None if that is uncertain."""
        if self._traced is None:
            return None
        tracer, template = self._traced
        try:
            trace = tracer.trace(template, context)
        except Exception:
            return None  # the plain render succeeded, so the row is fine
        return trace if trace.known and trace.text == text else None


def check_types(messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
    """The type checks that transformers makes before rendering."""
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError(f"Chat messages should be dicts, but got {message!r}")
    for tool in tools or ():
        if not isinstance(tool, dict):
            raise ValueError(f"Tools should be JSON schemas, but got {tool!r}")


def with_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Adds reasoning under every name that templates read, as transformers does."""
    aliased = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        aliased.append(message)
    return aliased


def refusal(error: Exception) -> RowError:
    """Converts an exception raised during rendering to a `RowError`."""
    name = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
    return template_refusal(f"{name}{error}")


def template_refusal(words: str) -> RowError:
    """The error for a row that the template refuses, quoting the template."""
    return RowError(
        "template",
        f"the chat template refused the conversation: {words}",
        "Change the row, or choose a template that accepts it",
    )
