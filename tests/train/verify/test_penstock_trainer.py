"""`penstock train` under `penstock verify`, and the certificate of its first steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.train.verify.certificate import Certificate, Verdict
from penstock.train.verify.verifier import Supervisor, VerifyOptions, _Verification

pytestmark = pytest.mark.slow


def configuration(examples: Path, folder: Path, rows: str, **more: Any) -> str:
    values = {
        "output": str(folder / "run"),
        "model": {"init": str(examples / "tiny-llama"), "tokenizer": str(examples / "tokenizer")},
        "data": {
            "sources": [str(examples / "data" / rows)],
            "prepare": {"cache": str(folder / "cache"), "workers": "1"},
        },
        **more,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    return str(path)


def certify(supervisor: Supervisor, config: str, method: str) -> Certificate:
    options = VerifyOptions(config=config, method=method, layers=1, tokens=12)
    return _Verification(options, supervisor, lambda _: None).certificate()


def test_packed_run_with_liger(supervisor: Supervisor, examples: Path, tmp_path: Path) -> None:
    loader = {"collate": "packed", "capacity": 256, "batch_size": 2}
    config = configuration(examples, tmp_path, "chats.jsonl", loader=loader, liger={"enabled": True})
    certificate = certify(supervisor, config, "sft")
    verdicts = {finding.promise: finding for finding in certificate.findings}
    run = (
        "liger.rms_norm",
        "liger.rope",
        "liger.mlp",
        "liger.fused_linear_cross_entropy",
        "loss.finite",
        "loss.equal",
    )
    data = ("packing.isolated", "logits.not_materialised", "data.masks", "data.packing", "data.collate_ahead")
    for promise in (*run, *data):
        assert certificate.verdict(promise) is Verdict.ENGAGED, verdicts[promise]
    assert certificate.verdict("data.cache_hit") is Verdict.NOT_ENGAGED
    assert any("first 64 rows" in condition for condition in certificate.conditions)
    assert not (tmp_path / "run").exists()


def test_fused_dpo_loss(supervisor: Supervisor, examples: Path, tmp_path: Path) -> None:
    liger = {"enabled": True, "rms_norm": False, "rope": False, "mlp": False}
    config = configuration(examples, tmp_path, "pairs.jsonl", dpo={"reference": "live"}, liger=liger)
    certificate = certify(supervisor, config, "dpo")
    for promise in ("liger.fused_dpo_loss", "loss.equal", "loss.finite"):
        assert certificate.verdict(promise) is Verdict.ENGAGED, certificate.findings
    assert certificate.verdict("liger.rms_norm") is Verdict.NOT_ENGAGED


@pytest.mark.filterwarnings("ignore")
def test_first_steps_are_certified(examples: Path, tmp_path: Path) -> None:
    from penstock.train.run import train
    from penstock.train.verify.first_steps import first_steps

    loader = {"collate": "packed", "capacity": 64, "batch_size": 2, "steps": 3}
    config = configuration(examples, tmp_path, "chats.jsonl", loader=loader)
    overrides = ["view.max_length=64"]
    with first_steps("sft", config, overrides):
        train("sft", config, *overrides)
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    verdicts = {finding["promise"]: finding["verdict"] for finding in certificate["findings"]}
    assert verdicts["loss.finite"] == verdicts["packing.isolated"] == verdicts["attention"] == "engaged"
    assert verdicts["liger.rms_norm"] == "not engaged"
    assert verdicts["loss.equal"] == "unknown"
