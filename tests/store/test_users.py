"""Two system users with different umasks share one cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from tests.support.forks import Forks, leftovers, result

DAEMON, NOBODY = 1, 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")


@pytest.fixture
def shared(cache: Path) -> Path:
    """A world-writable folder."""
    cache.chmod(0o777)
    return cache


def prepare(forks: Forks, *args: object, user: int, umask: int) -> dict[str, object]:
    code, output = forks.run(
        "prepare", *args, "--no-fast", "--json", user=user, umask=umask, env={"HOME": "/nonexistent"}
    )
    assert code == 0, output
    value: dict[str, object] = orjson.loads(output[output.index("\n{") + 1 :])
    return value


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_one_user_builds_and_another_reuses(
    forks: Forks, chats: Path, public_tokenizer: Path, shared: Path, umask: int
) -> None:
    command = (chats, "--tokenizer", public_tokenizer, "--cache", shared)
    prepare(forks, *command, user=DAEMON, umask=umask)
    whole = result(shared)
    second = prepare(forks, *command, user=NOBODY, umask=0o022)
    assert result(shared) == whole
    assert second["hit"] is (umask == 0o022)  # shards hidden by the other user's umask are rebuilt, for both
    assert prepare(forks, *command, user=NOBODY, umask=0o022)["hit"]
    assert prepare(forks, *command, user=DAEMON, umask=umask)["hit"]
    owners = {path.stat().st_uid for path in shared.glob("shards/*/*.arrow")}
    assert owners == ({DAEMON} if umask == 0o022 else {NOBODY})
    assert leftovers(shared) == []


def test_one_user_is_killed_and_another_resumes(
    forks: Forks, chats: Path, public_tokenizer: Path, shared: Path
) -> None:
    command = (chats, "--tokenizer", public_tokenizer, "--cache", shared)
    home = {"HOME": "/nonexistent"}
    code, _ = forks.run("prepare", *command, "--no-fast", user=DAEMON, umask=0o002, fault="shard.sync:6", env=home)
    assert code == -9
    found = prepare(forks, *command, user=NOBODY, umask=0o022)
    build = found["build"]
    assert isinstance(build, dict)
    assert build["slices_reused"] == 5
    assert leftovers(shared) == []
