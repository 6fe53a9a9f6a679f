"""The command: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from tests.support.command import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, examples: Path, tokenizer: Path
) -> tuple[Path, dict[str, object]]:
    cache = tmp_path_factory.mktemp("cache")
    done = run("prepare", examples / "data" / "chats.jsonl", "--tokenizer", tokenizer, "--json", cache=cache)
    assert done.returncode == 0, done.stderr
    return cache, json.loads(done.stdout)


def test_json_is_the_only_output_on_stdout(prepared: tuple[Path, dict[str, object]]) -> None:
    cache, said = prepared
    assert said["examples"] == 400
    assert said["hit"] is False
    assert Path(str(said["path"])).parent.parent == cache
    assert said["format"] == "messages (columns: messages, tools)"


def test_the_summary(prepared: tuple[Path, dict[str, object]], examples: Path, tokenizer: Path) -> None:
    cache, said = prepared
    done = run("prepare", examples / "data" / "chats.jsonl", "--tokenizer", tokenizer, cache=cache)
    assert done.returncode == 0
    assert "400 in = 400 kept + 0 rejected" in done.stdout
    assert "1 found in the cache: nothing to do" in done.stdout
    one = run("prepare", examples / "data" / "chats.jsonl", "--tokenizer", tokenizer, "--limit", "1", cache=cache)
    hit = run("prepare", examples / "data" / "chats.jsonl", "--tokenizer", tokenizer, "--limit", "1", cache=cache)
    shown = [re.findall(r"^lengths +(.*?) *$", each.stdout, re.MULTILINE) for each in (one, hit)]
    assert shown[0] == shown[1] and re.match(r"p50 .*, p90 .*, p99 .*, max ", shown[0][0])
    assert f'view = ps.open("{said["path"]}")' in done.stdout
    assert "format: messages" in done.stderr


def test_no_known_regions(tmp_path: Path, tokenizer: Path) -> None:
    template, rows, cache = tmp_path / "t.jinja", tmp_path / "rows.jsonl", tmp_path / "cache"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}(bot) {% endif %}"
    )
    rows.write_text('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n')
    for _ in ("built", "found in the cache"):
        done = run("prepare", rows, "--tokenizer", tokenizer, "--template", template, cache=cache)
        assert done.returncode == 1
        assert "no row has known regions, so only train_on='all_tokens' works" in done.stdout
        line = re.findall(r"^view = (.*)$", done.stdout, re.MULTILINE)[0]
        assert len(eval(line, {"ps": penstock})) == 1


def test_show_and_stats(prepared: tuple[Path, dict[str, object]]) -> None:
    cache, said = prepared
    shown = run("show", str(said["path"]), "--row", "3")
    assert shown.returncode == 0
    assert "<|im_start|>assistant" in shown.stdout
    by_key = run("show", str(said["key"])[:12], "--row", "3", cache=cache)
    assert by_key.stdout == shown.stdout
    counted = run("stats", str(said["path"]), "--json")
    assert json.loads(counted.stdout)["tokens"] == said["tokens"]
    assert "trained" in run("stats", str(said["path"]), "--train-on", "all_tokens").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["prepare"], 2, "Missing argument"),
        (["prepare", "x.jsonl", "--tokeniser", "y"], 2, "tokenizer"),
        (["prepare", "x.jsonl"], 2, "no tokenizer given"),
        (["prepare", "nowhere.jsonl", "--tokenizer", "nowhere/x/y"], 1, "nowhere"),
        (["show", "nowhere"], 1, "no dataset at this path"),
        (["prepare", "x.jsonl", "--tokenizer", "t", "--workers", "many"], 2, "workers"),
        (["prepare", "x.jsonl", "--tokenizer", "t", "--role", "bot"], 2, "expected NAME=VALUE"),
        (["prepare", "x.jsonl", "--tokenizer", "t", "--regions", "maybe"], 2, "auto"),
        (["prepare", "x.jsonl", "--tokenizer", "t", "--date", "yesterday"], 2, "date"),
        (["prepare", "x.jsonl", "--tokenizer", "t", "--template-var", "tools=[]"], 2, "it is not a template variable"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, text: str, tmp_path: Path) -> None:
    done = run(*arguments, cache=tmp_path)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_row_is_one_line_with_its_location(write_rows: object, tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text('{"messages": [{"role": "bot", "content": "x"}]}\n')
    done = run("prepare", source, "--tokenizer", tokenizer, cache=tmp_path / "c")
    assert done.returncode == 1
    assert f"penstock: {source}:1: " in done.stderr
    assert "--role bot=assistant" in done.stderr
    mapped = run("prepare", source, "--tokenizer", tokenizer, "--role", "bot=assistant", "--json", cache=tmp_path / "c")
    assert json.loads(mapped.stdout)["examples"] == 1


def test_help_lists_every_option() -> None:
    from dataclasses import fields

    from penstock.build.options import PrepareOptions
    from penstock.cli.flags import flag_of

    text = run("prepare", "--help").stdout
    for option in fields(PrepareOptions):
        assert flag_of(option) in text


def test_a_shell_completes_values(prepared: tuple[Path, dict[str, object]]) -> None:
    cache, said = prepared

    def completed(line: str) -> list[str]:
        words = line.split(" ")
        asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        environment = {**os.environ, **asked, "PENSTOCK_CACHE": str(cache)}
        command = [sys.executable, "-c", "import sys; sys.argv = ['penstock']; from penstock.cli import main; main()"]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False).stdout.split()

    assert completed("penstock prepare x --format m") == ["messages"]
    assert completed("penstock stats latest --train-on last") == ["last_assistant_message", "last_assistant_turn"]
    assert "trl" in completed("penstock export latest --to t")
    assert Path(str(said["path"])).name in completed("penstock show b3")
    assert completed("penstock report lat") == ["latest"]
