"""Stencils give what the engine and the splitter give; the pipeline's results are the same without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.conformance import trl_templates
from benchmarks.meters import ROOT, pipeline_of
from penstock.build.options import prepare_options
from penstock.build.pipeline import Pipeline, SliceResult
from penstock.build.recipe import make_recipe
from penstock.chat.adapt import Adapter
from penstock.chat.conversation import Conversation, Message
from penstock.chat.engine import TemplateEngine
from penstock.chat.formats import ROLES, Format, Mapping
from penstock.chat.formats_detect import detect
from penstock.chat.parts import RegionsMode, Splitter
from penstock.chat.plain_rows import PlainRows
from penstock.chat.rows import Normaliser
from penstock.chat.shapes import Draft
from penstock.chat.special_text import SpecialTextFinder
from penstock.chat.stencil import Filled
from penstock.chat.stencils import Stencils
from penstock.errors import RowError
from penstock.sources import Rows, model_folder
from tests.chat.splitting import assistant, calls, recipe, returns, user

TURN: Final = "<|{{ m.role }}|>{{ m.content }}<|end|>"
PROMPT: Final = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
OWN: Final = {
    "whole": f"{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}",
    "trimmed": "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}" + PROMPT,
    "a longer header after a tool": "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and "
    "loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}<b>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if messages[-1].role == 'tool' %}<b>{% endif %}{% endif %}",
    "calls": "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}: {{ c.function.arguments | tojson }}]{% endfor %}<|end|>{% endfor %}"
    + PROMPT,
    "a longer prompt": f"{{% for m in messages %}}{TURN}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|><b>"
    "{% endif %}",
    "all but a system prompt": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "^{{ messages[0].content }}^{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    + TURN + "{% endfor %}" + PROMPT,
}  # fmt: skip
MAPPING: Final = Mapping(
    Format.MESSAGES,
    (("messages", "messages"), ("system", "system"), ("tools", "tools"), ("variables", "chat_template_kwargs")),
    roles=tuple(sorted(ROLES.items())),
)


class Made(NamedTuple):
    """All that stencils of a template need."""

    engine: TemplateEngine
    splitter: Splitter
    adapter: Adapter

    def stencils(self, names: dict[str, str] | None = None) -> Stencils:
        return Stencils(self.engine, self.splitter, names or {}, self.adapter.adapt_message)


@cache
def made(name: str) -> Made:
    engine, splitter = recipe(OWN.get(name) or trl_templates()[name])
    return Made(engine, splitter, Adapter(engine.plain))


TEMPLATES: Final = [
    *OWN, "trl/cohere", "trl/gemma", "trl/llama3", "trl/phi3", "trl/phi3_5", "trl/qwen2_5", "trl/qwen3_instruct_2507",
]  # fmt: skip


def added(draft: Draft, conversations: Sequence[Conversation]) -> Draft:
    for row, conversation in enumerate(conversations):
        draft.add(row, conversation)
    return draft


def check(parts: Made, filled: Filled | None, conversations: Sequence[Conversation]) -> list[int]:
    """The rows that were served, each as the engine and the splitter would have served it."""
    if filled is None:
        return []
    served = [conversations[row] for row in filled.rows]
    regions = parts.engine.render(served)
    segments, errors = parts.splitter.split(served, regions)
    assert not errors and not regions.errors and not segments.notes and not filled.segments.notes
    assert filled.texts == regions.texts
    for field in ("offsets", "ends", "roles", "parts", "messages", "inclusive", "known"):
        own, wanted = getattr(filled.segments, field), getattr(segments, field)
        assert own.dtype == wanted.dtype and own.tolist() == wanted.tolist(), field
    return filled.rows


def served(parts: Made, conversations: Sequence[Conversation], stencils: Stencils | None = None) -> list[int]:
    """Fill stencils for conversations, and compare."""
    adapted = [parts.adapter.adapt(conversation) for conversation in conversations]
    stencils = stencils or parts.stencils()
    return check(parts, stencils.fill(added(stencils.draft(), adapted)), adapted)


def chat(*messages: Message) -> Conversation:
    return Conversation(list(messages))


# ---- rows of all kinds

SAID: Final = (
    None, "", " ", "\n\n", "<|end|>", "<|im_end|>", "</s>", "<|eot_id|>", "<end_of_turn>", "<|im_start|>assistant\n",
    "<|assistant|>", "assistant\n", "<b>", "<b> more", "<think>\n", "<think>\n\n</think>\n\n", "\nmore", " leading",
    "trailing \n", "\u2003", "\u3000wide\u3000", "\U0010fe000\U0010fe01", "\u2003\U0010fe001\U0010fe01\u2003",
    '{"\U0010fe000a0\U0010fe01": 0}', "\U0010fe00", "é日本\U0001f600", "\x1cx\x1f", "\x01\x10", "a\r\nb", "\U0010ff00",
    "{{ x }}{% if %}", "e\u0301", "[f: {}]", "^",
)  # fmt: skip
CONTENTS = st.one_of(st.sampled_from(SAID), st.text(max_size=8), st.text("ab \n<|end>", max_size=8))
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)


@st.composite
def tool_calls(draw: st.DrawFn) -> list[dict[str, Any]]:
    count = draw(st.integers(0, 3))
    names = st.sampled_from(("f", "get_weather", "", "<|end|>", "\U0010fe000n0\U0010fe01", "naïve", " f "))
    functions = [{"name": draw(names), "arguments": draw(ARGUMENTS | st.just("{}"))} for _ in range(count)]
    return [
        {"id": f"call{number}", "type": "function", "function": function}
        if draw(st.booleans())
        else {"type": "function", "function": function}
        for number, function in enumerate(functions)
    ]


@st.composite
def messages(draw: st.DrawFn) -> Message:
    role = draw(st.sampled_from(("user", "assistant", "user", "assistant", "system", "tool")))
    message: Message = {"role": role, "content": draw(CONTENTS)}
    if role == "assistant" and draw(st.integers(0, 3)) == 0:
        message["tool_calls"] = draw(tool_calls())
    if draw(st.integers(0, 5)) == 0:
        message[draw(st.sampled_from(("name", "tool_call_id", "id", "rating", "reasoning_content")))] = "x"
    return message


@st.composite
def orderly(draw: st.DrawFn) -> list[Message]:
    """Turns as every template takes them, some with calls and their results."""
    words = CONTENTS.filter(lambda said: bool(said and not said.isspace())).map(str)
    said = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        said.append(user(draw(words)))
        if draw(st.integers(0, 3)) == 0:
            functions = [{"name": "f", "arguments": draw(ARGUMENTS)} for _ in range(draw(st.integers(1, 2)))]
            made_calls = [{"type": "function", "function": function} for function in functions]
            said += [assistant(draw(CONTENTS), tool_calls=made_calls), returns(draw(words))]
        said.append(assistant(draw(words)))
    return said


ROWS = st.lists(st.one_of(orderly(), st.lists(messages(), min_size=1, max_size=12)), min_size=1, max_size=5)


def read(lists: Sequence[list[Message]]) -> tuple[list[bytes], list[Conversation]]:
    """The rows that can be read, and what is read from them."""
    reader = Normaliser(MAPPING)
    rows: list[bytes] = []
    found: list[Conversation] = []
    for row in (json.dumps({"messages": said}, ensure_ascii=False).encode() for said in lists):
        try:
            found += reader.conversations(row)
            rows.append(row)
        except RowError:
            pass
    return rows, found


def is_adaptable(parts: Made, conversation: Conversation) -> bool:
    try:
        parts.adapter.adapt(conversation)
    except RowError:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TEMPLATES), ROWS)
def test_any_conversations(name: str, lists: list[list[Message]]) -> None:
    parts = made(name)
    served(parts, [found for found in read(lists)[1] if is_adaptable(parts, found)])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TEMPLATES), ROWS)
def test_any_rows_that_are_decoded_as_plain(name: str, lists: list[list[Message]]) -> None:
    parts = made(name)
    rows, conversations = read(lists)
    assert parts.engine.locality is not None
    plain = PlainRows(MAPPING, parts.engine.locality)
    stencils = parts.stencils(plain.roles)
    draft = stencils.draft()
    plain.read(rows, SpecialTextFinder(()).find(rows)[1], (), draft.add_plain)
    filled = stencils.fill(draft)
    assert filled is None or all(is_adaptable(parts, conversations[row]) for row in filled.rows)
    adapted = [parts.adapter.adapt(c) if is_adaptable(parts, c) else c for c in conversations]
    check(parts, filled, adapted)


@pytest.mark.parametrize("name", TEMPLATES)
def test_hostile_contents_one_by_one(name: str) -> None:
    parts, stencils = made(name), made(name).stencils()
    words = [said for said in SAID if said and not said.isspace()]
    chats = [chat(user(said), assistant(said), user(said), assistant(said)) for said in words]
    chats += [chat(user("q"), assistant(said, tool_calls=[]), user("r"), assistant(said)) for said in words]
    assert served(parts, chats, stencils)[: len(words)] in ([], list(range(len(words))))
    more = [chat(user("q"), calls("f", text=said), returns(said or ""), assistant("a")) for said in (*words, "", None)]
    served(parts, more, stencils)


# ---- what is served, and what is not


@pytest.mark.parametrize("words", ["", " "])
def test_empty_words_of_rows_that_are_read_as_plain(words: str) -> None:
    row = json.dumps({"messages": [user("q"), assistant(words)]}).encode()
    served(made("trimmed"), Normaliser(MAPPING).conversations(row))


def test_marks_of_both_alphabets_in_one_row() -> None:
    """The engine has no marks left for such a row, so that its regions are unknown."""
    assert served(made("whole"), [chat(user("\U0010ff00"), assistant("a"))]) == [0]
    served(made("whole"), [chat(user("\U0010ff00\x06"), assistant("a"))])


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"a longer prompt"}))
def test_plain_conversations_are_served(name: str) -> None:
    turns = [user("q"), assistant("a"), user("r"), assistant("b")]
    assert served(made(name), [chat(*turns[:2]), chat(*turns), chat(*turns * 3)]) == [0, 1, 2]


@pytest.mark.parametrize("name", ["a longer header after a tool", "a longer prompt"])
def test_words_that_look_like_the_rest_of_a_header(name: str) -> None:
    after_tool = chat(user("q"), assistant("a"), returns("t"), assistant("<b>b"))
    chats = [chat(user("q"), assistant("<b>b")), after_tool, chat(user("q"), assistant("a"))]
    assert len(served(made(name), chats)) == (3 if name == "a longer header after a tool" else 0)


def test_rows_keep_their_order_and_others_are_left_out() -> None:
    parts = made("calls")
    plain, calling = chat(user("q"), assistant("a")), chat(user("q"), calls("f", "g"), returns("t"), assistant("a"))
    blank, missing = chat(user(" "), assistant("a")), chat(user("q"), {"role": "assistant"})
    tools, variables = plain._replace(tools=[{"name": "f"}]), plain._replace(variables={"x": 1})
    developer = chat({"role": "developer", "content": "d"}, assistant("a"))
    ids = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}, "more": 1}}]
    unusual = chat(user("q"), assistant("", tool_calls=ids), assistant("a"))
    reasoning = chat(user("q"), assistant("a", reasoning_content="r"))
    given = [tools, calling, blank, plain, missing, variables, calling, developer, chat(), unusual, plain, reasoning]
    adapted = [parts.adapter.adapt(conversation) for conversation in given]
    stencils = parts.stencils()
    assert check(parts, stencils.fill(added(stencils.draft(), adapted)), adapted) == [1, 3, 6, 10]
    assert stencils.fill(added(stencils.draft(), [tools, blank])) is None
    assert stencils.fill(stencils.draft()) is None


def test_nothing_is_learned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, renders = made("calls"), []
    stencils, render = parts.stencils(), parts.engine.render
    turns = [user("q"), assistant("a")]
    refused = chat(*turns, {"role": "tool", "content": None})  # drops nothing, but prints no stop of its own
    chats = [chat(*turns), chat(*turns * 2), chat(*turns * 4), chat(user("x"), assistant("y")), refused, refused]

    def counted(conversations: Sequence[Conversation]) -> Any:
        renders.append(len(conversations))
        return render(conversations)

    monkeypatch.setattr(parts.engine, "render", counted)
    first = stencils.fill(added(stencils.draft(), chats))
    learned = len(renders)
    assert 0 < learned <= 4 and first is not None
    again = stencils.fill(added(stencils.draft(), [*chats, chat(*turns * 6), chat(*turns * 5)]))
    assert again is not None and again.rows[:4] == first.rows[:4] and again.texts[:4] == first.texts[:4]
    assert len(renders) == learned  # longer conversations have no contexts of their own


def test_lone_surrogates_in_arguments_are_left_to_the_engine() -> None:
    message = assistant("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"a": "\ud800"}}}])
    stencils = made("calls").stencils()
    assert stencils.fill(added(stencils.draft(), [chat(user("q"), message)])) is None


@pytest.mark.parametrize("condition", ["m.role != 'assistant'", "m.content"])
def test_a_template_that_does_not_print_an_answer(condition: str) -> None:
    engine, splitter = recipe(
        f"{{% for m in messages %}}{{% if {condition} %}}{TURN}{{% endif %}}{{% endfor %}}{PROMPT}"
    )
    parts = Made(engine, splitter, Adapter(engine.plain))
    assert parts.stencils().active
    served(parts, [chat(user("q"), assistant(""))])


def test_a_template_with_an_empty_text() -> None:
    engine, splitter = recipe("{% for m in messages %}{% if m.role == 'x' %}{{ m.content }}{% endif %}{% endfor %}")
    parts = Made(engine, splitter, Adapter(engine.plain))
    chats = [chat(user("q")), chat(user("")), chat(user(""), user(""))]
    assert served(parts, chats) in ([], [1, 2])


def test_a_template_that_is_not_local_or_is_tagged_has_none() -> None:
    tagged = f"{{% for m in messages %}}{{% generation %}}{TURN}{{% endgeneration %}}{{% endfor %}}{PROMPT}"
    far = "{% for m in messages %}{{ m.content | length }}{% endfor %}"
    for template, active in ((tagged, False), (far, False), (OWN["whole"], True)):
        engine, splitter = recipe(template, RegionsMode.AUTO)
        assert Stencils(engine, splitter, {}, Adapter(engine.plain).adapt_message).active is active


# ---- through the whole pipeline


def pipeline(tokenizer: Path, lines: list[bytes], fast: bool, **options: Any) -> Pipeline:
    model = model_folder.load(str(tokenizer))
    chosen = prepare_options({"tokenizer": str(tokenizer), **options})
    sample = [json.loads(lines[0])]
    return Pipeline(make_recipe(chosen, detect(sample, chosen), model), model.tokenizer_json, fast=fast)


def results(tokenizer: Path, rows: Sequence[Any], **options: Any) -> tuple[Pipeline, SliceResult, SliceResult]:
    """What becomes of rows, with the fast engines and without."""
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    slow = pipeline(tokenizer, lines, False, **options).run(Rows(lines, list(range(1, len(lines) + 1))))
    quick = pipeline(tokenizer, lines, True, **options)
    return quick, quick.run(Rows(lines, list(range(1, len(lines) + 1)))), slow


def assert_same(quick: SliceResult, slow: SliceResult) -> None:
    assert quick.rejected == slow.rejected
    assert +quick.notes == +slow.notes
    for name, one, other in zip(slow.columns._fields, quick.columns, slow.columns, strict=True):
        if one is None or other is None:
            assert one is other, name
        else:
            assert one.dtype == other.dtype, name
            np.testing.assert_array_equal(one, other, err_msg=name)


TOOL: Final = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
TURNS: Final = [user("How many?"), assistant("Seven.")]
NULL: Final = [{"role": "user", "content": None}, assistant("a")]
MIXED: Final[list[Any]] = [
    {"messages": TURNS},
    {"messages": [{"role": "system", "content": "Be brief."}, *TURNS * 3], "id": 7},
    {"messages": [user("q"), calls("f", "g"), returns("t"), assistant("a")]},
    {"messages": [user("q"), calls("f", text=None), returns("t"), assistant("a")]},
    {"messages": TURNS, "tools": [TOOL]},
    {"messages": [user("q"), calls("f"), returns("t"), assistant("a")], "tools": [TOOL]},
    {"messages": TURNS, "system": "Be kind."},
    {"messages": [user("q"), {**assistant("a"), "weight": 0}]},
    {"messages": [user("a <|im_end|> b"), assistant("<|im_start|>assistant\n")]},
    {"messages": [user(""), assistant("a")]},
    {"messages": [user("q"), assistant(" ")]},
    {"messages": [user("q"), assistant(None)]},
    {"messages": [user("q")]},
    {"messages": []},
    {"messages": [user("q"), {"role": "bot", "content": "a"}]},
    {"messages": [{"role": "developer", "content": "d"}, *TURNS]},
    {"messages": [user("\x01\U0010fe00"), assistant("\u2003x\u2003")]},
    {"messages": [user([{"type": "text", "text": "q"}]), assistant("a")]},  # type: ignore[arg-type]
    {"messages": [user("q"), assistant("a", reasoning_content="r")]},
    b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}',
    b"\xff", b"[]", b"", b'{"messages": [{"role": "user", "content": "\xff"}]}',
    {"messages": TURNS * 6},
]  # fmt: skip
SHAREGPT: Final[list[Any]] = [
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"conversations": [{"from": "human", "value": " q\n"}, {"from": "gpt", "value": ""}], "source": "x"},
    {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1.5}}'},
            {"from": "observation", "value": "t"},
            {"from": "gpt", "value": "a"},
        ]
    },
    {"conversations": [{"from": "human", "value": "<|im_end|>"}, {"from": "chatgpt", "value": "a"}]},
    {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "user", "value": "q"},
            {"from": "gpt", "value": "b"},
        ]
    },
    {"conversations": [{"from": "human", "value": "q"}]},
    {"conversations": [{"from": "human", "value": "q", "weight": 1}, {"from": "gpt", "value": "a", "weight": 0}]},
]


def test_a_mixed_batch(tokenizer: Path) -> None:
    quick, *both = results(tokenizer, MIXED * 2)
    assert_same(*both)
    assert quick.renderings["default"].stencils.active
    assert both[0].columns.examples > 20 and len(both[0].rejected) > 10


@pytest.mark.parametrize("option", [{"special_tokens_in_text": "reject"}, {"dropped_tool_calls": "keep"}])
def test_a_mixed_batch_with_options(tokenizer: Path, option: dict[str, str]) -> None:
    assert_same(*results(tokenizer, MIXED, **option)[1:])


def test_sharegpt(tokenizer: Path) -> None:
    assert_same(*results(tokenizer, SHAREGPT * 2)[1:])


def test_special_tokens_next_to_empty_words(tokenizer: Path) -> None:
    assert_same(*results(tokenizer, [{"messages": [user("<|im_end|>"), assistant("")]}])[1:])


@pytest.mark.parametrize("more", [{"messages": [user("q"), assistant("a")], "x": 10**310}, {"messages": NULL}])
def test_rows_that_are_refused_without_the_fast_engines(tokenizer: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(OWN["whole"].replace("<|end|>", "<|im_end|>"))
    assert_same(*results(tokenizer, [{"messages": TURNS}, more], template=str(template))[1:])


def test_a_row_that_is_cut_in_a_new_column(tokenizer: Path) -> None:
    cut = json.dumps({"messages": TURNS}).encode()[:-1] + b', "x": '
    assert_same(*results(tokenizer, [{"messages": TURNS}, cut])[1:])


@pytest.fixture(scope="module")
def two_templates(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled tokenizer with a template of its own for tools."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    text = (tokenizer / "chat_template.jinja").read_text()
    named = [{"name": "default", "template": text}, {"name": "tool_use", "template": "TOOLS " + text}]
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    return folder


def test_a_template_for_tools(two_templates: Path) -> None:
    quick, *both = results(two_templates, MIXED)
    assert set(quick.renderings) == {"default", "tool_use"}
    assert_same(*both)


def test_the_bundled_rows(tokenizer: Path, examples: Path) -> None:
    for name in ("chats", "pairs"):
        rows = (examples / "data" / f"{name}.jsonl").read_bytes().splitlines()
        assert_same(*results(tokenizer, rows)[1:])


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_any_rows_of_the_bundled_tokenizer(lists: list[list[Message]]) -> None:
    parts = bundled()
    served(parts, [found for found in read(lists)[1] if is_adaptable(parts, found)])


@cache
def bundled() -> Made:
    """The bundled tokenizer's own template, with the special tokens of its vocabulary."""
    rendering = pipeline_of(str(ROOT / "examples" / "tokenizer"), [json.dumps(MIXED[0]).encode()]).renderings["default"]
    return Made(rendering.engine, rendering.splitter, rendering.adapter)
