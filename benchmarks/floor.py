"""Measures the slowest chat templates and kinds of text: the speed of `penstock.prepare`, relative to an ordinary run.

    python -m benchmarks.floor --model FOLDER --data FILE.jsonl … [--models FOLDER …] [--only NAME …] [--megabytes 16]
    python -m benchmarks.floor --model FOLDER --texts FOLDER … [--only NAME …] [--megabytes 16]

Every chat template of PyPI's trl is tried with the tokenizer of `--model` (Qwen2.5), and every folder of `--models`
with its own tokenizer and template, on files grown from the rows that the template accepts; the ordinary run is that of
`--model` on the same file. With `--texts`, folders of byte-level models are tried on each kind of text of
`benchmarks.kinds` instead; there the ordinary run is that of `--model` on plain English. One worker prepares a file
slice by slice, alternating with another for the ordinary run, so that both see the same noise. The first slices count
as start-up; what follows the last is not in the speed either. The first conversations of each also go through
transformers, whose tokens must be equal. Targets: 0.4 of the ordinary run's CPU-time speed for templates, 0.6 for
texts. Exits with 1 if one is missed or a token differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from benchmarks.clock import DATE
from benchmarks.grow import MATERIAL, grow_rows, material
from benchmarks.kinds import write_texts
from benchmarks.meters import Meter, MeterRun, chosen
from benchmarks.models import trl_templates
from benchmarks.oracle import Oracle, has_null_content, token_hash
from benchmarks.prepare import Row, accepted
from penstock.prepare.tokenizer.files import load_tokenizer

FLOORS = {"templates": 0.4, "texts": 0.6}
CHECKED, CHECKED_BYTES = 40, 200_000  # conversations compared with transformers


def templates(model: Path, out: Path) -> Iterator[Path]:
    """Writes a folder for each of trl's templates, with the model's tokenizer."""
    for name, text in trl_templates().items():
        folder = out / name
        folder.mkdir()
        config = json.loads((model / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        shutil.copyfile(model / "tokenizer.json", folder / "tokenizer.json")
        (folder / "chat_template.jinja").write_text(text)
        yield folder


def against(*jobs: tuple[Path, Path]) -> list[MeterRun]:
    """Prepares files with models, one slice each in turn."""
    with tempfile.TemporaryDirectory(prefix="bench-") as cache:
        meters = [Meter("penstock", str(model), str(file), f"{cache}/{n}") for n, (model, file) in enumerate(jobs)]
        runs = [MeterRun([meter.ready]) for meter in meters]
        while not all("dataset" in run.result for run in runs):
            for meter, run in zip(meters, runs, strict=True):
                if "dataset" not in run.result:
                    run.reports.append(meter.measure())
        for meter in meters:
            meter.close()
    return runs


def differing(model: Path, file: Path, folder: Path) -> int:
    """The number of rows whose tokens are not those of transformers."""
    own, oracle = dict(load_tokenizer(model).templates), Oracle(model)
    dataset = ps.prepare(
        file, tokenizer=str(model), cache=folder / "checked", workers=1, dropped_tool_calls="keep",
        on_bad_row="quarantine", date=DATE, progress=False,
    )  # fmt: skip
    found = 0
    for number in range(min(CHECKED, len(dataset))):
        conversation = dataset.conversation(number)
        if not has_null_content(conversation):
            text = oracle.render(conversation, chosen(own, conversation))[0]
            ids = oracle.tokenizer.encode(text, add_special_tokens=False)
            found += token_hash(np.asarray(ids)) != token_hash(dataset.input_ids(number))
    return found


def measure(model: Path, standard: Path, rows: Sequence[Row], size: int) -> dict[str, Any]:
    """The figures of one model on rows."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            kept, _ = accepted(model, rows, folder)
        except ps.PenstockError as error:
            return {"refused_rows": len(rows), "error": str(error)}
        file = grow_rows(kept, size, folder / "mixed.jsonl")
        checked = grow_rows(kept, CHECKED_BYTES, folder / "checked.jsonl", seed=1)
        wrong = differing(model, checked, folder)
        return {
            "refused_rows": len(rows) - len(kept),
            "differing_rows": wrong,
            **figures(*against((model, file), (standard, file))),
        }


def measure_text(model: Path, file: Path, standard: Path, plain: Path) -> dict[str, Any]:
    """The figures of one model on a kind of text."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with file.open("rb") as lines:
            (folder / "checked.jsonl").write_bytes(b"".join(lines.readlines(CHECKED_BYTES)))
        wrong = differing(model, folder / "checked.jsonl", folder)
    return {"differing_rows": wrong, **figures(*against((model, file), (standard, plain)))}


def figures(ours: MeterRun, ordinary: MeterRun) -> dict[str, Any]:
    return {
        "speed": ordinary.cost("cpu") / ours.cost("cpu"),
        "megabytes_per_second": 1e-6 / ours.cost("cpu"),
        "start_up": ours.start_up("cpu"),
        "end": ours.end("cpu"),
        "reference_served": ours.result["reference"],
    }


def shown(name: str, found: dict[str, Any]) -> str:
    if "speed" not in found:
        return f"{name:48}    -   its template refuses all rows"
    reasons = "; ".join(f"{why} {n}" for stage in found["reference_served"].values() for why, n in stage.items())
    differs = f"  {found['differing_rows']} ROWS DIFFER" if found["differing_rows"] else ""
    return f"{name:48} {found['speed']:6.2f} {found['megabytes_per_second']:7.1f} MB/s{differs}  {reasons}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to compare with (Qwen2.5)")
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="folders of other models")
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="folders of models to try kinds of text with")
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--only", nargs="+", help="names of templates, models or kinds of text")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    model, size = arguments.model.absolute(), int(arguments.megabytes * 1e6)
    rows, only = [] if arguments.texts else material(arguments.data), arguments.only or ()
    found: dict[str, dict[str, Any]] = {"templates": {}, "texts": {}}

    def add(group: str, name: str, one: dict[str, Any]) -> None:
        found[group][name] = one
        print(shown(name, one), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({**found, "floors": FLOORS}, indent=1))

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for tried in [] if arguments.texts else [*templates(model, folder), *arguments.models]:
            if not only or tried.name in only:
                add("templates", tried.name, measure(tried.absolute(), model, rows, size))
        files = write_texts(folder, size) if arguments.texts else {}
        for tried in arguments.texts:
            for kind, file in files.items():
                if not only or kind in only:
                    one = measure_text(tried.absolute(), file, model, next(iter(files.values())))
                    add("texts", f"{kind}, {tried.name}", one)
    missed = [report(group, found[group], least) for group, least in FLOORS.items()]
    return 1 if any(missed) else 0


def report(group: str, found: dict[str, Any], least: float) -> bool:
    """Prints the slowest of a group; returns whether one is below the target or wrong."""
    speeds = sorted((one["speed"], name) for name, one in found.items() if "speed" in one)
    slow = [name for speed, name in speeds if speed < least]
    wrong = [name for name, one in found.items() if one.get("differing_rows")]
    if speeds:
        print(f"{group}, slowest: {speeds[0][0]:.2f} ({speeds[0][1]}); below {least}: {'; '.join(slow) or 'none'}")
    return bool(slow or wrong)


if __name__ == "__main__":
    sys.exit(main())
