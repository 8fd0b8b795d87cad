"""Sphinx configuration: `tox run -e docs`."""

from importlib.metadata import version as _version

project = "scalebench"
author = "The scalebench maintainers"
copyright = author
release = version = _version("scalebench")

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_generate"]

html_theme = "furo"
html_title = "scalebench"
