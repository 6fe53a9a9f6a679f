"""Every example in the README and in docs/ that is not tested beside its own stage runs here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
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


@pytest.fixture
def fresh_environment(tmp_path: Path) -> dict[str, str]:
    """The wheel of this tree in a new virtual environment, which has nothing else but our dependencies on its path."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.so", "tests", "build")
    shutil.copytree(
        ROOT, tree, ignore=lambda folder, names: ignored(folder, names) if folder == str(ROOT) else {"__pycache__"}
    )
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree]
    subprocess.run(wheel, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh"], check=True)
    (site,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    (built,) = tmp_path.glob("penstock-*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = tmp_path / "fresh" / "bin" / "penstock"
    command.write_text(f"#!{command.parent / 'python'}\nfrom penstock.cli import main\n\nmain()\n")
    command.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return {**variables, "PATH": path, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


def test_the_first_hour_runs(fresh_environment: dict[str, str], tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "docs" / "tutorial.md").read_text()
    printed = []
    for language, code in re.findall(r"^```(bash|python)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        command = ["bash", "-euc", code] if language == "bash" else [tmp_path / "fresh" / "bin" / "python", "-c", code]
        done = subprocess.run(command, cwd=work, env=fresh_environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr[-3000:]}"
        printed.append(done.stdout + done.stderr)
    told = "\n".join(printed)
    for words in ("penstock 0.1.0", "nothing to do", "tokens cut", "stopped, as it should be", "role 'bot' is unknown"):
        assert words in told, words
    assert "going on from step 4 of 6" in told
    assert "all_messages: " in told


PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in ("export", "look", "scale-out")),
    *sorted((ROOT / "docs").glob("coming-from-*.md")),
]


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
