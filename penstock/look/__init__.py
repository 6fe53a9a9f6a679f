"""Shows prepared data in the terminal, in reports, in the viewer, in diffs and in notebooks.

Everything is drawn from the same `stats` and `survey`, so that figures agree everywhere. `terminal` prints, `report`
writes one HTML file, `server` is the viewer, and `compare` finds the differences between two datasets.
"""
