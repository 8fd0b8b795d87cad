"""Colours, markers and lines: hue and marker encode the strategy, shade its options, the marker's fill the execution.

Names of series in titles and legends are shortened where they are alike, never where
they differ, and wrapped. Grey is left to what is context only: other panels' series,
ideal lines, fronts.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from scalebench.analysis.native_check import PREFERRED_ENGINES
from scalebench.figures.selection import EXECUTION
from scalebench.study.cell import strategy_rank
from scalebench.study.choices import PER_BATCH
from scalebench.tables.latex import printed_width

# The colours of a family (a strategy with all its options): its own one, then shades of
# it for further options. The first six are Okabe and Ito's, distinct for colour-blind
# readers; the others were searched for the largest distances in CIELAB from these and
# from one another, as seen with and without red or green cones.
_SHADES = (
    ("#000000", "#444444"),
    ("#0072B2", "#183C54", "#5AB1FE", "#99BAD7"),
    ("#E69F00", "#AE6503", "#F1A65B", "#BD8C5E"),
    ("#009E73", "#014135", "#4BCD87", "#03673B"),
    ("#D55E00", "#751E00", "#FF9D7A", "#A3614A"),
    ("#CC79A7", "#512F3C", "#8A467B", "#F298DD"),
    ("#5E4100", "#D1B35C", "#7D7154", "#C3B595"),
    ("#DE75FE", "#4A04B2", "#B423AC", "#452E63"),
    ("#0544C2", "#ABA7FF", "#493287", "#7C68A2"),
    ("#762275", "#FF7DD9", "#9D51BD", "#966987"),
    ("#E81C45", "#691D2E", "#FE919F", "#FF162A"),
    ("#90003D", "#F45597", "#C6254A", "#FF5D75"),
)
# Baselines and the paper's two strategies look alike in every study and report.
_FIXED = {
    "serial": (0, "P"),
    "allreduce": (1, "s"),
    "horovod": (2, "^"),
    "ddp": (3, "D"),
    "epoch_average": (4, "o"),
    "epoch_async": (5, "v"),
}
# All other families take one of the other hues: those in _PLACED by position (append
# only), own ones by a checksum.
_OTHERS = range(len(_FIXED), len(_SHADES))
_MARKERS = ("p", "<", ">", "h", "X", "d", "8", "*", "H")
_INSIDE = ("", "|", "_", "x", ".", "+")  # what marks of further options have inside
_PLACED = (
    *(
        "local_sgd",
        "post_local_sgd",
        "hierarchical_local_sgd",
        "slowmo",
        "bmuf",
        "diloco",
    ),
    *("easgd", "gossip", "ad_psgd", "fedavg", "fedprox", "adasum"),
    *("bsp", "bsp_backup", "asp", "ssp", "dssp", "elastic_bsp"),
    *("daso-heat", "daso-fixed", "dislib-compat", "dislib-compat-async"),
    *("torch_local_sgd", "torch_hierarchical_local_sgd", "torch_post_local_sgd"),
    "streaming_diloco",
    "sparse_loco",
    "noloco",
    "demo",
    "sparta",
    *("fsdp", "tensor", "pipeline", "hybrid", "adaptive", "model_parallel"),
    *("torch_fsdp", "torch_tensor", "torch_pipeline"),
)
_PLACES = len(_OTHERS) * len(_MARKERS)
TASKS = {
    "compute": "#4477AA",
    "communication": "#EE6677",
    "waiting": "#66CCEE",
    "data": "#CCBB44",
    "other": "#D9B48F",
}
TASK_PATTERNS = {
    "communication": "/////",
    "waiting": ".....",
    "data": "xxxxx",
    "other": "",
}
SERVING = "#AA3377"
ENGINE_ALONE, ENGINE_ALONE_PATTERN = (
    "#228833",
    "+++++",
)  # cost of an engine at one worker
MOST_SERIES, GROUP = 6, 4  # in one panel
NEUTRAL = "#444444"

Handle = Artist | tuple[Artist, ...]  # of a legend; several are drawn over one another
Dash = Literal["-"] | tuple[int, tuple[float, ...]]  # of matplotlib
FillStyle = Literal["full", "left", "none"]
FILLS: dict[str, FillStyle] = {
    "native": "full",
    "paced": "left",
    "virtual": "none",
    "modelled": "none",
    EXECUTION: "full",
}
# Lines of options beyond the shades of a family, which begin again; modelled and added
# curves have other dashes.
_DASHES: tuple[Dash, ...] = ("-", (0, (1, 0.9)), (0, (3, 1, 1, 1, 1, 1)))
LINES = {"modelled": "--", EXECUTION: "-."}
EXECUTION_WORDS = {
    "native": "native (measured)",
    "paced": "paced (measured communication)",
    "virtual": "virtual (computed time)",
    "modelled": "modelled (priced, without training)",
    EXECUTION: "added from a file",
}


MARK_WORDS = {
    "oversubscribed": "oversubscribed (no baseline)",
    "disturbed": "disturbed by other programs (no baseline)",
}

LONG = 26  # characters; shorter names stay as they are
_LABEL = re.compile(
    r"(?P<head>[^(]*?)(?:\((?P<options>.*)\))?(?P<rest> (?:on|in) .*)?", re.DOTALL
)
_LETTER = re.compile(r"\([a-z]+\)")  # of a panel
# a word may be broken after these, a number nowhere
_BREAKS = re.compile(r"(?<=[(,_:/])|(?<=\.)(?!\d)")


def cross() -> dict[str, Any]:
    """Return matplotlib keywords of the cross over oversubscribed points."""
    size = 1.4 * rcParams["lines.markersize"]
    edge = 1.2 * rcParams["lines.markeredgewidth"]
    return {
        "color": NEUTRAL,
        "linestyle": "",
        "marker": "x",
        "markersize": size,
        "markeredgewidth": edge,
    }


def plus() -> dict[str, Any]:
    """Return matplotlib keywords of the plus sign over disturbed points."""
    return cross() | {"marker": "+", "markersize": 1.9 * rcParams["lines.markersize"]}


def knee() -> dict[str, Any]:
    """Return matplotlib keywords of the knee of a scaling law."""
    size = 1.3 * rcParams["lines.markersize"]
    edge = 0.8 * rcParams["lines.markeredgewidth"]
    color = {"color": NEUTRAL, "markerfacecolor": "#FFD400"}
    return {
        **color,
        "linestyle": "",
        "marker": "D",
        "markersize": size,
        "markeredgewidth": edge,
    }


def wide_interval(color: str = NEUTRAL, *, upright: bool = True) -> dict[str, Any]:
    """Return matplotlib keywords of the mark for an interval that is wider than its panel, along y or along x."""
    size = 2.6 * rcParams["lines.markersize"]
    edge = 0.7 * rcParams["lines.markeredgewidth"]
    marker = (
        _BOTH_WAYS if upright else _BOTH_WAYS.transformed(Affine2D().rotate_deg(90))
    )
    return {
        "color": color,
        "linestyle": "",
        "marker": marker,
        "markersize": size,
        "markeredgewidth": edge,
    }


# An upright line with an arrowhead at each end.
_BOTH_WAYS = Path(
    [
        (0, -1),
        (0, 1),
        (-0.3, 0.6),
        (0, 1),
        (0.3, 0.6),
        (-0.3, -0.6),
        (0, -1),
        (0.3, -0.6),
    ],
    [
        Path.MOVETO,
        Path.LINETO,
        Path.MOVETO,
        Path.LINETO,
        Path.LINETO,
        Path.MOVETO,
        Path.LINETO,
        Path.LINETO,
    ],
)


@dataclass(frozen=True)
class Look:
    """Colour and marker of one series, with what the marker has inside; `shift` separates points at equal x.

    A family has one marker and the shades of one colour: its further options differ by
    shade and by `inside`, and those beyond its shades by `dash`, too. The shift is in
    octaves.
    """

    color: str
    marker: str
    shift: float
    inside: str = ""
    dash: Dash = "-"

    def line(self, execution: str) -> dict[str, Any]:
        """Return matplotlib keywords of a line with markers for `execution`."""
        hollow = FILLS[execution] != "full"
        return {
            "color": self.color,
            "marker": self.marker,
            "fillstyle": FILLS[execution],
            "markerfacecolor": "white" if FILLS[execution] == "none" else self.color,
            "markerfacecoloralt": "white",
            "linestyle": LINES.get(execution, "-") if self.dash == "-" else self.dash,
            # A hollow marker on a thick line looks filled.
            "linewidth": (0.8 if hollow else 1.3) * rcParams["lines.linewidth"],
        }

    def inner(self, execution: str) -> dict[str, Any]:
        """Return matplotlib keywords for the fill of markers of `execution`."""
        return {
            "color": "white" if FILLS[execution] == "full" else self.color,
            "marker": self.inside,
            "markersize": (0.4 if self.inside == "." else 0.6)
            * rcParams["lines.markersize"],
            "markeredgewidth": 0.7 * rcParams["lines.markeredgewidth"],
            "linestyle": "",
        }

    def sample(self) -> Handle:
        """Return the lines of the legend."""
        size = 1.1 * rcParams["lines.markersize"]
        line = Line2D(
            [],
            [],
            color=self.color,
            linestyle=self.dash,
            marker=self.marker,
            markersize=size,
        )
        return (line, Line2D([], [], **self.inner("native"))) if self.inside else line


def grouped(names: Sequence[str], most: int = MOST_SERIES) -> list[list[str]]:
    """Split the series of a panel into groups that stay legible, the per-batch baselines first.

    A lone baseline, such as serial, joins the first group. Up to `most` series stay
    together.
    """
    if len(names) <= most:
        return [list(names)]
    base = [name for name in names if name in PER_BATCH]
    others = [name for name in names if name not in base]
    parts = _parts(others, -(-len(others) // GROUP))
    return [base + parts[0], *parts[1:]] if len(base) < 2 else [base, *parts]


def _parts(names: Sequence[str], number: int) -> list[list[str]]:
    """Split `names` into `number` equal parts, or between families where no part has more than one name too many."""
    even = [round(len(names) * place / number) for place in range(number + 1)]
    ends = [
        place
        for place in range(1, len(names))
        if family(names[place - 1]) != family(names[place])
    ]
    # Each cut moves to the nearest end of a family, where there is one.
    near = [
        min(ends, key=lambda end: (abs(end - cut), end), default=cut)
        for cut in even[1:-1]
    ]
    bounds = [0, *near, len(names)]
    if not all(
        0 < stop - start <= GROUP + 1 for start, stop in itertools.pairwise(bounds)
    ):
        bounds = even
    return [list(names[start:stop]) for start, stop in itertools.pairwise(bounds)]


def name_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return `table` with a column `series`: the label, with the engine if a strategy ran natively on several.

    The first of mpi, nccl, gloo, horovod keeps the plain label, as in the comparison
    with virtual runs.
    """
    native = table[table["execution"].isin(("native", "paced"))]
    first = {
        str(label): min(group, key=PREFERRED_ENGINES.index)
        for label, group in native.groupby("label")["engine"]
    }
    series = []
    for label, engine in zip(
        table["label"].astype(str), table["engine"].astype(str), strict=True
    ):
        plain = engine in ("virtual", EXECUTION, first.get(label))
        series.append(label if plain else f"{label} on {engine}")
    return table.assign(series=series)


