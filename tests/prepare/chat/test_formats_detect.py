"""Detection of formats from columns, their description, and their part of the recipe."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import SourceError, UsageError
from penstock.prepare.chat.formats import ColumnMapping, Format, FormatOptions, detect

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"messages": CHAT}, "messages (columns: messages)"),
        ({"messages": CHAT, "tools": [{}], "label": 3}, "messages (columns: messages, tools; not used: label)"),
        ({"messages": CHAT, "tools": [{}], "label": True}, "kto (columns: messages, tools, label)"),
        ({"conversations": SHAREGPT, "label": False}, "kto (columns: conversations, label)"),
        ({"prompt": "a", "completion": "b", "label": 0}, "kto (columns: prompt, completion, label)"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:], "label": 1.0}, "kto (columns: prompt, completion, label)"),
        ({"text": "a", "label": 0}, "text (columns: text; not used: label)"),
        ({"conversations": CHAT, "system": "S"}, "messages (columns: conversations, system)"),
        ({"conversations": SHAREGPT}, "sharegpt (columns: conversations)"),
        ({"messages": SHAREGPT}, "sharegpt (columns: messages)"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion (columns: prompt, completion)"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca (columns: instruction, input, output)"),
        ({"query": "a", "response": "b", "history": []}, "query_response (columns: query, response, history)"),
        ({"text": "a", "id": 1}, "text (columns: text; not used: id)"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference (columns: prompt, chosen, rejected)"),
        ({"chosen": CHAT, "rejected": CHAT}, "preference (columns: chosen, rejected)"),
        (
            {"messages": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]},
            "preference (columns: messages, chosen, rejected)",
        ),
        ({"instruction": "a", "chosen": "b", "rejected": "c"}, "preference (columns: instruction, chosen, rejected)"),
        # several fit: the order of Format decides
        ({"text": "t", "instruction": "a", "output": "b"}, "alpaca (columns: instruction, output; not used: text)"),
        ({"prompt": "a", "messages": CHAT}, "messages (columns: messages; not used: prompt)"),
        (
            {"prompt": "Hi", "messages": CHAT, "chosen": CHAT, "rejected": CHAT},
            "preference (columns: prompt, chosen, rejected; not used: messages)",
        ),
        # a column of nulls counts as absent
        ({"messages": None, "text": "a"}, "text (columns: text)"),
    ],
)
def test_the_format_is_detected_and_described(row: dict[str, Any], shown: str) -> None:
    assert detect([row]).describe() == shown


@pytest.mark.parametrize(("name", "meant"), [("chatml", "messages"), ("dpo", "preference"), ("alpca", "alpaca")])
def test_formats_by_the_names_of_other_tools(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"format='{name}' is unknown; expected .*\. Nearest: {meant}\."):
        detect([{"messages": CHAT}], FormatOptions(format=name))


def test_half_a_pair() -> None:
    with pytest.raises(SourceError) as caught:
        detect([{"prompt": "a", "chosen": "b"}])
    assert str(caught.value) == (
        "the rows have a column 'chosen' but no 'rejected' with a value, and a pair needs both. The columns are: "
        "prompt, chosen. Name the other side with rejected_key=…; to train on one side alone, use prompt_key and "
        "completion_key='chosen'."
    )


@pytest.mark.parametrize(("chat", "plain"), [(CHAT, "messages"), (SHAREGPT, "sharegpt")])
def test_ones_and_zeros_beside_messages_are_a_question(chat: Any, plain: str) -> None:
    rows = [{"messages": chat, "label": 1}, {"messages": chat, "label": 0}]
    with pytest.raises(SourceError) as caught:
        detect(rows)
    assert str(caught.value) == (
        "column 'label' holds only 1 and 0, which may mark good and bad answers (KTO) or be classes. Use format='kto' "
        f"to train on them as labels, or format='{plain}' to ignore them."
    )
    assert detect(rows, FormatOptions(format=plain)).format == plain
    for options in (FormatOptions(format="kto"), FormatOptions(label_key="label")):
        assert detect(rows, options).format is Format.KTO
    assert detect([*rows, {"messages": chat, "label": 2}]).format == plain  # these are classes
    assert detect([*rows, {"messages": chat}]).format == plain


def test_options_name_columns_keys_and_roles() -> None:
    rows = [{"log": [{"speaker": "bot", "text": "Hi"}], "functions": []}]
    options = FormatOptions(
        messages_key="log", tools_key="functions", role_key="speaker", content_key="text", roles={"bot": "assistant"}
    )
    mapping = detect(rows, options)
    assert mapping.describe() == "messages (columns: log, functions; roles: bot=assistant)"
    assert (mapping.role_key, mapping.content_key, dict(mapping.roles)["bot"]) == ("speaker", "text", "assistant")


def test_a_named_column_narrows_the_choice() -> None:
    row = {"messages": CHAT, "body": "text", "text": "other"}
    assert detect([row], FormatOptions(text_key="body")).describe() == "text (columns: body; not used: messages, text)"
    assert detect([row], FormatOptions(format="text")).format is Format.TEXT


def test_the_recipe_has_exactly_what_changes_the_output() -> None:
    with_label = detect([{"messages": CHAT, "label": 2, "tools": [{}]}])
    assert with_label == detect([{"messages": CHAT}])  # seen and unused columns are described, not stored
    assert with_label.as_json() == {
        "format": "messages",
        "columns": {"messages": "messages", "tools": "tools", "system": "system", "variables": "chat_template_kwargs"},
        "role_key": "role",
        "content_key": "content",
        "roles": {name: name for name in ("assistant", "developer", "system", "tool", "user")},
        "weight_keys": ["weight", "train", "trainable", "masked", "loss", "loss_scale", "loss_weight"],
    }
    assert detect([{"text": "a"}]).as_json()["roles"] == {}


@pytest.mark.parametrize(
    "options",
    [
        FormatOptions(roles={"bot": "assistant"}),
        FormatOptions(weight_keys=("score",)),
        FormatOptions(tools_key="label"),
        FormatOptions(system_key="label"),
        FormatOptions(variables_key="label"),
        FormatOptions(content_key="text"),
        FormatOptions(format="sharegpt"),
    ],
)
def test_every_option_that_changes_the_output_changes_the_mapping(options: FormatOptions) -> None:
    rows = [{"messages": CHAT, "label": "x"}]
    assert detect(rows, options).as_json() != detect(rows).as_json()


@pytest.mark.parametrize(
    "row", [{"messages": CHAT}, {"conversations": SHAREGPT}, {"text": "a"}, {"chosen": "a b", "rejected": "a c"}]
)
def test_a_mapping_survives_json(row: dict[str, Any]) -> None:
    mapping = detect([row])
    assert ColumnMapping.from_json(json.loads(json.dumps(mapping.as_json()))) == mapping


CATALOGUE = (
    "Formats: preference (chosen + rejected + prompt, or chosen + rejected + messages|conversations|conversation, or "
    "chosen + rejected + instruction|query|question, or chosen + rejected); "
    "kto (prompt + completion + label, or messages|conversations|conversation + label); "
    "messages (messages|conversations|conversation of {role, content}); "
    "sharegpt (conversations|conversation|messages of {from, value}); prompt_completion (prompt + completion); "
    "alpaca (instruction + output); query_response (query + response); text (text)."
)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"mesages": CHAT, "id": 1}],
            FormatOptions(),
            f"no row format fits the columns mesages, id. {CATALOGUE} "
            "Column 'mesages' is near 'messages': name it with messages_key='mesages'.",
        ),
        (
            [{"a": 1}],
            FormatOptions(),
            f"no row format fits the columns a. {CATALOGUE} If 'a' holds the conversation, say so: messages_key='a'.",
        ),
        ([{"a": 1}], FormatOptions(format="alpaca"), f"format alpaca does not fit the columns a. {CATALOGUE}"),
        (
            [{"question": "q", "answer": "a"}],
            FormatOptions(),
            f"no row format fits the columns question, answer. {CATALOGUE} "
            "If these are questions and answers, say so: query_key='question' response_key='answer'.",
        ),
        (
            [{"conversations": json.dumps(SHAREGPT)}],
            FormatOptions(),
            f"no row format fits the columns conversations. {CATALOGUE} Column 'conversations' holds strings, not "
            "lists of messages. If they are JSON, decode them first, for example "
            "with jq -c '.conversations |= fromjson'.",
        ),
        (
            [{"messages": []}],
            FormatOptions(messages_key="messages"),
            f"no row format fits the columns messages. {CATALOGUE} "
            "Column 'messages' has no messages in the first 1 rows.",
        ),
        ([{}], FormatOptions(), f"no row format fits the columns (none with a value). {CATALOGUE}"),
        (
            [{"messages": [{"speaker": "a", "text": "b"}]}],
            FormatOptions(),
            "the messages in column 'messages' have the keys speaker, text; expected role and content, or from and "
            "value. Name them with role_key=… and content_key.",
        ),
        (
            [{"messages": CHAT, "tool": []}],
            FormatOptions(tools_key="toolz"),
            "tools_key: there is no column 'toolz'. The columns are: messages, tool. Nearest: tool.",
        ),
        ([], FormatOptions(), "there are no rows, so their format can't be found. Check the files and the split."),
    ],
)
def test_the_error_suggests_a_fix_if_no_format_fits(
    rows: list[dict[str, Any]], options: FormatOptions, message: str
) -> None:
    with pytest.raises(SourceError) as caught:
        detect(rows, options)
    assert str(caught.value) == message


def test_wrong_options_are_usage_errors() -> None:
    with pytest.raises(UsageError, match=r"^format='mesages' is unknown; expected auto, .*\. Nearest: messages\.$"):
        detect([{"messages": CHAT}], FormatOptions(format="mesages"))
    with pytest.raises(UsageError, match=r"^no row format has all the columns that text_key, messages_key name\."):
        detect([{"messages": CHAT}], FormatOptions(text_key="a", messages_key="b"))
