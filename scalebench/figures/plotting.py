"""Draws figures and writes each as PDF, SVG, PNG and the CSV of its drawn data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalebench.errors import ResultsError
from scalebench.figures.base import FIGURES, figure_names
from scalebench.study.spec import slug

if TYPE_CHECKING:
    from scalebench.analysis import Results

FORMATS = ("pdf", "svg", "png")
# Nothing that differs from run to run: the same records give the same bytes.
_METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "Creator": "scalebench", "Producer": None},
    "svg": {"Date": None, "Creator": "scalebench"},
    "png": {"Software": "scalebench"},
}


def plot(
    results: Results, output: Path, names: Sequence[str] = (), formats: Sequence[str] = FORMATS
) -> tuple[list[Path], list[str]]:
    """Write the figures `names` (all that these results can carry) to `output/<study>/`.

    Returns the files, and one line for each figure that was left out.

    Raises:
        UsageError: an unknown figure.
        ResultsError: a figure asked for by name, or every figure, cannot be drawn from these results, or `output`
            cannot be written.
    """
    kinds = {name: FIGURES.create(name, {}) for name in names or figure_names()}
    reasons = {name: kind.absent(results) for name, kind in kinds.items()}
    left_out = [f"{name} not drawn: {reason}" for name, reason in reasons.items() if reason]
    if names and left_out:
        raise ResultsError(f"{results.folder}: {left_out[0]}")
    if len(left_out) == len(kinds):
        raise ResultsError(f"{results.folder}: no figure can be drawn: {left_out[0]}")
    folder = output / slug(str(results.runs["study"].iloc[-1]))
    files: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, kind in kinds.items():
            if not reasons[name]:
                files += _write(kind, results, folder / name, formats)
    except OSError as error:
        raise ResultsError(f"cannot write {folder}: {error.strerror}; choose another folder with --output") from None
    return files, left_out


def _write(kind: Any, results: Results, stem: Path, formats: Sequence[str]) -> list[Path]:
    from scalebench.figures.drawing.canvas import Canvas

    with _style():
        canvas = Canvas(kind.name)
        kind.draw(results, canvas)
        figure = canvas.finish()
        files = [stem.with_suffix(f".{suffix}") for suffix in formats]
        for file in files:
            _save(figure, file)
    data = stem.with_suffix(".csv")
    canvas.data().to_csv(data, index=False, lineterminator="\n")
    return [*files, data]


def _save(figure: Any, file: Path) -> None:
    """As `figure.savefig` does, which draws every figure twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    canvases: dict[str, Any] = {".png": FigureCanvasAgg, ".svg": FigureCanvasSVG, ".pdf": FigureCanvasPdf}
    suffix, dpi = file.suffix, figure.dpi
    write = getattr(canvases[suffix](figure), f"print_{suffix[1:]}")
    fast = {"pil_kwargs": {"compress_level": 4}} if suffix == ".png" else {}
    write(file, metadata=_METADATA[suffix[1:]], **fast)
    figure.dpi = dpi  # vector formats change it


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """scalebench's own style on matplotlib's defaults, whatever the user's matplotlibrc says."""
    import matplotlib as mpl

    sheet = mpl.rc_params_from_file(Path(__file__).with_name("scalebench.mplstyle"), use_default_template=False)
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(sheet)
        yield