def looks(series: Iterable[str]) -> dict[str, Look]:
    """Return the look of each series: one hue and marker for a family, in all studies unless two families collide.

    Up to twelve families have hues of their own; of two that would share one the later
    in order gets a free hue.
    """
    ordered = sorted(set(series), key=strategy_rank)
    members: dict[str, list[str]] = {}
    for name in ordered:
        members.setdefault(family(name), []).append(name)
    given: dict[str, tuple[int, str]] = {}
    # Own strategies last: they must not take the look of a shipped one.
    for one in sorted(members, key=lambda one: (one not in _FIXED, one not in _PLACED)):
        given[one] = _FIXED.get(one) or _free(one, list(given.values()))
    # All shifts together stay within 0.4 octaves, so that counts stay apart.
    step = min(0.06, 0.4 / max(1, len(ordered)))
    middle = (len(ordered) - 1) / 2
    found = {}
    for place, name in enumerate(ordered):
        hue, marker = given[family(name)]
        option = members[family(name)].index(name)
        shades = _SHADES[hue]
        turn, shade = divmod(option, len(shades))
        inside = _INSIDE[(shade + turn) % len(_INSIDE)]
        dash = _DASHES[turn % len(_DASHES)]
        found[name] = Look(shades[shade], marker, step * (place - middle), inside, dash)
    return found


