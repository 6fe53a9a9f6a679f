"""What pyproject.toml can't say: inner loops in C, which are left out where there is no compiler."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("penstock", "native")

setup(
    ext_modules=[
        Extension(
            "penstock.native._native",
            sources=sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            optional=True,
        )
    ]
)
