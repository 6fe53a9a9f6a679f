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


def test_the_readme_runs(workplace: Path) -> None:
    variables = environment(workplace)
    for code in blocks(ROOT / "README.md", "python"):
        script = workplace / "script.py"
        script.write_text(code)
        subprocess.run([sys.executable, script], cwd=workplace, env=variables, check=True, capture_output=True)
    shell = [b for b in blocks(ROOT / "README.md", "bash") if "make" not in b]
    assert shell
    for code in shell:
        done = subprocess.run(
            ["bash", "-euc", code], cwd=workplace, env=variables, check=True, capture_output=True, text=True
        )
        assert "found in the cache" in done.stdout
        assert "assistant" in done.stdout


def test_the_planning_page_runs(workplace: Path) -> None:
    (code,) = blocks(ROOT / "docs" / "planning.md", "bash")
    (shown,) = blocks(ROOT / "docs" / "planning.md", "text")
    done = subprocess.run(
        ["bash", "-euc", code], cwd=workplace, env=environment(workplace), check=True, capture_output=True, text=True
    )
    for label in ("rows", "rejected", "tokens", "trained", "in the cache"):
        assert [*re.findall(rf"^{label} .*?$", shown, re.MULTILINE)] == [
            line.rstrip() for line in re.findall(rf"^{label} .*?$", done.stdout, re.MULTILINE)
        ]


def run_page(page: Path, folder: Path, variables: dict[str, str]) -> str:
    """Runs all blocks of a page, in order and in one folder; returns what they printed."""
    printed = []
    for language, code in re.findall(r"^```(bash|python)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        command = ["bash", "-euc", code] if language == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr[-3000:]}"
        printed.append(done.stdout + done.stderr)
    return "\n".join(printed)


TASKS = {  # pages whose blocks run in order in one folder, and words that they print
    "quickstart": ("assistant", "tokens cut", "examples in"),
    "prepare": ("nobody answers", "encoded"),
    "share-a-cache": ("nothing to do", "hit"),
    "check-masks": ("last_assistant_message: ",),
    "max-length": ("of the tokens cut",),
    "packing": ("packed Counts(",),
    "resume": (),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_page_runs(workplace: Path, name: str) -> None:
    told = run_page(ROOT / "docs" / f"{name}.md", workplace, environment(workplace))
    for words in TASKS[name]:
        assert words in told, told


def test_the_example_of_train_runs(workplace: Path) -> None:
    assert "EvalReport(" in run_page(ROOT / "docs" / "train.md", workplace, environment(workplace))


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


def test_the_example_of_faithful_runs(workplace: Path) -> None:
    prepared = "import penstock as ps; ds = ps.prepare('examples/data/chats.jsonl', tokenizer='examples/tokenizer')\n"
    (code,) = blocks(ROOT / "docs" / "faithful.md", "python")
    run = [sys.executable, "-c", prepared + code]
    done = subprocess.run(run, cwd=workplace, env=environment(workplace), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_examples_of_feed_run(workplace: Path) -> None:
    """With a tiny model; the trainers of the last two are only made."""
    code = "\n".join([FEED, *blocks(ROOT / "docs" / "feed.md", "python")])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=workplace, env=environment(workplace), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in ("export", "look", "scale-out")),
    *sorted((ROOT / "docs").glob("coming-from-*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_an_export_page_run(workplace: Path, page: Path) -> None:
    """Their other recipes run where the trainers' packages are: tests/exchange/test_packages.py."""
    variables = environment(workplace)
    for number, code in enumerate(blocks(page, "bash")):
        place = workplace / str(number)
        place.mkdir()
        (place / "examples").symlink_to(workplace / "examples")
        subprocess.run(["bash", "-euc", code], cwd=place, env=variables, check=True, capture_output=True)


def test_the_examples_of_sources_run(workplace: Path) -> None:
    code = "\n".join(blocks(ROOT / "docs" / "sources.md", "python"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=workplace, env=environment(workplace), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "400 rows, 27100 tokens" in done.stdout


def test_the_recipes_for_trl_run(workplace: Path) -> None:
    variables = environment(workplace)
    for code in blocks(ROOT / "docs" / "coming-from-trl.md", "python"):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=workplace, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]


def test_the_page_on_kto_runs(workplace: Path) -> None:
    variables, shown = environment(workplace), []
    page = (ROOT / "docs" / "kto.md").read_text()
    for language, code in re.findall(r"^```(bash|python)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        command = ["bash", "-euc", code] if language == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=workplace, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        shown.append(done.stdout)
    assert "[1 0 1 0]" in shown[1]
    assert (workplace / "runs" / "kto" / "model" / "model.safetensors").is_file()


def test_datasets_are_never_named_by_a_glob() -> None:
    """A glob matches two datasets as soon as there are two; `latest` names one."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert "b3-*" not in page.read_text(), page.name


def test_the_example_of_look_runs(workplace: Path) -> None:
    (code,) = blocks(ROOT / "docs" / "look.md", "python")
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=workplace, env=environment(workplace), capture_output=True, text=True, check=True)
    assert "128" in done.stdout


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
