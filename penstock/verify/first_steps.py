"""The certificate of a training run's own first steps, written while it trains: OUTPUT/certificate.json.

The instruments watch the process, so that the trainer knows nothing of them; after the steps they are taken away. What
needs another run to compare with is unknown here; `penstock verify` finds it out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from penstock.train.config import TrainConfig
from penstock.train.promises import Method
from penstock.train.reading import Given, read_config
from penstock.verify.certificate import Certificate, Finding, Verdict, unknown
from penstock.verify.judge import judged
from penstock.verify.observe import Watch
from penstock.verify.own_trainer import promises
from penstock.verify.verifying import conditions

log = logging.getLogger("penstock")


@contextmanager
def first_steps(method: str, given: Given, overrides: Iterable[str] = (), *, steps: int = 2) -> Iterator[None]:
    """Watch the first steps of the run inside, and write the certificate into its output."""
    config = read_config(given, overrides)
    written: list[Path] = []

    def write() -> None:
        if not written:
            watch.close()
            written.append(_written(watch, config, Method(method)))

    watch = Watch(steps, 10**6, on_done=write, imports=config.liger.enabled)
    watch.__enter__()
    try:
        yield
    finally:
        watch.close()
        if not written and watch.steps.losses:
            write()


def _written(watch: Watch, config: TrainConfig, method: Method) -> Path:
    promised = promises(config, method)
    facts = watch.facts(promised, [f"the first {len(watch.steps.gradients)} steps of the run itself"])
    findings = judged(facts)
    findings += unknown(["loss.equal"], "there is no run without Liger to compare with: see penstock verify")
    if promised["packing"]:
        evidence = ("the trainer's own experiment on this model, before the first step, found them isolated",)
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
        log.warning("promised, and not seen in the first steps: %s; see %s", ", ".join(missing), path)
    return path
