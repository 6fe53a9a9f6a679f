"""`penstock prepare`: prepares a dataset and prints a summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.build.options import prepare_options
from penstock.build.outcome import Outcome, outcome_json
from penstock.build.run import Builder
from penstock.look.progress import WARNING, LiveProgress, Terminal, facts, progress_line
from penstock.printable import printable_json


def run_prepare(sources: list[str], given: dict[str, Any], *, json: bool) -> None:
    """Prepare a dataset and print the outcome."""
    messages = Terminal(stderr=True)
    with _interruptible(), LiveProgress(messages, progress_line) as live:
        builder = Builder(sources, prepare_options(given), live)
        messages.print(f"format: {builder.search.mapping.describe()}", highlight=False, markup=False)
        outcome = builder.run()
    if json:
        print(printable_json(outcome_json(outcome)))
    else:
        summary(Terminal(), outcome)
    if outcome.dataset.manifest.lacks_regions:
        sys.exit(1)  # the warning says why: no loss policy that needs regions can use it


def dry_run_of(sources: list[str], given: dict[str, Any], nodes: int, json: bool) -> None:
    """Print what the build would produce and cost."""
    from penstock.build.estimate import predict
    from penstock.look.terminal import show_estimate

    with _interruptible():
        found = predict(sources, prepare_options(given), nodes=nodes)
    if json:
        print(printable_json(found.to_json()))
    else:
        show_estimate(Terminal(), found)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the command with one line."""
    try:
        yield
    except KeyboardInterrupt:
        print("penstock: stopped; the same command resumes from here", file=sys.stderr, flush=True)
        os._exit(130)  # committed shards are complete, so there is no need to wait for the threads


def summary(console: Console, outcome: Outcome) -> None:
    """Summarise rows kept and rejected, speed, and the next commands to run."""
    dataset = outcome.dataset
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for label, text in facts(outcome):
        table.add_row(Text(label, style="yellow" if label == WARNING else "bold"), Text(text))
    console.print(table, highlight=False)
    console.print(f"\n{dataset.address}", highlight=False, soft_wrap=True, markup=False)
    console.print("\nimport penstock as ps", style="dim")
    limit = ["max_length=4096"] if dataset.ledger.lengths.get("max", 0) > 4096 else []
    policy = ['train_on="all_tokens"'] if dataset.manifest.lacks_regions else []
    settings = ", ".join((*policy, *limit))
    console.print(f'view = ps.open("{dataset.address}").view({settings})', style="dim", soft_wrap=True)
