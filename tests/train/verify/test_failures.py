"""Crashes, time-outs and failed imports are unknown, with the message; NaN is traced to its kernel."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.train.verify.certificate import Verdict
from penstock.train.verify.probe_jobs import JobKind, ProbeJob
from penstock.train.verify.verifier import Failure, Supervisor, VerifyOptions, _Verification, verify
from tests.train.verify.conftest import HERE, ROOT

pytestmark = pytest.mark.slow


def test_segfault_and_hang_are_reported(supervisor: Supervisor) -> None:
    died = supervisor.observe(ProbeJob(JobKind.RUN, {"factory": "factories:segfault"}))
    assert isinstance(died, Failure)
    assert "SIGSEGV" in died.reason
    assert "string_at" in died.reason
    started = time.monotonic()
    hung = supervisor.observe(ProbeJob(JobKind.RUN, {"factory": "factories:hang"}), limit=9)
    assert isinstance(hung, Failure)
    assert "no answer within" in hung.reason
    assert time.monotonic() - started < 15


def test_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(ROOT)]))
    started = time.monotonic()
    certificate = verify(VerifyOptions(factory="factories:hang", limit=4))
    assert time.monotonic() - started < 8
    assert {finding.verdict for finding in certificate.findings} == {Verdict.UNKNOWN}


@pytest.mark.parametrize("package", ["liger_kernel", "triton"])
def test_failed_import_is_unknown(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise ImportError('{package} is broken')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE), str(ROOT)]))
    certificate = verify(VerifyOptions(factory="factories:llama", limit=300, layers=1, tokens=6))
    liger = [finding for finding in certificate.findings if finding.promise.startswith("liger.")]
    assert len(liger) == 5
    assert {finding.verdict for finding in liger} == {Verdict.UNKNOWN}
    assert all(f"{package} is broken" in finding.evidence[0] for finding in liger)


def test_bisection_finds_kernel_that_returns_nan(supervisor: Supervisor) -> None:
    options = VerifyOptions(factory="factories:not_a_number", layers=1, tokens=4)
    certificate = _Verification(options, supervisor, lambda _: None).certificate()
    assert certificate.verdict("loss.finite") is Verdict.NOT_ENGAGED
    assert certificate.verdict("loss.equal") is Verdict.NOT_ENGAGED
    (remedy,) = certificate.remedies
    assert remedy.startswith("The difference comes from Liger's mlp. To disable: liger_kernel_config: {swiglu: false")
