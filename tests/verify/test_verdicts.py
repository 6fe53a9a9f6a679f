"""Rules and bisection by themselves: no torch, no processes."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from penstock.errors import UsageError
from penstock.verify.certificate import Certificate, Finding, Verdict, required_promises
from penstock.verify.culprit import culprits
from penstock.verify.judge import ran_attention
from penstock.verify.judge_data import isolation_verdict

KERNELS = ["rms_norm", "rope", "mlp", "cross_entropy", "fused_linear_cross_entropy"]


@pytest.mark.parametrize("guilty", [*combinations(KERNELS, 1), *combinations(KERNELS, 2)])
def test_bisection_finds_every_culprit(guilty: tuple[str, ...]) -> None:
    runs: list[tuple[str, ...]] = []

    def is_wrong(off: tuple[str, ...]) -> bool:
        runs.append(off)
        return bool(set(guilty) - set(off))

    (said,) = culprits(KERNELS, is_wrong, " ".join)
    assert set(said.split(" makes")[0].removeprefix("Liger's ").split(" and ")) == set(guilty)
    assert len(runs) <= 4 * len(guilty)


def test_a_failed_run_ends_the_search() -> None:
    assert "not complete" in culprits(KERNELS, lambda off: None, " ".join)[0]


def test_required_promises() -> None:
    assert required_promises(["liger.rope,packing.isolated", "bf16"]) == ["liger.rope", "packing.isolated", "bf16"]
    with pytest.raises(UsageError, match="Did you mean 'liger.rope'"):
        required_promises(["liger.ropes"])


def test_what_was_not_looked_at_is_not_engaged_for_certain() -> None:
    found = (Finding("bf16", Verdict.ENGAGED, ("x",)), Finding("lora", Verdict.UNKNOWN, ("y",)))
    certificate = Certificate("t", (), found)
    assert certificate.broken(["bf16", "lora", "attention"]) == ["lora", "attention"]
    assert json.loads(json.dumps(certificate.to_json()))["findings"][0]["verdict"] == "engaged"


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
def test_an_experiment_without_power_is_unknown(own: float, others: float, noise: float, verdict: Verdict) -> None:
    case = {"name": "x", "packed": True, "own": own, "others": others, "noise": noise, "sequences": 3, "error": None}
    assert isolation_verdict(case)[0] is verdict  # type: ignore[arg-type]


def test_families_of_attention() -> None:
    assert ran_attention({"aten::_scaled_dot_product_flash_attention_for_cpu": 2}) == "sdpa"
    assert ran_attention({"aten::_softmax": 2}) == "eager"
    assert ran_attention({"flash_attn::_flash_attn_varlen_forward": 1, "aten::_softmax": 1}) == "flash"
    assert ran_attention({}) is None
