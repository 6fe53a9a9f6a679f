"""Fuzzes what reads strangers' bytes: differences from the references, memory errors, bad answers of the viewer.

    python -m tools.fuzz --seconds 60 [--seed N] [--part NAME] [--data FOLDER] [--tokenizers FOLDER …]
    python -m tools.fuzz --replay FIND.json

Six parts share the time:

rows        valid rows of every format, mutated at random, rendered with the templates of PyPI's trl. The machine must
            agree with `RowReader`, `Adapter` and the reference, or leave the row to them. Every other batch is rendered
            with its assistant turns, as `--turns faithful` does.
templates   random templates on unusual values. The machine must render or refuse exactly as transformers does, with
            the same spans and turns as the reference, or give up.
tokens      conversations of unusual text, with templates of trl and the given tokenizers (default: the bundled one),
            prepared and encoded by transformers: ids and masks must be equal.
unigram     random Unigram tokenizers and texts: our engine's ids and offsets must be the reference's.
viewer      requests, valid and hostile, on a dataset of hostile rows.
sanitizer   rows, templates and Unigram again in a separate process, with the C core compiled for AddressSanitizer and
            UBSan, the former two without references; and damaged bytecode, which must be refused or run safely.

Findings are written as JSON with their seed to --finds, ready for --replay, and the exit code is 1. To keep one as a
regression test, move its file to tests/prepare/template/fuzz_corpus.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parent.parent
NATIVE = "penstock.native._native"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
NEEDLES = ("<|im_end|>", "<|endoftext|>", "</s>", "<|im_start|>")
BATCH = 100
WARNINGS = ("-Wall", "-Wextra", "-Werror")
PARTS = {
    "rows": 0.3,
    "templates": 0.2,
    "tokens": 0.15,
    "unigram": 0.05,
    "viewer": 0.1,
    "sanitizer": 0.2,
}  # shares of the time


def use_native(path: str) -> None:
    """Loads the compiled core from this file; call it before importing Penstock."""
    loader = importlib.machinery.ExtensionFileLoader(NATIVE, path)
    spec = importlib.util.spec_from_file_location(NATIVE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NATIVE] = module


if __name__ == "__main__" and "--native" in sys.argv:
    use_native(sys.argv[sys.argv.index("--native") + 1])

from benchmarks.clock import DATE, stop_clock  # noqa: E402
from benchmarks.models import trl_templates  # noqa: E402
from penstock.errors import RowError, TemplateError  # noqa: E402
from penstock.native import RenderedBatch, RowFlag, RowStatus  # noqa: E402
from penstock.prepare.chat.conversation import Conversation, Role  # noqa: E402
from penstock.prepare.chat.rows import RowReader  # noqa: E402
from penstock.prepare.template.bytecode import NotCompiled  # noqa: E402
from penstock.prepare.template.compiler import CompiledTemplate, conversation_layout, encoded  # noqa: E402
from penstock.prepare.template.printed import MessageFlag  # noqa: E402
from penstock.prepare.template.probes import rows as regions_of  # noqa: E402
from penstock.prepare.template.reference import Reference  # noqa: E402
from penstock.prepare.template.rendered import Rendered  # noqa: E402
from penstock.prepare.template.renderer import TemplateRenderer  # noqa: E402
from penstock.prepare.template.turns import REFUSED, SpanColumn, TagColumn, TurnColumn, Turns, TurnState  # noqa: E402
from penstock.printable import printable  # noqa: E402
from tools.fuzz_rows import mutated_row, seeds  # noqa: E402
from tools.fuzz_templates import TemplateGenerator, conversations  # noqa: E402


class Facts(NamedTuple):
    """Everything that is compared about a rendered row."""

    text: bytes = b""
    known: bool = True
    spans: tuple[Any, ...] = ()
    tags: tuple[Any, ...] = ()
    roles: tuple[int, ...] = ()
    flags: tuple[int, ...] = ()
    weights: tuple[str, ...] = ()
    own_variables: bool = False
    special: str | None = None
    refusal: str | None = None
    turns: tuple[Any, ...] = ()


class Difference(NamedTuple):
    """An input on which the machine and a reference differ."""

    number: int
    what: str
    machine: Any
    reference: Any


# ---- rows


def _flags(roles: Sequence[int], flags: Sequence[int]) -> tuple[int, ...]:
    """Normalises flags: the machine tracks whether content is printed only for assistant and system messages."""
    tracked, printed = (Role.SYSTEM, Role.ASSISTANT), MessageFlag.CONTENT_PRINTED.value
    has_calls = MessageFlag.HAS_CALLS.value
    return tuple(f if role in tracked or f & has_calls else printed for role, f in zip(roles, flags, strict=True))


def turn_facts(turns: Turns | None) -> dict[int, tuple[Any, ...]]:
    """The turns of each row, by message, without what nothing reads: sizes of refused turns, whether the root extends
    a turn, and the flags of a root that is the whole row."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    if turns is None:
        return {}
    kept, at = zip(*(sizes.tolist() for sizes in turns.kept), strict=True), 0
    spans, tags = turns.spans.tolist(), turns.tags.tolist()
    for number, (turn, own) in enumerate(zip(turns.table.tolist(), kept, strict=True)):
        row, message, state = turn[TurnColumn.ROW], turn[TurnColumn.MESSAGE], turn[TurnColumn.STATE]
        texts = turns.data[at : at + own[0]], turns.data[at + own[0] : at + sum(own)]
        at += sum(own)
        if state & REFUSED:
            found.setdefault(row, []).append((message, state & REFUSED))
            continue
        if state & TurnState.IS_ROOT:
            turn[TurnColumn.STATE] = int(state & ~TurnState.EXTENDS)
            turn[TurnColumn.FLAGS] = -1 if state & TurnState.IN_ROOT else turn[TurnColumn.FLAGS]
        regions = [[place[1:] for place in places if place[0] == number] for places in (spans, tags)]
        found.setdefault(row, []).append((*turn[TurnColumn.MESSAGE :], *texts, *regions))
    return {row: tuple(sorted(own, key=lambda turn: turn[0])) for row, own in found.items()}


