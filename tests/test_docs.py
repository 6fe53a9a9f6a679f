"""Every example in the README and in docs/ that is not tested beside its own stage runs here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.exactness import table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the bundled examples in it, as a reader of the README would have."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    command = folder / "bin" / "penstock"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock.cli "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(folder)}


def run(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def run_page(page: Path, folder: Path, setup: str = "", first: int | None = None) -> str:
    """Runs the commands of a page, then its Python (the `first` blocks, as one program); returns what they print."""
    variables = environment(folder)
    printed = [run(["bash", "-euc", code], folder, variables) for code in blocks(page, "bash") if "make" not in code]
    if code := "\n".join(blocks(page, "python")[:first]):
        printed.append(run([sys.executable, "-c", setup + code], folder, variables))
    return "\n".join(printed)


FEED = """
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig as Config, SFTTrainer as Sft
from functools import partial
config = LlamaConfig(vocab_size=1024, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model, produce = LlamaForCausalLM(config), lambda step: step
optimizer = torch.optim.SGD(model.parameters())
SFTTrainer = partial(Sft, processing_class=AutoTokenizer.from_pretrained("examples/tokenizer"))
SFTConfig = partial(Config, "sft", report_to=[], use_cpu=True, bf16=False)
args = TrainingArguments("trainer", max_steps=1, report_to=[], use_cpu=True, remove_unused_columns=False)
accelerator = Accelerator(cpu=True)
"""
RUN = {  # pages, what their examples expect, how many blocks of Python run here, and words that are printed
    "cache": ("", None, ("nothing to do", "hit")),
    "coming-from": ("", 1, ("train_loss",)),  # the others run in tests/export/test_packages.py
    "export": ("", None, ()),
    "faithful": ("", None, ()),
    "feed": (FEED, None, ("packed", "% full")),
    "look": ("", None, ("128",)),
    "scale-out": ("", None, ("in the cache",)),
    "sources": ("", None, ("nobody answers", "400 rows, 27100 tokens")),
    "train": ("", None, ("EvalReport(",)),
    "views": ("", 0, ("trained",)),  # its Python runs in tests/view/test_docs_views.py
}


@pytest.mark.parametrize("name", RUN)
def test_the_examples_of_a_page_run(workplace: Path, name: str) -> None:
    setup, first, words = RUN[name]
    printed = run_page(ROOT / "docs" / f"{name}.md", workplace, setup, first)
    for expected in words:
        assert expected in printed, printed
    if name == "train":
        assert (workplace / "runs" / "kto" / "model" / "model.safetensors").is_file()
    if name == "scale-out":
        shown = "\n".join(blocks(ROOT / "docs" / "scale-out.md", "text"))
        for label in ("rows", "rejected", "tokens", "trained", "in the cache"):
            (line,) = re.findall(rf"^{label} .*?$", shown, re.MULTILINE)
            assert line in [found.rstrip() for found in printed.splitlines()]


def test_the_readme_runs(workplace: Path) -> None:
    """Its Python runs below, in a notebook."""
    assert "assistant" in run_page(ROOT / "README.md", workplace, first=0)


def test_datasets_are_never_named_by_a_glob() -> None:
    """A glob matches two datasets as soon as there are two; `latest` names one."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert "b3-*" not in page.read_text(), page.name


def test_the_readme_example_runs_in_a_notebook(workplace: Path) -> None:
    """And shows its progress there: one display, which ends as the summary."""
    code = f"""
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="python3")
shown = []
reply = client.execute_interactive(
    {blocks(ROOT / "README.md", "python")[0] + "ds"!r}, timeout=120,
    output_hook=lambda m: shown.append((m["msg_type"], m["content"].get("data", {{}}).get("text/html", ""))),
)
manager.shutdown_kernel(now=True)
assert reply["content"]["status"] == "ok", reply
kinds = [kind for kind, _ in shown]
assert kinds.count("display_data") == 1 and "update_display_data" in kinds and "stream" not in kinds, kinds
assert "27,100" in shown[kinds.index("execute_result")][1], shown
assert "prepared in" in [html for kind, html in shown if kind == "update_display_data"][-1], shown
"""
    variables = {**environment(workplace), "JUPYTER_PLATFORM_DIRS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=workplace, env=variables, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr


def test_the_demo_runs(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"], env=variables, capture_output=True, text=True, check=True
    )
    assert "nothing to do" in done.stdout
    assert "penstock-demo.html" in done.stdout and "penstock view b3-" in done.stdout


def test_the_table_of_tokenizers_is_the_measured_one() -> None:
    figures = json.loads((ROOT / "benchmarks" / "exactness.json").read_text())
    assert table(figures) in (ROOT / "docs" / "tokenizers.md").read_text()
    assert all(one["ids"] == one["masks"] == 0 and one["hostile"] >= 20_000 for one in figures.values())
