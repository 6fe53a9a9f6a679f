"""Packing isolation by experiment: the documented table for eager and sdpa, and TRL's trainers."""

from __future__ import annotations

import pytest

from penstock.train.verify.certificate import Verdict
from penstock.train.verify.judge import isolation_finding, isolation_verdict
from penstock.train.verify.probe_jobs import JobKind
from tests.train.verify.conftest import Observe

pytestmark = pytest.mark.slow

ISOLATED = {
    "position_ids": True,
    "position_ids, default use_cache": False,
    "position_ids, attention_mask of ones": False,
    "cu_seq_lens": False,
    "cu_seq_lens, position_ids": True,
}


@pytest.mark.parametrize("factory", ["eager", "llama_without"])
def test_input_styles(observe: Observe, factory: str) -> None:
    cases = observe(factory, JobKind.ISOLATION)["cases"]
    assert {case["name"] for case in cases} == ISOLATED.keys()
    for case in cases:
        expected = Verdict.ENGAGED if ISOLATED[case["name"]] else Verdict.NOT_ENGAGED
        assert isolation_verdict(case)[0] is expected, case
        assert case["own"] > 0


@pytest.mark.parametrize(("factory", "words"), [("trl_packed", "isolated"), ("trl_wrapped", "contaminated")])
def test_trl_packing_strategies(observe: Observe, factory: str, words: str) -> None:
    finding = isolation_finding(observe(factory, JobKind.ISOLATION)["cases"], True, ())
    assert finding.evidence[0].startswith(words)
    assert finding.verdict is (Verdict.ENGAGED if words == "isolated" else Verdict.NOT_ENGAGED)