def facts_of(rendered: Rendered) -> list[Facts]:
    """The facts of each row in a batch."""
    offsets = rendered.message_offsets.tolist()
    turns = turn_facts(rendered.turns)
    weights = rendered.message_weights
    found = []
    for k, (text, known, spans, tags, failed) in enumerate(regions_of(rendered)):
        if failed:
            found.append(Facts(refusal=str(rendered.errors[k])))
            continue
        own = slice(offsets[k], offsets[k + 1])
        count = offsets[k + 1] - offsets[k]
        roles = tuple(rendered.message_roles[own].tolist())
        found.append(
            Facts(
                text,
                known,
                tuple(spans),
                tuple(tags),
                roles,
                _flags(roles, rendered.message_flags[own].tolist()),
                ("nan",) * count if weights is None else tuple(map(repr, weights[own].tolist())),
                rendered.own_variables is not None and bool(rendered.own_variables[k]),
                rendered.special.get(k),
                turns=turns.get(k, ()),
            )
        )
    return found


def compare(number: int, machine: Facts, reference: Facts) -> Iterator[Difference]:
    """Yields the first fact that differs, if any."""
    for what, one, other in zip(Facts._fields, machine, reference, strict=True):
        if one != other:
            yield Difference(number, what, one, other)
            return


class RowCheck:
    """Compares the engines on rows of one format with one template; `turns` adds the assistant turns."""

    def __init__(self, template: str, name: str, *, turns: bool = False) -> None:
        self.mapping = seeds()[name][0]
        self.renderer = TemplateRenderer(
            template,
            special_tokens=SPECIAL,
            variables={},
            date=DATE,
            mapping=self.mapping,
            special_text=NEEDLES,
            added_tokens=NEEDLES,
            turns=turns,
        )
        self.reader = RowReader(self.mapping)

    def read(self, row: bytes) -> Conversation:
        return self.renderer.adapter.adapt(self.reader.conversations(row)[0])

    def differences(self, rows: list[bytes], counts: Counter[str]) -> Iterator[Difference]:
        """Yields the differences; every row of the batch is compared."""
        found = self.renderer.render_rows(rows, lambda row: self.reader.conversations(row)[0])
        places: dict[int, int] = {}
        read: list[Conversation] = []
        for number, row in enumerate(rows):
            try:
                read.append(self.read(row))
                places[number] = len(read) - 1
            except RowError:
                counts["refused by the reader"] += 1
            except Exception as error:
                yield Difference(number, "the reader fails", None, repr(error))
        expected = facts_of(self.renderer.render_reference(read))
        for number, own in zip(found.rows, facts_of(found.rendered), strict=True):
            counts["served by the machine"] += 1
            if number in places:
                yield from compare(number, own, expected[places[number]])
            else:
                yield Difference(number, "reading", own, "refused by the reader")
        left = [number for number in found.left if number in places]
        counts["left to the reader"] += len(found.left)
        if left:
            rendered = self.renderer.render([read[places[number]] for number in left])
            counts["served by the reference"] += sum(rendered.reference.values())
            for number, own in zip(left, facts_of(rendered), strict=True):
                yield from compare(number, own, expected[places[number]])


