"""`penstock train sft|dpo|kto CONFIG.yaml [section.key=value …]`: trains and shows progress."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.errors import UsageError
from penstock.look.terminal.console import Terminal
from penstock.look.terminal.live import LiveProgress
from penstock.printable import printable_json

if TYPE_CHECKING:
    from penstock.train.run import TrainResult

train_app = typer.Typer(
    help="Train a model on conversations, on preference pairs or on labelled answers.", no_args_is_help=True
)

Config = Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value …", help="Values that override the file's", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output")]


@train_app.command()
def sft(config: Config, overrides: Overrides = None, json: Json = False) -> None:
    """Supervised fine-tuning."""
    _run("sft", config, overrides or [], json)


@train_app.command()
def dpo(config: Config, overrides: Overrides = None, json: Json = False) -> None:
    """Direct preference optimisation on pairs."""
    _run("dpo", config, overrides or [], json)


@train_app.command()
def kto(config: Config, overrides: Overrides = None, json: Json = False) -> None:
    """KTO on answers labelled as good or bad."""
    _run("kto", config, overrides or [], json)


def _run(method: str, config: str, overrides: list[str], json: bool) -> None:
    first = os.environ.get("RANK", "0") == "0"  # other ranks are silent
    messages = Terminal(stderr=True, quiet=not first)
    messages.print(f"penstock train {method}: {config}", highlight=False, markup=False)  # imports take seconds
    from penstock.train.config_reader import read_config  # imports numpy, which a hit does without

    read_config(config, overrides)
    try:
        import accelerate  # noqa: F401
        import transformers.utils.logging as its_logging
    except ImportError as error:
        raise UsageError(f"training needs more packages ({error}): pip install 'penstock[train]'") from error
    from penstock.cli.live_training import LiveTraining, preparing_line
    from penstock.train.run import train as run
    from penstock.train.validation import Method
    from penstock.verify.first_steps import first_steps

    its_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("penstock").setLevel(logging.INFO)

    def status(text: str) -> None:
        messages.print(text, highlight=False, markup=False, soft_wrap=True)

    watched = first_steps(method, config, overrides)
    with watched, LiveTraining(messages) as live, LiveProgress(messages, preparing_line) as preparing:
        outcome = run(
            Method(method),
            config,
            overrides,
            on_progress=preparing,
            on_scored=preparing,
            on_report=live,
            on_status=status,
        )
    if first:
        _finish(outcome, json)
    if outcome.signal:
        sys.exit(128 + outcome.signal)


def _finish(outcome: TrainResult, json: bool) -> None:
    if json:
        print(printable_json(outcome.to_json()))
        return
    console = Terminal()
    if outcome.first is not None and outcome.last is not None:
        fell = f"loss {outcome.first.loss:.4f} → {outcome.last.loss:.4f} after {outcome.steps} steps"
        console.print(fell, highlight=False)
    elif outcome.model is not None:
        console.print(f"all {outcome.steps} steps are already done; the model is written again", highlight=False)
    if outcome.model is not None:
        finished = f"finished: {outcome.steps} steps; the model is in {outcome.model}"
        console.print(finished, highlight=False, soft_wrap=True, markup=False)
    if outcome.signal:
        message = f"stopped after step {outcome.steps}, which is saved; the same command resumes from there"
        console.print(message, highlight=False)
    for path in (outcome.output / "metrics.jsonl", outcome.output / "loss.svg"):
        console.print(str(path), highlight=False, soft_wrap=True, markup=False)
