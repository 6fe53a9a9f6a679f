"""Hostile configuration files: each ends within limits of time and memory, with one clear line, whoever reads it.

One process imports the commands once and forks for each file, with 10 s of processor time and 1 GB.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from penstock.config_files import MAX_DEPTH, MAX_VALUES, load_yaml

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hostile files")]  # they share an expensive fixture

SECONDS, BYTES = 10, 1 << 30
COMMANDS = {"lint": ["lint", "--for", "trl.SFTConfig"], "train": ["train", "sft"], "verify": ["verify"]}
HARNESS = f"""
import json, os, resource, sys
from penstock.cli import main
import penstock.train.lint, penstock.train.config, penstock.cli.train, penstock.train.verify.verifier
for number, line in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{{number}}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
        resource.setrlimit(resource.RLIMIT_DATA, ({BYTES}, {BYTES}))
        sys.argv[1:] = line
        try:
            main()
        except SystemExit as end:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(end.code or 0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(70)
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss << 10]))
"""


def _chain(first: str, line: str, length: int) -> str:
    return first + "".join(line.format(n=n, before=n - 1) for n in range(1, length))


TEN = ", ".join(["*a{before}"] * 10)
FILES: dict[str, tuple[bytes, str]] = {  # and words of the error
    "aliases": (_chain("a0: &a0 [x]\n", f"a{{n}}: &a{{n}} [{TEN}]\n", 12).encode(), "more than 20,000 values"),
    "aliases in mappings": (
        _chain("a0: &a0 {k: x}\n", "a{n}: &a{n} {{p: *a{before}, q: *a{before}, r: *a{before}}}\n", 20).encode(),
        "more than 20,000 values",
    ),
    "aliases of a long text": (
        ("a0: &a0 " + "x" * 100_000 + "\n" + _chain("", f"a{{n}}: &a{{n}} [{TEN}]\n", 9)).encode(),
        "more than 20,000 values",
    ),
    "merges": (_chain("a0: &a0 {k: x}\n", f"a{{n}}: &a{{n}} {{{{<<: [{TEN}]}}}}\n", 12).encode(), "values"),
    "a chain of aliases": (_chain("a0: &a0 [x]\n", "a{n}: &a{n} [*a{before}]\n", 5000).encode(), "more than 64 levels"),
    "an alias of itself": (b"a: &a [1, *a]\n", "line 1: \\*a contains itself"),
    "a merge of itself": (b"a: &a\n  <<: *a\n", "line 2: \\*a contains itself"),
    "nested lists": (b"a: " + b"[" * 20_000, "more than 64 levels"),
    "nested mappings": (b"a: " + b"{a: " * 20_000, "more than 64 levels"),
    "nested blocks": (b"- " * 20_000, "more than 64 levels"),
    "nested keys": (b"? " * 20_000, "more than 64 levels"),
    "many values": (b"a: [" + b"1," * 400_000 + b"]", "more than 20,000 values"),
    "many keys": (b"".join(b"k%d: 1\n" % n for n in range(60_000)), "more than 20,000 values"),
    "many documents": (b"--- 1\n" * 100_000, "expected a single document|another document"),
    "a large file": (b"a: 1\n#" + b"x" * 3_000_000, "larger than 1,000,000 bytes"),
    "a long number": (b"learning_rate: 0x" + b"f" * 200_000, "a number of 200,002 characters"),
    "a long decimal number": (b"learning_rate: " + b"9" * 200_000, "a number of 200,000 characters"),
    "a number in base 60": (b"learning_rate: 1" + b":59" * 60_000, "a number of 180,001 characters"),
    "an impossible date": (b"learning_rate: 2024-13-45\n", "month must be in 1..12"),
    "an impossible character": (b'learning_rate: "\\UFFFFFFFF"\n', "not valid YAML"),
    "control characters": (b"learning_rate: \x00\x1b[2J\n", "unacceptable character"),
    "not UTF-8": (b"\xff\xfe\x00a", "not UTF-8 at byte 0"),
    "an object of Python": (b"a: !!python/object/apply:os.system ['true']\n", "line 1: could not determine"),
    "an empty number": (b"a: !!int ''\n", "not valid YAML"),
    "a list as a key": (b"? [a, b]\n: 1\n", "line 1: found unhashable key"),
    "an undefined alias": (b"a: *missing\n", "line 1: found undefined alias"),
}
# Too deep for a parser, and sound YAML with keys that a terminal would obey.
JSON_FILES = {"nested": b'{"a": ' + b"[" * 100_000, "a long number": b'{"a": ' + b"9" * 100_000 + b"}"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What each command did with each file: exit code, seconds of processor time, bytes of memory, output."""
    folder = tmp_path_factory.mktemp("hostile")
    cases = [(command, name) for command in COMMANDS for name in FILES]
    cases += [("lint", f"{name}.json") for name in JSON_FILES]
    for name, (data, _) in FILES.items():
        (folder / f"{name}.yaml").write_bytes(data)
    for name, data in JSON_FILES.items():
        (folder / f"{name}.json").write_bytes(data)
    lines = []
    for command, name in cases:
        first, *rest = COMMANDS[command]
        file = name if name.endswith(".json") else f"{name}.yaml"
        lines.append([first, *rest, file] if command == "train" else [first, file, *rest])
    done = subprocess.run(
        [sys.executable, "-c", HARNESS],
        input=json.dumps(lines),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        case: {"code": code, "seconds": seconds, "bytes": size, "output": (folder / f"{number}.out").read_text()}
        for number, (case, (code, seconds, size)) in enumerate(zip(cases, results, strict=True))
    }


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_hostile_file_ends_with_one_line(
    command: str, name: str, outcomes: dict[tuple[str, str], dict[str, Any]]
) -> None:
    found = outcomes[command, name]
    lines = [line for line in found["output"].splitlines() if not line.startswith("penstock train sft: ")]
    assert found["code"] == 2, found
    assert len(lines) == 1, lines[-3:]
    assert lines[0].startswith(f"penstock: {name}.yaml: ")
    assert len(lines[0]) < 300
    assert re.search(FILES[name][1], lines[0]), lines[0]
    assert found["seconds"] < SECONDS
    assert found["bytes"] < BYTES


@pytest.mark.parametrize("name", JSON_FILES)
def test_hostile_json(name: str, outcomes: dict[tuple[str, str], dict[str, Any]]) -> None:
    found = outcomes["lint", f"{name}.json"]
    assert (found["code"], len(found["output"].splitlines())) == (2, 1), found
    assert found["output"].startswith(f"penstock: {name}.json: ")


def test_there_are_26_of_them() -> None:
    assert len(FILES) == 26


def test_usual_aliases_and_merges_are_read() -> None:
    text = "base: &base {lr: 1e-5, list: [1, 2]}\nrun:\n  <<: *base\n  lr: 3\nagain: *base\n"
    found = load_yaml(text)
    assert found["run"] == {"lr": 3, "list": [1, 2]}
    assert found["again"] == found["base"]
    deep = MAX_DEPTH - 2  # the document and the innermost value are levels, too
    assert load_yaml("[" * deep + "1" + "]" * deep)
    assert len(load_yaml("\n".join(f"- {n}" for n in range(MAX_VALUES - 1)))) == MAX_VALUES - 1
