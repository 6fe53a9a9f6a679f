"""Watching the growth of the process, and clearing the engine's cache when it has grown."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.prepare.encode import encoder as encoder_module
from penstock.prepare.encode import process_memory
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.process_memory import GrowthWatch, allocated_bytes
from penstock.prepare.tokenizer.vocabulary import Vocabulary

MB = 1 << 20


def test_growth_is_detected() -> None:
    watch = GrowthWatch(30 * MB)
    assert not watch.exceeded()
    first = b"x" * (20 * MB)
    assert not watch.exceeded()
    second = b"y" * (20 * MB)
    assert watch.exceeded()
    del first, second
    assert not watch.exceeded()
    watch.restart()
    assert not watch.exceeded()


@pytest.mark.skipif(process_memory._mallinfo() is None, reason="the allocator does not tell")
def test_the_allocator_is_queried_only_after_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because that takes milliseconds: it walks all free blocks."""
    asked: list[int] = []

    def counted() -> int:
        asked.append(1)
        return allocated_bytes()

    watch = GrowthWatch(30 * MB)
    monkeypatch.setattr(process_memory, "allocated_bytes", counted)
    for _ in range(100):
        assert not watch.exceeded()
    assert not asked
    block = b"x" * (40 * MB)
    assert watch.exceeded() and len(asked) == 1
    del block


def test_freed_memory_does_not_count() -> None:
    """Small blocks, which the allocator may keep resident."""
    watch = GrowthWatch(20 * MB)
    blocks = [b"x" * 1000 + bytes([n % 256]) for n in range(50_000)]
    del blocks
    assert not watch.exceeded()


def test_the_engine_cache_is_cleared_only_between_batches(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "GROWTH_LIMIT", -(1 << 40))  # reached at once
    data = (tokenizer / "tokenizer.json").read_bytes()
    subject = Encoder(data, Vocabulary(data))
    texts = [b"What is the country of Oslo?", "new \U000323b0 ideograph".encode()]
    expected = subject.reference(texts).ids.tolist()
    steps: list[str] = []
    assert subject.encode(texts).ids.tolist() == expected
    engine = subject._fast
    assert engine is not None
    clear_cache, encode = engine.clear_cache, engine.encode
    monkeypatch.setattr(engine, "clear_cache", lambda: (steps.append("clear_cache"), clear_cache()))
    monkeypatch.setattr(engine, "encode", lambda texts: (steps.append("encode"), encode(texts))[1])
    for _ in range(2):
        assert subject.encode(texts).ids.tolist() == expected
    assert steps == ["clear_cache", "encode", "encode"] * 2  # the second one encodes the pieces of the guarded text
