"""Fuzzes tokens and masks: random conversations through `prepare` and through transformers, template by template."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.conformance import ConformanceTally, compare
from benchmarks.material import Files
from benchmarks.models import trl_templates
from benchmarks.oracle import Oracle
from tools.fuzz_text import conversation

ROWS = 60


def rounds(choose: random.Random, tokenizers: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yields cases without end: a template, a tokenizer and rows."""
    templates = sorted(trl_templates())
    while True:
        rows = [conversation(choose) for _ in range(ROWS)]
        yield {
            "part": "tokens",
            "template": choose.choice(templates),
            "tokenizer": str(choose.choice(tokenizers)),
            "rows": rows,
        }


def differences(case: dict[str, Any], counts: Counter[str]) -> list[str]:
    """What differs from transformers in a case."""
    tokenizer, tally = Path(case["tokenizer"]), ConformanceTally()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in case["rows"]))
        files = Files([str(file)], [[*range(1, len(case["rows"]) + 1)]])
        compare(files, tokenizer, Oracle(tokenizer), trl_templates()[case["template"]], tally)
    counts["rows prepared"] += tally.rows
    counts["tokens equal"] += tally.equal
    counts["masks equal"] += tally.masks_equal
    return [*tally.errors, *tally.differing]
