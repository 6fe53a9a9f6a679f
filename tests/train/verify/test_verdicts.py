"""Rules and bisection on their own, without torch or processes."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from penstock.errors import UsageError
from penstock.train.verify.certificate import Certificate, Finding, Verdict, required_promises
from penstock.train.verify.judge import isolation_verdict, ran_attention
from penstock.train.verify.verifier import bisect_kernels

pytestmark = pytest.mark.slow

KERNELS = ["rms_norm", "rope", "mlp", "cross_entropy", "fused_linear_cross_entropy"]


@pytest.mark.parametrize("faulty", [*combinations(KERNELS, 1), *combinations(KERNELS, 2)])
def test_bisection_finds_all_faulty_kernels(faulty: tuple[str, ...]) -> None:
    runs: list[tuple[str, ...]] = []

    def is_wrong(off: tuple[str, ...]) -> bool:
        runs.append(off)
        return bool(set(faulty) - set(off))

    (remedy,) = bisect_kernels(KERNELS, is_wrong, " ".join)
    named = remedy.partition(". ")[0].removeprefix("The difference comes from Liger's ")
    assert set(named.split(" and ")) == set(faulty)
    assert len(runs) <= 4 * len(faulty)


def test_failed_run_ends_the_bisection() -> None:
    assert "not complete" in bisect_kernels(KERNELS, lambda off: None, " ".join)[0]


def test_required_promises() -> None:
    assert required_promises(["liger.rope,packing.isolated", "bf16"]) == ["liger.rope", "packing.isolated", "bf16"]
    with pytest.raises(UsageError, match="Did you mean 'liger.rope'"):
        required_promises(["liger.ropes"])


def test_unknown_and_unexamined_promises_count_as_broken() -> None:
    found = (Finding("bf16", Verdict.ENGAGED, ("x",)), Finding("lora", Verdict.UNKNOWN, ("y",)))
    certificate = Certificate("t", (), found)
    assert certificate.broken(["bf16", "lora", "attention"]) == ["lora", "attention"]
    assert json.loads(json.dumps(certificate.to_json()))["findings"][0]["verdict"] == "engaged"


def test_only_a_loss_seen_to_fail_breaks_every_certificate() -> None:
    broken = {
        verdict: Certificate("t", (), (Finding("loss.finite", verdict, ("x",)),)).broken(()) for verdict in Verdict
    }
    assert broken == {Verdict.ENGAGED: [], Verdict.NOT_ENGAGED: ["loss.finite"], Verdict.UNKNOWN: []}


@pytest.mark.parametrize(
    ("own", "others", "noise", "verdict"),
    [
        (0.1, 0.0, 0.0, Verdict.ENGAGED),
        (0.1, 0.01, 0.0, Verdict.NOT_ENGAGED),
        (0.0, 0.0, 0.0, Verdict.UNKNOWN),
        (0.1, 0.0005, 0.001, Verdict.ENGAGED),
        (0.001, 0.0005, 0.001, Verdict.UNKNOWN),
    ],
)
def test_isolation_verdict(own: float, others: float, noise: float, verdict: Verdict) -> None:
    case = {"name": "x", "packed": True, "own": own, "others": others, "noise": noise, "sequences": 3, "error": None}
    assert isolation_verdict(case)[0] is verdict  # type: ignore[arg-type]


def test_attention_families() -> None:
    assert ran_attention({"aten::_scaled_dot_product_flash_attention_for_cpu": 2}) == "sdpa"
    assert ran_attention({"aten::_softmax": 2}) == "eager"
    assert ran_attention({"flash_attn::_flash_attn_varlen_forward": 1, "aten::_softmax": 1}) == "flash"
    assert ran_attention({}) is None
