"""`--turns faithful` against transformers: is every assistant turn trained in the context that inference shows?

    python -m benchmarks.faithful --data FOLDER --model FOLDER [--rows N] [--share S] [TEMPLATE | FILE.jinja …]

Takes rows with several turns from JSON-lines files of a folder, adds reasoning to a share of their answers, prepares
them with each of trl's chat templates and those in `benchmarks/chat_templates` (or those named), and checks every
assistant turn of every row: the tokens before it must be those of `apply_chat_template(messages[:i],
add_generation_prompt=True)` (its `render_jinja_template`, then the tokenizer), and what is trained must be what
`messages[:i+1]` adds. A turn is trained in exactly one example, or in none, and then a note on its row says why. Prints
a line per template: turns, chains, refused, wrong, and the tokens of all chains (`run`) and those stored, as multiples
of the tokens of the rows' last chains. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from benchmarks.clock import DATE, stop_clock
from benchmarks.models import add_markers, trl_templates
from benchmarks.oracle import reference_tokenizer
from penstock.errors import PenstockError
from penstock.load.options import UnknownRegions, ViewOptions
from penstock.load.view import View
from penstock.prepare.chat.conversation import Role
from penstock.prepare.faithful.prefixes import roots, sizes

FILES = (
    "tau_airline_a",
    "swe_trajs_a",
    "sgd_dev_a",
    "smile_zh_2000",
    "lf_reason_tool_use",
    "lf_glaive_toolcall_en_demo",
)
REASONING = ("Let me see.", "Hm …\nSo 2 + 2 = 4.", "考虑一下")
BOS = "<s>"
UNSEEN = Path(__file__).parent / "chat_templates"  # written for this check, in the style of models that trl lacks
REASONS = ("turn_refused", "turn_unsettled", "turn_straddles", "header_unknown", "span_unowned", "trailing_messages")
MARKERS = re.compile(
    r"<\|[\w/]+\|?>|<[\w/]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]{2,}\]|<(?:start|end)_of_turn>|</?s>|<[a-z]+_id>"
)


def material(data: Path, rows: int, share: float, target: Path) -> None:
    """Rows with several turns, some answers with reasoning, as one file."""
    chance = random.Random(0)
    lines = []
    for name in FILES:
        found = [json.loads(line) for line in (data / f"{name}.jsonl").read_bytes().splitlines()]
        for row in chance.sample(found, min(rows, len(found))):
            messages = [dict(m) for m in row.get("messages") or row.get("conversations") or []]
            if "from" in (messages or [{}])[0]:
                names = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "call"}
                messages = [{"role": names.get(m["from"], m["from"]), "content": m["value"]} for m in messages]
            messages = [m for m in messages if m["role"] in ("system", "user", "assistant", "tool")]
            for message in messages:
                if message["role"] == "assistant" and chance.random() < share:
                    message["reasoning_content"] = chance.choice(REASONING)
            if sum(m["role"] == "assistant" for m in messages) > 1:
                lines.append(json.dumps({"messages": messages, "tools": row.get("tools")}, ensure_ascii=False))
    target.write_text("\n".join(lines) + "\n")


def templates(names: Sequence[str]) -> dict[str, str]:
    """Templates by name or path; without any, all that are known."""
    known = {**trl_templates(), **{path.stem: path.read_text() for path in sorted(UNSEEN.glob("*.jinja"))}}
    return {Path(name).stem: known.get(name) or Path(name).read_text() for name in names} if names else known


def with_markers(model: Path, template: str, target: Path) -> Path:
    """The model with the markers of a template as special tokens, as the template's own tokenizer has them."""
    shutil.copytree(model, target)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    text = (target / "tokenizer.json").read_text()
    there = {token["content"] for token in json.loads(text)["added_tokens"]}
    wanted = {*MARKERS.findall(template), BOS}
    add_markers(target / "tokenizer.json", tuple(sorted(wanted - there)))
    config = json.loads((target / "tokenizer_config.json").read_text())
    config["bos_token"] = config.get("bos_token") or BOS  # which some templates can't do without
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


@dataclass
class Result:
    """What became of the turns of one template."""

    rows: int = 0
    turns: int = 0
    chains: int = 0
    trained: int = 0
    wrong: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # of turns that are not trained


