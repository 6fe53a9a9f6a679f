"""Processes that Penstock starts run its own code: never a module that lies in the folder where a command is run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

import penstock
from penstock import child
from tests.support.ray_cluster import LoopbackCluster
from tools import graph

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SHADOWED = (
    *("penstock", "orjson", "numpy", "pyarrow", "tokenizers", "jinja2", "yaml", "xxhash", "blake3", "gigatoken"),
    *("torch", "transformers", "accelerate", "peft", "ray", "psutil", "msgpack", "cloudpickle", "liger_kernel", "trl"),
    *("json", "typing", "signal", "select", "tempfile", "socket", "sitecustomize", "usercustomize"),
)


class HostileFolder:
    """A folder of data with a Python module for every name that a process of ours imports."""

    def __init__(self, path: Path, data: Path) -> None:
        self.path, self._log = path, path.parent / "imported"
        path.mkdir()
        rows = data.read_text().splitlines(keepends=True)
        (path / "chats.jsonl").write_text("".join(rows[::2]))
        (path / "more.jsonl").write_text("".join(rows[1::2]))
        (path / "penstock").mkdir()
        code = (
            f"import os\nlog = os.open({str(self._log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
            'os.write(log, f"{__name__}\\n".encode())\nraise ImportError("hostile code ran")\n'
        )
        for name in SHADOWED:
            file = path / name / "__init__.py" if name == "penstock" else path / f"{name}.py"
            file.write_text(code)

    @property
    def imported(self) -> list[str]:
        """The modules of the folder that a process has imported."""
        return self._log.read_text().split() if self._log.exists() else []

    def run(self, *arguments: object, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs `penstock` in the folder, as the installed command does: without the folder on its own path."""
        line = [sys.executable, "-P", "-m", "penstock.cli", *map(str, arguments)]
        environment = {**os.environ, **(variables or {})}
        return subprocess.run(line, cwd=self.path, env=environment, capture_output=True, text=True, check=False)

    def prepare(self, cache: Path, tokenizer: Path, *options: str) -> dict[str, object]:
        """Prepares the data; returns what `--json` prints about the build."""
        line = ["prepare", "chats.jsonl", "more.jsonl", "--tokenizer", tokenizer, "--cache", cache, "--json", *options]
        done = self.run(*line, variables={"RAY_AUTH_MODE": "disabled"} if "--ray-address" in options else None)
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)["build"]
        return found


@pytest.fixture
def hostile(tmp_path: Path, examples: Path) -> HostileFolder:
    return HostileFolder(tmp_path / "data", examples / "data" / "chats.jsonl")


def test_a_worker(hostile: HostileFolder, tokenizer: Path, tmp_path: Path) -> None:
    found = hostile.prepare(tmp_path / "cache", tokenizer, "--workers", "2")
    assert found["slices_done"] == 2
    assert hostile.imported == []


def test_the_comparison_with_auto_tokenizer(hostile: HostileFolder, tokenizer: Path, tmp_path: Path) -> None:
    named = tmp_path / "named"
    shutil.copytree(tokenizer, named)
    config = json.loads((named / "tokenizer_config.json").read_text())
    (named / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    done = hostile.run("prepare", "chats.jsonl", "--tokenizer", named, "--cache", tmp_path / "cache")
    assert hostile.imported == []
    assert "AutoTokenizer (GPT2Tokenizer of transformers" in done.stdout + done.stderr
    assert "not compared" not in done.stdout + done.stderr


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A folder with a factory for `verify`."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "makes_models.py").write_text(
        "import torch\n\n\ndef step():\n    weight = torch.ones(1, requires_grad=True)\n"
        "    return lambda: weight.sum().backward()\n"
    )
    return folder


