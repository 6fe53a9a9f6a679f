"""What pipelines make of rows is the same with stencils and without; why rows had none is told."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.build.options import prepare_options
from penstock.build.pipeline import Pipeline, SliceResult
from penstock.build.prepare import Builder
from penstock.build.recipe import make_recipe
from penstock.chat.formats_detect import detect
from penstock.sources import Rows, model_folder
from tests.chat.splitting import assistant, calls, returns, user
from tests.chat.stencil_probes import OWN


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
    {"messages": TURNS * 2, "tools": [TOOL, {"name": "<|im_end|> é\u2028", "x": [0.1, 10**30]}]},
    {"messages": TURNS, "tools": []},
    {"messages": TURNS, "tools": None},
    {"messages": TURNS, "tools": json.dumps([TOOL])},
    {"messages": TURNS, "tools": [json.dumps(TOOL)], "system": "Be kind."},
    {"messages": TURNS, "tools": [TOOL] * 130},
    {"messages": TURNS, "tools": [7]},
    {"messages": TURNS, "tools": {"name": "f"}},
    {"messages": [user("q"), calls("f"), returns("t"), assistant("a", thinking="r")], "tools": [TOOL, TOOL]},
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


@pytest.mark.parametrize("place", ["tools", "arguments"])
def test_rows_that_are_nested_very_deeply_are_refused_and_no_others(tokenizer: Path, place: str) -> None:
    tools = [{**TOOL, "x": [5.5]}] if place == "tools" else None
    called = [{"type": "function", "function": {"name": "f", "arguments": {"x": [5.5]}}}]
    messages = TURNS if tools else [user("q"), assistant("", tool_calls=called), *TURNS]
    usual = json.dumps({"messages": messages, "tools": tools} if tools else {"messages": messages}).encode()
    deep = usual.replace(b"5.5", b"[" * 1000 + b"]" * 1000)
    _, quick, slow = results(tokenizer, [usual, deep, usual])
    assert_same(quick, slow)
    ((row, reason),) = ((refused["row"], refused["reason"]) for refused in quick.rejected)
    assert row == 1 and "RecursionError" in reason
    assert quick.columns.examples == 2


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


# ---- why rows are rendered one by one

TOOLS: Final = "tools, with which the template does more than print them, or very many"
VARIABLES: Final = "template variables of the row"
TURN: Final = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT: Final = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP: Final = f"{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}"
TAGS: Final = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}"
    f"<|im_end|>{{% endgeneration %}}\n{{% else %}}{TURN}{{% endif %}}{{% endfor %}}{PROMPT}"
)
NOT_LOCAL: Final = "messages depend on each other in this template: "
ONE_BY_ONE: Final = {  # templates without stencils, and how the reason starts
    "the last message's words": ("{{ messages[-1].content }}\n" + LOOP, NOT_LOCAL),
    "how many messages": ("{{ messages | length }}\n" + LOOP, NOT_LOCAL),
    "tags": (TAGS, "the template's own tags are followed"),
}


def reasons(source: Path, tokenizer: Path, cache: Path, **options: Any) -> Counter[str]:
    """Why rows of a build had no stencils."""
    chosen = prepare_options({"tokenizer": str(tokenizer), "cache": cache, "workers": "1", **options})
    return Builder([source], chosen, None).run().progress.engines.get("stencil", Counter())


def test_rows_with_more_to_them_are_counted(write_rows: Callable[..., Path], tokenizer: Path, tmp_path: Path) -> None:
    plain = [{"messages": TURNS}, {"messages": TURNS * 2, "id": 1}]
    more = [{"messages": TURNS, "tools": [TOOL]}, {"messages": TURNS, "chat_template_kwargs": {"x": 1}}]
    assert reasons(write_rows(plain), tokenizer, tmp_path / "plain") == {}
    many = {"messages": TURNS, "tools": [TOOL] * 127}
    assert reasons(write_rows([*plain, more[0]]), tokenizer, tmp_path / "tools") == {}
    assert reasons(write_rows([*plain, many]), tokenizer, tmp_path / "many") == {TOOLS: 1}
    assert reasons(write_rows([*more, many, *plain]), tokenizer, tmp_path / "more") == {VARIABLES: 1, TOOLS: 1}
    assert reasons(write_rows(more), tokenizer, tmp_path / "slow", fast=False) == {"stencils are switched off": 2}


def test_rows_that_no_stencil_fits_are_told_with_their_reason(
    write_rows: Callable[..., Path], tokenizer: Path, tmp_path: Path
) -> None:
    """Each by what is odd about it, however many odd ones came before it."""
    path = tmp_path / "template.jinja"
    path.write_text(LOOP.replace("<|im_end|>", "{% if m.role != 'assistant' or loop.last %}<|im_end|>{% endif %}"))
    rows = [{"messages": TURNS * length} for length in (*range(2, 80), 1)] + [{"messages": [*TURNS, user("q")]}]
    found = reasons(write_rows(rows), tokenizer, tmp_path / "cache", template=str(path))
    assert found == {"the template has no stop, or none that is a special token of this tokenizer": 79}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_templates_without_stencils_are_told_with_their_reason(
    name: str, write_rows: Callable[..., Path], tokenizer: Path, tmp_path: Path
) -> None:
    template, start = ONE_BY_ONE[name]
    path = tmp_path / "template.jinja"
    path.write_text(template)
    source = write_rows([{"messages": TURNS}, {"messages": TURNS * 2}, {"messages": TURNS, "tools": [TOOL]}])
    ((reason, rows),) = reasons(source, tokenizer, tmp_path / "cache", template=str(path)).items()
    assert reason.startswith(start)
    assert rows == 3
