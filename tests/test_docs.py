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
from penstock.cli.document import document

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


def recipes() -> list[tuple[str, str, str]]:
    """Title, language and code of each recipe."""
    found = re.split(r"^## ", (ROOT / "docs" / "recipes.md").read_text(), flags=re.MULTILINE)[1:]
    return [
        (part.splitlines()[0], *re.findall(r"^```(\w+)\n(.*?)^```", part, re.DOTALL | re.MULTILINE)[0])
        for part in found
    ]


@pytest.mark.parametrize(("title", "language", "code"), recipes(), ids=[title for title, _, _ in recipes()])
def test_a_recipe_runs(workplace: Path, title: str, language: str, code: str) -> None:
    command = ["bash", "-euc", code] if language == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=workplace, env=environment(workplace), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = {
        "Try another loss policy, length or packing": "packed",
        "Prepare on a node with many cores, train on others": "nothing to do",
        "Data with bad rows": "nobody answers",
        "Append rows and encode only what is new": "encoded",
    }
    assert expected.get(title, "") in done.stdout


def test_the_recipes_run_in_order_in_one_folder(workplace: Path) -> None:
    """A reader can run the whole page in one folder: no recipe breaks a later one."""
    variables = environment(workplace)
    for title, language, code in recipes():
        command = ["bash", "-euc", code] if language == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=workplace, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{title}: {done.stderr}"


PAGES = [ROOT / "docs" / "export.md", ROOT / "docs" / "look.md", *sorted((ROOT / "docs").glob("coming-from-*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_an_export_page_run(workplace: Path, page: Path) -> None:
    """Their other recipes run where the trainers' packages are: tests/export/test_packages.py."""
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
    (workplace / "tiny").mkdir()
    config = {"model_type": "llama", "vocab_size": 1024, "hidden_size": 16, "intermediate_size": 32}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    (workplace / "tiny" / "config.json").write_text(json.dumps(config))
    variables = environment(workplace)
    for code in blocks(ROOT / "docs" / "coming-from-trl.md", "python"):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=workplace, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]


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


def test_the_command_line_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == document(), "run `python -m penstock.cli.document > docs/cli.md`"


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_table_of_tokenizers_is_the_measured_one() -> None:
    figures = json.loads((ROOT / "benchmarks" / "exactness.json").read_text())
    assert table(figures) in (ROOT / "docs" / "tokenizers.md").read_text()
    assert all(one["ids"] == one["masks"] == 0 and one["hostile"] >= 20_000 for one in figures.values())
