"""Digests, dead writers and the validation of names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.digests import bytes_digest, digest, file_digest, validate_name
from penstock.errors import CorruptError
from penstock.store.files import writer_is_dead, writer_name


def test_dead_writers_are_recognized(tmp_path: Path) -> None:
    assert not writer_is_dead(writer_name() + ".abc")
    code = "from penstock.store.files import writer_name; print(writer_name())"
    gone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert writer_is_dead(gone + ".abc")
    assert not writer_is_dead("otherhost.1.1.abc")
    assert not writer_is_dead("nonsense")


def test_names_read_from_files_are_validated() -> None:
    for name in ("../../etc/passwd", "b3-..", "b3-" + "g" * 64, 7, None, "b3-" + "a" * 63):
        with pytest.raises(CorruptError, match="is not the name of a shard"):
            validate_name(name)
    assert validate_name("b3-" + "a" * 64)


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert file_digest(tmp_path / "x") == bytes_digest(b"abc")
    assert digest(b"a", b"bc") != digest(b"ab", b"c")
