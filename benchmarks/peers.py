"""Prepares the same rows with Penstock and with what people use: the time, and the rows whose tokens or masks differ.

    python -m benchmarks.peers --model FOLDER [--data FILE.jsonl …] [--megabytes 10] [--rounds 1] [--json FILE]

Peers are a loop over transformers' `apply_chat_template` with masks, `datasets.map(num_proc=…)` around it, TRL's
`SFTTrainer`, which prepares its data when it is constructed (with a tiny model), and the preparation of Axolotl, SkyRL
and LLaMA-Factory (`benchmarks.trainers`), which need the environment of `make exits` and are left out without it. Each
runs in a new process; its clock starts after imports and loading, and stops when the tokens are where a trainer can
read them. For Penstock that includes starting its engines and workers and committing the dataset; Axolotl, SkyRL and
LLaMA-Factory read the file and save the result as well. All use trl's template with {% generation %} tags for the
model, so that all make masks, except for LLaMA-Factory, which has its own for Qwen2.5. Rounds alternate; the fastest of
each is compared.

Tokens and masks are compared with transformers' own. Where masks differ, the tokens that are trained in only one of the
two are shown, and whether the mask equals Penstock's with `regions="structure"`, which ignores the tags. Exits with 1
if a token of Penstock's differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grow import MATERIAL, grow_rows, material
from benchmarks.models import trl_templates
from benchmarks.prepared import PreparedRows, Stopwatch

ROOT = Path(__file__).parent.parent
EXITS = Path(os.environ.get("PENSTOCK_EXITS", ROOT / ".exits")) / "bin" / "python"
STRUCTURE = "penstock, regions='structure'"  # compared, not timed
QWEN = "qwen2_5_training"
SHOWN = 3  # of the tokens that differ
Pairs = Counter[tuple[int | None, int]]  # the token before, and the token


def _tokenizer(model: Path, template: str) -> Any:
    from benchmarks.oracle import reference_tokenizer

    found = reference_tokenizer(model)
    found.chat_template = template
    return found


def _encode(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    encoded = tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}


def transformers_loop(model: Path, template: str, rows: list[dict[str, Any]], _: int) -> PreparedRows:
    tokenizer = _tokenizer(model, template)
    with Stopwatch() as watch:
        encoded = [_encode(row, tokenizer) for row in rows]
    return PreparedRows.of(watch, [e["input_ids"] for e in encoded], [e["assistant_masks"] for e in encoded])


def datasets_map(model: Path, template: str, rows: list[dict[str, Any]], processes: int) -> PreparedRows:
    import datasets

    tokenizer = _tokenizer(model, template)
    with tempfile.TemporaryDirectory() as folder:
        given = datasets.Dataset.from_list([{"row": json.dumps(row)} for row in rows])
        with Stopwatch() as watch:
            found = given.map(
                _encode_json, fn_kwargs={"tokenizer": tokenizer}, num_proc=processes if processes > 1 else None,
                cache_file_name=str(Path(folder, "cache.arrow")), remove_columns=["row"],
            )  # fmt: skip
        return PreparedRows.of(watch, list(found["input_ids"]), list(found["assistant_masks"]))


def _encode_json(row: dict[str, str], tokenizer: Any) -> dict[str, Any]:
    return _encode(json.loads(row["row"]), tokenizer)  # Arrow would add null keys to messages


def trl_trainer(model: Path, template: str, rows: list[dict[str, Any]], processes: int) -> PreparedRows:
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = _tokenizer(model, template)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tiny = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    network = LlamaForCausalLM(tiny)
    given = datasets.Dataset.from_list([{"messages": row["messages"]} for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder, max_length=None, assistant_only_loss=True, dataset_num_proc=processes if processes > 1 else None,
            report_to=[], use_cpu=True, bf16=False,
        )  # fmt: skip
        with Stopwatch() as watch:
            trainer = SFTTrainer(network, args=config, train_dataset=given, processing_class=tokenizer)
        found = trainer.train_dataset
        masks = [[k != -100 for k in labels] for labels in found["labels"]]
        return PreparedRows.of(watch, list(found["input_ids"]), masks)


def penstock(
    model: Path, template: str, rows: list[dict[str, Any]], processes: int, regions: str = "auto"
) -> PreparedRows:
    import penstock as ps

    with tempfile.TemporaryDirectory() as folder:
        file, chat = Path(folder, "rows.jsonl"), Path(folder, "template.jinja")
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        chat.write_text(template)
        with Stopwatch() as watch:
            dataset = ps.prepare(
                file, tokenizer=str(model), template=str(chat), cache=Path(folder, "cache"), workers=processes,
                progress=False, tokenizer_as="file", regions=regions,
            )  # fmt: skip
        view = dataset.view()
        examples = [view[number] for number in range(len(view))]
        return PreparedRows.of(watch, [e.input_ids for e in examples], [e.loss_mask for e in examples])


def penstock_structure(model: Path, template: str, rows: list[dict[str, Any]], processes: int) -> PreparedRows:
    return penstock(model, template, rows, processes, "structure")


PEERS: dict[str, Callable[[Path, str, list[dict[str, Any]], int], PreparedRows]] = {
    "transformers": transformers_loop,
    "datasets.map": datasets_map,
    "TRL SFTTrainer": trl_trainer,
    "penstock": penstock,
}
TRAINERS = {"Axolotl": "axolotl_sft", "SkyRL": "skyrl_sft", "LLaMA-Factory": "llama_factory_sft"}


class PeerFailed(Exception):
    """A peer can't run here."""


