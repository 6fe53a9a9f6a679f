"""Writes three kinds of conversations from text that every Python installation has, for benchmarks without data.

    python -m benchmarks.kinds --out FOLDER [--megabytes 4]

`chats` are short questions and answers from the documentation of the standard library; `traces` are long agent runs
with tool definitions, calls and results, which are source code; `scripts` mix Chinese, Japanese, Korean, Arabic, Hindi,
Russian, German and emoji, from the names in Unicode's CLDR (package `babel`). `write_texts` writes one kind of text a
file, usual and unusual, for `benchmarks.floor`. The same Python and babel give the same bytes. Text is real,
conversations are not: give your own with `--data` wherever it matters.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from babel import Locale

Row = dict[str, Any]
Documents = Sequence[tuple[str, str, str]]
Text = Callable[[random.Random], str]
LOCALES = ("zh", "ja", "ko", "ar", "hi", "ru", "de", "en")
EMOJI = "😀🚀🎉🔥✅❤️🧪"
NEW_EMOJI = "🩵🩶🩷🫨🫷🫸🪭🪮🪯🪻🪼🪽🪿🫎🫏🫚🫛🛜🫩🫆🪾🫜🪉🪏🫟"  # of Unicode 15 and 16
UNICODE_17 = range(0x323B0, 0x33479)  # CJK extension J, which fast engines and the reference split differently
NUKTA = "".join(map(chr, range(0x958, 0x960)))
DECOMPOSED = 0.3  # of the vowels
LONG_ROW = 1_000_000  # characters
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


def chats(choose: random.Random, documents: Documents) -> Iterator[Row]:
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


def traces(choose: random.Random, documents: Documents) -> Iterator[Row]:
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


def texts(documents: Documents) -> dict[str, Text]:
    """What an assistant says, by kind of text; the first is plain English."""

    def plain(choose: random.Random) -> str:
        return choose.choice(documents)[1]

    def followed(words: Sequence[str]) -> Text:
        return lambda choose: f"{plain(choose)} {choose.choice(words)}"

    def named(*locales: str, joint: str = " ", form: str = "NFC") -> Text:
        words = [word for name in locales for word in _words(Locale.parse(name))]
        return lambda choose: unicodedata.normalize(form, joint.join(choose.choices(words, k=choose.randint(2, 120))))

    devanagari = named("hi", "mr", "ne")

    def hindi(choose: random.Random) -> str:
        """With the letters that keyboards type, which NFC takes apart."""
        text = devanagari(choose)
        for letter in NUKTA:
            text = text.replace(unicodedata.normalize("NFD", letter), letter)
        return text

    def decomposed(choose: random.Random) -> str:
        return re.sub("[aeiou]", lambda m: m[0] + "\u0301" * (choose.random() < DECOMPOSED), plain(choose))

    def table(choose: random.Random) -> str:
        return "\n".join(str(choose.randrange(1000)) for _ in range(choose.randint(50, 400)))

    def long(choose: random.Random) -> str:
        return "\n\n".join(choose.choices([text for _, text, _ in documents], k=LONG_ROW // _mean(documents)))

    french = [name for name in _words(Locale.parse("fr")) if unicodedata.normalize("NFD", name) != name]
    return {
        "English": plain,
        "an NFD word per message": followed([unicodedata.normalize("NFD", name) for name in french]),
        "30% of vowels decomposed": decomposed,
        "Vietnamese": named("vi"),
        "Vietnamese, NFD": named("vi", form="NFD"),
        "Hindi, Marathi, Nepali": hindi,
        "Chinese": named("zh", "zh_Hant", joint="，"),
        "a new emoji per message": followed(NEW_EMOJI),
        "a Unicode 17 character per message": followed([chr(point) for point in UNICODE_17]),
        "code": lambda choose: choose.choice(documents)[2],
        "tables, a token per line": table,
        "rows of 1 MB": long,
    }


def _mean(documents: Documents) -> int:
    return sum(len(text) for _, text, _ in documents) // len(documents)


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


def write_texts(out: Path, size: int, seed: int = 0) -> dict[str, Path]:
    """Writes a file of questions and answers for each kind of text."""
    documents = documentation()
    files: dict[str, Path] = {}
    for number, (kind, answer) in enumerate(texts(documents).items()):
        choose = random.Random(f"{seed} {kind}")
        files[kind] = out / f"text{number:02}.jsonl"
        with files[kind].open("wb") as rows:
            while rows.tell() < size:
                asked = {"role": "user", "content": f"What does {choose.choice(documents)[0]} do?"}
                said = {"role": "assistant", "content": answer(choose)}
                rows.write(orjson.dumps({"messages": [asked, said]}) + b"\n")
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
