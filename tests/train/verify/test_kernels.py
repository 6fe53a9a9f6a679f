"""Liger on, off and unsupported: observations of real tiny models, and their verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.train.verify.certificate import Finding, Verdict
from penstock.train.verify.judge import compare_losses, judge_run
from penstock.train.verify.verifier import OFF
from tests.train.verify.conftest import Observe

pytestmark = pytest.mark.slow

KERNELS = ("rms_norm", "rope", "mlp", "cross_entropy", "fused_linear_cross_entropy")


def findings(facts: dict[str, Any]) -> dict[str, Finding]:
    return {finding.promise: finding for finding in judge_run(facts)}  # type: ignore[arg-type]


@pytest.mark.parametrize(("factory", "without"), [("llama", "cross_entropy"), ("qwen3", "fused_linear_cross_entropy")])
def test_kernels_are_engaged_and_the_loss_is_equal(observe: Observe, factory: str, without: str) -> None:
    facts = observe(factory)
    found = findings(facts)
    for kernel in KERNELS:
        expected = Verdict.NOT_ENGAGED if kernel == without else Verdict.ENGAGED
        assert found[f"liger.{kernel}"].verdict is expected, found[f"liger.{kernel}"]
    calls = facts["kernels"]["rms_norm"]
    assert calls["forward"] == calls["backward"] == calls["profiled"] > 0
    assert calls["patched"] == calls["modules"]
    assert found["loss.finite"].verdict is Verdict.ENGAGED
    plain = observe(factory, off=OFF)
    assert all(findings(plain)[f"liger.{kernel}"].verdict is Verdict.NOT_ENGAGED for kernel in KERNELS)
    verdict, words = compare_losses(facts, plain)  # type: ignore[arg-type]
    assert verdict is Verdict.ENGAGED, words
    logits = found["logits.not_materialised"].verdict
    assert logits is (Verdict.ENGAGED if factory == "llama" else Verdict.NOT_ENGAGED)


def test_unsupported_architecture_is_not_engaged(observe: Observe) -> None:
    found = findings(observe("gpt2"))
    assert found["liger.rms_norm"].verdict is Verdict.NOT_ENGAGED
    assert "Liger has no kernels for models of type 'gpt2'" in found["liger.rms_norm"].evidence


def test_findings_name_their_packages(observe: Observe) -> None:
    about = {package.package: package for package in findings(observe("llama_without"))["liger.rope"].about}
    assert {"liger_kernel", "transformers", "penstock", "factories"} <= about.keys()
    assert about["liger_kernel"].version
    assert about["liger_kernel"].file
    assert about["factories"].file


def test_adapters_checkpointing_and_bf16(observe: Observe) -> None:
    found = findings(observe("adapters"))
    for promise in ("lora", "gradient_checkpointing", "bf16"):
        assert found[promise].verdict is Verdict.ENGAGED, found[promise]
    plain = findings(observe("llama_without"))
    for promise in ("lora", "gradient_checkpointing", "bf16"):
        assert plain[promise].verdict is Verdict.NOT_ENGAGED
    assert plain["attention"].evidence[0] == "sdpa ran"


def test_trainer_that_applies_liger_on_train(observe: Observe) -> None:
    facts = observe("hugging_face")
    found = findings(facts)
    for kernel in ("rms_norm", "rope", "mlp", "fused_linear_cross_entropy"):
        assert found[f"liger.{kernel}"].verdict is Verdict.ENGAGED
        assert found[f"liger.{kernel}"].asked
    assert facts["batches"]["rows"] == 4
    assert facts["batches"]["tokens"] == 96  # before they were cut


def test_use_liger_kernel_does_not_fuse_the_dpo_loss_in_trl(observe: Observe) -> None:
    found = findings(observe("trl_dpo"))["liger.fused_dpo_loss"]
    assert found.verdict is Verdict.NOT_ENGAGED
    assert found.asked
    assert "TRL" in found.evidence[1]