@pytest.mark.parametrize("where", ["elsewhere", "relative"])
def test_a_probe_of_a_factory(hostile: HostileFolder, module: Path, where: str) -> None:
    """The module is found through PYTHONPATH, so the current folder is no place for its code."""
    path = str(module) if where == "elsewhere" else os.path.relpath(module, hostile.path)
    variables = {"PYTHONPATH": os.pathsep.join([path, str(ROOT)])}
    done = hostile.run("verify", "--target", "makes_models:step", "--json", variables=variables)
    assert hostile.imported == []
    finite = next(f for f in json.loads(done.stdout)["findings"] if f["promise"] == "loss.finite")
    assert "can't be imported" not in finite["evidence"][0]


def test_a_probe_of_a_configuration(hostile: HostileFolder, tokenizer: Path, tmp_path: Path) -> None:
    config = {"model": {"path": str(tmp_path)}, "data": {"sources": "chats.jsonl", "tokenizer": str(tokenizer)}}
    (hostile.path / "config.yaml").write_text(yaml.safe_dump({**config, "output": str(tmp_path / "out")}))
    hostile.run("verify", "config.yaml", "--method", "sft")
    assert hostile.imported == []


def test_a_worker_of_a_ray_cluster_that_we_start(hostile: HostileFolder, tokenizer: Path, tmp_path: Path) -> None:
    options = ["--runner", "ray", "--ray-address", "local", "--workers", "1"]
    assert hostile.prepare(tmp_path / "cache", tokenizer, *options)["slices_done"] == 2
    assert hostile.imported == []


def test_a_worker_of_a_running_ray_cluster(hostile: HostileFolder, tokenizer: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short, because it holds sockets
        cluster = LoopbackCluster(1, folder)
        try:
            options = ["--runner", "ray", "--ray-address", cluster.address, "--workers", "1"]
            # Relative paths are the driver's, wherever the cluster was started.
            assert hostile.prepare(Path("../cache"), tokenizer, *options)["slices_done"] == 2
        finally:
            cluster.close()
    assert hostile.imported == []


def test_a_child_finds_this_penstock_and_what_was_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Entries of PYTHONPATH for the current folder are dropped; the others stay, and decide as in this process."""
    monkeypatch.chdir(tmp_path)
    root = str(Path(penstock.__file__).parent.parent)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert child.import_path() == root
    for given in ("", ".", ":", "./:"):
        monkeypatch.setenv("PYTHONPATH", given)
        assert child.import_path() == root, given
    monkeypatch.setenv("PYTHONPATH", f":{tmp_path}:lib:../lib:")
    assert child.import_path().split(os.pathsep) == [*(str(tmp_path / name) for name in ("", "lib", "../lib")), root]
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", f".:{tmp_path}")  # here Penstock itself is in the current folder
    assert child.import_path().split(os.pathsep) == [root, str(tmp_path)]


def test_a_penstock_that_is_not_installed_is_found_by_its_children(
    examples: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """A checkout on PYTHONPATH, by an absolute or a relative path, or as the current folder."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "penstock", copy / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    packages = [path for path in sys.path if "site-packages" in path]  # the interpreter below has none of its own
    code = "import sys, penstock.cli; print(penstock.__file__, file=sys.stderr); penstock.cli.main()"
    rows = (examples / "data/chats.jsonl").read_text().splitlines(keepends=True)
    for number in (0, 1):
        (copy / f"{number}.jsonl").write_text("".join(rows[number::2]))
    for number, given in enumerate([str(copy), ".", "../checkout"]):
        line = ["prepare", "0.jsonl", "1.jsonl", "--tokenizer", str(tokenizer), "--workers", "2", "--json"]
        done = subprocess.run(
            [sys.executable, "-S", "-P", "-c", code, *line, "--cache", str(tmp_path / f"cache{number}")],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([given, *packages])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(str(copy))
        assert json.loads(done.stdout)["build"]["slices_done"] == 2


def test_every_child_is_started_in_one_way() -> None:
    """Only `child` knows the interpreter; nothing forks or spawns through `multiprocessing`."""
    for path in sorted(graph.ROOT.rglob("*.py")):
        code = path.read_text()
        assert path.name == "child.py" or "sys.executable" not in code, path
        assert "multiprocessing." not in code.replace("multiprocessing_context", ""), path
