"""Shows prepared data in the terminal, in reports, in the viewer, in diffs and in notebooks.

Everything is drawn from the same `statistics` and `survey`, so that figures agree everywhere. `terminal` prints,
`report` writes one HTML file, `viewer` is a web application, and `compare` finds the differences between two datasets.
"""
