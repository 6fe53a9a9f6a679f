"""One probe process per test session, so that torch and transformers are imported once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.train.verify.probe_jobs import JobKind, ProbeJob
from penstock.train.verify.verifier import Failure, Supervisor

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
Observe = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def supervisor() -> Iterator[Supervisor]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT)])
    found = Supervisor(limit=900)
    yield found
    found.close()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def observe(supervisor: Supervisor) -> Observe:
    """Returns the facts about a target from `factories`."""

    def observed(
        factory: str, kind: JobKind = JobKind.RUN, off: tuple[str, ...] = (), tokens: int = 6
    ) -> dict[str, Any]:
        job = ProbeJob(kind, {"factory": f"factories:{factory}"}, off, layers=1, tokens=tokens)
        found = supervisor.observe(job)
        assert not isinstance(found, Failure), found.reason
        return found

    return observed
