"""`penstock verify`: checks that the features a configuration asks for really take effect."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.addresses import local_path
from penstock.errors import UsageError
from penstock.printable import printable_json


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
    from penstock.look.terminal.console import Terminal
    from penstock.train.config_reader import read_config
    from penstock.verify import VerifyOptions, required_promises
    from penstock.verify import verify as verify_target
    from penstock.verify.table import print_certificate

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
