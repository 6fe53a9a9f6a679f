"""Renders probe conversations to observe what a template prints around an assistant's content.

A dozen built-in conversations yield one `Observation` per assistant message. Their contents start with a character that
no template prints, so that literal text and content can't be confused. `headers` and `stops` draw the conclusions.
Calibration takes about 40 small renders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from penstock.errors import RowError
from penstock.prepare.chat.conversation import Conversation, Message, Role, role_number
from penstock.prepare.template.rendered import Rendered

OPEN, CLOSE = "⟦", "⟧"  # around all probe contents
Variables = Mapping[str, Any]
_to_json = json.JSONEncoder(ensure_ascii=False).encode


class Renderer(Protocol):
    """The part of the template renderer that calibration uses."""

    @property
    def has_generation(self) -> bool: ...
    def render(self, conversations: Sequence[Conversation]) -> Rendered: ...
    def plain(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str: ...


class Observation(NamedTuple):
    """One assistant message of a probe, as the template printed it."""

    previous: Role  # NONE if the message opens the conversation
    plain: bool  # an answer without calls and reasoning
    literal: bytes  # its region up to the first content
    region: bytes
    ending: bytes  # its region after the last content
    supplied: bytes | None  # what the generation prompt supplies of the region; None if undetermined


class ProbeRenders(NamedTuple):
    """The probes that a template accepts, in the form it accepts, and how it renders them."""

    conversations: list[Conversation]
    rendered: Rendered


def _message(text: str, role: str = "assistant", **more: Any) -> Message:
    return {"role": role, "content": f"{OPEN}{text}{CLOSE}", **more}


def _call(*numbers: int, text: str = "", **more: Any) -> Message:
    function = {"name": "get_weather", "arguments": {"city": f"{OPEN}city{CLOSE}"}}
    ids = [f"call0000{number}" for number in numbers]  # Mistral requires nine characters
    calls = [{"id": own, "type": "function", "function": function} for own in ids]
    return {"role": "assistant", "content": text and f"{OPEN}{text}{CLOSE}", "tool_calls": calls, **more}


def _result(number: int) -> Message:
    return _message("result", "tool", tool_call_id=f"call0000{number}", name="get_weather")


_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}, "required": []}
_FUNCTION = {"name": "get_weather", "description": "Weather", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _FUNCTION}


def _probes() -> list[Conversation]:
    """Every context that headers are known to depend on: the previous role, tools, reasoning, switches in the text."""
    ask, answer, system = _message("q", "user"), _message("a"), _message("s", "system")
    reasoning = {"reasoning_content": f"{OPEN}r{CLOSE}"}
    no_think = {"role": "user", "content": f"{OPEN}q{CLOSE} /no_think"}
    tool_use = [ask, _call(1), _result(1), answer, ask, _call(2, text="c"), _result(2), _call(3), _result(3), answer]
    # Some templates print calls only in messages without content.
    without_content = [m | {"content": None} if "tool_calls" in m else m for m in tool_use]
    reasoned = [_call(1, **reasoning), _result(1), answer | reasoning, ask, answer | reasoning]
    return [
        Conversation([ask, answer, ask, answer, ask, answer]),
        Conversation([system, ask, answer, ask, answer]),
        Conversation([ask, answer | reasoning, ask, answer | reasoning]),
        Conversation([{"role": "system", "content": f"/no_think {OPEN}s{CLOSE}"}, ask, answer, no_think, answer]),
        Conversation([ask, answer, ask, answer], tools=[_TOOL]),
        Conversation(tool_use, tools=[_TOOL]),
        Conversation(without_content, tools=[_TOOL]),
        Conversation([ask, *reasoned], tools=[_TOOL]),
        Conversation([ask, _call(1, 2), _result(1), _result(2), answer], tools=[_TOOL]),
        Conversation([answer, ask, answer]),
        Conversation([ask, answer, answer, ask, answer]),
        Conversation([system, answer, ask, answer]),
    ]


FOREIGN = "zqforeign"  # in texts that are not the assistant's own


def _foreign_probes() -> list[Conversation]:
    """Conversations in which some templates print other text within an assistant's turn.

    Instructions and tool schemas before the first message, whoever it is from, and tool results that the message itself
    carries.
    """
    ask, answer, system = _message("q", "user"), _message("a"), _message("s", "system")
    tool = {"type": "function", "function": _FUNCTION | {"description": FOREIGN}}
    results = ({"value": FOREIGN}, FOREIGN)
    carried = [_call(1, tool_responses=[{"name": "get_weather", "response": result}]) for result in results]
    starts = [[answer], [_call(1), _result(1)]]  # some templates refuse a plain answer as the first message
    return [
        *(Conversation([*before, *start, ask, answer], tools=[tool]) for start in starts for before in ([], [system])),
        *(Conversation([ask, message, answer], tools=[_TOOL]) for message in carried),
    ]


def foreign_literals(renderer: Renderer) -> list[bytes]:
    """What a template prints in an assistant's turn before text that is not the assistant's own, if it ever does so."""
    probes = render_probes(renderer, conversations=_foreign_probes())
    found = []
    for conversation, text, spans in _texts(probes):
        for number, own in spans.items():
            if conversation.messages[number]["role"] == "assistant":
                region = b"".join(text[start:end] for start, end in own)
                literal, printed, _ = region.partition(FOREIGN.encode())
                found += [literal] if printed else []
    return found


def _as_strings(message: Message) -> Message:
    """Copies a message with the arguments of its calls as JSON strings, which some templates expect."""
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": _to_json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _as_parts(message: Message) -> Message:
    """Copies a message with its content as a list of parts, which multimodal templates expect."""
    return message | {"content": [{"type": "text", "text": message["content"] or ""}]}


_FORMS: tuple[Callable[[Message], Message], ...] = (lambda message: message, _as_strings, _as_parts)


def render_probes(
    renderer: Renderer, variables: Variables | None = None, conversations: Sequence[Conversation] | None = None
) -> ProbeRenders:
    """Renders each probe in the first form that the template accepts; probes refused in every form are left out."""
    waiting: Sequence[Conversation] = _probes() if conversations is None else conversations
    accepted: list[Conversation] = []
    for form in _FORMS:
        tried = [
            Conversation([form(m) for m in c.messages], c.tools, variables=dict(variables) if variables else None)
            for c in waiting
        ]
        refused = renderer.render(tried).errors
        accepted += [c for i, c in enumerate(tried) if i not in refused]
        waiting = [c for i, c in enumerate(waiting) if i in refused]
        if not waiting:
            break
    return ProbeRenders(accepted, renderer.render(accepted))


def observe(renderer: Renderer, probes: ProbeRenders) -> list[Observation]:
    """Returns an observation for each assistant message of the probes."""
    seen = []
    for conversation, text, spans in _texts(probes):
        for number, message in enumerate(conversation.messages):
            if message["role"] == "assistant" and number in spans:
                seen.append(_observe_message(renderer, conversation, number, text, spans[number]))
    return seen


def literals_of_others(probes: ProbeRenders) -> list[tuple[Role, bytes]]:
    """What the template prints before the content of other messages than the assistant's, by role.

    Only of tool results and of later questions in conversations without tools: before the first ones, some templates
    print whole instructions.
    """
    found = []
    for conversation, text, spans in _texts(probes):
        for number, message in enumerate(conversation.messages):
            later = message["role"] == "user" and number > 1 and not conversation.tools
            if number in spans and (later or message["role"] == "tool"):
                start, end = spans[number][0]
                literal, opened, _ = text[start:end].partition(OPEN.encode())
                found += [(role_number(message["role"]), literal)] if opened else []
    return found


def _texts(probes: ProbeRenders) -> Iterator[tuple[Conversation, bytes, dict[int, list[tuple[int, int]]]]]:
    """Each probe with its text, and with the spans of each message in it."""
    regions = probes.rendered
    for row, conversation in enumerate(probes.conversations):
        low = int(regions.text_ends[row - 1]) if row else 0
        spans: dict[int, list[tuple[int, int]]] = {}
        for index in (regions.span_rows == row).nonzero()[0].tolist():
            ends = int(regions.span_starts[index]) - low, int(regions.span_ends[index]) - low
            spans.setdefault(int(regions.span_messages[index]), []).append(ends)
        yield conversation, regions.data[low : int(regions.text_ends[row])], spans


def _observe_message(
    renderer: Renderer, conversation: Conversation, number: int, text: bytes, spans: list[tuple[int, int]]
) -> Observation:
    message, (start, end), final = conversation.messages[number], spans[0], spans[-1]
    region, last = text[start:end], text[final[0] : final[1]]
    return Observation(
        previous=role_number(conversation.messages[number - 1]["role"]) if number else Role.NONE,
        plain="tool_calls" not in message and "reasoning_content" not in message,
        literal=region.partition(OPEN.encode())[0],
        region=region,
        ending=last.rpartition(CLOSE.encode())[2] if CLOSE.encode() in last else b"",
        supplied=supplied(renderer, conversation, number, text, start, region),
    )


def supplied(
    renderer: Renderer, conversation: Conversation, number: int, text: bytes, start: int, region: bytes
) -> bytes | None:
    """The part of message `number`'s region that the generation prompt supplies; None if undetermined.

    If earlier messages render the same in the prompt as in the whole conversation, it is the prompt from `start`
    onwards. If they don't (some templates drop earlier reasoning), it is the suffix of what `add_generation_prompt`
    adds with which the region begins.
    """
    before, tools = conversation.messages[:number], conversation.tools
    try:
        prompt = renderer.plain(before, tools, conversation.variables, add_generation_prompt=True).encode()
        if prompt.startswith(text[:start]):
            return prompt[start:]
        if text.startswith(prompt):
            return b""  # there is glue between the prompt and the region
        bare = renderer.plain(before, tools, conversation.variables).encode()
    except RowError:
        return None
    if not prompt.startswith(bare):
        return None
    added = prompt[len(bare) :]
    for at in range(len(added)):
        if region.startswith(added[at:]) and added[at:].strip():
            return added[at:]
    return added if not added or common_length(added, region) else None


def common_length(one: bytes, other: bytes) -> int:
    """The length of the common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
