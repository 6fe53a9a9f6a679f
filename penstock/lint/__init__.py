"""Checks trainer configurations against the trainers' source code.

In: a YAML or JSON file and/or a launcher's command line (`config_values`), and the classes that will read it, such as
`trl.SFTConfig` (`config_class`, which resolves names with `resolver` and `modules`). Out: a `LintReport` that says, for
each key, whether it is accepted, refused or unknown, what replaced a removed key (`history`), and which keys have no
effect given the other values (`rules`).

Nothing is imported: classes are read with `ast`, so lint works without torch and on unpacked wheels.
"""

from penstock.lint.config_class import ConfigClass, read_config_class
from penstock.lint.config_values import ConfigValues, read_command, read_file
from penstock.lint.linter import KeyFinding, KeyStatus, LintReport, lint, report_lines

__all__ = [
    "ConfigClass",
    "ConfigValues",
    "KeyFinding",
    "KeyStatus",
    "LintReport",
    "lint",
    "read_command",
    "read_config_class",
    "read_file",
    "report_lines",
]
