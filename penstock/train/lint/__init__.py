"""Checks trainer configurations against the trainers' source code.

In: a YAML or JSON file and/or a launcher's command line (`config_values`), and the classes that will read it, such as
`trl.SFTConfig` (`config_class`). Out: a `LintReport` that says, for
each key, whether it is accepted, refused or unknown, what replaced a removed key (`history`), and which keys have no
effect given the other values.

Nothing is imported: classes are read with `ast`, so lint works without torch and on unpacked wheels.
"""
