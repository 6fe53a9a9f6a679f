"""Writes three kinds of conversations from text that every Python installation has, for benchmarks without data.

    python -m benchmarks.kinds --out FOLDER [--megabytes 4]

`chats` are short questions and answers from the documentation of the standard library; `traces` are long agent runs
with tool definitions, calls and results, which are source code; `scripts` mix Chinese, Japanese, Korean, Arabic, Hindi,
Russian, German and emoji, from the names in Unicode's CLDR (package `babel`). The same Python and babel give the same
bytes. Text is real, conversations are not: give your own with `--data` wherever it matters.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from babel import Locale

Row = dict[str, Any]
LOCALES = ("zh", "ja", "ko", "ar", "hi", "ru", "de", "en")
EMOJI = "😀🚀🎉🔥✅❤️🧪"
TOOLS = ("read_file", "search", "run_tests", "apply_patch", "list_folder")


def documentation() -> list[tuple[str, str, str]]:
    """Name, docstring and source of functions and classes of the standard library."""
    found: list[tuple[str, str, str]] = []
    folder = Path(sysconfig.get_path("stdlib"))
    for file in sorted(folder.glob("*.py")) + sorted(folder.glob("*/[a-z]*.py")):
        if "site-packages" in file.parts or "test" in file.parent.name:
            continue
        try:
            text = file.read_text()
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (documented := ast.get_docstring(node)):
                source = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
                found.append((f"{file.stem}.{node.name}", documented, source))
    return found


def chats(choose: random.Random, documents: list[tuple[str, str, str]]) -> Iterator[Row]:
    while True:
        messages: list[Row] = []
        if choose.random() < 0.3:
            messages.append({"role": "system", "content": "You answer questions about Python's standard library."})
        for _ in range(choose.choice((1, 1, 2, 3))):
            name, text, _ = choose.choice(documents)
            asked = choose.choice(("What does {} do?", "Explain {} to me, please.", "How is {} used?"))
            messages.append({"role": "user", "content": asked.format(name)})
            messages.append({"role": "assistant", "content": text})
        yield {"messages": messages}


def traces(choose: random.Random, documents: list[tuple[str, str, str]]) -> Iterator[Row]:
    text = {"type": "object", "properties": {"path": {"type": "string"}, "query": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": name, "description": f"Runs {name}.", "parameters": text}}
        for name in TOOLS
    ]
    while True:
        name, goal, _ = choose.choice(documents)
        messages: list[Row] = [{"role": "system", "content": "You are a careful engineer."}]
        messages.append({"role": "user", "content": f"Find out why {name} fails.\n\n{goal}"})
        for number in range(choose.randint(8, 30)):
            name, text_, source = choose.choice(documents)
            arguments = {"path": f"lib/{name.replace('.', '/')}.py", "query": text_[:80]}
            call = {"type": "function", "id": f"call{number:05}"}
            call |= {"function": {"name": choose.choice(TOOLS), "arguments": arguments}}
            messages.append({"role": "assistant", "content": text_[:400], "tool_calls": [call]})
            tool = call["function"]["name"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": tool, "content": source[:4000]})
        messages.append({"role": "assistant", "content": goal})
        yield {"messages": messages, "tools": tools}


def scripts(choose: random.Random) -> Iterator[Row]:
    words = {name: _words(Locale.parse(name)) for name in LOCALES}
    while True:
        name = choose.choice(LOCALES)
        joint = "，" if name in ("zh", "ja") else " "

        def said(longest: int, name: str = name, joint: str = joint) -> str:
            other = choose.choice(LOCALES) if choose.random() < 0.2 else name
            text = joint.join(choose.choices(words[other], k=choose.randint(2, longest)))
            return text + choose.choice(("", "", choose.choice(EMOJI), "。", "?"))

        messages = []
        for _ in range(choose.choice((1, 2, 3))):
            messages += [{"role": "user", "content": said(20)}, {"role": "assistant", "content": said(120)}]
        yield {"messages": messages}


def _words(locale: Locale) -> list[str]:
    names = [*locale.territories.values(), *locale.languages.values(), *locale.currencies.values()]
    return sorted({str(name) for name in names} | {str(unit) for unit in locale.scripts.values()})


def write_kinds(out: Path, size: int, seed: int = 0) -> dict[str, Path]:
    """Writes a file of each kind; existing ones are kept."""
    out.mkdir(parents=True, exist_ok=True)
    documents = documentation()
    makers = {"chats": chats, "traces": traces, "scripts": lambda choose, _: scripts(choose)}
    files = {name: out / f"{name}.jsonl" for name in makers}
    for name, file in files.items():
        if not file.exists():
            choose = random.Random(f"{seed} {name}")
            with file.open("wb") as rows:
                for row in makers[name](choose, documents):
                    rows.write(orjson.dumps(row) + b"\n")
                    if rows.tell() >= size:
                        break
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=4)
    arguments = parser.parse_args()
    for file in write_kinds(arguments.out, int(arguments.megabytes * 1e6)).values():
        print(file)


if __name__ == "__main__":
    main()
