"""Write a drawn figure as PNG, PDF or SVG; the same records give the same bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fontTools.subset import Options
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from scalebench import __version__
from scalebench.system.atomic_write import open_own

_CANVASES: dict[str, Any] = {".png": FigureCanvasAgg, ".pdf": FigureCanvasPdf, ".svg": FigureCanvasSVG}
# Without dates.
_METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": f"scalebench {__version__}"},
    ".pdf": {"CreationDate": None, "Creator": "scalebench", "Producer": None},
    ".svg": {"Date": None, "Creator": "scalebench"},
}
_FASTER: dict[str, dict[str, Any]] = {".png": {"pil_kwargs": {"compress_level": 4}}}
_OF_LAYOUT = ["GSUB", "GPOS", "GDEF"]  # tables of a font


def save(figure: Figure, file: Path) -> None:
    """Write `figure` in the format of the file's ending, without the second drawing of `savefig`.

    Raises:
        OSError: the file cannot be written.
    """
    kind, dpi, canvas = file.suffix, figure.dpi, figure.canvas
    own = canvas if isinstance(canvas, _CANVASES[kind]) else _CANVASES[kind](figure)
    with open_own(file, "wb") as stream, _small_fonts():
        getattr(own, f"print_{kind[1:]}")(stream, metadata=_METADATA[kind], **_FASTER.get(kind, {}))
    figure.dpi = dpi  # vector formats change it
    figure.set_canvas(canvas)


@contextlib.contextmanager
def _small_fonts() -> Iterator[None]:
    """Embed fonts without the tables that lay out text: all letters of a picture have their places.

    To reduce these tables to the letters in use takes three quarters of the time of a font.
    """
    usual = Options._drop_tables_default
    Options._drop_tables_default = [*usual, *_OF_LAYOUT]
    try:
        yield
    finally:
        Options._drop_tables_default = usual
