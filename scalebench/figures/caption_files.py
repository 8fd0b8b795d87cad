"""Captions beside figures: plain text, and LaTeX to be read into a figure environment."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from pathlib import Path

from scalebench.system.atomic_write import open_own

_TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "µ": r"\ensuremath{\mu}",
    "×": r"\ensuremath{\times}",
    "±": r"\ensuremath{\pm}",
    "²": r"\textsuperscript{2}",
    "–": "--",
    "—": "---",
    "£": r"\pounds{}",
    "§": r"\S{}",
    "…": r"\dots{}",
    "“": "``",
    "”": "''",
    "‘": "`",
    "’": "'",
}
_LIGATURES = re.compile(r"([-,'])(?=\1)")  # two hyphens are a dash, two apostrophes a closing quote
_NOT_IN_T1 = "ĦħĸĿŀŉŦŧſ"  # the letters from À to ſ that stop LaTeX with T1 fonts, found by trying each
_LINE = 110


def escape_latex(text: str) -> str:
    """Escape `text` for LaTeX with T1 fonts: special characters escaped, ligatures broken.

    Accented Latin letters stay, other letters lose their accents, and characters without a Latin form become their code
    point, as an unknown character stops LaTeX.
    """
    pieces = _LIGATURES.sub("\\1\0", text.replace("\0", ""))
    return "".join("{}" if piece == "\0" else _TEX.get(piece) or _letter(piece) for piece in pieces)


def _letter(character: str) -> str:
    if character.isspace():
        return " "
    code = ord(character)
    if 0x20 <= code < 0x7F or (0xC0 <= code <= 0x17F and character.isalpha() and character not in _NOT_IN_T1):
        return character
    if unicodedata.category(character)[0] == "C":
        return "" if code < 0x20 or 0x7F <= code < 0xA0 else f"U+{code:04X}"
    bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return "".join(_TEX.get(plain, plain) for plain in bare) or f"U+{code:04X}"


def to_latex(text: str) -> str:
    """Return `escape_latex(text)` with minus signs, and numbers on one line with their unit."""
    return escape_latex(text).replace(r" \%", r"\,\%").replace(" - ", " $-$ ")


def latex_lines(text: str) -> str:
    """Return `to_latex(text)` in lines of a LaTeX file."""
    return textwrap.fill(to_latex(text), _LINE, break_long_words=False, break_on_hyphens=False)


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