def run_peer(name: str, model: Path, template: Path, file: Path, processes: int, out: Path) -> None:
    """Prepares the rows in this process."""
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    peer = penstock_structure if name == STRUCTURE else PEERS[name]
    peer(model, template.read_text(), rows, processes).write(out)


def prepared(name: str, model: Path, template: Path, file: Path, processes: int) -> PreparedRows:
    """Prepares the rows in a process of its own, with nothing cached."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder, "out.npz"), Path(folder, "said")
        given = [str(model), str(template), str(file), str(processes), str(out)]
        if name in TRAINERS:
            command = [str(EXITS), "-m", f"benchmarks.trainers.{TRAINERS[name]}", *given]
        else:
            command = [sys.executable, "-m", "benchmarks.peers", "--model", str(model), "--peer", name, *given]
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
        environment = {**os.environ, **quiet, "HF_DATASETS_CACHE": folder}
        with said.open("wb") as log:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if done.returncode:
            text = said.read_text(errors="replace").strip()
            print(text, file=sys.stderr)
            raise PeerFailed(f"it failed: {text.splitlines()[-1] if text else done.returncode}")
        return PreparedRows.read(out)


def unavailable(template: str) -> dict[str, str]:
    """The trainers that can't take part, and why."""
    if not EXITS.exists():
        return dict.fromkeys(TRAINERS, "not installed; `make exits` installs it")
    if template != trl_templates()[QWEN]:
        return {"LLaMA-Factory": f"has its own templates; the one that runs here corresponds to {QWEN} alone"}
    return {}