# ---- templates


def machine_facts(batch: RenderedBatch, number: int) -> Facts:
    """The facts of one conversation rendered by the machine, without those that only rows have."""
    if batch.status[number] != RowStatus.RENDERED:
        return Facts(refusal=batch.reasons[number])
    spans = np.frombuffer(batch.spans, np.int32).reshape(-1, len(SpanColumn))
    tags = np.frombuffer(batch.tags, np.int32).reshape(-1, len(TagColumn))
    counts = memoryview(batch.counts).cast("i").tolist()
    first = sum(counts[:number])
    own = slice(first, first + counts[number])
    return Facts(
        batch.texts[number],
        bool(batch.row_flags[number] & RowFlag.KNOWN),
        tuple(map(tuple, spans[spans[:, SpanColumn.ROW] == number, SpanColumn.MESSAGE :].tolist())),
        tuple(map(tuple, tags[tags[:, TagColumn.ROW] == number, TagColumn.START :].tolist())),
        tuple(batch.roles[own]),
        _flags(batch.roles[own], batch.flags[own]),
        ("nan",) * counts[number],
    )


class TemplateCheck:
    """Compares the engines on parsed conversations with one template. Raises NotCompiled."""

    def __init__(self, template: str) -> None:
        stop_clock()
        self._template = template
        self.reference = Reference(template, special_tokens=SPECIAL, variables={}, date=DATE)
        base = {"documents": None, "add_generation_prompt": False, **SPECIAL}
        self._machine = CompiledTemplate(self.reference.parse(template), base, DATE, conversation_layout([]))

    def render(self, chats: list[Conversation]) -> RenderedBatch:
        """Renders with the machine alone."""
        return self._machine.render_turns([encoded(chat) or b"" for chat in chats])

    def differences(self, chats: list[Conversation], counts: Counter[str]) -> Iterator[Difference]:
        """Yields the differences from transformers and from the reference."""
        batch = self.render(chats)
        served = [
            number for number, status in enumerate(batch.status) if status in (RowStatus.RENDERED, RowStatus.REFUSED)
        ]
        expected = facts_of(self.reference.render([chats[number] for number in served]))
        turns = turn_facts(Turns.of(*batch[-5:]))
        counts["given up"] += len(chats) - len(served)
        for number, facts in zip(served, expected, strict=True):
            own = machine_facts(batch, number)
            if batch.status[number] == RowStatus.REFUSED:
                counts["refused"] += 1
                actual = facts.refusal or "rendered"
                expected_prefix = f"the chat template refused the conversation: {printable(own.refusal or '')}"
                if not actual.startswith(expected_prefix):
                    yield Difference(number, "refusal", own.refusal, actual)
                continue
            counts["equal"] += 1
            if differing := next(compare(number, own, facts), None):
                yield differing
            elif (theirs := self._transformers(chats[number])) != own.text:
                yield Difference(number, "text (transformers)", own.text, theirs)
            elif (made := turns.get(number)) != (by := turn_facts(self.reference.turns([chats[number]])).get(0)):
                yield Difference(number, "turns", made, by)

    def _transformers(self, chat: Conversation) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        own = {**SPECIAL, **(chat.variables or {})}
        try:
            rendered = render_jinja_template([chat.messages], tools=chat.tools, chat_template=self._template, **own)
            return rendered[0][0].encode()
        except Exception as error:
            return repr(error)


