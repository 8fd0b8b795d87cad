"""scalebench: how much time does synchronising less often save, and what does it cost in accuracy?

In a notebook, `scalebench.load("results/my-study")` gives a study's tables, `scalebench.analysis` the numbers that the
command line prints, and `scalebench.figures` the figures. They are imported when they are asked for, so that
`import scalebench` takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["__version__", "analysis", "figures", "load"]

if TYPE_CHECKING:
    from scalebench import analysis as analysis
    from scalebench import figures as figures
    from scalebench.analysis import load as load


def __getattr__(name: str) -> object:
    if name in ("analysis", "figures"):
        return importlib.import_module(f"scalebench.{name}")
    if name == "load":
        return importlib.import_module("scalebench.analysis").load
    raise AttributeError(f"module 'scalebench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
