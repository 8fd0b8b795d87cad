"""Styles of figures: width, font, sizes, caption and formats, for the columns of a journal, slides or the screen."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from scalebench.errors import UsageError, nearest
from scalebench.study.choices import FIGURE_STYLES, Caption

_BASE_PT = 8.5  # size of the style sheet
_UNITS_IN = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27}
_WIDTHS_IN = (1.5, 40.0)


@dataclass(frozen=True)
class Style:
    """Width (inches) and typography (points) of a figure at its final size.

    `font` is the name of a font, `small` the size of the smallest text, `height` the
    factor of the heights of panels, and `page_in` the height of a page's text, which no
    figure exceeds. A `caption` is written beside the figure (`file`), in the picture as
    well (`below`), or not at all. `formats` are those of the files: PDF for print, PNG
    for a screen.
    """

    name: str
    width_in: float
    font: str = "DejaVu Sans"
    size: float = 8.0
    small: float = 7.0
    height: float = 0.74
    page_in: float = 9.0
    dpi: int = 300
    caption: Caption = "file"
    titles: bool = True
    patterns: bool = True  # hatches tell the parts of bars apart in grey
    formats: tuple[str, ...] = ("pdf",)

    @property
    def full_width(self) -> bool:
        """Return True if the figure is as wide as two columns."""
        return self.width_in >= _STYLES[self.name][1].width_in

    @property
    def scale(self) -> float:
        """Size of text and marks relative to the style sheet."""
        return self.size / _BASE_PT

    def parameters(self) -> dict[str, Any]:
        """Return matplotlib parameters that differ from the style sheet."""
        # The sheet itself is the report's.
        if self.name == REPORT.name and self.font == REPORT.font:
            return {}
        return {
            "font.family": [self.font],
            "font.size": self.size,
            "axes.titlesize": self.size + (1.5 if self.name == REPORT.name else 0.5),
            "axes.titlepad": 4 * self.scale,
            "axes.labelsize": self.size,
            "axes.labelpad": 2.5 * self.scale,
            "axes.linewidth": 0.7 * self.scale,
            "grid.linewidth": 0.5 * self.scale,
            "xtick.labelsize": self.small,
            "ytick.labelsize": self.small,
            "xtick.major.size": 2.5 * self.scale,
            "ytick.major.size": 2.5 * self.scale,
            "lines.linewidth": 1.15 * self.scale,
            "lines.markersize": 4.2 * self.scale,
            "lines.markeredgewidth": 0.9 * self.scale,
            "legend.fontsize": (self.size + self.small) / 2,
            "legend.handlelength": 1.9,
            "legend.columnspacing": 1.2,
            "legend.handletextpad": 0.5,
            "figure.dpi": self.dpi,
        }


_SCREEN = ("png",)
REPORT = Style(
    "report",
    9.6,
    size=_BASE_PT,
    height=1.0,
    dpi=150,
    caption="below",
    patterns=False,
    formats=_SCREEN,
)
# One and two columns. IEEE: Times; ACM: Libertine, to which STIX is the nearest that
# matplotlib brings along; Springer: a font without serifs, 84 and 174 mm. Slides: half
# and the whole of 16:9.
_STYLES: dict[str, tuple[Style, Style]] = {
    "ieee": (Style("ieee", 3.5, "STIXGeneral"), Style("ieee", 7.16, "STIXGeneral")),
    "acm": (Style("acm", 3.33, "STIXGeneral"), Style("acm", 7.0, "STIXGeneral")),
    "springer": (
        Style("springer", 84 / 25.4, size=7.5),
        Style("springer", 174 / 25.4, size=7.5),
    ),
    "slides": (
        Style(
            "slides",
            6.0,
            size=16,
            small=14,
            height=1.4,
            page_in=6.75,
            dpi=150,
            caption="none",
            formats=_SCREEN,
        ),
        Style(
            "slides",
            12.0,
            size=16,
            small=14,
            height=1.4,
            page_in=6.75,
            dpi=150,
            caption="none",
            formats=_SCREEN,
        ),
    ),
    "report": (replace(REPORT, width_in=4.8), REPORT),
}


def choose_style(
    name: str = "report",
    *,
    columns: int | None = None,
    width_in: float | None = None,
    font: str | None = None,
    caption: Caption | None = None,
    titles: bool = True,
) -> Style:
    """Return the style `name` over one or two columns (default: one in print, two in slides and report).

    Raises:
        UsageError: an unknown style, or a font that is missing or cannot be embedded as Type 42.
    """
    if name not in _STYLES:
        raise UsageError(f"unknown style {name!r}; {nearest(name, FIGURE_STYLES)}")
    if columns not in (None, 1, 2):
        raise UsageError(f"--columns: expected 1 or 2, got {columns!r}")
    one, two = _STYLES[name]
    # A journal's figure is usually one column wide, a slide's the whole.
    style = {1: one, 2: two, None: two if name in ("slides", "report") else one}[
        columns
    ]
    return replace(
        style,
        width_in=width_in or style.width_in,
        font=_embeddable(font) if font else style.font,
        caption=caption or style.caption,
        titles=titles,
    )


def parse_width(text: str) -> float:
    """Return the inches of `3.5in`, `84mm`, `8.4cm` or `252pt`.

    Raises:
        ValueError: another form, or a width that is out of range.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(in|cm|mm|pt)\s*", text)
    width = float(match[1]) * _UNITS_IN[match[2]] if match else 0.0
    if not _WIDTHS_IN[0] <= width <= _WIDTHS_IN[1]:
        raise ValueError(
            f"expected a width such as 3.5in, 84mm or 252pt, from 1.5 to 40 inches, got {text!r}"
        )
    return width


def _embeddable(font: str) -> str:
    from matplotlib.font_manager import findfont, get_font_names

    known = get_font_names()
    if font not in known:
        raise UsageError(
            f"--font: no font {font!r} on this machine; {nearest(font, known)}"
        )
    file = findfont(font)
    # Journals refuse Type 3 fonts, as which matplotlib embeds others.
    if not file.endswith(".ttf"):
        raise UsageError(
            f"--font: {font!r} ({file}) is no TrueType font, and only those are embedded as Type 42"
        )
    return font
