"""`--turns faithful`: every assistant turn has the context of inference, with any template."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from benchmarks.clock import DATE
from benchmarks.faithful import Truth, check
from benchmarks.models import trl_templates
from penstock.errors import CorruptError, UsageError, ViewError
from penstock.load.options import LossPolicy
from penstock.prepare.chat.conversation import Part
from penstock.prepare.check import same_examples
from penstock.prepare.faithful.prefixes import check_prefixes, sizes, tokens
from tests.support.faithful_chats import CHATS, QWEN, RESULT, calls, says, user
from tests.support.splitting import trained_texts

pytestmark = pytest.mark.slow

Rows = Callable[..., Path]
Write = Callable[[list[object]], Path]


def rows_of(chats: list[list[dict[str, Any]]]) -> list[object]:
    return [{"messages": messages} for messages in chats]


@pytest.fixture(scope="module")
def oracle(tokenizer: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"), eos_token="<|im_end|>")


@pytest.fixture
def prepare(tokenizer: Path, tmp_path: Path, write_rows: Rows) -> Callable[..., ps.Dataset]:
    """Prepares conversations with a template, by default with `turns="faithful"`."""

    def run(chats: list[list[dict[str, Any]]], template: str, **options: Any) -> ps.Dataset:
        file = tmp_path / "template.jinja"
        file.write_text(template)
        options = {"cache": tmp_path / "cache", "turns": "faithful", "workers": "1", "date": DATE} | options
        return ps.prepare(write_rows(rows_of(chats)), tokenizer=str(tokenizer), template=str(file), **options)

    return run


SOME = ("qwen3", "qwen2_5", "gptoss", "gemma4", "glm4moe", "deepseek_r1_distill", "nemotron_3_nano", "qwen3_6", "phi3")


@pytest.mark.parametrize("name", [name for name in SOME if name in trl_templates()])
def test_turns_equal_transformers(prepare: Callable[..., ps.Dataset], oracle: Any, name: str) -> None:
    template = trl_templates()[name]
    ds = prepare(CHATS, template, regions="structure", dropped_tool_calls="keep", on_bad_row="quarantine")
    result = check(ds, Truth(oracle, template))
    assert result.wrong == []
    noted = sum(count for note, count in result.notes.items() if note.startswith("turn_"))
    assert result.turns == result.trained or noted or ds.ledger.regions_unknown


def test_long_prompts_without_markers_are_cut_between_characters(
    prepare: Callable[..., ps.Dataset], oracle: Any
) -> None:
    """Only the end of a prompt is looked at, and it may begin inside a character."""
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    chats = [[user("\u732b" * 2000 + "x" * shift), says("\u72ac"), user("and?"), says("bird")] for shift in range(3)]
    assert check(prepare(chats, template), Truth(oracle, template)).wrong == []


def test_rewritten_turns_get_chains(prepare: Callable[..., ps.Dataset]) -> None:
    ds = prepare(CHATS[:1], QWEN)
    text = b"".join(ds.vocabulary.token_bytes[t] for t in ds.input_ids(0)).decode()
    whole = b"".join(ds.vocabulary.token_bytes[t] for t in ds.input_ids(1)).decode()
    assert len(ds) == 2
    assert text.endswith("<think>\ntwo and two\n</think>4<|im_end|>") and "two and two" not in whole
    columns = ds.shards.columns(0)
    assert columns.prefixes is not None
    assert columns.prefixes.tolist()[1] == 0 < columns.prefixes.tolist()[0]
    assert len(columns.ids) < ds.tokens == sum(sizes(columns))


def test_turns_that_extend_each_other_share_a_chain(prepare: Callable[..., ps.Dataset]) -> None:
    ds = prepare(CHATS[2:3], QWEN, dropped_tool_calls="keep")
    assert len(ds) == 2  # the calls and the answer to the first question, then the second one
    assert [sorted({*view_messages(ds, item)}) for item in range(2)] == [[1, 3], [5]]


def view_messages(ds: ps.Dataset, item: int, **options: Any) -> list[int]:
    """Returns the messages that an item trains."""
    example = ds.view(**options).example(item)
    owners = np.repeat(np.arange(len(example.runs.roles)), example.runs.lengths)
    return np.unique(example.runs.messages[owners[example.loss_mask]]).tolist()


def shards(cache: Path) -> set[bytes]:
    return {file.read_bytes() for file in cache.glob("shards/*/*.arrow")}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "bundled"])
def test_a_template_that_rewrites_nothing_gives_the_same_shards(
    prepare: Callable[..., ps.Dataset], tokenizer: Path, tmp_path: Path, name: str
) -> None:
    template = trl_templates().get(name) or (tokenizer / "chat_template.jinja").read_text()
    found = []
    for turns in ("conversation", "faithful"):
        prepare(CHATS[:2] + CHATS[4:6], template, turns=turns, cache=tmp_path / turns, regions="structure")
        found.append(shards(tmp_path / turns))
    assert found[0] == found[1]


@pytest.mark.parametrize("template", [QWEN, "gptoss", "gemma4"])
def test_engines_give_the_same_shards(prepare: Callable[..., ps.Dataset], tmp_path: Path, template: str) -> None:
    template = trl_templates().get(template, template)
    for name, options in {"fast": {}, "slow": {"fast": False}}.items():
        prepare(CHATS, template, cache=tmp_path / name, dropped_tool_calls="keep", date="2025-01-01", **options)
    assert shards(tmp_path / "fast") == shards(tmp_path / "slow")


SPLICED = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)


def test_a_longer_prompt_takes_precedence(prepare: Callable[..., ps.Dataset]) -> None:
    ds = prepare(CHATS[:1], SPLICED)
    view = ds.view()
    texts = [b"".join(ds.vocabulary.token_bytes[t] for t in view.example(i).input_ids).decode() for i in range(2)]
    assert texts[0].endswith("assistant\n<think>\n\n</think>\n\n4<|im_end|>\n") and texts[1].count("<think>") == 1
    assert [view_messages(ds, item) for item in range(2)] == [[1], [3]]


@pytest.mark.parametrize(
    ("block", "printed"),
    [
        ("<think>\n\n</think>\n\n", "</think>"),  # as DeepSeek-V3.2: the template closes what the prompt has closed
        ("<|channel>thought\n<channel|>", ""),  # as Gemma 4: words inside of the block
    ],
)
def test_an_answer_follows_a_block_that_the_prompt_closes(
    block: str, printed: str, prepare: Callable[..., ps.Dataset]
) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '"
        + printed
        + "' if m.role == 'assistant' }}{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n" + block + "{% endif %}"
    )
    ds = prepare([[user("2+2?"), says("4"), user("3+3?"), says("6")]], template)
    view = ds.view()
    assert "turn_unsettled" not in ds.ledger.notes
    trained = set()
    for i in range(ds.shards.total):
        example = view.example(i)
        pieces = [ds.vocabulary.token_bytes[t] for t in example.input_ids.tolist()]
        trained.add(b"".join(p for p, mask in zip(pieces, example.loss_mask.tolist(), strict=True) if mask).decode())
        assert f"assistant\n{block}" in b"".join(pieces).decode()
    assert trained == {"4<|im_end|>", "6<|im_end|>"}


def test_text_that_ends_every_render_is_not_trained(prepare: Callable[..., ps.Dataset]) -> None:
    template = (  # as Hunyuan's without thinking: the block is printed whether or not a prompt is asked for
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}<think>\n\n</think>\n"
    )
    ds = prepare([[user("2+2?"), says("4"), user("3+3?"), says("6")]], template)
    view, pieces = ds.view(), ds.vocabulary.token_bytes
    for example in map(view.example, range(ds.shards.total)):
        trained = [pieces[t] for t, mask in zip(example.input_ids, example.loss_mask, strict=True) if mask]
        assert b"think" not in b"".join(trained) and b"".join(trained).endswith(b"<|im_end|>")


def test_no_turn_goes_on_with_a_chain_that_has_the_server_s_prompt(
    prepare: Callable[..., ps.Dataset], oracle: Any
) -> None:
    """Its prompt holds what the template prints for the turn before, which is not what that chain has."""
    template = trl_templates()["nemotron_3_nano"]  # opens a block that answers without reasoning close at once
    chat = [user("a"), calls(), RESULT, says("d", "e"), user("f"), says("g", "h")]
    ds = prepare([chat], template, regions="structure", dropped_tool_calls="keep")
    result = check(ds, Truth(oracle, template))
    assert (result.turns, result.trained, result.wrong) == (3, 3, [])
    assert [view_messages(ds, item) for item in range(ds.shards.total)] == [[1], [3], [5]]


def test_an_answer_is_encoded_apart_from_the_server_s_prompt(prepare: Callable[..., ps.Dataset], oracle: Any) -> None:
    ds = prepare([[user("a"), says("\n\nb"), user("c"), says("d")]], SPLICED)
    result = check(ds, Truth(oracle, SPLICED))
    assert (result.turns, result.trained, result.wrong, ds.ledger.notes) == (2, 2, [], {})


def test_an_answer_with_an_undetermined_start_is_context(prepare: Callable[..., ps.Dataset]) -> None:
    ds = prepare(CHATS[:2], SPLICED.replace("\n\n</think>\n\n", "\n"))
    assert ds.ledger.notes["turn_unsettled"] == 2
    assert ds.view(train_on="all_tokens").ledger.trained > 0
    with pytest.raises(ViewError, match="no token"):
        ds.view()


def test_messages_after_the_last_answer_may_be_left_out(prepare: Callable[..., ps.Dataset]) -> None:
    ds = prepare([[user("a"), says("b", "c"), user("d")]], QWEN)
    assert ds.ledger.notes == {"trailing_messages": 1} and len(ds) == 1


def test_an_opening_assistant_message_has_no_prompt(prepare: Callable[..., ps.Dataset]) -> None:
    ds = prepare([[says("hello"), user("a"), says("b")]], QWEN)
    assert ds.ledger.notes["turn_refused"] == 1
    assert view_messages(ds, 0) == [2]


# -- chains in views, loaders and exports


@pytest.fixture(scope="module")
def chains(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> ps.Dataset:
    folder = tmp_path_factory.mktemp("chains")
    (folder / "template.jinja").write_text(QWEN)
    lines = [json.dumps({"messages": chat}) for chat in CHATS * 4]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return ps.prepare(
        folder / "rows.jsonl", tokenizer=str(tokenizer), cache=folder / "cache",
        template=str(folder / "template.jinja"),
        turns="faithful", workers="1", dropped_tool_calls="keep",
    )  # fmt: skip


def rows_trained(ds: ps.Dataset, **options: Any) -> Iterator[tuple[tuple[int, int], int]]:
    view = ds.view(**options)
    for item in range(len(view)):
        place = view.example(item).row
        yield from (((place.source, place.row), message) for message in view_messages(ds, item, **options))


@pytest.mark.parametrize("policy", [p.value for p in LossPolicy if p is not LossPolicy.CUSTOMIZED])
def test_a_message_is_trained_once(chains: ps.Dataset, policy: str) -> None:
    found = [entry for entry in rows_trained(chains, train_on=policy) if entry[1] >= 0]
    assert len(found) == len(set(found))
    if policy.startswith("last"):
        assert {message for (_, row), message in found if row % len(CHATS) == 0} == {3}
    if policy == "all_assistant_messages":
        wanted = sum(message["role"] == "assistant" for chat in CHATS * 4 for message in chat)
        assert len(found) == wanted


def test_a_holdout_never_splits_the_chains_of_a_row(chains: ps.Dataset) -> None:
    for holdout in (0.5, 3):
        parts = [
            {p for p, _ in rows_trained(chains, holdout=holdout, holdout_side=part)} for part in ("train", "held_out")
        ]
        columns = chains.shards.columns(0)
        of_row = dict(zip(columns.rows.tolist(), columns.row_hashes.tolist(), strict=True))
        hashes = [{of_row[row] for _, row in part} for part in parts]
        assert not hashes[0] & hashes[1] and all(hashes)


@given(st.integers(34, 70), st.sampled_from(["truncate", "truncate_left", "drop", "split"]))
@settings(max_examples=25, deadline=None)
def test_views_gather_and_ledgers_agree(chains: ps.Dataset, limit: int, overlong: str) -> None:
    from penstock.load.gather import Gatherer

    view = chains.view(max_length=limit, overlong=overlong)
    assert view.ledger.adds_up
    assert view.ledger.trained == sum(int(view.example(k).loss_mask.sum()) for k in range(len(view)))
    order = np.random.default_rng(limit).permutation(len(view))
    found, at = Gatherer(view)(order), 0
    for item, length in zip(order.tolist(), found.lengths.tolist(), strict=True):
        example = view.example(item)
        assert np.array_equal(found.ids[at : at + length], example.input_ids)
        assert np.array_equal(found.weights[at : at + length], example.loss_weights)
        at += length


@pytest.mark.parametrize("collate", ["padded", "packed"])
def test_loaders_resume_at_every_step_on_any_number_of_ranks(chains: ps.Dataset, collate: str) -> None:
    view = chains.view(max_length=128)
    options: dict[str, Any] = {"batch_size": 4, "collate": collate, "epochs": 2}
    whole = [pickle.dumps(dict(batch.tensors)) for batch in view.loader(**options)]
    for step in range(len(whole)):
        loader = view.loader(**options)
        loader.seek(step)
        assert pickle.dumps(dict(next(iter(loader)).tensors)) == whole[step]
    items = [sorted(batch.items.tolist()) for batch in view.loader(**options)]
    for world_size in (2, 4):
        ranks = [view.loader(rank=rank, world_size=world_size, **options) for rank in range(world_size)]
        steps = zip(*ranks, strict=True)
        assert [sorted(item for batch in step for item in batch.items.tolist()) for step in steps] == items


def test_exports_hold_the_examples_of_the_view(chains: ps.Dataset, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    view = chains.view(max_length=64)
    view.export("parquet", tmp_path / "out")
    table = [row for file in sorted((tmp_path / "out").rglob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert [row["input_ids"] for row in table] == [view.example(k).input_ids.tolist() for k in range(len(view))]
    assert [row["labels"] for row in table] == [view.example(k).labels.tolist() for k in range(len(view))]


def test_statistics_count_rows_and_sequences(chains: ps.Dataset) -> None:
    from penstock.look.statistics import stats

    found = stats(chains)
    assert found.rows == len(CHATS) * 4 and found.sequences == chains.shards.total > found.rows
    assert found.duplicate_rows == len(CHATS) * 3
    assert found.tokens == chains.tokens == sum(len(chains.input_ids(k)) for k in range(chains.shards.total))


def test_show_prints_what_later_turns_see_of_an_answer(chains: ps.Dataset) -> None:
    from typer.testing import CliRunner

    from penstock.cli import app

    shown = CliRunner().invoke(app, ["show", str(chains.path), "--turns"], env={"COLUMNS": "200"}).output
    assert shown.count("row 0 of source 0") == 2
    table = shown[shown.index("in the last chain") :]
    assert "two and two" in table and "three and three" in table and table.count("the same") == 1 and "+" in table


def test_invalid_prefixes_are_corruption(chains: ps.Dataset) -> None:
    columns = chains.shards.columns(0)
    assert columns.prefixes is not None
    check_prefixes(columns)
    for change in (1, 10_000):
        wrong = columns.prefixes.copy()
        wrong[np.flatnonzero(wrong)[0]] += change
        with pytest.raises(CorruptError, match="prefix"):
            check_prefixes(columns._replace(prefixes=wrong))
    assert all(np.array_equal(tokens(columns, k), chains.input_ids(k)) for k in range(columns.examples))
    assert same_examples(columns, 0, columns, 0)


# -- the cache


def test_shards_are_identical_after_append_force_and_with_workers(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    from penstock.prepare.sources import text_slices
    from penstock.prepare.sources.slices import SliceSizes

    monkeypatch.setitem(text_slices.cut_text.__kwdefaults__, "sizes", SliceSizes(400, 1_000, 4_000))
    (tmp_path / "template.jinja").write_text(QWEN)
    lines = [json.dumps({"messages": chat}) + "\n" for chat in CHATS * 6]
    source = tmp_path / "rows.jsonl"

    def build(cache: str, count: int, **options: Any) -> dict[str, bytes]:
        source.write_text("".join(lines[:count]))
        ps.prepare(
            source, tokenizer=str(tokenizer), template=str(tmp_path / "template.jinja"), cache=tmp_path / cache,
            turns="faithful", dropped_tool_calls="keep", **options,
        )  # fmt: skip
        files = [*(tmp_path / cache).glob("shards/*/*.arrow"), *(tmp_path / cache).glob("datasets/*/manifest.json")]
        return {str(file.relative_to(tmp_path / cache)): file.read_bytes() for file in files}

    wanted = build("once", len(lines), workers="1")
    build("appended", len(lines) // 2, workers="1")
    assert wanted.items() <= build("appended", len(lines), workers="2").items()
    assert wanted == build("once", len(lines), workers="1", force=True)


def test_recipes_of_conversation_mode_are_unchanged(prepare: Callable[..., ps.Dataset]) -> None:
    assert "turns" not in prepare(CHATS[:1], QWEN, turns="conversation").recipe
    assert prepare(CHATS[:1], QWEN).recipe["turns"] == "faithful"


def test_unsupported_combinations_are_refused(tokenizer: Path, write_rows: Rows) -> None:
    pair = {"prompt": [user("a")], "chosen": [says("b")], "rejected": [says("c")]}
    with pytest.raises(UsageError, match="preference"):
        ps.prepare(write_rows([pair]), tokenizer=str(tokenizer), turns="faithful")


def test_context_is_a_separate_part(chains: ps.Dataset) -> None:
    view = chains.view()
    assert any(Part.CONTEXT in view.example(k).runs.parts for k in range(len(view)))


SPACE_BEFORE_TAG = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{{- '\\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def test_prompts_that_end_inside_a_header(deepseek: Path, write_rows: Write, tmp_path: Path) -> None:
    """White space between the prompt and the author's tag would merge with the prompt's last token."""
    (tmp_path / "template.jinja").write_text(SPACE_BEFORE_TAG)
    file = write_rows(rows_of([[user("one"), says("two")], [user("a"), says("b", "c"), says("d")]]))

    def prepared(**more: Any) -> ps.Dataset:
        template, cache = tmp_path / "template.jinja", tmp_path / "cache"
        return ps.prepare(file, tokenizer=str(deepseek), template=template, cache=cache, workers=1, **more)

    prepared()  # with a preview of the other mode
    dataset = prepared(turns="faithful")
    trained = ["".join(trained_texts(dataset, k)).strip() for k in range(len(dataset.view(max_length=None)))]
    assert trained == ["two<|im_end|>", "b<|im_end|>", "d<|im_end|>"]
    assert not dataset.ledger.notes.keys() - {"reasoning_dropped", "no_stop"}
