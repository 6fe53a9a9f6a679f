"""Builds resume after a kill: SIGKILL of the process group at every commit step and at random times."""

from __future__ import annotations

import json
import random
import time
from itertools import chain
from pathlib import Path

import pytest

import penstock as ps
from tests.support.forks import Forks, leftovers, result

pytestmark = pytest.mark.slow

STEPS = [
    *(f"{file}.{step}" for file in ("marker", "note", "shard", "lease", "manifest", "notes", "tokenizer", "memo")
      for step in ("open", "write", "sync", "rename")),
    "shard.retire",
    "claim.open",
    "claim.write",
    "claim.release",
]  # fmt: skip
KILLED = -9


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, chats: Path, tokenizer: Path, memory: Path) -> dict[str, bytes]:
    cache = memory / "undisturbed"
    code, output = forks.run("prepare", chats, "--tokenizer", tokenizer, "--cache", cache)  # with the fast engines
    assert code == 0, output
    found = result(cache)
    assert len(found) > 15
    assert leftovers(cache) == []
    return found


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_every_commit_step(
    forks: Forks, chats: Path, tokenizer: Path, cache: Path, undisturbed: dict[str, bytes], step: str
) -> None:
    command = ("prepare", chats, "--tokenizer", tokenizer, "--cache", cache, "--no-fast")
    once = step.split(".")[0] in ("marker", "lease", "manifest", "notes", "tokenizer", "memo")
    for passage in (1,) if once or step == "claim.open" else (1, 4):
        code, output = forks.run(*command, fault=f"{step}:{passage}")
        assert code == KILLED, output
    code, output = forks.run(*command)
    assert code == 0, output
    assert result(cache) == undisturbed
    assert leftovers(cache) == []


def kills_until_done(forks: Forks, command: tuple[object, ...], choose: random.Random, longest: float) -> int:
    """Runs a command again and again, killing it at random times, until it succeeds. Returns the number of kills."""
    for kills in range(1000):
        pid = forks.start(*command)
        time.sleep(choose.uniform(0, longest))
        forks.kill(pid)
        code = forks.wait(pid)
        if code != KILLED:
            assert code == 0, forks.output(pid)
            return kills
    raise AssertionError("it is always killed before it ends")


def test_killed_at_random_times(
    forks: Forks, chats: Path, tokenizer: Path, cache: Path, undisturbed: dict[str, bytes]
) -> None:
    choose = random.Random(7)
    kills, began = 0, time.monotonic()
    forks.run("prepare", chats, "--tokenizer", tokenizer, "--cache", cache / "timed", "--no-fast")
    whole = time.monotonic() - began
    for round_ in range(100):
        place = cache / str(round_)
        command = ("prepare", chats, "--tokenizer", tokenizer, "--cache", place, "--no-fast")
        kills += kills_until_done(forks, command, choose, 1.2 * whole)
        assert result(place) == undisturbed
        forks.run(*command)
        assert leftovers(place) == []
        if kills >= 25:
            return
    raise AssertionError(f"only {kills} kills")


def test_killed_with_a_changing_number_of_workers(
    forks: Forks, chats: Path, tokenizer: Path, cache: Path, undisturbed: dict[str, bytes]
) -> None:
    command = ("prepare", chats, "--tokenizer", tokenizer, "--cache", cache)
    for workers, fault in ((2, "shard.write:2"), (3, "note.rename:2"), (1, "shard.rename:3")):
        code, output = forks.run(*command, "--workers", workers, "--no-fast", workers=True, fault=fault)
        assert code == KILLED, output
    code, output = forks.run(*command, "--workers", 2, workers=True)
    assert code == 0, output
    assert result(cache) == undisturbed
    assert leftovers(cache) == []


REWRITES = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ '~' if m.role == 'assistant' and not loop.last }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # a template that rewrites history: every turn is a chain of its own


@pytest.fixture(scope="module")
def faithful(forks: Forks, tokenizer: Path, memory: Path) -> tuple[tuple[object, ...], dict[str, bytes]]:
    """A command that makes four chains a row, and its undisturbed result."""
    source, template = memory / "turns.jsonl", memory / "rewrites.jinja"
    template.write_text(REWRITES)
    turns = [[("user", f"{n}, {k}?"), ("assistant", f"{n} and {k}. " * 9)] for n in range(60) for k in range(4)]
    rows = [list(chain.from_iterable(turns[n : n + 4])) for n in range(0, len(turns), 4)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in row]}) for row in rows]
    source.write_text("\n".join(lines) + "\n")
    command = ("prepare", source, "--tokenizer", tokenizer, "--template", template, "--turns", "faithful")
    code, output = forks.run(*command, "--cache", memory / "faithful")
    assert code == 0, output
    assert ps.open(next((memory / "faithful" / "datasets").iterdir())).shards.total == 4 * len(rows)
    return command, result(memory / "faithful")


def test_a_faithful_build_is_byte_identical_after_kills(
    forks: Forks, cache: Path, faithful: tuple[tuple[object, ...], dict[str, bytes]]
) -> None:
    """Several examples a row, whose prefixes are stored once."""
    command = (*faithful[0], "--cache", cache, "--no-fast")
    for fault in ("shard.write:1", "shard.rename:2", "note.rename:1", "claim.release:1", "manifest.rename:1"):
        code, output = forks.run(*command, fault=fault)
        assert code == KILLED, (fault, output)
    code, output = forks.run(*command)
    assert code == 0, output
    assert result(cache) == faithful[1]
    assert leftovers(cache) == []


def test_a_faithful_build_is_killed_at_random_times(
    forks: Forks, cache: Path, faithful: tuple[tuple[object, ...], dict[str, bytes]]
) -> None:
    choose = random.Random(11)
    began = time.monotonic()
    forks.run(*faithful[0], "--cache", cache / "timed")
    whole, kills, rounds = time.monotonic() - began, 0, 0
    while kills < 8:
        command = (*faithful[0], "--cache", cache / str(rounds))
        kills += kills_until_done(forks, command, choose, 1.2 * whole)
        assert result(cache / str(rounds)) == faithful[1]
        rounds += 1
        assert rounds < 60, f"only {kills} kills"
