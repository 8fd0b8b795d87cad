"""scalebench: how much time does synchronising less often save, and what does it cost in accuracy?

In a notebook, `scalebench.run(...)` runs a study and
`scalebench.load("results/my-study")` reads one, `scalebench.plot(results,
"time-reduction")` draws a figure, `scalebench.predict("resnet50", ...)` predicts times
and `scalebench.plan("vit_b16", ...)` finds layouts. `scalebench.analysis` has the numbers that the command line prints,
`scalebench.figures` all figures as files. They are imported when they are asked for, so
that `import scalebench` takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "analysis",
    "figures",
    "load",
    "plan",
    "plot",
    "predict",
    "run",
]

if TYPE_CHECKING:
    from scalebench import analysis, figures
    from scalebench.notebook import load, plan, plot, predict, run


def __getattr__(name: str) -> object:
    if name in ("analysis", "figures"):
        return importlib.import_module(f"scalebench.{name}")
    if name in ("load", "plan", "plot", "predict", "run"):
        return getattr(importlib.import_module("scalebench.notebook"), name)
    raise AttributeError(f"module 'scalebench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