def compare(model: Path, file: Path, template: str, cores: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Runs all peers, with one process and with all cores."""
    chat = folder / "template.jinja"
    chat.write_text(template)
    best: dict[tuple[str, int], PreparedRows] = {}
    left_out = unavailable(template)
    runs = [(name, count) for count in dict.fromkeys((1, cores)) for name in (*PEERS, *TRAINERS)]
    for _ in range(rounds):
        for name, count in runs:
            if name in left_out or (name == "transformers" and count > 1):
                continue
            try:
                found = prepared(name, model, chat, file, count)
            except PeerFailed as failure:
                if name not in TRAINERS:
                    raise
                left_out[name] = str(failure)
                continue
            if (name, count) not in best or found.seconds < best[name, count].seconds:
                best[name, count] = found
    structure = prepared(STRUCTURE, model, chat, file, cores)
    comparison = Comparison(best["transformers", 1], structure, _tokenizer(model, template))
    report = {
        f"{name}, {count} {'process' if count == 1 else 'processes'}": {
            "seconds": found.seconds,
            "cpu_seconds": found.cpu,
            "penstock_is_faster": found.seconds / best["penstock", count].seconds,
            "penstock_is_faster_cpu": found.cpu / best["penstock", count].cpu,
            **comparison.differences(found),
        }
        for name, count in runs
        if (found := best.get((name, count)))
    }
    return report | {name: {"left_out": reason} for name, reason in left_out.items()}


class Comparison:
    """Compares rows with transformers' own, and masks also with Penstock's structural ones."""

    def __init__(self, truth: PreparedRows, structure: PreparedRows, tokenizer: Any) -> None:
        self.truth, self.structure, self._tokenizer = truth, structure, tokenizer

    def differences(self, found: PreparedRows) -> dict[str, Any]:
        """Counts of the rows that differ, and why."""
        if len(found.ids) != len(self.truth.ids):
            missing = len(self.truth.ids) - len(found.ids)
            return {"rows": len(found.ids), "why": f"{missing:,} {'row is' if missing == 1 else 'rows are'} missing"}
        tokens = list(self._differing(found.ids, self.truth.ids))
        masks = list(self._differing(found.masks, self.truth.masks))
        report = {"rows": len(found.ids), "other_tokens": len(tokens), "other_masks": len(masks)}
        reasons = [self._tokens(found, tokens)] if tokens else []
        comparable = [row for row in masks if len(found.masks[row]) == len(self.truth.masks[row])]
        if comparable:
            reasons.append(self._masks(found, comparable))
        return report | ({"why": "; ".join(reasons)} if reasons else {})

    @staticmethod
    def _differing(found: Sequence[Any], wanted: Sequence[Any]) -> Iterator[int]:
        return (row for row, (a, b) in enumerate(zip(found, wanted, strict=True)) if not np.array_equal(a, b))

    def _tokens(self, found: PreparedRows, rows: Sequence[int]) -> str:
        """The first difference in tokens."""
        ours, theirs = self.truth.ids[rows[0]], found.ids[rows[0]]
        first = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        place = min(len(ours), len(theirs)) if first is None else first
        shown = [self._tokenizer.decode(ids[place : place + 8]) for ids in (theirs, ours)]
        return f"row {rows[0]} has {shown[0]!r} from token {place} on instead of {shown[1]!r}"

    def _masks(self, found: PreparedRows, rows: Sequence[int]) -> str:
        """The tokens that are trained on one side alone, and the rows that are as with structural masks."""
        alone: tuple[Pairs, Pairs] = (Counter(), Counter())
        for row in rows:
            theirs, ours, ids = found.masks[row], self.truth.masks[row], self.truth.ids[row]
            for pairs, only in zip(alone, (ours & ~theirs, theirs & ~ours), strict=True):
                places = np.flatnonzero(only).tolist()
                pairs.update((int(ids[place - 1]) if place else None, int(ids[place])) for place in places)
        parts = [
            wording.format(self._shown(pairs))
            for wording, pairs in zip(("does not train {}, which the tags cover", "also trains {}"), alone, strict=True)
            if pairs
        ]
        same = sum(np.array_equal(found.masks[row], self.structure.masks[row]) for row in rows)
        if same:
            parts.append(f'equals Penstock with `regions="structure"` in {same:,} of these {len(rows):,} rows')
        return "; ".join(parts)

    def _shown(self, pairs: Pairs) -> str:
        """The most frequent tokens, each with the one before it."""
        texts = [
            f"{self._quoted(token)} {'at the beginning' if before is None else f'after {self._quoted(before)}'} "
            f"({count:,} times)"
            for (before, token), count in pairs.most_common(SHOWN)
        ]
        return " and ".join(texts) + (f" and {len(pairs) - SHOWN:,} others" if len(pairs) > SHOWN else "")

    def _quoted(self, token: int) -> str:
        return f"`{json.dumps(self._tokenizer.decode([token]), ensure_ascii=False)}`"


def show(found: dict[str, Any]) -> None:
    """Prints a table, and below it why rows differ."""
    head = ("seconds", "penstock ×", "CPU s", "penstock ×", "rows", "other tokens", "other masks")
    print(f"{'':30}" + "".join(f"{name:>13}" for name in head))
    for name, row in found.items():
        if "seconds" in row:
            times = [row[k] for k in ("seconds", "penstock_is_faster", "cpu_seconds", "penstock_is_faster_cpu")]
            counts = [row.get(k, row["rows"]) for k in ("rows", "other_tokens", "other_masks")]
            print(f"{name:30}" + "".join(f"{t:13.1f}" for t in times) + "".join(f"{c:13,}" for c in counts))
    for name, row in found.items():
        if remark := row.get("left_out", row.get("why")):
            print(f"{name}: {remark}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--template", default=QWEN, help="one of trl's, with generation tags")
    parser.add_argument("--data", nargs="+", type=Path, default=[MATERIAL / "chats.jsonl"])
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        name, model, chat, file, processes, out = arguments.peer
        run_peer(name, Path(model), Path(chat), Path(file), int(processes), Path(out))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        rows = [{key: row[key] for key in ("messages", "tools") if row.get(key)} for row in material(arguments.data)]
        plain = [row for row in rows if "tools" not in row and not any("tool_calls" in m for m in row["messages"])]
        file = grow_rows(plain, int(arguments.megabytes * 1e6), Path(scratch, "rows.jsonl"))
        cores = len(os.sched_getaffinity(0))
        template = trl_templates()[arguments.template]
        found = compare(arguments.model, file, template, cores, arguments.rounds, Path(scratch))
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    wrong = [name for name, row in found.items() if name.startswith("penstock") and row.get("other_tokens") != 0]
    print(f"MISSED: other tokens: {', '.join(wrong)}" if wrong else "Penstock's tokens all equal transformers'")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
