"""Certifies the first steps of a training run while it trains: OUTPUT/certificate.json.

The process is observed through hooks that the trainer doesn't know about and that are removed after those steps.
Promises that need a second run to compare with stay unknown here; use `penstock verify` for them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from penstock.train.config import ConfigSource, TrainConfig, read_config
from penstock.train.validation import Method
from penstock.train.verify.certificate import Certificate, Finding, Verdict, unknown
from penstock.train.verify.judge import judge_run
from penstock.train.verify.observer import Observer
from penstock.train.verify.penstock_trainer import promised_by
from penstock.train.verify.verifier import conditions

log = logging.getLogger("penstock")


@contextmanager
def first_steps(method: str, given: ConfigSource, overrides: Iterable[str] = (), *, steps: int = 2) -> Iterator[None]:
    """Observes the first steps of the run in the `with` block and writes a certificate to its output folder."""
    config = read_config(given, overrides)
    written: list[Path] = []

    def write() -> None:
        if not written:
            observer.close()
            written.append(_written(observer, config, Method(method)))

    observer = Observer(steps, 10**6, on_done=write, imports=config.liger.enabled)
    observer.__enter__()
    try:
        yield
    finally:
        observer.close()
        if not written and observer.steps.losses:
            write()


def _written(observer: Observer, config: TrainConfig, method: Method) -> Path:
    promised = promised_by(config, method)
    facts = observer.facts(promised, [f"the first {len(observer.steps.gradients)} steps of the run itself"])
    findings = judge_run(facts)
    findings += unknown(["loss.equal"], "there is no run without Liger to compare with; use penstock verify")
    if promised["packing"]:
        evidence = ("the trainer's own experiment before the first step found packed sequences isolated",)
        findings.append(Finding("packing.isolated", Verdict.ENGAGED, evidence, True, findings[0].about))
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    target = f"penstock train {method}"
    certificate = Certificate(target, tuple(conditions(facts)), tuple(findings), (), rank, world)
    name = "certificate.json" if world == 1 else f"certificate.rank{rank}.json"
    config.output.mkdir(parents=True, exist_ok=True)
    path = config.output / name
    path.write_bytes(orjson.dumps(certificate.to_json(), option=orjson.OPT_INDENT_2))
    missing = [f.promise for f in findings if f.asked and f.verdict is not Verdict.ENGAGED]
    if missing:
        log.warning("promised but not seen in the first steps: %s; see %s", ", ".join(missing), path)
    return path