class Truth:
    """What transformers says about turns."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        stop_clock()
        self._tokenizer, self._template = tokenizer, template

    def text(self, conversation: dict[str, Any], count: int, prompt: bool) -> str | None:
        """The text of the first messages; None where the template refuses them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._tokenizer.special_tokens_map, **conversation["variables"]}
        try:
            texts, _ = render_jinja_template(
                [conversation["messages"][:count]],
                tools=conversation["tools"],
                chat_template=self._template,
                add_generation_prompt=prompt,
                **variables,
            )
        except Exception:
            return None
        return str(texts[0])

    def ids(self, text: str) -> list[int]:
        """Its tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def trained_turns(ds: Any) -> Iterator[tuple[int, list[tuple[int, int, list[int], list[int]]]]]:
    """Of each row: its first example, and (message, example, tokens before, tokens trained) of its turns."""
    view = View(ds, ViewOptions(regions_unknown=UnknownRegions.DROP))  # may be empty
    rows: dict[tuple[int, int], tuple[int, list[tuple[int, int, list[int], list[int]]]]] = {}
    for number in range(ds.shards.total):
        place = ds.locate(number)
        rows.setdefault((place.source, place.row), (number, []))
    for item in range(len(view)):
        example = view.example(item)
        owners = np.repeat(np.arange(len(example.runs.roles)), example.runs.lengths)
        messages = np.where(example.runs.roles == Role.ASSISTANT, example.runs.messages, -1)[owners]
        for message in np.unique(messages[example.loss_mask]).tolist():
            own = np.flatnonzero(example.loss_mask & (messages == message))
            before, trained = example.input_ids[: own[0]].tolist(), example.input_ids[own].tolist()
            rows[example.row.source, example.row.row][1].append((message, item, before, trained))
    yield from rows.values()


def check(ds: Any, truth: Truth) -> Result:
    """Compare every turn with transformers."""
    result = Result(chains=ds.shards.total, notes=Counter(ds.ledger.notes))
    noted = {name: set(ds.rows_with(name).tolist()) for name in result.notes if name in REASONS}
    for first, turns in trained_turns(ds):
        conversation = ds.conversation(first)
        result.rows += 1
        where = [m for m, message in enumerate(conversation["messages"]) if message["role"] == "assistant"]
        result.turns += len(where)
        counts = Counter(message for message, *_ in turns)
        result.wrong += [f"{ds.locate(first)} message {m} is trained {n} times" for m, n in counts.items() if n > 1]
        for message, _, before, trained in turns:
            result.trained += 1
            reason = difference(truth, conversation, message, before, trained)
            if reason:
                result.wrong.append(f"{ds.locate(first)} message {message}: {reason}")
        refused = len(where) - len(counts)
        why = [name for name, rows in noted.items() if first in rows]
        if refused and not why:
            result.wrong.append(f"{ds.locate(first)}: {refused} turns are not trained, and no note says why")
        result.reasons.update({" or ".join(why): refused} if refused else {})
    return result


def difference(truth: Truth, conversation: dict[str, Any], message: int, before: list[int], trained: list[int]) -> str:
    """What is not as transformers has it, or nothing."""
    prompt, turn = truth.text(conversation, message, True), truth.text(conversation, message + 1, False)
    if prompt is None or turn is None:
        return "transformers refuses it"
    if truth.ids(prompt) != before:
        return f"the prompt ends …{truth.decode(before)[-60:]!r}, not …{prompt[-60:]!r}"
    said = truth.decode(trained)
    if turn.startswith(prompt):
        answer = turn[len(prompt) :]
        return (
            ""
            if answer.startswith(said) and not answer[len(said) :].strip()
            else f"{said[:80]!r} is not {answer[:80]!r}"
        )
    return "" if turn.rstrip().endswith(said.rstrip()) else f"{said[:80]!r} does not end {turn[-80:]!r}"


def costs(ds: Any) -> tuple[float, float]:
    """Tokens of all chains, and those stored, as multiples of the tokens of roots."""
    shards = [ds.shards.columns(number) for number in range(len(ds.shards))]
    last = sum(int(sizes(columns)[np.unique(roots(columns))].sum()) for columns in shards)
    return ds.tokens / max(last, 1), sum(int(columns.id_offsets[-1]) for columns in shards) / max(last, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", nargs="*", help="default: all of trl's, and our own")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with tokenizer.json and tokenizer_config.json"
    )
    parser.add_argument("--rows", type=int, default=10, help="of each file")
    parser.add_argument("--share", type=float, default=0.4, help="of answers that get reasoning")
    parser.add_argument("--slow", action="store_true", help="the reference engines alone")
    arguments = parser.parse_args()
    known = templates(arguments.templates)
    total: Counter[str] = Counter()
    widths = {"rows": 5, "turns": 6, "chains": 6, "trained": 7, "refused": 7, "wrong": 5, "run": 5, "stored": 6}
    print(" ".join([f"{'template':36}", *(f"{name:>{width}}" for name, width in widths.items())]))
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        material(arguments.data, arguments.rows, arguments.share, rows)
        for name in sorted(known):
            template = Path(folder, f"{name}.jinja")
            template.write_text(known[name])
            model = with_markers(arguments.model, known[name], Path(folder, f"model-{name}"))
            try:
                ds = ps.prepare(
                    rows, tokenizer=str(model), template=str(template), cache=Path(folder, "cache"), date=DATE,
                    turns="faithful", regions="structure", workers="1", dropped_tool_calls="keep",
                    on_bad_row="quarantine", fast=not arguments.slow,
                )  # fmt: skip
            except PenstockError as error:
                print(f"{name:36} {error}")
                continue
            result = check(ds, Truth(reference_tokenizer(model), known[name]))
            run, stored = costs(ds)
            refused = result.turns - result.trained
            print(
                f"{name:36} {result.rows:5} {result.turns:6} {result.chains:6} {result.trained:7} {refused:7} "
                f"{len(result.wrong):5} {run:5.2f} {stored:6.2f}  {dict(result.reasons) or ''}",
                flush=True,
            )
            for line in result.wrong[:3]:
                print("    " + line)
            total.update(
                turns=result.turns, trained=result.trained, refused=refused, wrong=len(result.wrong), templates=1
            )
    print(dict(total))
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
