"""The what-if figure: training time along one axis, or over two axes with the borders of the binding components."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalebench.errors import ResultsError

COLORS = {
    "compute": "#4477AA",
    "network bandwidth": "#EE6677",
    "network latency": "#CCBB44",
    "memory bandwidth": "#228833",
    "launch overhead": "#66CCEE",
    "engine": "#AA3377",
    "input": "#BBBBBB",
    "epoch overhead": "#777777",
    "jitter": "#000000",
}


def draw_what_if(
    path: Path,
    titles: Sequence[str],
    values: Sequence[Sequence[float]],
    seconds: NDArray[np.float64],
    bound: NDArray[np.int64],
    components: Sequence[str],
    caption: str,
) -> None:
    """Write the figure of `seconds` (n, m) over the values of one axis, or of two, to `path`.

    `bound` (n, m) holds places in `components`; `caption` says what was priced.

    Raises:
        ResultsError: the file cannot be written, or its ending is not that of a figure.
    """
    from matplotlib import rc_context
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    used = [place for place in range(len(components)) if (bound == place).any()]
    if len(values) == 1:
        x, y = np.asarray(values[0]), seconds[:, 0]
        axes.plot(x, y, color="#444444", linestyle="--")
        for place in used:
            here = bound[:, 0] == place
            axes.scatter(x[here], y[here], s=14, color=COLORS[components[place]], zorder=3)
        axes.set_ylabel("training time (s), modelled")
        axes.set_yscale("log")
        axes.set_xlabel(titles[0])
        _scale(axes.set_xscale, values[0])
    else:
        x, y = np.asarray(values[1]), np.asarray(values[0])
        mesh = axes.pcolormesh(x, y, seconds, norm=LogNorm(), cmap="Greys", shading="nearest", rasterized=True)
        figure.colorbar(mesh, ax=axes, label="training time (s), modelled")
        colors = ListedColormap([COLORS[name] for name in components])
        top = len(components) - 0.5
        axes.pcolormesh(x, y, bound, cmap=colors, alpha=0.35, shading="nearest", rasterized=True, vmin=-0.5, vmax=top)
        for place in used:
            if len(used) > 1:
                axes.contour(x, y, (bound == place).astype(float), levels=[0.5], colors="black", linewidths=0.8)
        axes.set_xlabel(titles[1])
        axes.set_ylabel(titles[0])
        _scale(axes.set_xscale, values[1])
        _scale(axes.set_yscale, values[0])
    entries = [Patch(color=COLORS[components[place]], alpha=0.6) for place in used]
    names = [f"bound by {components[place]}" for place in used]
    figure.legend(entries, names, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    figure.supxlabel(caption, fontsize=7.2, color="#444444")
    try:
        with rc_context({"svg.hashsalt": "scalebench"}):  # the same numbers give the same bytes
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "expected a name that ends in .png, .pdf or .svg"
        raise ResultsError(f"cannot write the figure {path}: {reason}") from None


def _scale(set_scale: object, values: Sequence[float]) -> None:
    """Choose a logarithmic axis for values over a decade or more."""
    if min(values) > 0 and max(values) / min(values) >= 10:
        set_scale("log")  # type: ignore[operator]
