"""Writes the description in LaTeX and in Markdown; whatever a name holds, it stays text."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scalebench.artifact.contents import Description

TEMPLATES = Path(__file__).with_name("templates")
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
_SAFE_LINK = re.compile(r"https?://[A-Za-z0-9./_~:-]+")
_NOT_IN_T1 = "ĦħĸĿŀŉŦŧſ"  # the letters from À to ſ that stop LaTeX with T1 fonts, found by trying each
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&])")


def escape_latex(text: str) -> str:
    """`text` as LaTeX sets it with T1 fonts: every special character escaped, ligatures broken.

    Accented Latin letters stay; other letters lose their accents, and what has no Latin form becomes its code point,
    as an unknown character would stop LaTeX.
    """
    pieces = _LIGATURES.sub("\\1\0", text.replace("\0", ""))
    return "".join("{}" if piece == "\0" else _TEX.get(piece) or _letter(piece) for piece in pieces)


class Tex(str):
    """LaTeX, not text to be escaped."""

    __slots__ = ()


def latex_link(address: str) -> str:
    """An address that LaTeX may break, or its text if it holds what `\\url` cannot."""
    return Tex(rf"\url{{{address}}}") if _SAFE_LINK.fullmatch(address) else address


def escape_markdown(text: str) -> str:
    """`text` as Markdown shows it: nothing in it is markup, HTML or a new line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def latex(description: Description) -> str:
    """The artifact description as a LaTeX document of class IEEEtran."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=False,  # noqa: S701 - finalize escapes for LaTeX, which has no HTML
        undefined=StrictUndefined,
        finalize=_finalize(escape_latex),
        block_start_string=r"\BLOCK{",
        block_end_string="}",
        variable_start_string=r"\VAR{",
        variable_end_string="}",
        comment_start_string=r"\NOTE{",
        comment_end_string="}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["link"] = latex_link
    return environment.get_template("artifact.tex.j2").render(d=description)


def markdown(description: Description) -> str:
    """The same in Markdown, for the place where the artifact is kept."""
    return _plain_environment(escape_markdown).get_template("artifact.md.j2").render(d=description)


def script(description: Description) -> str:
    """`reproduce.sh`."""
    return _plain_environment(str).get_template("artifact.sh.j2").render(d=description)


def _plain_environment(escape: Any) -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=False,  # noqa: S701 - finalize escapes for the language at hand
        undefined=StrictUndefined,
        finalize=_finalize(escape),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _finalize(escape: Any) -> Any:
    def finalize(value: object) -> object:
        return escape(value) if isinstance(value, str) and not isinstance(value, Tex) else value

    return finalize


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
