"""Sphinx configuration: `tox run -e docs`."""

import sys
from importlib.metadata import version as _version
from pathlib import Path

_DOCS = Path(__file__).parent
sys.path.insert(0, str(_DOCS.parent))

from docs._generate.reference import write  # noqa: E402

project = "scalebench"
author = "The scalebench maintainers"
copyright = author
release = version = _version("scalebench")

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_generate"]

smartquotes = False  # "--set" is an option

html_theme = "furo"
html_title = "scalebench"
html_theme_options = {"sidebar_hide_name": False}

write(_DOCS / "reference")
