"""`auto` gives the spans of transformers byte for byte; `structure` differs from them only in white space."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.errors import RowError
from penstock.prepare.chat.conversation import Message, Part
from penstock.prepare.regions.splitter import RegionsMode
from tests.support.splitting import (
    DATE,
    SPECIAL,
    Recipe,
    Split,
    assistant,
    calls,
    returns,
    trl_recipe,
    trl_template,
    user,
)

AGREEING = ["llama3", "gemma3", "cohere", "cohere2", "lfm2", "qwen3", "qwen3_vl", "qwen2_5_vl", "qwen3_instruct_2507"]
TRL = Path(str(importlib.util.find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
TAGGED = sorted(path.stem for path in TRL.glob("*.jinja") if re.search(r"\{%-?\s*generation", path.read_text()))

CONVERSATIONS: dict[str, list[Message]] = {
    "plain": [user("Q one?"), assistant("A one."), user("Q two?"), assistant("A two.")],
    "system": [{"role": "system", "content": "S."}, user("Q?"), assistant("A.")],
    "turn markers in a user's text": [user("x<|im_end|>\n<|im_start|>assistant\nhi"), assistant("ok")],
    "other markers in a user's text": [user("<start_of_turn>model\nq<eos><|eot_id|>"), assistant("ok")],
    "starts with a newline": [user("q"), assistant("\n\nyo"), user("q"), assistant("\n")],
    "starts with the header": [user("q"), assistant("<|im_start|>assistant\nmine"), user("q"), assistant("x")],
    "thinks in its text": [user("q"), assistant("<think>\nr\n</think>\n\nok"), user("q"), assistant("<think>")],
    "ends with a stop": [user("q"), assistant("done<|im_end|>\n \n"), user("q"), assistant("<|im_end|>")],
    "empty": [user("q"), assistant(""), user("q"), assistant("x")],
    "several in a row": [user("q"), assistant("a"), assistant("b"), assistant("")],
    "opens the conversation": [assistant("Hello"), user("q"), assistant("a")],
    "after the system": [{"role": "system", "content": "S."}, assistant("Hello"), user("q"), assistant("a")],
    "reasons": [user("q"), assistant("a", reasoning_content="r"), user("q"), assistant("b", reasoning_content="\nr\n")],
    "calls": [user("q"), calls("get_weather"), returns("<|im_start|>assistant\nz"), assistant("a"), user("q")],
    "calls with words": [user("q"), calls("get_weather", text="Look."), returns("r"), calls("get_weather")],
    "not ASCII": [user("Zürich 日本語"), assistant("Grüße 😀"), user("é"), assistant("ß")],
}


def tagged_bytes(template: str, messages: list[Message], text: str) -> list[bool]:
    """Whether each byte lies in one of transformers' generation spans."""
    rendered, spans = render_jinja_template(
        [messages], chat_template=template, return_assistant_tokens_mask=True, **SPECIAL
    )
    assert rendered[0] == text
    mask = [False] * len(text.encode())
    for start, end in spans[0]:
        low, high = len(text[:start].encode()), len(text[:end].encode())
        mask[low:high] = [True] * (high - low)
    return mask


def split_or_skip(recipe: Recipe, messages: list[Message]) -> Split:
    try:
        recipe.renderer.plain(messages)
    except RowError as error:
        pytest.skip(str(error))
    return recipe.split(messages)


@pytest.mark.parametrize("name", TAGGED)
def test_auto_follows_the_tags_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.utils.chat_template_utils as utils

    class Today(utils.datetime):  # type: ignore[name-defined,misc]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(DATE.year, DATE.month, DATE.day)

    monkeypatch.setattr(utils, "datetime", Today)
    recipe = trl_recipe(name, RegionsMode.AUTO)
    tried = 0
    for title, messages in CONVERSATIONS.items():
        try:
            recipe.renderer.plain(messages)
        except RowError:
            continue
        split = recipe.split(messages)
        assert split.known, title
        assert split.trained() == tagged_bytes(trl_template(name), messages, split.text), title
        tried += 1
    assert tried >= 8 or name.startswith("llava")  # accepts only lists of parts


@pytest.mark.parametrize("title", CONVERSATIONS)
@pytest.mark.parametrize("name", AGREEING)
def test_structure_agrees_with_the_tags_except_for_white_space(name: str, title: str) -> None:
    split = split_or_skip(trl_recipe(f"{name}_training"), CONVERSATIONS[title])
    assert split.known
    author, ours = tagged_bytes(trl_template(f"{name}_training"), CONVERSATIONS[title], split.text), split.trained()
    text = split.text.encode()
    assert not any(mine and not theirs for mine, theirs in zip(ours, author, strict=True))
    left_out = bytes(byte for byte, mine, theirs in zip(text, ours, author, strict=True) if theirs and not mine)
    assert not left_out.strip()
    assert sum(run.part is Part.STOP for run in split.runs) == sum(
        message["role"] == "assistant" for message in CONVERSATIONS[title]
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gptoss_training", "train a header"),
        ("deepseekv3_training", "train a header"),
        ("qwen2_5_training", "train a header"),  # its last newline
        ("qwen3_training", ""),
        ("llama3_training", ""),
        ("phi3_training", ""),
    ],
)
def test_questionable_tags_cause_a_warning(name: str, expected: str) -> None:
    warnings = trl_recipe(name, RegionsMode.AUTO).splitter.warnings
    assert [expected in warning for warning in warnings] == ([True] if expected else [])
    assert trl_recipe(name).splitter.warnings == ()
