"""The reference renderer: transformers' own jinja2 environment with bounded work, one row at a time.

It serves every row that the machine does not, and the machine is compared with it. Each row is rendered twice: once
plainly, for its text, and once traced, to find out which message printed what. If the two texts differ, the row keeps
its plain text with `known` False. A row takes a few hundred microseconds.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes

from penstock.errors import RowError, TemplateError
from penstock.prepare.chat.conversation import Conversation, Message, Role, roles_of
from penstock.prepare.chat.formats import REASONING_KEYS
from penstock.prepare.chat.notes import Note
from penstock.prepare.template.printed import MessageFlag, Shown, flags_of, shows_documents, shows_tools, used_keys
from penstock.prepare.template.rendered import FieldRuns, Rendered
from penstock.prepare.template.sandbox import Sandbox, is_generation
from penstock.prepare.template.tracing.provenance import Span
from penstock.prepare.template.tracing.tracer import Marks, Trace, Tracer
from penstock.prepare.template.turns import FieldColumn, SpanColumn, TagColumn, TracedText, Turns, reference_turns

# ---- batches


class BatchCollector:
    """Collects the rendered rows of a batch into a `Rendered`, one row at a time."""

    def __init__(self, conversations: Sequence[Conversation], used_keys: Mapping[str, str]) -> None:
        self.reference: Counter[str] = Counter()
        self._conversations, self._used_keys = conversations, used_keys
        self._texts: list[bytes] = []
        self._size = 0
        self._ends: list[int] = []
        self._known: list[bool] = []
        self._spans: list[tuple[int, int, int, int]] = []
        self._tags: list[tuple[int, int, int]] = []
        self._fields: list[tuple[int, int, int, int]] = []
        self._offsets: list[int] = [0]
        self._roles: list[Role] = []
        self._flags: list[int] = []
        self._errors: dict[int, RowError] = {}
        self._notes: dict[Note, list[int]] = {}

    def add(self, conversation: Conversation, text: str, data: bytes, trace: Trace | None) -> None:
        """Add a row; `trace` is None if its regions are unknown."""
        spans: list[Span] = []
        tags: list[tuple[int, int]] = []
        fields: list[tuple[int, int, int]] = []
        if trace is not None:
            runs = chain(trace.spans, trace.fields)
            at = byte_offsets(text, data, chain(*((start, end) for _, start, end in runs), *trace.generations))
            spans = [Span(span.message, at[span.start], at[span.end]) for span in trace.spans]
            tags = [(at[start], at[end]) for start, end in trace.generations]
            fields = [(label, at[start], at[end]) for label, start, end in trace.fields]
        printed = [b""] * len(conversation.messages)
        for number, start, end in spans:
            printed[number] += data[start:end]
        roles = roles_of(conversation.messages)
        for message, role, own in zip(conversation.messages, roles, printed, strict=True):
            whole = trace is None or (role is not Role.ASSISTANT and not own)
            self._add_message(role, flags_of(message, Shown(data if whole else own, data), self._used_keys))
        if conversation.tools and not shows_tools(conversation.tools, conversation.messages, data):
            self._notes.setdefault(Note.TOOLS_DROPPED, []).append(len(self._ends))
        if conversation.variables and not shows_documents(conversation.variables, data):
            self._notes.setdefault(Note.DOCUMENTS_DROPPED, []).append(len(self._ends))
        self._add_row(data, trace is not None, spans, tags, fields)

    def add_texts(self, texts: Iterable[tuple[Role, str]]) -> None:
        """Add a row without a template: each text counts as a message."""
        encoded, places, size = [], [], 0
        for number, (role, text) in enumerate(texts):
            encoded.append(text.encode())
            if text:
                places.append(Span(number, size, size + len(encoded[-1])))
            size += len(encoded[-1])
            self._add_message(role, MessageFlag.CONTENT_PRINTED)
        self._add_row(b"".join(encoded), True, places)

    def add_error(self, conversation: Conversation, error: RowError) -> None:
        """Add a row that the template refused."""
        self._errors[len(self._ends)] = error
        for role in roles_of(conversation.messages):
            self._add_message(role, MessageFlag(0))
        self._add_row(b"", True)

    def _add_message(self, role: Role, flags: MessageFlag) -> None:
        self._roles.append(role)
        self._flags.append(flags.value)

    def _add_row(
        self,
        data: bytes,
        known: bool,
        spans: Iterable[Span] = (),
        tags: Iterable[tuple[int, int]] = (),
        fields: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        row, base = len(self._ends), self._size
        self._spans += [(row, message, base + start, base + end) for message, start, end in spans]
        self._tags += [(row, base + start, base + end) for start, end in tags]
        self._fields += [(row, label, base + start, base + end) for label, start, end in fields]
        self._texts.append(data)
        self._size += len(data)
        self._ends.append(self._size)
        self._known.append(known)
        self._offsets.append(len(self._roles))

    def rendered(self) -> Rendered:
        """The collected batch."""
        spans = np.array(self._spans, np.int64).reshape(-1, len(SpanColumn))
        tags = np.array(self._tags, np.int64).reshape(-1, len(TagColumn))
        fields = np.array(self._fields, np.int64).reshape(-1, len(FieldColumn))
        return Rendered(
            data=b"".join(self._texts),
            text_ends=np.array(self._ends, np.int64),
            known=np.array(self._known, np.bool_),
            span_rows=spans[:, SpanColumn.ROW].astype(np.int32),
            span_messages=spans[:, SpanColumn.MESSAGE].astype(np.int32),
            span_starts=spans[:, SpanColumn.START].copy(),
            span_ends=spans[:, SpanColumn.END].copy(),
            tag_rows=tags[:, TagColumn.ROW].astype(np.int32),
            tag_starts=tags[:, TagColumn.START].copy(),
            tag_ends=tags[:, TagColumn.END].copy(),
            message_offsets=np.array(self._offsets, np.int64),
            message_roles=np.array(self._roles, np.uint8),
            message_flags=np.array(self._flags, np.uint8),
            conversation=self._conversations.__getitem__,
            notes={note: np.array(rows, np.int64) for note, rows in self._notes.items()},
            errors=self._errors,
            reference=self.reference,
            fields=FieldRuns(
                fields[:, FieldColumn.ROW].astype(np.int32),
                fields[:, FieldColumn.LABEL].astype(np.int32),
                fields[:, FieldColumn.START].copy(),
                fields[:, FieldColumn.END].copy(),
            ),
        )


def byte_offsets(text: str, data: bytes, places: Iterable[int]) -> dict[int, int]:
    """Maps character positions in a text to offsets in its UTF-8 bytes."""
    if len(text) == len(data):
        return {place: place for place in places}
    offsets: dict[int, int] = {}
    last = size = 0
    for place in sorted(set(places)):
        size += len(text[last:place].encode())
        offsets[place], last = size, place
    return offsets


# ---- rendering


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
            if conversation.texts is not None:
                batch.add_texts(conversation.texts)
                continue
            try:
                context = self._context(conversation.messages, conversation.tools, conversation.variables)
                text = self._sandbox.render(self._template, context)
                data = text.encode()
            except Exception as error:
                batch.add_error(conversation, refusal(error))
                continue
            batch.reference[why] += 1
            batch.add(conversation, text, data, self._trace(context, text, conversation.spans))
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
            columns = found.span_messages, found.span_starts, found.span_ends
            spans = map(Span, *(column.tolist() for column in columns))
            tags = zip(found.tag_starts.tolist(), found.tag_ends.tolist(), strict=True)
            runs = (found.fields.labels, found.fields.starts, found.fields.ends)
            fields = list(zip(*(column.tolist() for column in runs), strict=True))
            return TracedText(found.data, list(spans) if found.known[0] else None, list(tags), fields)

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

    def _trace(self, context: Mapping[str, Any], text: str, marks: Marks) -> Trace | None:
        """Which message printed what; None if that is uncertain."""
        if self._traced is None:
            return None
        tracer, template = self._traced
        for only_text in (False, True):  # labels of numbers and the like must not change the text
            try:
                trace = tracer.trace(template, context, marks, only_text)
            except Exception:
                continue  # the plain render succeeded, so the row is fine
            if trace.text == text:
                return trace if trace.known else None
        return None


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
