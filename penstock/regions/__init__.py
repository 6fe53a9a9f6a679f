"""Rendered text is cut into segments: which message, role and part made each byte.

`Rendered` enters, `Segments` leave. `splitter` is the entry: it calibrates itself on a template's probes (`calibrate`,
`headers`, `stops`), then cuts by structure (`structure`) or by the author's tags (`tagged`).
"""
