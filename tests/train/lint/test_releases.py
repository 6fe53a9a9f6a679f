"""Lint against two unpacked TRL releases, with torch not importable, and against the installed classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.train.lint.config_class import read_config_class

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CONFIG = "use_liger_loss: true\nmax_seq_length: 2048\ntokenizer: x\nlearning_rat: 1.0e-5\nlearning_rate: 1.0e-5\n"


def lint(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Runs the command with importing torch blocked."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    code = (
        "import sys; from penstock.cli import main\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ImportError('torch is not here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "lint", "config.yaml", "--json", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("version", "spec", "accepted"),
    [
        ("0.19.1", "trl.SFTConfig", {"max_seq_length", "learning_rate"}),
        ("0.19.1", "trl.DPOConfig", {"use_liger_loss", "learning_rate"}),
        ("1.14.0", "trl.SFTConfig", {"learning_rate"}),
        ("1.14.0", "trl.DPOConfig", {"learning_rate"}),
    ],
)
def test_unpacked_releases(
    trl_release: Callable[[str], Path], tmp_path: Path, version: str, spec: str, accepted: set[str]
) -> None:
    folder = trl_release(version)
    code, report = lint(tmp_path, "--for", spec, "--search", str(folder))
    keys = {entry["key"]: entry for entry in report["keys"]}
    assert {key for key, entry in keys.items() if entry["standing"] == "accepted"} == accepted
    assert {key for key, entry in keys.items() if entry["standing"] == "refused"} == keys.keys() - accepted
    assert code == 1
    assert keys["learning_rat"]["nearest"][0] == "learning_rate"
    assert "processing_class" in keys["tokenizer"]["replaced"]
    if "max_seq_length" not in accepted and spec == "trl.SFTConfig":
        assert "now max_length" in keys["max_seq_length"]["replaced"]
    if "use_liger_loss" not in accepted and spec == "trl.DPOConfig":
        assert "from 0.28 to 1.12" in keys["use_liger_loss"]["replaced"]
    (entry,) = report["classes"]
    assert entry["version"] == version
    assert entry["file"].startswith(str(folder))


def test_path_selects_that_file(trl_release: Callable[[str], Path], tmp_path: Path) -> None:
    file = trl_release("0.19.1") / "trl" / "trainer" / "dpo_config.py"
    _, report = lint(tmp_path, "--for", f"{file}:DPOConfig")
    assert report["classes"][0]["version"] == "0.19.1"
    assert {e["key"] for e in report["keys"] if e["standing"] == "accepted"} == {"use_liger_loss", "learning_rate"}


def test_keys_match_the_installed_dataclasses() -> None:
    code = (
        "import dataclasses, json, transformers, trl\n"
        "classes = (trl.SFTConfig, trl.DPOConfig, transformers.TrainingArguments)\n"
        "print(json.dumps([[f.name for f in dataclasses.fields(c) if f.init] for c in classes]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    specs = ("trl.SFTConfig", "trl.DPOConfig", "transformers.TrainingArguments")
    for spec, names in zip(specs, json.loads(done.stdout), strict=True):
        assert set(read_config_class(spec).keys) == set(names)