# ---- cases: found, replayed and kept


def text_of(row: bytes) -> Any:
    try:
        return row.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(row).decode()}


def bytes_of(row: Any) -> bytes:
    return base64.b64decode(row["base64"]) if isinstance(row, dict) else row.encode()


def chat_as_json(chat: Conversation) -> dict[str, Any]:
    return {"messages": chat.messages, "tools": chat.tools, "variables": chat.variables}


def replay(case: dict[str, Any]) -> list[Difference]:
    """The differences on a recorded case."""
    counts: Counter[str] = Counter()
    if case["part"] == "tokens":
        from tools import fuzz_tokens

        return [Difference(0, what, "", "") for what in fuzz_tokens.differences(case, counts)]
    if case["part"] == "unigram":
        from tools import fuzz_unigram

        return [Difference(0, what, "", "") for what in fuzz_unigram.differences(case, counts)]
    if case["part"] == "viewer":
        from tools import fuzz_viewer

        with fuzz_viewer.viewer_app() as (app, _):
            return [Difference(0, what, "", "") for what in fuzz_viewer.differences(app, case["path"], counts)]
    if case["part"] == "bytecode":
        from tools import fuzz_bytecode

        fuzz_bytecode.attempt(case["template"], case["damage"])
        return []
    if case["part"] == "rows":
        check = RowCheck(case["template"], case["format"], turns=case.get("turns", False))
        if not check.renderer.reads_rows:
            return []
        return list(check.differences(list(map(bytes_of, case["rows"])), counts))
    try:
        check_template = TemplateCheck(case["template"])
    except (NotCompiled, TemplateError):
        return []
    chats = [Conversation(chat["messages"], chat.get("tools"), None, chat.get("variables")) for chat in case["chats"]]
    return list(check_template.differences(chats, counts))


