"""Keys accepted by a class, read from its source: inheritance, constructors, unresolved bases."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.train.lint.config_class import read_config_class

SOURCE = """
from dataclasses import dataclass, field
from typing import ClassVar
import elsewhere
from nowhere import Gone
from .base import Base as Renamed

@dataclass
class Child(Renamed):
    own: int = 1
    fixed: ClassVar[int] = 2
    computed: int = field(init=False, default=3)

@dataclass
class Orphan(Gone):
    own: int = 1

class Undecorated(Child):
    annotation_only: int = 5

class Plain:
    def __init__(self, a, *, b=1): ...

class Open(Plain):
    def __init__(self, c, **rest): ...

class Handing(Plain):
    def __init__(self, c, **rest):
        super().__init__(**rest)

class Model(elsewhere.pydantic.BaseModel):
    name: str = "x"

Alias = Child
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "parcel"
    folder.mkdir()
    (folder / "__init__.py").write_text('__version__ = "3.1"\nfrom .settings import *\n')
    (folder / "base.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Base:\n    inherited: int\n"
    )
    (folder / "settings.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "keys", "complete"),
    [
        ("Child", {"own", "inherited"}, True),
        ("Alias", {"own", "inherited"}, True),
        ("Undecorated", {"own", "inherited"}, True),
        ("Orphan", {"own"}, False),
        ("Plain", {"a", "b"}, True),
        ("Open", {"c"}, False),
        ("Handing", {"a", "b", "c"}, True),
        ("Model", {"name"}, True),
    ],
)
def test_keys(package: Path, name: str, keys: set[str], complete: bool) -> None:
    found = read_config_class(f"parcel.{name}", (package,))
    assert set(found.keys) == keys
    assert found.complete is complete
    assert found.version == "3.1"


def test_file_and_unresolved_base_are_reported(package: Path) -> None:
    found = read_config_class("parcel.Orphan", (package,))
    assert found.file == package / "parcel" / "settings.py"
    assert "base Gone of Orphan" in found.unresolved[0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("parcel.Missing", "no class 'Missing' in"),
        ("not_there.Class", "no source found for 'not_there'"),
        ("missing.py:Class", "no such file: missing.py"),
        ("parcel", "expected package.Class"),
    ],
)
def test_error_messages(package: Path, spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_config_class(spec, (package,))
