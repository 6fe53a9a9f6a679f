"""Measures the speed of `penstock.prepare` on a grid of models, relative to transformers and to the fast encoder alone.

    python -m benchmarks.prepare --models FOLDER … --data FILE.jsonl … [--traces FILE.jsonl …] [--megabytes 200]

A model is a folder with tokenizer.json and a chat template; `benchmarks.models` builds them. For each, data is grown
from the rows that its template accepts, with seeded word shuffles. While one worker prepares it, the run stops the
clock every few slices and lets transformers (row by row, with masks) process a range of the same file, and gigatoken
(alone) the rendered text of what was prepared since the last pause, so that all three see the same noise. The encoder
too sees every text once, in the same order: its first pass is the limit. Every row that transformers encoded is
compared token by token, always with the model's own template. Start-up (interpreter, imports, engines, calibration, up
to the second slice) and the end (what follows the last slice) are reported separately, and so are the long tool traces
of `--traces`, at half the size. The first model also shows how the cost scales with workers and with the length
of conversations (`scaling`; skip it with `--rounds 0`).

Speeds and ratios are in CPU time, user and system, over all threads of a process: what one core can do. The JSON also
has wall time. Targets: 22 times transformers on byte-level models that gigatoken supports and 8 times on the others, on
traces too; 0.7 of the encoder's first pass (gigatoken, or splintr in its place); two workers reach 0.8 of the speed-up
of two copies of a plain loop; 400-message conversations cost at most 1.3 times as much per byte as 4-message ones.
Exits with 1 if a target is missed or a token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import xxhash
from jinja2 import TemplateError

import penstock as ps
from benchmarks.grow import MATERIAL, grow_rows, material
from benchmarks.meters import Meter, chosen, timed
from benchmarks.models import trl_templates
from benchmarks.oracle import Oracle, token_hash
from benchmarks.scaling import long_conversations, speed_up
from penstock.prepare.tokenizer.files import load_tokenizer

PEER_BYTES = 700_000
TIMES, SHARE = 22.0, 0.7  # targets, relative to transformers and to the encoder's first pass
FIRST_BYTES = 8_000_000  # about two slices
SLOWER = ("gemma3", "mistral_v0_1", "yi", "command_r_plus", "t5")  # models with slower encoders
SLOWER_TIMES = 8.0
Row = dict[str, Any]


def accepted(model: Path, rows: Sequence[Row], folder: Path) -> tuple[list[Row], list[Row]]:
    """The rows that the model's template accepts, and their conversations."""
    file, cache = folder / "material.jsonl", folder / "material"
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    dataset = ps.prepare(
        file, tokenizer=str(model), cache=cache, workers=1, dropped_tool_calls="keep", on_bad_row="quarantine"
    )
    numbers = range(len(dataset))
    return [rows[dataset.locate(k).row] for k in numbers], [dataset.conversation(k) for k in numbers]


def tagged_template(oracle: Oracle, own: str, conversations: Sequence[Row]) -> tuple[str, str]:
    """A template with {% generation %} that renders every conversation like the model's own, and its name.

    It is the model's own, one of trl's, or its own with an empty tag, for which transformers does the same mask work.
    """
    expected = [oracle.render(conversation, own)[0] for conversation in conversations]
    for name, template in {"own": own, **trl_templates()}.items():
        if "generation %}" not in template:
            continue
        try:
            pairs = zip(conversations, expected, strict=True)
            if all(oracle.render(conversation, template)[0] == text for conversation, text in pairs):
                return name, template
        except (TemplateError, TypeError):
            continue  # another model's template may reject the conversation
    return "own, with an empty tag", own + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"


