"""Names and texts from data can't control the terminal: every command, fed with control characters everywhere."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from penstock.cli import main

pytestmark = pytest.mark.slow

ESCAPES = "\x1b[31m\x07\x9b2J\x7f\u202e\u200b[red]"  # C0, C1, delete, reordering, invisible, rich's markup
NAME = f"a{ESCAPES}b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Rows, files, a tokenizer and a cache whose names are all hostile."""
    place = tmp_path_factory.mktemp("hostile") / NAME
    shutil.copytree(tokenizer, place / NAME)
    call = {"type": "function", "function": {"name": NAME, "arguments": {NAME: NAME}}}
    messages = [
        {"role": "system", "content": NAME, NAME: NAME},
        {"role": NAME, "content": NAME, "name": NAME},
        {"role": "assistant", "content": NAME, "tool_calls": [call], "reasoning_content": NAME},
    ]
    rows = [{"messages": messages, NAME: NAME, "tools": [{"name": NAME}]}] * 3
    write(place / f"chats-{NAME}.jsonl", rows)
    write(place / "pairs.jsonl", [{"prompt": NAME, "chosen": NAME, "rejected": "no", NAME: 1}])
    write(place / f"bad-{NAME}.jsonl", [*rows, {"messages": [{"role": f"other{NAME}", "content": "x"}]}])
    write(place / f"strange-{NAME}.jsonl", [{NAME: NAME, f"more{NAME}": 1}])
    write(place / "tokenized.jsonl", [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], NAME: NAME}])
    (place / f"{NAME}.yaml").write_text(json.dumps({NAME: NAME, "model": NAME, "packing": [NAME]}))
    return place


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def path_in(said: str) -> str:
    """The dataset's path in the JSON that a command printed; the rest went to standard error."""
    return str(json.loads(said[: said.rindex("}") + 1])["path"])


def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str]:
    """The exit code and everything printed, which must be printable."""
    monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capfd.readouterr()
    for printed in (said.out, said.err):
        wrong = [line for line in printed.splitlines() if not line.replace("\t", "").isprintable()]
        assert not wrong, (arguments, wrong)
    assert "Traceback" not in said.err
    code = ended.value.code
    return (code if isinstance(code, int) else 0), said.out + said.err


def test_no_command_prints_control_characters(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder / "cache"))
    chats, tokens = folder / f"chats-{NAME}.jsonl", ("--tokenizer", folder / NAME)
    roles = ("--role", f"{NAME}=user", "--no-fast")
    data = (chats, *tokens, *roles)

    def says(code: int, *arguments: object) -> str:
        ended, said = run(capfd, monkeypatch, *arguments)
        assert ended == code, said
        return said

    assert "roles: a\\x1b[31m" in says(0, "prepare", *data)
    for more in ([], ["--dry-run"], ["--dry-run", "--json"], ["--force", "--turns", "faithful"]):
        says(0, "prepare", *data, *more)
    dataset = path_in(says(0, "prepare", *data, "--json"))
    other = path_in(says(0, "prepare", *data, "--limit", "2", "--json"))
    pairs = path_in(says(0, "prepare", folder / "pairs.jsonl", *tokens, "--json"))
    assert "other" in says(1, "prepare", folder / f"bad-{NAME}.jsonl", *tokens, *roles)
    says(0, "prepare", folder / f"bad-{NAME}.jsonl", *tokens, *roles, "--on-bad-row", "quarantine")
    says(1, "prepare", folder / f"strange-{NAME}.jsonl", *tokens)
    says(1, "prepare", chats, *tokens)  # an unknown role
    says(1, "prepare", folder / f"none-{NAME}.jsonl", *tokens)
    says(1, "prepare", chats, "--tokenizer", folder / f"none-{NAME}")
    says(2, "prepare", chats, *tokens, "--template-var", NAME)
    says(0, "show", dataset, "--turns")
    says(2, "show", dataset, "--noted", NAME)
    for where in (dataset, pairs):
        says(0, "show", where)
        says(0, "stats", where)
        says(0, "stats", where, "--json")
    says(0, "report", dataset, "-o", folder / "report.html")
    page = (folder / "report.html").read_text()
    assert not any(char in page for char in "\x1b\x07\x9b\x7f\u202e\u200b") and "\\x1b[31m" in page
    says(1, "diff", dataset, other)
    says(1, "diff", dataset, other, "--json")
    says(0, "export", dataset, "--to", "jsonl", "-o", tmp_path / NAME)
    says(0, "export", dataset, "--to", "jsonl", "-o", tmp_path / f"json-{NAME}", "--json")
    says(0, "adopt", folder / "tokenized.jsonl", *tokens)
    says(1, "view", f"none-{NAME}")
    for command in ("ls", "verify"):
        says(0, "cache", command)
        says(0, "cache", command, "--json")
    says(0, "cache", "ls", "--shards")
    says(0, "cache", "explain", *data)
    says(0, "cache", "explain", *data, "--limit", "1")
    says(0, "cache", "push", dataset, "--to", folder / f"other-{NAME}")
    run(capfd, monkeypatch, "lint", folder / f"{NAME}.yaml", "--for", "trl.SFTConfig")
    run(capfd, monkeypatch, "lint", folder / f"{NAME}.yaml", "--for", "trl.SFTConfig", "--json")
    run(capfd, monkeypatch, "train", "sft", folder / f"{NAME}.yaml")
    run(capfd, monkeypatch, "verify", folder / f"{NAME}.yaml")
    says(0, "cache", "gc", "--older-than", "0", "--drop-unused", "0")
