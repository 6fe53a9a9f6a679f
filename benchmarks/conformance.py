"""Compares Penstock with transformers, row by row: tokens always, masks where the template has {% generation %}.

    python -m benchmarks.conformance --tokenizer FOLDER … --data FILE.jsonl … [--template FILE.jinja …] [--sample N]

Templates default to the tokenizer's own and all of PyPI's `trl`. For each template and tokenizer it prints how many
rows transformers renders, how many have equal tokens, how many have equal masks, what was refused, and which engines
served. Exit code 1 unless all are equal and none is refused.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from benchmarks import models
from benchmarks.masks import compare_masks, mask_report
from benchmarks.meters import reference_tokenizer
from penstock.build.options import prepare_options
from penstock.build.prepare import Builder
from penstock.sources import model_folder


@dataclass
class Tally:
    """One template with one tokenizer over all data."""

    rows: int = 0
    not_rendered: int = 0  # transformers refuses the conversation
    refused: int = 0  # transformers renders it, Penstock does not
    equal: int = 0
    masks: int = 0
    masks_equal: int = 0
    masks_theirs_wrong: int = 0  # equal once the known faults of transformers' own mask are repaired
    engines: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)

    @property
    def perfect(self) -> bool:
        return (
            self.equal == self.rows - self.not_rendered
            and not self.refused
            and self.masks_equal + self.masks_theirs_wrong == self.masks
        )


def trl_templates() -> dict[str, str]:
    """The chat templates that PyPI's trl carries."""
    return {f"trl/{name}": text for name, text in models.trl_templates().items()}


def groups(data: list[Path], sample: int | None, folder: Path) -> list[list[str]]:
    """Files that are read the same way, so that one prepare serves them; cut to a sample of their rows."""
    kinds: dict[bool, list[str]] = {}
    for path in data:
        lines = path.read_bytes().splitlines(keepends=True)
        if sample is not None and sample < len(lines):
            lines = random.Random(0).sample(lines, sample)
        target = folder / path.name
        target.write_bytes(b"".join(lines))
        kinds.setdefault(b'"chosen"' in lines[0], []).append(str(target))
    return list(kinds.values())


def compare(data: list[str], tokenizer: Path, oracle: Any, template: str, cache: Path, tally: Tally) -> None:
    """Prepare some files and compare every row of them."""
    file = cache / "template.jinja"
    file.write_text(template)
    options = prepare_options({
        "tokenizer": tokenizer, "template": file, "cache": cache, "workers": 1, "on_bad_row": "quarantine",
        "dropped_tool_calls": "keep",
    })  # fmt: skip
    builder = Builder(data, options, None)
    outcome = builder.run()
    for stage, why in outcome.progress.engines.items():
        tally.engines.update({f"{stage}: {reason}": n for reason, n in why.items()})
    dataset = ps.open(outcome.dataset.path)
    masks = view_masks(dataset) if "generation %}" in template and not dataset.is_preference else None
    for number, side in enumerate(dataset.origin.conversations()):
        tally.rows += 1
        compare_row(dataset, number, side, oracle, template, masks, tally)
    for entry in rejected(outcome.quarantine):
        tally.rows += 1
        if renders_raw(entry, oracle, template):
            tally.refused += 1
            tally.differing.append(f"refused {entry['where']}: {entry['reason']}")
        else:
            tally.not_rendered += 1


def view_masks(dataset: ps.Dataset) -> dict[int, Any]:
    """Masks of all_assistant_messages by number of the example; examples without a trained token are missing."""
    view = dataset.view(max_length=None, regions_unknown="drop")
    return {int(number): view.example(k).loss_mask for k, number in enumerate(view.numbers)}


def compare_row(
    dataset: ps.Dataset, number: int, side: dict[str, Any], oracle: Any, template: str, masks: Any, tally: Tally
) -> None:
    """Tokens of one conversation, and its mask."""
    try:
        expected = oracle.apply_chat_template(
            side["messages"], tools=side["tools"], chat_template=template, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=masks is not None, **side["variables"],
        )  # fmt: skip
    except Exception as error:
        tally.differing.append(f"transformers refuses what Penstock rendered: {error}")
        return
    ids = dataset.input_ids(number)
    if ids.tolist() == list(expected["input_ids"]):
        tally.equal += 1
    else:
        tally.differing.append(f"tokens of {dataset.locate(number)}")
    if masks is not None:
        tally.masks += 1
        theirs = np.asarray(expected["assistant_masks"], bool)
        ours = masks.get(number, np.zeros(len(ids), bool))
        if np.array_equal(ours, theirs):
            tally.masks_equal += 1
        elif np.array_equal(ours, repaired_mask(side, oracle, template, expected)):
            tally.masks_theirs_wrong += 1
        else:
            tally.differing.append(f"mask of {dataset.locate(number)}")


