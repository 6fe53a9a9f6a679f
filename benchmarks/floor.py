"""Measures the slowest chat templates: the speed of `penstock.prepare` with each, relative to Qwen2.5's, same rows.

    python -m benchmarks.floor --model FOLDER --data FILE.jsonl … [--models FOLDER …] [--only NAME …] [--megabytes 16]

Every chat template of PyPI's trl is tried with the tokenizer of `--model` (Qwen2.5), and every folder of `--models`
with its own tokenizer and template. For each, a file is grown from the rows that the template accepts; one worker
prepares it slice by slice, alternating with another that prepares the same file with the template of `--model`, so that
both see the same noise. The first slice counts as start-up. The first conversations of each also go through
transformers, whose tokens must be equal. Target: 0.4 of the CPU-time speed of `--model`. Exits with 1 if it is missed
or a token differs.
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
from benchmarks.meters import Meter, MeterRun, chosen
from benchmarks.models import trl_templates
from benchmarks.oracle import Oracle, has_null_content, token_hash
from benchmarks.prepare import Row, accepted
from penstock.prepare.tokenizer.files import load_tokenizer

FLOOR = 0.4
CHECKED = 40  # conversations compared with transformers


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


def against(model: Path, standard: Path, file: Path) -> tuple[MeterRun, MeterRun]:
    """Prepares a file with two models, one slice each in turn."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=file.parent) as cache:
        meters = [Meter("penstock", str(m), str(file), f"{cache}/{n}") for n, m in enumerate((model, standard))]
        runs = [MeterRun([meter.ready]) for meter in meters]
        while not all("dataset" in run.result for run in runs):
            for meter, run in zip(meters, runs, strict=True):
                if "dataset" not in run.result:
                    run.reports.append(meter.measure())
        for meter in meters:
            meter.close()
    return runs[0], runs[1]


def differing(model: Path, rows: Sequence[Row], folder: Path) -> int:
    """The number of rows whose tokens are not those of transformers."""
    own, oracle = dict(load_tokenizer(model).templates), Oracle(model)
    file = grow_rows(rows, 200_000, folder / "checked.jsonl", seed=1)
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
    """The figures of one model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            kept, _ = accepted(model, rows, folder)
        except ps.PenstockError as error:
            return {"refused_rows": len(rows), "error": str(error)}
        file = grow_rows(kept, size, folder / "mixed.jsonl")
        ours, theirs = against(model, standard, file)
        return {
            "refused_rows": len(rows) - len(kept),
            "differing_rows": differing(model, kept, folder),
            "speed": theirs.cost("cpu") / ours.cost("cpu"),
            "megabytes_per_second": 1e-6 / ours.cost("cpu"),
            "start_up": ours.start_up("cpu"),
            "reference_served": ours.result["reference"],
        }


def shown(name: str, found: dict[str, Any]) -> str:
    if "speed" not in found:
        return f"{name:32}    -   its template refuses all rows"
    reasons = "; ".join(f"{why} {n}" for stage in found["reference_served"].values() for why, n in stage.items())
    differs = f"  {found['differing_rows']} ROWS DIFFER" if found["differing_rows"] else ""
    return f"{name:32} {found['speed']:6.2f} {found['megabytes_per_second']:7.1f} MB/s{differs}  {reasons}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to compare with (Qwen2.5)")
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="folders of other models")
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--only", nargs="+", help="names of templates or models")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    rows, size = material(arguments.data), int(arguments.megabytes * 1e6)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = [*templates(arguments.model, Path(scratch)), *arguments.models]
        for folder in folders:
            if not arguments.only or folder.name in arguments.only:
                found[folder.name] = measure(folder.absolute(), arguments.model.absolute(), rows, size)
                print(shown(folder.name, found[folder.name]), flush=True)
    slow = sorted((one["speed"], name) for name, one in found.items() if one.get("speed", 1.0) < FLOOR)
    wrong = [name for name, one in found.items() if one.get("differing_rows")]
    worst = min((one["speed"], name) for name, one in found.items() if "speed" in one)
    print(f"slowest: {worst[0]:.2f} ({worst[1]}); below {FLOOR}: {', '.join(name for _, name in slow) or 'none'}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"templates": found, "floor": FLOOR}, indent=1))
    return 1 if slow or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
