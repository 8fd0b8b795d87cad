"""Text for LaTeX, and the width of text in print."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from functools import cache

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
    "†": r"\ensuremath{\dagger}",
    "±": r"\ensuremath{\pm}",
    "→": r"\ensuremath{\rightarrow}",
    "∞": r"\ensuremath{\infty}",
    "Δ": r"\ensuremath{\Delta}",
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


def printed_width(text: str, size: float, family: str) -> float:
    """Return the width of a line in print, in points, without kerning."""
    return size * sum(_advance_em(letter, family) for letter in text)


@cache
def _advance_em(letter: str, family: str) -> float:
    """Return how far a letter moves the next one, in ems; 1 for one that the font does not have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    size = 100
    font = get_font(findfont(FontProperties(family=[family])))
    if not font.get_char_index(ord(letter)):
        return 1.0
    font.set_size(size, 72)
    return float(font.load_char(ord(letter)).linearHoriAdvance) / 65536 / size  # fixed point: 16 bits behind the point
