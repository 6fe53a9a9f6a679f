"""Laws of segments, for any conversation: they cover every byte once, in order, and label it with its author."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.prepare.chat.conversation import BODY_PARTS, Conversation, Message, Part, Role, role_number
from penstock.prepare.regions.segments import Crossing
from penstock.prepare.regions.splitter import RegionsMode
from tests.support.splitting import Split, trl_recipe

NAMES = ["qwen2_5", "qwen3_training", "llama3_training", "gemma4", "gptoss", "deepseek_r1_distill_training"]
MARKERS = ["<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<think>\n", "</think>", "<turn|>", "</s>", "\n", " "]
TEXT = st.lists(st.sampled_from(MARKERS) | st.text("aü日\x03\x85", max_size=4), max_size=5).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Messages in any order; every text contains a name of its author, so that it can be located."""
    messages: list[Message] = []
    for number in range(draw(st.integers(1, 6))):
        role = draw(st.sampled_from(["user", "assistant", "assistant", "system", "tool"]))
        message: Message = {"role": role, "content": f"{draw(TEXT)}«{role}{number}»{draw(TEXT)}"}
        if role == "assistant" and draw(st.booleans()):
            message["reasoning_content"] = f"«{role}{number}»{draw(TEXT)}"
        if role == "tool":
            message |= {"tool_call_id": "call00001", "name": "look"}
        messages.append(message)
    return Conversation(messages)


def check_cover(split: Split) -> None:
    assert "".join(run.text for run in split.runs) == split.text
    assert all(run.text for run in split.runs)


def check_labels(split: Split, messages: list[Message]) -> None:
    for run in split.runs:
        if run.part is Part.GLUE:
            assert (run.role, run.message) == (Role.NONE, -1)
        else:
            assert run.role is role_number(messages[run.message]["role"])
            assert run.role is Role.ASSISTANT or run.part is Part.BODY
        for number, message in enumerate(messages):
            if f"«{message['role']}{number}»" in run.text:
                assert run.message == number
                own = (Part.CONTENT, Part.REASONING) if run.role is Role.ASSISTANT else (Part.BODY,)
                assert run.part in own


def check_order(split: Split) -> None:
    order = [Part.HEADER, Part.BODY, Part.STOP, Part.TAIL]
    for one, next_one in pairwise(split.runs):
        if one.message == next_one.message and one.role is Role.ASSISTANT:
            first, then = (order.index(Part.BODY if run.part in BODY_PARTS else run.part) for run in (one, next_one))
            assert first < then or (first == then and one.part is not next_one.part)


@pytest.mark.parametrize("mode", RegionsMode)
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(batch=st.lists(conversations(), min_size=1, max_size=3))
def test_segments_cover_each_text_once(name: str, mode: RegionsMode, batch: list[Conversation]) -> None:
    recipe = trl_recipe(name, mode)
    for conversation, split in zip(batch, recipe.split_all(batch), strict=True):
        check_cover(split)
        if not split.known:
            assert all(run.part is Part.GLUE for run in split.runs)
            continue
        check_labels(split, conversation.messages)
        if mode is RegionsMode.STRUCTURE or not recipe.renderer.has_generation:
            check_order(split)
            assert all(run.crossing != Crossing.OWN for run in split.runs)
