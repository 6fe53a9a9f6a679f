"""`penstock train sft|dpo|kto CONFIG.yaml [section.key=value …]`: trains and shows progress."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.addresses import local_path
from penstock.errors import UsageError
from penstock.look.progress import LiveProgress, Terminal
from penstock.printable import printable, printable_json
from penstock.train.verify.certificate import ALWAYS_REQUIRED, Certificate, Verdict

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
    from penstock.train.config import read_config  # imports numpy, which a hit does without

    read_config(config, overrides)
    try:
        import accelerate  # noqa: F401
        import transformers.utils.logging as its_logging
    except ImportError as error:
        raise UsageError(f"training needs more packages ({error}): pip install 'penstock[train]'") from error
    from penstock.cli.live_training import LiveTraining, preparing_line
    from penstock.train.run import train as run
    from penstock.train.verify.first_steps import first_steps

    its_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("penstock").setLevel(logging.INFO)

    def status(text: str) -> None:
        messages.print(text, highlight=False, markup=False, soft_wrap=True)

    watched = first_steps(method, config, overrides)
    with watched, LiveTraining(messages) as live, LiveProgress(messages, preparing_line) as preparing:
        outcome = run(
            method,
            config,
            *overrides,
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


# ---- verify ----------------------------------------------------------------------------------------------------------
#
# `penstock verify`: checks that the features a configuration asks for really take effect.


def verify(
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG.yaml]", help="Configuration of `penstock train`", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value …]", help="Values that override the file's", show_default=False),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="sft or dpo; default: inferred from the dpo section", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="module:function that returns a transformers or TRL trainer, a model, or a step",
            show_default=False,
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(help="Promises that must be engaged, such as liger.rms_norm,packing.isolated", show_default=False),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the certificate to this file", show_default=False)] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for all probes together")] = 600.0,
    layers: Annotated[int, typer.Option(help="Layers to keep if there is no GPU")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens per row if there is no GPU")] = 16,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output")] = False,
) -> None:
    """Run a few training steps and certify each feature as engaged, not engaged or unknown."""
    from penstock.train.config import read_config
    from penstock.train.verify.certificate import required_promises
    from penstock.train.verify.verifier import VerifyOptions
    from penstock.train.verify.verifier import verify as verify_target

    required = required_promises(require or ())
    if output is not None:
        local_path(output, "--output")
    if config is None and target is None:
        raise UsageError("nothing to verify: pass a configuration, or --target module:function.")
    if target is None and config is not None and not Path(config).is_file():
        raise UsageError(f"{config}: no such file. Pass a YAML file, or --target module:function.")
    if method not in (None, "sft", "dpo", "kto"):
        raise UsageError(f"--method {method}: expected sft, dpo or kto.")
    if target is None and config is not None:
        read_config(config, overrides or ())  # an invalid one is an error here, not an unknown verdict
    messages = Terminal(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    options = VerifyOptions(config, method, tuple(overrides or ()), target, time_limit, layers=layers, tokens=tokens)
    certificate = verify_target(options, lambda what: messages.print(f"verify: {what}", highlight=False))
    broken = certificate.broken(required)
    values = printable_json({**certificate.to_json(), "broken": broken})
    if output is not None:
        place = output if certificate.world_size == 1 else output.with_suffix(f".rank{certificate.rank}{output.suffix}")
        place.write_text(values)
    if json:
        print(values)
    else:
        print_certificate(certificate, broken)
    if broken:
        raise typer.Exit(1)


# ---- lint ------------------------------------------------------------------------------------------------------------
#
# `penstock lint`: which keys of a configuration the installed trainers accept.


def lint(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML or JSON file", show_default=False)
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND…]", help="Arguments a launcher passes, after --", show_default=False),
    ] = None,
    for_: Annotated[
        list[str] | None,
        typer.Option(
            "--for", help="Class that reads it: package.Class or PATH.py:Class; repeatable", show_default=False
        ),
    ] = None,
    search: Annotated[
        list[Path] | None, typer.Option(help="Folder to search before the installed packages", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output")] = False,
) -> None:
    """Report keys that a trainer does not accept, what replaced them, and keys without effect. Imports nothing."""
    from penstock.train.lint.config_class import read_config_class
    from penstock.train.lint.config_values import read_command, read_file
    from penstock.train.lint.linter import lint as lint_values
    from penstock.train.lint.linter import report_lines

    if not for_:
        raise UsageError("no class to lint against: pass --for trl.SFTConfig, or --for PATH.py:Class.")
    words = list(command or ())
    if config is not None and str(config).startswith("--"):  # only a command line was given
        words, config = [str(config), *words], None
    passed = read_command(words) if words else None
    values = read_file(config) if config is not None else passed
    if values is None:
        raise UsageError("nothing to lint: pass a YAML or JSON file, or a command line after --.")
    classes = [read_config_class(spec, tuple(search or ())) for spec in for_]
    report = lint_values(values, classes, passed if config is not None else None)
    if json:
        print(printable_json(report.to_json(), default=str))
    else:
        for line in report_lines(report):
            print(printable(line))
    if report.refused or report.mostly_unknown:
        raise typer.Exit(1)


# ---- table -----------------------------------------------------------------------------------------------------------
#
# Prints a certificate as a table.


_COLOURS = {Verdict.ENGAGED: "green", Verdict.NOT_ENGAGED: "red", Verdict.UNKNOWN: "yellow"}


def certificate_table(certificate: Certificate, broken: Iterable[str] = ()) -> RenderableType:
    """The conditions, one row per finding, then the packages, remedies and broken promises."""
    table = Table("promise", "verdict", "asked", "evidence", box=None, pad_edge=False)
    before: tuple[str, ...] = ()
    for finding in certificate.findings:
        verdict = Text(finding.verdict.value, style=_COLOURS[finding.verdict])
        asked = {True: "yes", False: "no", None: ""}[finding.asked]
        evidence = "as above" if finding.evidence == before else "\n".join(finding.evidence)
        table.add_row(finding.promise, verdict, asked, Text(evidence))
        before = finding.evidence
    rank = f" (rank {certificate.rank} of {certificate.world_size})" if certificate.world_size > 1 else ""
    lines = [f"{certificate.target}{rank}", *(f"  {condition}" for condition in certificate.conditions)]
    packages = dict.fromkeys(str(package) for finding in certificate.findings for package in finding.about)
    after = [*(f"about {package}" for package in packages), *certificate.remedies]
    after += [f"required but {certificate.verdict(promise)}: {promise}{_always(promise)}" for promise in broken]
    return Group(Text("\n".join(lines)), table, Text("\n".join(after)))


def _always(promise: str) -> str:
    return " (required of every run: loss and gradient must be finite)" if promise == ALWAYS_REQUIRED else ""


def print_certificate(certificate: Certificate, broken: Iterable[str] = ()) -> None:
    """Prints a certificate to standard output."""
    Terminal().print(certificate_table(certificate, broken), highlight=False, soft_wrap=False)
