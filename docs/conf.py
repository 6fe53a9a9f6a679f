"""Builds the site from the Markdown of this folder: `make docs`. It needs no network, to build or to view."""

from penstock import __version__

project = "Penstock"
author = "The Penstock authors"
copyright = author
version = release = __version__

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
nitpicky = True
suppress_warnings = ["misc.highlighting_failure"]  # examples with … in them

html_theme = "furo"
html_title = f"Penstock {__version__}"
html_static_path = ["images"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
