"""The compiled part, which pyproject.toml can't describe.

It uses Python's stable ABI, so that one wheel serves Python 3.11 and later. Without a compiler it is left out, and the
references do its work; PENSTOCK_COMPILED=required makes that an error, for wheels meant to be published.
"""

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("penstock", "native")
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free-threaded Python has no stable ABI


class BuildExtension(build_ext):
    """Removes what earlier builds left: Python prefers a module made for its own version to a stable one."""

    def copy_extensions_to_source(self) -> None:
        for stale in NATIVE.glob("_native.*.so"):
            stale.unlink()
        super().copy_extensions_to_source()


setup(
    cmdclass={"build_ext": BuildExtension},
    ext_modules=[
        Extension(
            "penstock.native._native",
            sources=sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            py_limited_api=STABLE,
            optional=os.environ.get("PENSTOCK_COMPILED") != "required",
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