class FuzzRun:
    """One run of the fuzzer."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.seed: int = options.seed
        self.finds = Path(options.finds)
        self.compares: bool = options.native is None
        self.data: Path | None = options.data
        self.tokenizers: list[Path] = options.tokenizers
        self.counts: Counter[str] = Counter()
        self.found = 0
        self.finds.mkdir(parents=True, exist_ok=True)

    def report(self, case: dict[str, Any], difference: Difference) -> None:
        """Writes a case to a file."""
        self.found += 1
        case = {**case, "seed": self.seed, "what": difference.what}
        case |= {"machine": repr(difference.machine)[:2000], "reference": repr(difference.reference)[:2000]}
        data = json.dumps(case, indent=1, ensure_ascii=False).encode("utf-8", "replace")
        path = self.finds / f"find-{case['part']}-{hashlib.sha256(data).hexdigest()[:12]}.json"
        path.write_bytes(data)
        print(f"{path}: {difference.what}: {difference.machine!r:.300} vs {difference.reference!r:.300}", flush=True)

    def begin(self, case: dict[str, Any]) -> None:
        """Records the case, in case the process dies of it."""
        if not self.compares:
            (self.finds / "running.json").write_text(json.dumps(case))

    def rows(self, seconds: float) -> None:
        rnd = random.Random(f"{self.seed} rows {self.compares}")  # noqa: S311
        formats, templates = seeds(self.data), trl_templates()
        pairs = list(itertools.product(templates, formats, (False, True)))
        rnd.shuffle(pairs)
        pairs.sort(key=lambda pair: pair[1] != "messages" and rnd.random() < 0.6)
        checks: dict[tuple[str, str, bool], RowCheck] = {}
        end = time.process_time() + seconds
        for pair in itertools.cycle(pairs):
            if time.process_time() >= end:
                return
            template, name, turns = templates[pair[0]], *pair[1:]
            check = checks[pair] = checks.get(pair) or RowCheck(template, name, turns=turns)
            if not check.renderer.reads_rows:
                self.counts[f"not served: {pair[0]} {check.renderer.why_reference}"] += 1
                continue
            until = min(end, time.process_time() + 2)
            while time.process_time() < until:
                rows = [mutated_row(rnd, rnd.choice(formats[name][1])) for _ in range(BATCH)]
                self._check_rows(check, rows, {"part": "rows", "template": template, "format": name, "turns": turns})

    def _check_rows(self, check: RowCheck, rows: list[bytes], case: dict[str, Any]) -> None:
        self.counts["rows"] += len(rows)
        if not self.compares:
            self.begin({**case, "rows": list(map(text_of, rows))})
            found = check.renderer.render_rows(rows, check.read)
            self.counts["served by the machine"] += len(found.rows)
            return
        for difference in check.differences(rows, self.counts):
            self.report({**case, "rows": [text_of(rows[difference.number])]}, difference)

    def templates(self, seconds: float) -> None:
        rnd = random.Random(f"{self.seed} templates {self.compares}")  # noqa: S311
        maker = TemplateGenerator(rnd)
        end = time.process_time() + seconds
        while time.process_time() < end:
            template = maker.make()
            self.counts["templates"] += 1
            try:
                check = TemplateCheck(template)
            except (NotCompiled, TemplateError):
                self.counts["templates not compiled"] += 1
                continue
            chats = conversations(rnd, 20)
            case = {"part": "templates", "template": template}
            self.counts["conversations"] += len(chats)
            if not self.compares:
                self.begin({**case, "chats": list(map(chat_as_json, chats))})
                check.render(chats)
                continue
            for difference in itertools.islice(check.differences(chats, self.counts), 1):
                self.report({**case, "chats": [chat_as_json(chats[difference.number])]}, difference)

    def bytecode(self, seconds: float) -> None:
        from tools import fuzz_bytecode

        rnd, end = random.Random(f"{self.seed} bytecode"), time.process_time() + seconds  # noqa: S311
        templates = list(trl_templates().values())
        for number in itertools.count():
            if time.process_time() >= end:
                return
            case = {"part": "bytecode", "template": rnd.choice(templates), "damage": f"{self.seed} {number}"}
            self.begin(case)
            ran = fuzz_bytecode.attempt(case["template"], case["damage"])
            self.counts["damaged programs that ran" if ran else "damaged programs refused"] += 1

    def tokens(self, seconds: float) -> None:
        from tools import fuzz_tokens

        end = time.process_time() + seconds
        for case in fuzz_tokens.rounds(random.Random(f"{self.seed} tokens"), self.tokenizers):  # noqa: S311
            if time.process_time() >= end:
                return
            for what in fuzz_tokens.differences(case, self.counts)[:3]:
                self.report(case, Difference(0, what, "", ""))

    def unigram(self, seconds: float) -> None:
        from tools import fuzz_unigram

        end = time.process_time() + seconds
        for case in fuzz_unigram.rounds(random.Random(f"{self.seed} unigram {self.compares}")):  # noqa: S311
            if time.process_time() >= end:
                return
            if not self.compares:
                self.begin(case)
            for what in fuzz_unigram.differences(case, self.counts)[:3]:
                self.report(case, Difference(0, what, "", ""))

    def viewer(self, seconds: float) -> None:
        from tools import fuzz_viewer

        rnd, end = random.Random(f"{self.seed} viewer"), time.process_time() + seconds  # noqa: S311
        with fuzz_viewer.viewer_app() as (app, rows):
            while time.process_time() < end:
                path = fuzz_viewer.any_path(rnd, rows)
                for what in fuzz_viewer.differences(app, path, self.counts):
                    self.report({"part": "viewer", "path": path}, Difference(0, what, "", ""))

    def sanitizer(self, seconds: float) -> None:
        """Runs both parts in a separate process with sanitizers."""
        begun = time.monotonic()
        library = build_sanitized(ROOT / "build" / "asan")
        if library is None:
            print("no sanitizers: gcc or its libasan is missing")
            return
        preload = " ".join(_gcc_file(name) for name in ("libasan.so", "libubsan.so"))
        environment = {
            **os.environ,
            "LD_PRELOAD": preload,
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        }
        left = max(5.0, seconds - (time.monotonic() - begun))
        finds = self.finds / "sanitizer"
        command = [sys.executable, "-m", "tools.fuzz", "--seed", str(self.seed), "--finds", str(finds)]
        command += ["--native", str(library), "--seconds", str(left)]
        if self.data is not None:
            command += ["--data", str(self.data)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        print("\n".join(f"  sanitizer: {line}" for line in done.stdout.splitlines()))
        if done.returncode:
            self.found += 1
            name = f"find-sanitizer-{hashlib.sha256(done.stderr.encode()).hexdigest()[:12]}"
            (self.finds / f"{name}.txt").write_text(done.stderr)
            running = finds / "running.json"
            if running.exists():
                (self.finds / f"{name}.json").write_bytes(running.read_bytes())
            print(f"{self.finds / name}.json: the sanitizers report\n{done.stderr[-3000:]}")


def _gcc_file(name: str) -> str:
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def build_sanitized(folder: Path) -> Path | None:
    """Compiles the core with sanitizers if it is outdated; None if the compiler doesn't support them."""
    sources = sorted((ROOT / "penstock" / "native").glob("*.[ch]"))
    library = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if library.exists() and all(library.stat().st_mtime > source.stat().st_mtime for source in sources):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    flags = [
        *WARNINGS,
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
        "-fno-omit-frame-pointer",
        "-g",
        "-O1",
    ]
    includes = [f"-I{sysconfig.get_paths()['include']}"]
    files = [str(source) for source in sources if source.suffix == ".c"]
    try:
        command = ["gcc", *flags, "-shared", "-fPIC", *includes, *files, "-o", str(library), "-lm"]
        subprocess.run(command, check=True, capture_output=True)
    except OSError:
        return None
    except subprocess.CalledProcessError as error:
        print(error.stderr.decode()[-3000:])
        return None
    return library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of CPU time, so that a busy machine checks as much")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--part", choices=[*PARTS, "bytecode"])
    parser.add_argument("--data", type=Path, help="a folder of JSON-lines files whose rows are mutated too")
    bundled = [ROOT / "examples" / "tokenizer"]
    parser.add_argument("--tokenizers", nargs="+", type=Path, default=bundled, help="folders, for tokens")
    parser.add_argument("--finds", default=str(ROOT / "build" / "fuzz"))
    parser.add_argument("--native", help="use this compiled core and skip comparisons")
    parser.add_argument("--replay", type=Path, help="a recorded case to run again")
    options = parser.parse_args()
    if options.replay is not None:
        found = replay(json.loads(options.replay.read_text()))
        print("\n".join(map(str, found)) or "no difference")
        return 1 if found else 0
    warnings.simplefilter("ignore", SyntaxWarning)  # raised for the code that jinja2 generates from unusual templates
    run = FuzzRun(options)
    print(f"seed {run.seed}", flush=True)
    shares = {"rows": 0.4, "templates": 0.3, "bytecode": 0.2, "unigram": 0.1} if options.native else PARTS
    for part, share in shares.items():
        if options.part in (None, part):
            seconds = options.seconds if options.part else options.seconds * share
            getattr(run, part)(seconds)
    for what, count in sorted(run.counts.items()):
        print(f"{count:>10,} {what}")
    print(f"{run.found} finds")
    return 1 if run.found else 0


if __name__ == "__main__":
    sys.exit(main())
