"""A real NFS 3 server with two separately cached mounts; see tools/nfs.py and nfs_guest.py."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.store import nfs_guest
from tools import nfs

pytestmark = pytest.mark.slow

ROUNDS = 1


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The results of the scenarios, or their tracebacks; one virtual machine runs them all."""
    why = nfs.missing()
    if why is not None:
        pytest.skip(why)
    done = nfs.run([sys.executable, "-m", nfs_guest.__name__, str(ROUNDS)], timeout=400)
    assert not done.too_long, done.output
    if done.code is None:
        pytest.skip(f"the machine did not start, or died itself: {done.output[-500:]}")
    assert done.code == 0, done.output
    value: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    return value


@pytest.mark.parametrize("scenario", nfs_guest.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_on_nfs(found: dict[str, Any], scenario: Any) -> None:
    outcome = found[scenario.__name__]
    assert isinstance(outcome, dict), outcome
