"""Write a drawn figure as PNG, PDF or SVG, and its caption beside it; the same records give the same bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.figure import Figure

from scalebench import __version__
from scalebench.system.file_access import open_own
from scalebench.tables.printed import latex_lines

# Without dates.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": f"scalebench {__version__}"},
    "pdf": {"CreationDate": None, "Creator": "scalebench", "Producer": None},
    "svg": {"Date": None, "Creator": "scalebench"},
}
_FASTER: dict[str, dict[str, Any]] = {"png": {"pil_kwargs": {"compress_level": 4}}}
_OF_LAYOUT = ["GSUB", "GPOS", "GDEF"]  # tables of a font


def save(figure: Figure, file: Path) -> None:
    """Write `figure` in the format of the file's ending, without the second drawing of `savefig`.

    Raises:
        OSError: the file cannot be written.
    """
    kind, dpi, usual = file.suffix[1:], figure.dpi, figure.canvas
    fitting: Any = get_registered_canvas_class(kind)
    canvas = usual if isinstance(usual, fitting) else fitting(figure)
    write = getattr(canvas, f"print_{kind}")
    with (
        open_own(file, "wb") as stream,
        _small_fonts() if kind == "pdf" else contextlib.nullcontext(),
    ):
        write(stream, metadata=_METADATA[kind], **_FASTER.get(kind, {}))
    figure.dpi = dpi  # vector formats change it
    figure.set_canvas(usual)


@contextlib.contextmanager
def _small_fonts() -> Iterator[None]:
    """Embed fonts without the tables that lay out text: all letters of a picture have their places.

    To reduce these tables to the letters in use takes three quarters of the time of a
    font.
    """
    from fontTools.subset import Options

    usual = Options._drop_tables_default
    Options._drop_tables_default = [*usual, *_OF_LAYOUT]
    try:
        yield
    finally:
        Options._drop_tables_default = usual


def write_caption(stem: Path, caption: str, width_in: float) -> list[Path]:
    """Write `caption` as plain text to `stem`.txt, and to `stem`.tex for a figure environment; return both.

    Raises:
        OSError: a file cannot be written.
    """
    text = stem.with_suffix(".txt")
    latex = stem.with_suffix(".tex")
    with open_own(text, "w") as file:
        file.write(f"{caption}\n")
    lines = latex_lines(caption)
    usage = [
        r"% \begin{figure}",
        f"%   \\includegraphics[width={width_in:.4g}in]{{{stem.name}}}",
        f"%   \\input{{{stem.name}.tex}}",
        r"% \end{figure}",
    ]
    with open_own(latex, "w") as file:
        file.write(
            "\n".join([*usage, f"\\caption{{{lines}}}", f"\\label{{fig:{stem.name}}}"])
            + "\n"
        )
    return [text, latex]
