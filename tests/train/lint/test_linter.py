"""Findings, keys without effect, and differences between file and command line."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.config_files import load_yaml
from penstock.errors import UsageError
from penstock.train.lint.config_class import ConfigClass, Key, read_config_class
from penstock.train.lint.config_values import ConfigValues, differences, read_command, read_file
from penstock.train.lint.linter import KeyStatus, lint, report_lines


def trl(name: str = "SFTConfig", version: str = "1.16.0") -> ConfigClass:
    real = read_config_class(f"trl.{name}")
    return replace(real, version=version, lineage={**real.lineage, f"trl.{name}": version})


def without_effect(values: dict[str, Any], entry: ConfigClass | None = None) -> dict[str, str]:
    report = lint(ConfigValues("x", values), [entry or trl()])
    return {effect.key: effect.reason for effect in report.ineffective}


def test_valid_configuration_has_no_findings() -> None:
    report = lint(ConfigValues("x", {"learning_rate": 1e-5, "packing": False, "config": "y"}), [trl()])
    assert report.sound
    assert all(finding.status is KeyStatus.ACCEPTED for finding in report.findings)


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"packing": True}, "packing", "no attn_implementation"),
        ({"packing": True, "model_init_kwargs": {"attn_implementation": "sdpa"}}, "packing", "'sdpa'"),
        ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy", "attend to each other"),
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
def test_effective_keys_are_not_reported(values: dict[str, Any]) -> None:
    assert not without_effect(values)


@pytest.mark.parametrize(("version", "reported"), [("0.27.0", True), ("1.0.0", False), ("1.13.0", True)])
def test_use_liger_kernel_depends_on_the_trl_release(version: str, reported: bool) -> None:
    assert ("use_liger_kernel" in without_effect({"use_liger_kernel": True}, trl("DPOConfig", version))) is reported


def test_keys_of_an_unresolved_base_are_unknown_not_refused() -> None:
    entry = ConfigClass(
        "p.C", "C", "p", None, Path("p.py"), 1, {"a": Key("a", Path("p.py"), 2, None)}, (), ("base B of C",)
    )
    report = lint(ConfigValues("x", {"a": 1, "b": 2}), [entry])
    assert [finding.status for finding in report.findings] == [KeyStatus.ACCEPTED, KeyStatus.UNKNOWN]
    assert not report.refused
    assert not report.sound
    assert any("base B of C" in line for line in report_lines(report))


def test_command_lines() -> None:
    words = ["train.py", "--learning-rate", "1e-5", "--bf16", "--no_packing", "--report_to", "a", "b", "--beta=0.2"]
    expected = {"learning_rate": 1e-5, "bf16": True, "packing": False, "report_to": ["a", "b"], "beta": 0.2}
    assert read_command(words).values == expected


def test_differences_between_file_and_command_line() -> None:
    file = ConfigValues("c.yaml", {"learning_rate": "1e-5", "packing": True, "beta": 0.1})
    passed = read_command(["--learning_rate", "1e-5", "--packing", "false", "--seed", "3"])
    found = {entry.key: entry.reason for entry in differences(file, passed)}
    assert found.keys() == {"packing", "beta", "seed"}
    assert found["packing"] == "c.yaml says True; the command line passes False"
    assert "does not pass it" in found["beta"]


def test_config_files(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"a": 1}')
    assert read_file(tmp_path / "c.json").values == {"a": 1}
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- a")
    for name, words in (("bad.yaml", "not valid YAML"), ("list.yaml", "found list"), ("none.yaml", "No such file")):
        with pytest.raises(UsageError, match=words):
            read_file(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "x.yaml",
            "learning_rate: 1e-5\npacking: true\nlearning_rate: 2e-5\n",
            "is set twice, first in line 1. Remove",
        ),
        ("x.yaml", "a: {packing: true, 'packing': false}\n", "packing is set twice, first in line 1"),
        ("x.json", '{"packing": true, "packing": false}', "packing is set twice. Remove"),
    ],
)
def test_a_repeated_key_is_an_error(name: str, text: str, words: str, tmp_path: Path) -> None:
    """PyYAML and orjson silently keep the last value, and so do most trainers."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=words):
        read_file(tmp_path / name)


