"""The command: exit codes with --require, usage errors, and one certificate per rank under a launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.train.verify import verifier
from penstock.train.verify.certificate import Certificate, Finding, PackageInfo, Verdict
from tests.train.verify.conftest import HERE, ROOT

pytestmark = pytest.mark.slow


def test_required_promise_that_is_not_engaged_exits_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subject = PackageInfo("liger_kernel", "0.8.5", "/x/liger_kernel/__init__.py", "abc+changes")
    found = (
        Finding("liger.rope", Verdict.ENGAGED, ("4 calls",), True, (subject,)),
        Finding("packing.isolated", Verdict.UNKNOWN, ("it crashed",), True, (subject,)),
    )
    monkeypatch.setattr(verifier, "verify", lambda *_: Certificate("t", ("device cpu",), found))
    output = tmp_path / "certificate.json"
    run = CliRunner().invoke(app, ["verify", "--target", "m:f", "--output", str(output), "--require", "liger.rope"])
    assert run.exit_code == 0, run.output
    assert "liger_kernel 0.8.5 /x/liger_kernel/__init__.py at commit abc+changes" in run.output.replace("\n", "")
    run = CliRunner().invoke(app, ["verify", "--target", "m:f", "--require", "liger.rope,packing.isolated", "--json"])
    assert run.exit_code == 1
    assert json.loads(run.stdout)["broken"] == ["packing.isolated"]
    assert json.loads(output.read_text())["findings"][1]["verdict"] == "unknown"


@pytest.mark.parametrize("required", [[], ["--require", "loss.finite"]])
def test_a_loss_that_is_not_finite_exits_with_1(required: list[str]) -> None:
    """Without `--require`, too: the command runs a real step, whose loss is infinite."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "verify", "--target", "factories:overflowing", *required],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    words = "required but not engaged: loss.finite (required of every run: loss and gradient must be finite)"
    assert done.stdout.count(words) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to verify"),
        (["none.yaml"], "no such file"),
        (["--target", "m:f", "--require", "liger.ropes"], "Did you mean 'liger.rope'"),
        (["--target", "m:f", "--method", "ppo"], "expected sft, dpo or kto"),
    ],
)
def test_usage_errors(arguments: list[str], words: str) -> None:
    run = CliRunner().invoke(app, ["verify", *arguments])
    assert words in str(run.exception)


def test_each_rank_certifies_itself(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
    ]
    launch += [
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        str(port),
    ]
    command = ["-m", "penstock.cli", "verify", "--target", "factories:hugging_face", "--layers", "1", "--tokens", "4"]
    done = subprocess.run(
        [*launch, *command, "--output", str(tmp_path / "certificate.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads((tmp_path / f"certificate.rank{rank}.json").read_text()) for rank in (0, 1)]
    evidence = []
    for rank, certificate in enumerate(found):
        assert (certificate["rank"], certificate["world_size"]) == (rank, 2)
        findings = {finding["promise"]: finding for finding in certificate["findings"]}
        assert findings["liger.rms_norm"]["verdict"] == findings["loss.equal"]["verdict"] == "engaged"
        evidence.append(findings["loss.finite"]["evidence"][0])
    losses, gradients = zip(*(text.split("; ") for text in evidence), strict=True)
    assert losses[0] != losses[1]  # each rank has its own rows
    assert gradients[0] == gradients[1]  # gradients are reduced