def against(file: Path, model: Path, peer: Meter, encoder: Meter, pauses: int) -> dict[str, Any]:
    """Runs one worker on a file, with transformers and gigatoken on ranges of it in between."""
    size, encoded = file.stat().st_size, FIRST_BYTES
    encoder.measure(path=str(file), offset=0, bytes=encoded)  # counts as start-up, as the worker's first slices do
    theirs: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []

    def pause(seen: int) -> None:
        nonlocal encoded
        if seen <= encoded:
            return  # within the first slices
        theirs.append(peer.measure(path=str(file), offset=max(0, min(seen, size - PEER_BYTES)), bytes=PEER_BYTES))
        alone.append(encoder.measure(path=str(file), offset=encoded, bytes=seen - encoded))
        encoded = seen

    with tempfile.TemporaryDirectory(prefix="bench-", dir=file.parent) as cache:
        run = timed(file, model, Path(cache), size // (pauses + 1), pause)
        equal, compared = same_tokens(ps.open(run.result["dataset"]), file, theirs)
    kinds = ("cpu", "seconds")
    ours = {kind: run.cost(kind) for kind in kinds}
    others = {
        name: {kind: sum(a[kind] for a in answers) / sum(a["bytes"] for a in answers) for kind in kinds}
        for name, answers in (("transformers", theirs), ("gigatoken", alone))
    }
    return {
        "megabytes": size / 1e6,
        "rows": run.result["rows"],
        "tokens": run.result["tokens"],
        "start_up": {kind: run.start_up(kind) for kind in kinds},
        "end": {kind: run.end(kind) for kind in kinds},
        "megabytes_per_second": {
            name: {kind: 1e-6 / cost for kind, cost in costs.items()}
            for name, costs in {"penstock": ours, **others}.items()
        },
        "times_transformers": {kind: others["transformers"][kind] / ours[kind] for kind in kinds},
        "share_of_first_pass": {kind: others["gigatoken"][kind] / ours[kind] for kind in kinds},
        "compared_rows": compared,
        "equal_rows": equal,
        "other_text_rows": sum(a["other_text"] for a in theirs),
        "reference_served": run.result["reference"],
        "mismatches": run.result["mismatches"],
    }


def same_tokens(dataset: ps.Dataset, file: Path, theirs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """The number of rows encoded by transformers that have the same tokens here, and their total."""
    expected = {line: ids for answer in theirs for line, ids in answer["rows"]}
    with file.open("rb") as lines:
        hashes = enumerate(xxhash.xxh3_128_hexdigest(line.rstrip(b"\n")) for line in lines)
        rows = {number: expected[line] for number, line in hashes if line in expected}
    found = {row: k for k in range(len(dataset)) if (row := dataset.locate(k).row) in rows}
    equal = sum(token_hash(dataset.input_ids(k)).hex() == rows[row] for row, k in found.items())
    return equal, len(rows)


def measure(model: Path, rows: Sequence[Row], traces: Sequence[Row], size: int, pauses: int) -> dict[str, Any]:
    """Measures one model on mixed rows and on traces."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        kept, conversations = accepted(model, rows, folder)
        kept_traces, more = accepted(model, traces, folder) if traces else ([], [])
        templates = load_tokenizer(model).templates
        oracle = Oracle(model)
        equivalent = {
            name: tagged_template(oracle, text, [c for c in conversations + more if chosen(templates, c) == text])
            for name, text in templates.items()
            if name in ("default", "tool_use")
        }
        tagged = folder / "tagged.json"
        tagged.write_text(json.dumps({name: text for name, (_, text) in equivalent.items()}))
        peer, encoder = Meter("transformers", str(model), str(tagged)), Meter("gigatoken", str(model))
        result: dict[str, Any] = {
            "transformers_template": ", ".join(name for name, _ in equivalent.values()),
            "refused_rows": len(rows) - len(kept),
        }
        for name, source, length in (("mixed", kept, size), ("traces", kept_traces, size // 2)):
            if source:
                file = grow_rows(source, length, folder / f"{name}.jsonl", seed=name == "traces")
                result[name] = against(file, model, peer, encoder, pauses)
                file.unlink()
        peer.close()
        encoder.close()
    return result


def scaling(model: Path, rows: Sequence[Row], size: int, rounds: int) -> dict[str, Any]:
    """Measures scaling with workers and with conversation length."""
    with tempfile.TemporaryDirectory() as scratch:
        mixed = grow_rows(rows, size, Path(scratch) / "mixed.jsonl")
        workers = speed_up(mixed, model, rounds)
        mixed.unlink()
        return {"two_workers": workers, "turns": long_conversations(rows, model, Path(scratch), rounds)}


HEAD = (
    f"{'model':16} {'MB/s':>7} {'× transformers':>14} {'of first pass':>13} {'traces ×':>8} {'equal/compared':>16}"
    f" {'start-up, s':>11} {'end, s':>6}  by the reference"
)


def line(name: str, result: dict[str, Any]) -> str:
    """A model's line in the table; all times are CPU time."""
    mixed, parts = result["mixed"], [result[name] for name in ("mixed", "traces") if name in result]
    traces = f"{result['traces']['times_transformers']['cpu']:8.1f}" if "traces" in result else f"{'-':>8}"
    equal = f"{sum(p['equal_rows'] for p in parts)}/{sum(p['compared_rows'] for p in parts)}"
    reference = "; ".join(f"{why} {n}" for stage in mixed["reference_served"].values() for why, n in stage.items())
    return (
        f"{name:16} {mixed['megabytes_per_second']['penstock']['cpu']:7.1f} {mixed['times_transformers']['cpu']:14.1f}"
        f" {mixed['share_of_first_pass']['cpu']:13.2f} {traces} {equal:>16} {mixed['start_up']['cpu']:11.1f}"
        f" {mixed['end']['cpu']:6.2f}  {reference or '-'}"
    )


def verdicts(models: dict[str, Any], scaled: dict[str, Any]) -> dict[str, bool]:
    """Which targets are met."""
    met: dict[str, bool] = {}
    for name, result in models.items():
        for part in ("mixed", "traces"):
            if part in result:
                found = result[part]
                times = SLOWER_TIMES if name in SLOWER else TIMES
                met[f"{name}, {part}: {times:.0f} times transformers"] = found["times_transformers"]["cpu"] >= times
                met[f"{name}, {part}: same tokens"] = found["equal_rows"] == found["compared_rows"] > 0
        met[f"{name}: {SHARE} of the first pass"] = result["mixed"]["share_of_first_pass"]["cpu"] >= SHARE
    if scaled:
        met["two workers: 0.8 of the loops"] = scaled["two_workers"]["share_of_loops"] >= 0.8
        met["400 messages: at most 1.3"] = scaled["turns"]["400_messages_against_4"] <= 1.3
    return met


def report(models: dict[str, Any], scaled: dict[str, Any], met: dict[str, bool]) -> None:
    """Prints the worst and best model, the scaling, and missed targets."""
    for figure, label in (
        ("times_transformers", "× transformers"),
        ("share_of_first_pass", "of the encoder's first pass"),
    ):
        order = sorted((result["mixed"][figure]["cpu"], name) for name, result in models.items())
        (low, worst), (high, best) = order[0], order[-1]
        print(f"{label}: worst {low:.2f} ({worst}), best {high:.2f} ({best})")
    if scaled:
        workers, turns = scaled["two_workers"]["share_of_loops"], scaled["turns"]["400_messages_against_4"]
        print(f"two workers: {workers:.2f} of two loops; 400 messages cost {turns:.2f} times 4 messages, per byte")
    missed = [name for name, ok in met.items() if not ok]
    print("all targets met" if not missed else "MISSED: " + "; ".join(missed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=Path, default=[MATERIAL.parent / "tokenizer"], help="folders")
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--traces", nargs="*", type=Path, default=[], help="long tool traces, measured separately")
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--pauses", type=int, default=10, help="number of pauses in which the others are measured")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the scaling measurements, on the first model")
    parser.add_argument("--scratch", type=Path, help="folder for the grown data; default: the system's")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    tempfile.tempdir = str(arguments.scratch) if arguments.scratch else None
    rows, traces, size = material(arguments.data), material(arguments.traces), int(arguments.megabytes * 1e6)
    models: dict[str, Any] = {}
    print(HEAD)
    for model in arguments.models:
        models[model.name] = measure(model.absolute(), rows, traces, size, arguments.pauses)
        print(line(model.name, models[model.name]), flush=True)
        write(arguments.json, models, {})
    scaled = scaling(arguments.models[0].absolute(), rows, size, arguments.rounds) if arguments.rounds else {}
    met = write(arguments.json, models, scaled)
    report(models, scaled, met)
    return 0 if all(met.values()) else 1


def write(file: Path | None, models: dict[str, Any], scaled: dict[str, Any]) -> dict[str, bool]:
    """Writes the figures so far; returns which targets are met."""
    met = verdicts(models, scaled)
    if file:
        file.write_text(json.dumps({"models": models, **scaled, "met": met}, indent=1))
    return met


if __name__ == "__main__":
    sys.exit(main())
