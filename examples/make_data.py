"""Regenerates the bundled demo data and tokenizer: `python examples/make_data.py`. The results are committed."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
CITIES = {
    "Bern": "Switzerland",
    "Oslo": "Norway",
    "Lima": "Peru",
    "Cairo": "Egypt",
    "Hanoi": "Vietnam",
    "Quito": "Ecuador",
}
ANIMALS = {"spider": 8, "beetle": 6, "horse": 4, "sparrow": 2, "crab": 10, "lizard": 4}
TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def turn(rng: random.Random) -> list[dict[str, object]]:
    match rng.randrange(4):
        case 0:
            a, b = rng.randint(2, 60), rng.randint(2, 60)
            return [user(f"What is {a} + {b}?"), assistant(f"{a} + {b} = {a + b}.")]
        case 1:
            city = rng.choice(sorted(CITIES))
            return [user(f"Which country is {city} in?"), assistant(f"{city} is in {CITIES[city]}.")]
        case 2:
            animal, count = rng.choice(sorted(ANIMALS)), rng.randint(2, 9)
            legs = ANIMALS[animal]
            return [
                user(f"How many legs do {count} {animal}s have?"),
                assistant(f"One {animal} has {legs} legs, so {count} have {count} × {legs} = {count * legs}."),
            ]
        case _:
            word = rng.choice(["penstock", "turbine", "river", "valley", "größe", "café"])
            return [user(f"Spell '{word}' backwards."), assistant(f"{word[::-1]}")]


def conversation(rng: random.Random, number: int) -> dict[str, object]:
    messages: list[dict[str, object]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": "You are brief and exact."})
    if number % 10 == 0:
        a, b = rng.randint(11, 99), rng.randint(11, 99)
        call = {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": "multiply", "arguments": {"a": a, "b": b}},
        }
        messages += [
            user(f"What is {a} times {b}?"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call{number:05}", "content": str(a * b)},
            assistant(f"{a} times {b} is {a * b}."),
        ]
        return {"messages": messages, "tools": [TOOL]}
    for _ in range(rng.randint(1, 3)):
        messages += turn(rng)
    return {"messages": messages}


def pair(rng: random.Random) -> dict[str, object]:
    question, answer = turn(rng)
    return {"prompt": [question], "chosen": [answer], "rejected": [assistant("I do not know.")]}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(texts: list[str], folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    words += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def main() -> None:
    rng = random.Random(0)
    chats = [conversation(rng, n) for n in range(400)]
    pairs = [pair(rng) for _ in range(120)]
    write(HERE / "data" / "chats.jsonl", chats)
    write(HERE / "data" / "pairs.jsonl", pairs)
    train_tokenizer([json.dumps(row, ensure_ascii=False) for row in chats], HERE / "tokenizer")


if __name__ == "__main__":
    main()
