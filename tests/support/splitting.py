"""Shared by the tests of the splitter: real templates, renderers, and segments converted back to text."""

from __future__ import annotations

import datetime
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import penstock as ps
from penstock.errors import RowError
from penstock.prepare.chat.conversation import BODY_PARTS, Conversation, Message, Part, Role
from penstock.prepare.regions.segments import Crossing, Segments
from penstock.prepare.regions.splitter import RegionsMode, Splitter
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.renderer import TemplateRenderer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
DATE = datetime.date(2026, 1, 2)
MARKER = re.compile(r"<\|[^|<>\s]{1,60}\|>|<｜[^｜\n]{1,60}｜>|<\|[a-z_]+>|<[a-z_]+\|>|<[a-z]+_of_[a-z]+>")


class Run(NamedTuple):
    """One segment with its text."""

    role: Role
    part: Part
    message: int
    text: str
    crossing: Crossing


class Split(NamedTuple):
    """One conversation, rendered and split."""

    text: str
    runs: list[Run]
    known: bool
    notes: dict[str, int]
    error: RowError | None

    def assistant(self, message: int) -> dict[str, str]:
        """The parts of one assistant message, its body in one."""
        found: dict[str, str] = {}
        for run in self.runs:
            if run.message == message and run.role is Role.ASSISTANT:
                name, is_body = run.part.name, run.part in BODY_PARTS
                found["BODY" if is_body else name] = (found.get("BODY", "") if is_body else "") + run.text
        return found

    def trained(self) -> list[bool]:
        """Whether each byte is trained when all assistant messages are."""
        return [
            run.role is Role.ASSISTANT and run.part in (*BODY_PARTS, Part.STOP)
            for run in self.runs
            for _ in run.text.encode()
        ]


class Recipe(NamedTuple):
    """A template's renderer and splitter."""

    renderer: TemplateRenderer
    splitter: Splitter

    def split(self, messages: list[Message], tools: list[Any] | None = None, **variables: Any) -> Split:
        """Render and split one conversation."""
        return self.split_all([Conversation(messages, tools, variables=variables or None)])[0]

    def split_all(self, conversations: list[Conversation]) -> list[Split]:
        """Render and split a batch."""
        rendered = self.renderer.render(conversations)
        segments, errors = self.splitter.split(rendered)
        return [_read(rendered, segments, errors, row) for row in range(len(conversations))]


def _read(rendered: Rendered, segments: Segments, errors: dict[int, RowError], row: int) -> Split:
    low = int(rendered.text_ends[row - 1]) if row else 0
    text = rendered.data[low : int(rendered.text_ends[row])]
    runs, start = [], 0
    for index in range(int(segments.offsets[row]), int(segments.offsets[row + 1])):
        end = int(segments.ends[index])
        role, part = Role(int(segments.roles[index])), Part(int(segments.parts[index]))
        message, crossing = int(segments.messages[index]), Crossing(int(segments.crossing[index]))
        runs.append(Run(role, part, message, text[start:end].decode(), crossing))
        start = end
    notes = {note.value: len(rows) for note, rows in segments.notes.items()}
    return Split(text.decode(), runs, bool(segments.known[row]), notes, errors.get(row))


def recipe(template: str, mode: RegionsMode = RegionsMode.STRUCTURE, **variables: Any) -> Recipe:
    """Creates a renderer and a splitter, with the template's own markers as special tokens."""
    renderer = TemplateRenderer(template, special_tokens=SPECIAL, variables=variables, date=DATE)
    tokens = frozenset(MARKER.findall(template)) | set(SPECIAL.values())
    return Recipe(renderer, Splitter(renderer, special_tokens=tokens, eos_token="</s>", mode=mode))


@cache
def trl_template(name: str) -> str:
    """A real chat template from the package `trl`."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@cache
def trl_recipe(name: str, mode: RegionsMode = RegionsMode.STRUCTURE) -> Recipe:
    """A recipe with a template from `trl`."""
    return recipe(trl_template(name), mode)


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": text, **more}


def calls(*names: str, text: str | None = "") -> Message:
    """An assistant message that calls tools."""
    made = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": {"city": "Zürich"}}}
        for i, name in enumerate(names)
    ]
    return assistant(text, tool_calls=made)


def returns(text: str, number: int = 0) -> Message:
    """A tool result."""
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "get_weather", "content": text}


def trained_texts(dataset: ps.Dataset, number: int = 0) -> list[str]:
    """The trained spans of an example, as text."""
    return trained_spans(dataset, dataset.view(max_length=None)[number])


def trained_spans(dataset: ps.Dataset, example: Any) -> list[str]:
    """The trained spans of a view's example, as text."""
    pieces = dataset.vocabulary.token_bytes
    texts, before = [], False
    for token, mask in zip(example.input_ids.tolist(), example.loss_mask.tolist(), strict=True):
        if mask:
            texts[-1:] = [texts[-1] + pieces[token]] if before else [*texts[-1:], pieces[token]]
        before = mask
    return [text.decode() for text in texts]
