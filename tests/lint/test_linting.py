"""Findings, keys without effect, and command lines compared with files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.lint.accepts import Accepted, Key, accepted_by
from penstock.lint.given import Given, differences, read_command, read_file
from penstock.lint.lines import report_lines
from penstock.lint.linting import Standing, lint


def trl(name: str = "SFTConfig", version: str = "1.16.0") -> Accepted:
    real = accepted_by(f"trl.{name}")
    return Accepted(real.spec, name, "trl", version, real.file, real.line, real.keys, real.read)


def without_effect(values: dict[str, Any], entry: Accepted | None = None) -> dict[str, str]:
    report = lint(Given("x", values), [entry or trl()])
    return {effect.key: effect.reason for effect in report.effects}


def test_a_sound_configuration_is_sound() -> None:
    report = lint(Given("x", {"learning_rate": 1e-5, "packing": False, "config": "y"}), [trl()])
    assert report.sound
    assert all(finding.standing is Standing.ACCEPTED for finding in report.findings)


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"packing": True}, "packing", "no attn_implementation"),
        ({"packing": True, "model_init_kwargs": {"attn_implementation": "sdpa"}}, "packing", "'sdpa'"),
        ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy", "see each other"),
        ({"packing_strategy": "bfd"}, "packing_strategy", "without packing"),
        ({"columns": ["input_ids", "completion_mask"]}, "completion_mask", "completion_only_loss: true"),
        ({"liger_kernel_config": {"rope": False}}, "liger_kernel_config", "use_liger_kernel"),
        ({"use_liger_kernel": True}, "use_liger_kernel", "fused cross entropy off"),
        ({"eval_steps": 10}, "eval_steps", "eval_strategy is steps"),
        ({"max_steps": 5, "num_train_epochs": 3}, "num_train_epochs", "max_steps: 5"),
        ({"dataloader_prefetch_factor": 4}, "dataloader_prefetch_factor", "num_workers: 0"),
        ({"padding_free": True, "max_length": 100}, "max_length", "not enforced"),
    ],
)
def test_keys_without_effect(values: dict[str, Any], key: str, words: str) -> None:
    assert words in without_effect(values)[key]


@pytest.mark.parametrize(
    "values",
    [
        {"packing": True, "model_init_kwargs": {"attn_implementation": "flash_attention_2"}},
        {"columns": ["completion_mask"], "completion_only_loss": True},
        {"eval_steps": 10, "eval_strategy": "steps"},
        {"save_steps": 10},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},  # TRL checkpoints by default
    ],
)
def test_keys_with_their_effect(values: dict[str, Any]) -> None:
    assert not without_effect(values)


@pytest.mark.parametrize(("version", "said"), [("0.27.0", True), ("1.0.0", False), ("1.13.0", True)])
def test_the_same_flag_means_different_things(version: str, said: bool) -> None:
    assert ("use_liger_kernel" in without_effect({"use_liger_kernel": True}, trl("DPOConfig", version))) is said


def test_an_unresolved_base_makes_unknown_never_refused() -> None:
    entry = Accepted(
        "p.C", "C", "p", None, Path("p.py"), 1, {"a": Key("a", Path("p.py"), 2, None)}, (), ("base B of C",)
    )
    report = lint(Given("x", {"a": 1, "b": 2}), [entry])
    assert [finding.standing for finding in report.findings] == [Standing.ACCEPTED, Standing.UNKNOWN]
    assert not report.refused
    assert not report.sound
    assert any("base B of C" in line for line in report_lines(report))


def test_command_lines() -> None:
    words = ["train.py", "--learning-rate", "1e-5", "--bf16", "--no_packing", "--report_to", "a", "b", "--beta=0.2"]
    expected = {"learning_rate": 1e-5, "bf16": True, "packing": False, "report_to": ["a", "b"], "beta": 0.2}
    assert read_command(words).values == expected


def test_a_file_compared_with_what_is_passed() -> None:
    file = Given("c.yaml", {"learning_rate": "1e-5", "packing": True, "beta": 0.1})
    passed = read_command(["--learning_rate", "1e-5", "--packing", "false", "--seed", "3"])
    found = {entry.key: entry.reason for entry in differences(file, passed)}
    assert found.keys() == {"packing", "beta", "seed"}
    assert found["packing"] == "c.yaml says True; the command line passes False"
    assert "does not pass it" in found["beta"]


def test_files(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"a": 1}')
    assert read_file(tmp_path / "c.json").values == {"a": 1}
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- a")
    for name, words in (("bad.yaml", "not valid YAML"), ("list.yaml", "found list"), ("none.yaml", "No such file")):
        with pytest.raises(UsageError, match=words):
            read_file(tmp_path / name)
