"""Captions beside figures: plain text, and LaTeX to be read into a figure environment."""

from __future__ import annotations

import textwrap
from pathlib import Path

_ESCAPED = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "²": r"\textsuperscript{2}",
    "µ": r"$\mu$",
    "×": r"$\times$",
    "–": "--",
    "…": r"\ldots{}",
}
_LINE = 110


def to_latex(text: str) -> str:
    """Return `text` with LaTeX's special characters escaped, minus signs, and numbers on one line with their unit."""
    escaped = "".join(_ESCAPED.get(character, character) for character in text)
    return escaped.replace(r" \%", r"\,\%").replace(" - ", " $-$ ")


def latex_lines(text: str) -> str:
    """Return `to_latex(text)` in lines of a LaTeX file."""
    return textwrap.fill(to_latex(text), _LINE, break_long_words=False, break_on_hyphens=False)


def write_caption(stem: Path, caption: str, width_in: float) -> list[Path]:
    """Write `caption` to `stem`.txt and `stem`.tex, and return both.

    Raises:
        OSError: a file cannot be written.
    """
    text, latex = stem.with_suffix(".txt"), stem.with_suffix(".tex")
    text.write_text(f"{caption}\n", encoding="utf-8")
    lines = latex_lines(caption)
    usage = [
        r"% \begin{figure}",
        f"%   \\includegraphics[width={width_in:.4g}in]{{{stem.name}}}",
        f"%   \\input{{{stem.name}.tex}}",
        r"% \end{figure}",
    ]
    latex.write_text(
        "\n".join([*usage, f"\\caption{{{lines}}}", f"\\label{{fig:{stem.name}}}"]) + "\n", encoding="utf-8"
    )
    return [text, latex]
