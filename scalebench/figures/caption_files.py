"""Captions beside figures: plain text, and LaTeX to be read into a figure environment."""

from __future__ import annotations

from pathlib import Path

from scalebench.system.atomic_write import open_own
from scalebench.tables.latex import latex_lines


def write_caption(stem: Path, caption: str, width_in: float) -> list[Path]:
    """Write `caption` to `stem`.txt and `stem`.tex, and return both.

    Raises:
        OSError: a file cannot be written.
    """
    text, latex = stem.with_suffix(".txt"), stem.with_suffix(".tex")
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
        file.write("\n".join([*usage, f"\\caption{{{lines}}}", f"\\label{{fig:{stem.name}}}"]) + "\n")
    return [text, latex]
