"""Mutation testing: is every one-line bug caught?

    python -m tools.mutation_test [--only TEXT] [--data FOLDER] [--json FILE]   the template machine
    python -m tools.mutation_test --pipeline [--only TEXT] [--json FILE]        from source to batch, by `make quick`

Each mutation in `tools.mutations` is applied to a copy of the tree, the C file is recompiled, and the tests in `STAGES`
(quick ones first) run until one fails; with --pipeline, all tests of the quick tier. With --data, each mutation that
changes at least 1% of the rows of some file (rendered with one of `TEMPLATES`) must also be caught while that file is
prepared: by the probes that compare the engines before any row is served, or by the spot check. Exits with 1 if a
mutation is missed. Takes about ten seconds per mutation on one core, and a minute or two for one that survives.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.mutations import MUTATIONS, PIPELINE

ROOT = Path(__file__).parent.parent
_MACHINE = "tests/prepare/template/test_machine.py"
STAGES = (  # files of tests, and which of them
    *((_MACHINE, "not trl"), ("tests/prepare/template/test_control.py", ""), (_MACHINE, "trl")),
    *(("tests/prepare/template/test_special_text.py", ""), ("tests/prepare/template/test_rows.py", "")),
    ("tests/native/test_characters.py", ""),
    ("tests/prepare/template/test_every_filter.py", ""),
)
QUICK = (("tests", ""),)
ALIGNMENT = (("tests/prepare/encode/test_align.py", ""), ("tests/prepare/encode/test_spm_pieces.py", ""))
UNIGRAM = (("tests/prepare/encode/test_unigram.py", ""),)
COMPOSED = (("tests/prepare/encode/test_code_points.py", ""), ("tests/native/test_native.py", ""))
EVERY = (*STAGES, *ALIGNMENT, *COMPOSED, *UNIGRAM)
WITH_SLOW = (*ALIGNMENT, *UNIGRAM)
OWN_TEST = "tests/test_shape.py::test_every_mutation_still_has_its_place"  # it would notice every mutation
STALE = "stale"
TEMPLATES = ("qwen3", "gptoss")
ROWS = 150  # of each file
SHARE = 0.01


@dataclass
class MutationResult:
    """The result of a mutation."""

    file: str
    old: str
    new: str
    tests: str = ""  # the first test that fails, or "survived"
    share: float = 0.0  # fraction of rows changed, in the file with the most changes
    where: str = ""  # that file, and the template
    check: str = ""  # what caught it in a build: "probes", "spot check", "missed"

    @property
    def is_caught(self) -> bool:
        return self.tests != "survived" and not self.tests.startswith(STALE) and self.check != "missed"


class TreeCopy:
    """A copy of the source tree with its own compiled core."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listing, cwd=ROOT, text=True).split("\0")[:-1]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        self._objects = folder / "objects"
        self._objects.mkdir()
        for source in sorted((folder / "penstock" / "native").glob("*.c")):
            self._compile(source)
        self._link()

    def write(self, file: str, text: str) -> bool:
        """Changes a file; returns whether it compiles."""
        path = self.folder / file
        path.write_text(text)
        try:
            if path.suffix == ".c":
                self._compile(path)
                self._link()
        except subprocess.CalledProcessError:
            return False
        return True

    def _compile(self, source: Path) -> None:
        include = f"-I{sysconfig.get_paths()['include']}"
        command = ["gcc", "-O1", "-fPIC", "-w", include, "-c", str(source), "-o", str(self._object(source))]
        subprocess.run(command, check=True, capture_output=True)

    def _link(self) -> None:
        library = self.folder / "penstock" / "native" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
        objects = sorted(map(str, self._objects.glob("*.o")))
        subprocess.run(["gcc", "-shared", *objects, "-o", str(library), "-lm"], check=True, capture_output=True)

    def _object(self, source: Path) -> Path:
        return self._objects / f"{source.stem}.o"

    def run(self, *arguments: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Runs Python in this tree."""
        command = [sys.executable, *arguments]
        try:
            return subprocess.run(
                command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", "FAILED (hangs)")

    def tests(self, stages: tuple[tuple[str, str], ...] = STAGES) -> str:
        """The first test that fails, or "survived"."""
        outcomes = (self._tests(*stage, "-n", "2" if stage in QUICK else "0") for stage in stages)
        return next((outcome for outcome in outcomes if outcome != "survived"), "survived")

    def _tests(self, file: str, chosen: str, *more: str) -> str:
        slow = [] if (file, chosen) in WITH_SLOW else ["-m", "not slow"]
        options = ("-x", "-q", "-p", "no:cacheprovider", *more, *slow, "--tb=no", "-k", chosen, "--deselect", OWN_TEST)
        done = self.run("-m", "pytest", *options, file, seconds=3600)
        if done.returncode == 0:
            return "survived"
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        if not failed:
            return f"died ({done.returncode})" if done.returncode < 0 else (done.stderr or done.stdout)[-200:].strip()
        return failed[0].split("::")[1].split(" ")[0]


# ---- the effect of a mutation on rows; both functions run inside a copy


def digests(files: list[Path]) -> dict[str, list[str | None]]:
    """Digests of the machine's output for each row, by file and template; None if it leaves the row to Python."""
    import orjson

    from benchmarks.models import trl_templates
    from penstock.prepare.chat.adapt import Adapter
    from penstock.prepare.chat.formats import FormatOptions, detect
    from penstock.prepare.template.compiler import CompiledTemplate, can_read, row_layout
    from penstock.prepare.template.reference import Reference

    date = datetime.date(2026, 1, 1)
    base = {"documents": None, "add_generation_prompt": False, "bos_token": "<s>", "eos_token": "</s>"}
    found: dict[str, list[str | None]] = {}
    for name in TEMPLATES:
        template = trl_templates()[name]
        reference = Reference(template, special_tokens={}, variables=base, date=date)
        needs, tree = Adapter(reference.plain).needs, reference.parse(template)
        for file in files:
            rows = file.read_bytes().splitlines()
            mapping = detect(list(map(orjson.loads, rows)), FormatOptions())
            if not can_read(mapping):
                continue
            machine = CompiledTemplate(tree, base, date, row_layout(mapping, needs, []))
            found[f"{file.name} {name}"] = [_digest(machine.render([row])) for row in rows]
    return found


def _digest(batch: Any) -> str | None:
    if batch.status[0] in (1, 2):
        return None
    seen = (batch.data, batch.reasons, batch.row_flags, batch.spans, batch.tags, batch.roles, batch.weights)
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


def prepared(file: Path, template: str) -> dict[str, Any]:
    """Prepares one file and returns what the build reports."""
    import penstock as ps
    from benchmarks.models import trl_templates

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "template.jinja"
        source.write_text(trl_templates()[template])
        last: list[Any] = []
        ps.prepare(
            file,
            tokenizer=str(ROOT / "examples" / "tokenizer"),
            template=source,
            cache=Path(folder) / "cache",
            workers=1,
            on_bad_row="quarantine",
            quarantine_file=Path(folder) / "quarantine.jsonl",
            dropped_tool_calls="keep",
            on_progress=last.append,
        )
        return {"mismatches": last[-1].mismatches, "engines": last[-1].engines}


# ---- the run


def sampled(data: Path, folder: Path) -> list[Path]:
    """Samples rows from every file."""
    files = []
    for file in sorted(data.glob("*.jsonl")):
        lines = [line for line in file.read_bytes().splitlines() if line.strip()]
        lines = lines[:: max(1, len(lines) // ROWS)][:ROWS]
        files.append(folder / file.name)
        files[-1].write_bytes(b"".join(line + b"\n" for line in lines))
    return files


def judge_build(copy: TreeCopy, result: MutationResult, files: list[Path], usual: dict[str, list[str | None]]) -> None:
    """Counts the rows that a mutation changes, and checks whether a build catches it."""
    done = copy.run("-m", "tools.mutation_test", "--digests", *map(str, files))
    if done.returncode:
        result.check = "died"
        return
    now = json.loads(done.stdout)
    for key, before in usual.items():
        changed = sum(a is not None and a != b for a, b in zip(now[key], before, strict=True))
        if changed > result.share * len(before):
            result.share, result.where = changed / len(before), key
    if result.share < SHARE:
        return
    name, template = result.where.split()
    file = next(file for file in files if file.name == name)
    done = copy.run("-m", "tools.mutation_test", "--prepare", str(file), template)
    if done.returncode:
        result.check = f"died: {done.stderr.strip().splitlines()[-1:]}"
        return
    report = json.loads(done.stdout.splitlines()[-1])
    if report["mismatches"]:
        result.check = "spot check"
    elif any("what the machine" in why for why in report["engines"].get("render", {})):
        result.check = "probes"
    else:
        result.check = "missed"


def stages_for(mutation: tuple[str, str, str]) -> tuple[tuple[str, str], ...]:
    """The tests that must catch a mutation."""
    if mutation in PIPELINE:  # those of its room first, to be quick
        return ((str(Path("tests", *Path(mutation[0]).parent.parts[1:])), ""), *QUICK)
    file = Path(mutation[0]).stem
    return {"align": ALIGNMENT, "compose": COMPOSED, "unigram": UNIGRAM, "unigram_words": UNIGRAM}.get(file, STAGES)


def judge(copy: TreeCopy, mutation: tuple[str, str, str], files: list[Path], usual: dict[str, Any]) -> MutationResult:
    """Applies one mutation, tests it, and reverts it."""
    file, old, new = mutation
    result = MutationResult(file, old, new)
    text = (ROOT / file).read_text()
    if text.count(old) != 1:
        result.tests = f"{STALE}: found {text.count(old)} times"
        return result
    if copy.write(file, text.replace(old, new)):
        result.tests = copy.tests(stages_for(mutation))
        if files and not file.endswith("align.c"):
            judge_build(copy, result, files, usual)
    else:
        result.tests = "does not compile"
    copy.write(file, text)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", action="store_true", help="mutate the way from source to batch")
    parser.add_argument("--only", default="", help="only mutations whose file or text contains this")
    parser.add_argument("--data", type=Path, help="a folder of JSON-lines files")
    parser.add_argument("--json", type=Path, help="write the results here; mutations already in it are skipped")
    parser.add_argument("--digests", nargs="+", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.digests:
        print(json.dumps(digests(options.digests)))
        return 0
    if options.prepare:
        print(json.dumps(prepared(Path(options.prepare[0]), options.prepare[1])))
        return 0
    results: list[MutationResult] = []
    if options.json and options.json.exists():
        results = [MutationResult(**result) for result in json.loads(options.json.read_text())]
    judged = {(result.file, result.old, result.new) for result in results}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # some tests run as another user
        copy = TreeCopy(Path(folder) / "tree")
        (Path(folder) / "data").mkdir()
        files = sampled(options.data, Path(folder) / "data") if options.data else []
        usual = json.loads(copy.run("-m", "tools.mutation_test", "--digests", *map(str, files)).stdout) if files else {}
        if (first := copy.tests(QUICK if options.pipeline else EVERY)) != "survived":
            print(f"the tests fail without any mutation: {first}")
            return 1
        for mutation in PIPELINE if options.pipeline else MUTATIONS:
            if options.only not in " ".join(mutation) or mutation in judged:
                continue
            begun = time.monotonic()
            result = judge(copy, mutation, files, usual)
            results.append(result)
            build = f"{result.share:.0%} of {result.where}: {result.check}" if result.check else ""
            line = f"{result.file.split('/')[-1]}: {result.old.strip()!r:.70} -> {result.new.strip()!r:.50}"
            print(f"{line} | {result.tests} | {build} ({time.monotonic() - begun:.0f} s)", flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    missed = [result for result in results if not result.is_caught]
    print(f"{len(results)} mutations, {len(missed)} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