def _free(family: str, taken: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """Return hue and marker of a family: those of its place, else the next with a free hue, else any that are free."""
    first = (
        _PLACED.index(family)
        if family in _PLACED
        # `hash` of a text differs from process to process.
        else zlib.crc32(family.encode()) % _PLACES
    )
    count = len(_MARKERS)
    own = [
        (
            _OTHERS[place % len(_OTHERS)],
            # Moved on each time around, so that equal hues do not get equal markers.
            _MARKERS[(place + place // (2 * count)) % count],
        )
        for place in range(first, first + _PLACES)
    ]
    hues = {hue for hue, _ in taken}
    markers = {marker for _, marker in taken}
    spare = [
        (hue, marker)
        for hue in (*range(1, len(_FIXED)), 0)
        for _, marker in own[:count]
    ]
    free = [look for look in own + spare if look[0] not in hues]
    distinct = [look for look in free if look[1] not in markers]
    return (distinct or free or [look for look in own if look not in taken] or own)[0]


def family(name: str) -> str:
    """Return the strategy of a series without its options, engine and study."""
    return _label_parts(name)[0]


def short_names(series: Iterable[str]) -> dict[str, str]:
    """Return a name for each series: long ones without the options that others of the same strategy have too.

    `local_sgd(first=4, steps=16)` beside `local_sgd(first=4, steps=32)` becomes
    `local_sgd(…, steps=16)`. All names are distinct.
    """
    known = list(dict.fromkeys(series))
    options: dict[str, list[set[str]]] = {}
    for name in known:
        head, own, _ = _label_parts(name)
        options.setdefault(head, []).extend([set(own)] * bool(own))
    common: dict[str, set[str]] = {head: set() for head in options}
    for head, found in options.items():
        # a lone name keeps its options: beside nothing they say what it is
        if len(found) > 1:
            common[head] = set.intersection(*found)
    # beside these no option is common to all
    plain = {head for head, own, _ in map(_label_parts, known) if not own}
    short = {
        name: _without(name, common[family(name)], family(name) in plain)
        for name in known
    }
    taken = list(short.values())
    # Two that became equal keep their long names.
    return {name: own if taken.count(own) == 1 else name for name, own in short.items()}


def _without(name: str, common: set[str], beside_plain: bool) -> str:
    head, options, rest = _label_parts(name)
    if len(name) <= LONG or not common:
        return name
    kept = [option for option in options if option not in common]
    if not kept and beside_plain:
        return name
    return f"{head}({', '.join(['…', *kept])}){rest}"


def _label_parts(name: str) -> tuple[str, list[str], str]:
    """Split `head(key=value, key=value) on engine`."""
    match = _LABEL.fullmatch(name)
    if match is None or not match["head"]:
        return name, [], ""
    # A comma inside brackets, as in groups=[4, 8], does not end an option.
    options = re.split(r", (?=[\w.-]+=)", match["options"] or "")
    return match["head"], [option for option in options if option], match["rest"] or ""


def group_name(group: Sequence[str]) -> str:
    """Return the strategies of a group of series, each once: `local_sgd, slowmo`."""
    return ", ".join(dict.fromkeys(family(name) for name in group))


def wrapped(text: str, points: float, size: float) -> str:
    """Break `text` into lines of at most `points` at font `size`: at spaces, and inside of words that are wider."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if width(joined, size) <= points:
            lines[-1] = joined
        # a letter does not stand on a line of its own
        elif _LETTER.fullmatch(lines[-1]):
            lines[-1:] = _broken(joined, points, size)
        else:
            lines += (
                _broken(word, points, size) if width(word, size) > points else [word]
            )
    return "\n".join(line for line in lines if line)


def _broken(word: str, points: float, size: float) -> list[str]:
    """Break a word after brackets, commas and underscores where that is enough, else anywhere."""
    lines = [""]
    for piece in _BREAKS.split(word):
        whole = width(piece, size) <= points
        for part in [piece] if whole else piece:
            if lines[-1] and width(lines[-1] + part, size) > points:
                lines.append("")
            lines[-1] += part
    return lines


def width(text: str, size: float) -> float:
    """Return the width in points of `text` in the font of the style in use."""
    return printed_width(text, size, str(rcParams["font.family"][0]))