def test_merges_may_stand_twice_and_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: &a {x: 1}\nb: &b {y: 2}\nc:\n  <<: *a\n  <<: *b\n  x: 3\n")
    assert load_yaml((tmp_path / "x.yaml").read_text())["c"] == {"x": 3, "y": 2}


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("base: &base {a: 1, b: 2}\nother: {<<: *base, a: 3}\n")
    assert read_file(tmp_path / "x.yaml").values["other"] == {"a": 3, "b": 2}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout of a trainer like open-instruct, which has fields that TRL has, too."""
    folder = tmp_path / "checkout"
    (folder / "open_instruct").mkdir(parents=True)
    (folder / "open_instruct" / "__init__.py").write_text("")
    (folder / "open_instruct" / "finetune.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass\nclass FlatArguments:\n"
        "    packing: bool = False\n    max_steps: int = -1\n    num_train_epochs: int = 1\n"
    )
    for line in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--date", "2026-01-02T00:00:00Z"],
    ):
        subprocess.run(["git", "-C", str(folder), *line], check=True)
    return folder


def spec(folder: Path) -> str:
    return f"{folder / 'open_instruct' / 'finetune.py'}:FlatArguments"


def test_rules_belong_to_the_classes_they_were_written_for(checkout: Path) -> None:
    """TRL's rules said that `packing` of any class needs TRL's attention settings."""
    values = ConfigValues("x", {"packing": True, "max_steps": 5, "num_train_epochs": 3})
    report = lint(values, [read_config_class(spec(checkout))])
    assert report.sound, report.ineffective
    derived = checkout / "mine.py"
    derived.write_text(
        "import dataclasses\nimport trl\n\n\n@dataclasses.dataclass\nclass Mine(trl.SFTConfig):\n    x: int = 1\n"
    )
    classes = [read_config_class(f"{derived}:Mine")]
    assert {effect.key for effect in lint(values, classes).ineffective} == {"packing", "num_train_epochs"}


def test_the_commit_of_a_checkout_is_named(checkout: Path) -> None:
    head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    commit = head.stdout[:12]
    report = lint(ConfigValues("x", {"packing": True, "packin": 1}), [read_config_class(spec(checkout))])
    lines = list(report_lines(report))
    assert f"3 keys, open_instruct commit {commit} of 20" in lines[0]
    assert f"finetune.py:5 at commit {commit} of 20" in lines[1]
    assert f"no field of FlatArguments of open_instruct {commit} of 20" in lines[-1]
    assert report.to_json()["classes"][0]["commit"].startswith(commit)
    with (checkout / "open_instruct" / "finetune.py").open("a") as file:
        file.write("    packin: int = 0\n")
    assert (read_config_class(spec(checkout)).commit or "").startswith(f"{commit}+changes of 20")
    subprocess.run(["git", "-C", str(checkout), "rm", "-qr", "--cached", "."], check=True)
    commit_all = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "untrack"]
    subprocess.run(["git", "-C", str(checkout), *commit_all], check=True)
    assert read_config_class(spec(checkout)).commit is None


def test_a_checkout_can_not_run_commands(checkout: Path, tmp_path: Path) -> None:
    """git runs what a checkout's own configuration names: monitors, filters, pagers, signature checks."""
    script = tmp_path / "evil"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    script.chmod(0o755)
    settings = {
        "core.fsmonitor": script, "core.pager": script, "core.editor": script, "core.sshCommand": script,
        "filter.x.clean": script, "filter.x.smudge": script, "filter.x.process": script, "diff.external": script,
        "gpg.program": script, "log.showSignature": "true", "core.hooksPath": tmp_path, "credential.helper": script,
        "alias.rev-parse": f"!{script}", "alias.cat-file": f"!{script}",
    }  # fmt: skip
    for name, value in settings.items():
        subprocess.run(["git", "-C", str(checkout), "config", name, str(value)], check=True)
    (checkout / ".gitattributes").write_text("* filter=x diff=x\n")
    with (checkout / "open_instruct" / "finetune.py").open("a") as file:
        file.write("    packin: int = 0\n")
    assert "+changes" in (read_config_class(spec(checkout)).commit or "")
    assert not (tmp_path / "ran").exists()


def test_a_report_that_knows_little_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text("from missing import Base\n\n\nclass C(Base):\n    pass\n")
    (tmp_path / "x.yaml").write_text("a: 1\nb: 2\n")
    run = CliRunner().invoke(app, ["lint", str(tmp_path / "x.yaml"), "--for", f"{tmp_path / 'c.py'}:C"])
    assert run.exit_code == 1
    assert run.stdout.splitlines()[-1].startswith("Most keys can't be checked: pass the folders")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            "use_flash_attn",
            "Last seen in open_instruct 0.2 (FlatArguments); since 2026-03-30 the attention is detected",
        ),
        ("chat_template", "have chat_template_name, a key of TokenizerConfig"),
        ("chat_template_name", "a key of TokenizerConfig since 2025-03-21: add --for"),
    ],
)
def test_the_history_of_open_instruct(key: str, words: str, checkout: Path) -> None:
    report = lint(ConfigValues("x", {key: True}), [read_config_class(spec(checkout))])
    assert any(words in line for line in report_lines(report)), list(report_lines(report))