def repaired_mask(side: dict[str, Any], oracle: Any, template: str, expected: Any) -> Any:
    """transformers' mask without its known faults: every token that has a character in a tagged block is trained.

    An empty block trains a token that lies across it; of a last character split over several tokens only the first is
    trained; a block whose first character has no token of its own leaves the rest of the row untrained.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    _, spans = render_jinja_template(
        [side["messages"]], tools=side["tools"], chat_template=template, return_assistant_tokens_mask=True,
        **oracle.special_tokens_map, **side["variables"],
    )  # fmt: skip
    mask = np.zeros(len(expected["input_ids"]), bool)
    for token in range(len(mask)):
        own = expected.token_to_chars(token)
        mask[token] = own is not None and any(max(own.start, start) < min(own.end, end) for start, end in spans[0])
    return mask


def rejected(path: Path | None) -> list[dict[str, Any]]:
    """Rows set aside."""
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path else []


def renders_raw(entry: dict[str, Any], oracle: Any, template: str) -> bool:
    """Would transformers have rendered the row as it stands?"""
    row = json.loads(entry["data"])
    prompt = row.get("messages") or row.get("prompt")
    sides = [prompt + row[k] for k in ("chosen", "rejected")] if "chosen" in row else [prompt]
    try:
        for side in sides:
            oracle.apply_chat_template(side, tools=row.get("tools"), chat_template=template, tokenize=False)
    except Exception:
        return False
    return True


def chosen_templates(arguments: argparse.Namespace, tokenizer: Path) -> dict[str, str]:
    """The templates to compare, by name."""
    return {p.stem: p.read_text() for p in arguments.template or []} or {
        **{f"own/{n}": t for n, t in model_folder.load(tokenizer).templates.items()},
        **({} if arguments.own else trl_templates()),
    }


def masks_against(arguments: argparse.Namespace) -> int:
    """Compare masks and segments with another checkout's."""
    tallies = {}
    with tempfile.TemporaryDirectory() as folder:
        data = groups(arguments.data, arguments.sample, Path(folder))
        for tokenizer in arguments.tokenizer:
            templates = chosen_templates(arguments, tokenizer)
            found = compare_masks(arguments.masks_against, tokenizer, templates, data, arguments.timeout)
            tallies.update({f"{tokenizer.name} × {name}": tally for name, tally in found.items()})
    if arguments.json:
        arguments.json.write_text(json.dumps(mask_report(tallies), indent=1))
    good = all(tally.perfect for tally in tallies.values())
    print("all equal" if good else "NOT all equal")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", nargs="+", type=Path, required=True, help="folders with tokenizer.json")
    parser.add_argument("--data", nargs="+", type=Path, required=True)
    parser.add_argument("--template", nargs="*", type=Path, help="templates; default: the tokenizer's own and trl's")
    parser.add_argument("--own", action="store_true", help="the tokenizer's own templates alone")
    parser.add_argument("--sample", type=int, help="rows per file; default: all")
    parser.add_argument("--masks-against", type=Path, help="compare masks with this other checkout's instead")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a checkout may take for a template's files")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    if arguments.masks_against:
        return masks_against(arguments)
    results: dict[str, Any] = {}
    good = True
    print(f"{'tokenizer':16} {'template':36} {'rows':>7} {'rendered':>8} {'equal':>7} {'refused':>7} {'masks':>11} why")
    for folder in arguments.tokenizer:
        oracle = reference_tokenizer(folder)
        for name, template in chosen_templates(arguments, folder).items():
            tally = Tally()
            with tempfile.TemporaryDirectory() as cache:
                for data in groups(arguments.data, arguments.sample, Path(cache)):
                    compare(data, folder, oracle, template, Path(cache), tally)
            good &= tally.perfect
            rendered = tally.rows - tally.not_rendered
            masks = f"{tally.masks_equal}+{tally.masks_theirs_wrong}/{tally.masks}" if tally.masks else "-"
            why = "; ".join(f"{reason} {n}" for reason, n in tally.engines.most_common(3)) or "fast"
            print(
                f"{folder.name:16} {name:36} {tally.rows:7} {rendered:8} {tally.equal:7} {tally.refused:7} {masks:>11}",
                why,
            )
            for line in tally.differing[:3]:
                print(f"    {line}")
            sys.stdout.flush()
            results[f"{folder.name} × {name}"] = {**tally.__dict__, "engines": dict(tally.engines)}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    print("all equal" if good else "NOT all equal")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
