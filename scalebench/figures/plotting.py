"""Draw figures and write each as PDF, PNG or SVG beside the CSV of its drawn data.

They go to `plots/<study>`, or `plots/<study>-2` ... beside other records of that name.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, NamedTuple

from scalebench import __version__
from scalebench.errors import ResultsError, UsageError, nearest, writing
from scalebench.figures.base import (
    FIGURES,
    EmptyFigureError,
    Figure,
    default_figures,
    figure_names,
)
from scalebench.figures.selection import EVERYTHING, Added, Selection
from scalebench.figures.style import REPORT, Style
from scalebench.records.append_only import to_cell, to_text
from scalebench.records.attempts import Attempts
from scalebench.records.folder import RUNS, filled_by
from scalebench.study.spec import slug
from scalebench.system.file_access import open_own
from scalebench.tables.latex import latex_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Page

    from scalebench.analysis import Results
    from scalebench.figures.drawing.canvas import Canvas

_SLOWEST = (
    "scaling-laws",
    "breakdown",
    "convergence",
    "time-to-target",
    "reduction-parts",
)
_MOST_JOBS = 4  # each holds some 150 MiB

# Without dates.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": f"scalebench {__version__}"},
    "pdf": {"CreationDate": None, "Creator": "scalebench", "Producer": None},
    "svg": {"Date": None, "Creator": "scalebench"},
}
# bytes of pictures with these metadata
_MARKS = {
    "png": b"Software\0scalebench ",
    "pdf": b"/Creator (scalebench)",
    "svg": b"<dc:title>scalebench</dc:title>",
}
_FASTER: dict[str, dict[str, Any]] = {"png": {"pil_kwargs": {"compress_level": 4}}}
_OF_LAYOUT = ["GSUB", "GPOS", "GDEF"]  # tables of a font

_MARK = ".records"  # file with a hash of the path of the records


class Drawn(NamedTuple):
    """The files of one figure, or the reason why it cannot be drawn."""

    name: str
    files: list[Path]
    absent: str = ""
    notes: tuple[str, ...] = ()
    pages: int = 1


@dataclass(frozen=True)
class PlotRequest:
    """Which figures to draw, in which formats (none: the style's) and style, of which part of a study and of each."""

    names: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    style: Style = REPORT
    selection: Selection = EVERYTHING
    panels: tuple[str, ...] = ()
    added: tuple[Added, ...] = ()

    def figures(self) -> list[str]:
        """Return the named figures, else the `default_figures`, of these the ones with the wanted panels.

        Raises:
            UsageError: an unknown figure, or no figure has such a panel.
        """
        names = self.names or default_figures()
        if not self.added and not self.panels and set(names) <= set(figure_names()):
            return list(names)  # drawn by other processes: this one needs no matplotlib
        found = [FIGURES.find(name) for name in names]
        if self.added:
            found = [kind for kind in found if self._takes_added(kind)]
        kept = [kind for kind in found if self._has_panels(kind)]
        if not kept:
            known = [name for kind in found for name in kind.panels]
            having = (
                f"{nearest(self.panels[0], known)}"
                if known
                else "its panels are chosen with --strategy"
            )
            raise UsageError(
                f"--panel: {', '.join(kind.name for kind in found)} has no {self.panels[0]!r}; {having}"
            )
        return [kind.name for kind in kept]

    def panels_of(self, kind: type[Figure] | Figure) -> list[str]:
        """Return the names of the wanted panels, which may be given by their letters."""
        by_letter = dict(zip(ascii_lowercase, kind.panels, strict=False))
        return [by_letter[name] if len(name) == 1 else name for name in self.panels]

    def _takes_added(self, kind: type[Figure]) -> bool:
        if self.names and not kind.takes_added:
            able = [name for name in figure_names() if FIGURES.find(name).takes_added]
            raise UsageError(
                f"--add: {kind.name} shows one study; added curves are drawn in {', '.join(able)}"
            )
        return kind.takes_added

    def _has_panels(self, kind: type[Figure]) -> bool:
        letters = ascii_lowercase[: len(kind.panels)]
        return all(
            panel in kind.panels or panel in tuple(letters) for panel in self.panels
        )


def plot(
    results: Results,
    output: Path,
    names: Sequence[str] = (),
    formats: Sequence[str] = (),
) -> list[Drawn]:
    """Write those of the figures `names` that can be drawn to `output/<study>/`; default: the `default_figures`.

    Raises:
        UsageError: an unknown figure.
        ResultsError: none of them can be drawn, or `output` cannot be written.
    """
    request = PlotRequest(tuple(names), tuple(formats))
    drawn = [_draw(results, name, output, request) for name in request.figures()]
    return _some_drawn(drawn, results.folder)


def plot_folder(
    folder: Path,
    output: Path,
    request: PlotRequest = PlotRequest(),
    jobs: int = 1,
    place: Path | None = None,
) -> list[Drawn]:
    """Write figures of the records in `folder` as `plot` does, in `jobs` processes.

    `place` overrides the folder `output`/<study>. Each figure's `notes` are those of
    the results.

    Raises:
        UsageError: an unknown figure or panel, or a selected name or count without a completed run.
        ResultsError: none of them can be drawn, or `output` cannot be written.
    """
    from scalebench.analysis import load

    wanted = request.figures()
    results = load(folder)
    if request.selection != EVERYTHING:
        request.selection.require(results)
    # More processes than figures would cost their copies only.
    jobs = min(jobs, len(wanted))
    if jobs == 1:
        drawn = [_draw(results, name, output, request, place) for name in wanted]
    else:
        work = [(name, output, request, place) for name in slowest_first(wanted)]
        with drawing_processes(jobs, results) as pool:
            drawn = list(pool.map(_draw_shared, work))
    # The slowest were begun first; who asked expects their own order.
    drawn.sort(key=lambda figure: wanted.index(figure.name))
    return _some_drawn(drawn, folder)


def drawing_jobs() -> int:
    """Return how many processes may draw at once."""
    return min(_MOST_JOBS, len(os.sched_getaffinity(0)))


def slowest_first(names: Sequence[str]) -> list[str]:
    """Return the figures `names` in an order in which processes that draw them end at about the same time."""
    rank = {name: place for place, name in enumerate(_SLOWEST)}
    return sorted(names, key=lambda name: rank.get(name, len(rank)))


def drawing_processes(jobs: int, results: Results) -> ProcessPoolExecutor:
    """Return `jobs` processes that draw figures of their `shared_results`, which are `results`.

    They are copies of this process, which has imported and computed what all of them
    need. Threads are not copied, so that this process must have none of its own; those
    of numpy and Arrow prepare for a copy.
    """
    from scalebench.analysis import cells
    from scalebench.figures.drawing import canvas  # noqa: F401 - imported for all processes

    FIGURES.names()  # imports the figures
    if len(results.completed):
        cells(results)
    return ProcessPoolExecutor(
        jobs, get_context("fork"), initializer=_begin, initargs=(results,)
    )


_shared: list[Results] = []  # of a process that draws


def _begin(results: Results) -> None:
    """Prepare a process that draws: it ends soon, and a search for unused objects takes a sixth of its time."""
    gc.disable()
    _shared.append(results)


def shared_results() -> Results:
    """Return the records of which this process draws figures."""
    return _shared[-1]


def _draw_shared(work: tuple[str, Path, PlotRequest, Path | None]) -> Drawn:
    return _draw(shared_results(), *work)


def _some_drawn(drawn: list[Drawn], folder: Path) -> list[Drawn]:
    if all(figure.absent for figure in drawn):
        what = f"{drawn[0].name} cannot" if len(drawn) == 1 else "no figure can"
        raise ResultsError(f"{folder}: {what} be drawn: {drawn[0].absent}")
    return drawn


def _draw(
    results: Results,
    name: str,
    output: Path,
    request: PlotRequest,
    place: Path | None = None,
) -> Drawn:
    kind = FIGURES.create(name, {})
    # Asked before a folder is made for it.
    absent = kind.absent(results)
    if absent:
        return Drawn(name, [], absent, tuple(results.notes))
    own = place or output / slug(str(results.runs["study"].iloc[-1]))
    stem = own / name
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        files = _write(kind, results, stem, request)
        pages = sum(file.suffix == files[0].suffix for file in files)
        # more notes are known after drawing
        return Drawn(name, files, "", tuple(results.notes), pages)
    except EmptyFigureError as error:
        return Drawn(name, [], str(error), tuple(results.notes))
    except OSError as error:
        raise ResultsError(
            f"cannot write {stem.parent}: {error.strerror}; choose another folder with --output"
        ) from None


def _write(
    kind: Figure, results: Results, stem: Path, request: PlotRequest
) -> list[Path]:
    """Write pictures, caption and, as the last file, the drawn data."""
    pictures = [
        stem.with_suffix(f".{suffix}")
        for suffix in request.formats or request.style.formats
    ]
    with drawing(
        pictures, kind.name, request.style, request.selection, request.panels_of(kind)
    ) as canvas:
        canvas.added = request.added
        kind.draw(results, canvas)
    captions = canvas.captions()
    _drop_further_pages(pictures, len(captions))
    files = [of_page(file, page) for page in range(len(captions)) for file in pictures]
    if request.style.caption != "none":
        for page, caption in enumerate(captions):
            files += write_caption(of_page(stem, page), caption, request.style.width_in)
    data = stem.with_suffix(".csv")
    table = canvas.data()
    texts = table.select_dtypes(exclude=["number", "bool"]).columns
    # escaped: a spreadsheet would compute a text that begins with an equals sign
    for name in texts:
        table[name] = [
            to_cell(cell) if isinstance(cell, str) else cell for cell in table[name]
        ]
    with open_own(data, "w") as file:
        table.to_csv(file, index=False, lineterminator="\n")
    return [*files, data]


def _drop_further_pages(pictures: Sequence[Path], pages: int) -> None:
    """Remove the pages that an earlier drawing of a figure had beyond `pages`, with their captions.

    Only pictures that bear scalebench's mark, and captions with the label of one.
    """
    for first in pictures:
        for number in count(pages):
            page = of_page(first, number)
            if page.stem in figure_names() or not _has_mark(page):
                break
            page.unlink()
            label = f"\\label{{fig:{page.stem}}}"
            latex = page.with_suffix(".tex")
            others = [page.with_suffix(f".{kind}") for kind in _MARKS]
            if any(map(Path.exists, others)) or not _contains(latex, label.encode()):
                continue
            latex.unlink()
            page.with_suffix(".txt").unlink(missing_ok=True)


def _has_mark(file: Path) -> bool:
    return _contains(file, _MARKS[file.suffix[1:]])


def _contains(file: Path, words: bytes) -> bool:
    return file.is_file() and not file.is_symlink() and words in file.read_bytes()


@contextlib.contextmanager
def drawing(
    files: Sequence[Path],
    name: str,
    style: Style = REPORT,
    selection: Selection = EVERYTHING,
    panels: Sequence[str] = (),
) -> Iterator[Canvas]:
    """Give a canvas in scalebench's style, which is written to `files` in the formats of their endings.

    Pages after the first are written beside them, as NAME-2 and so on.

    Raises:
        OSError: a file cannot be written.
    """
    from scalebench.figures.drawing.canvas import Canvas

    with house_style(style):
        canvas = Canvas(name, style, selection, panels)
        yield canvas
        for page, figure in enumerate(canvas.finish()):
            for file in files:
                save(figure, of_page(file, page))


def save(figure: Page, file: Path) -> None:
    """Write `figure` in the format of the file's ending, without the second drawing of `savefig`.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backend_bases import get_registered_canvas_class

    kind, dpi, usual = file.suffix[1:], figure.dpi, figure.canvas
    fitting: Any = get_registered_canvas_class(kind)
    # `savefig` would draw everything twice, the first time to lay it out.
    canvas = usual if isinstance(usual, fitting) else fitting(figure)
    write = getattr(canvas, f"print_{kind}")
    with (
        open_own(file, "wb") as stream,
        _small_fonts() if kind == "pdf" else contextlib.nullcontext(),
    ):
        write(stream, metadata=_METADATA[kind], **_FASTER.get(kind, {}))
    figure.dpi = dpi  # vector formats change it
    # The next format begins from the same state.
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


def of_page(file: Path, page: int) -> Path:
    """Return the path of a page (0, 1 ...) of a figure: the first has that of the figure, the second NAME-2."""
    return file.with_stem(f"{file.stem}-{page + 1}") if page else file


@contextlib.contextmanager
def picture(path: Path, name: str) -> Iterator[Canvas]:
    """Give a canvas as `drawing` does, which is written to the file `path` (.png, .pdf or .svg) that a user named.

    Raises:
        ResultsError: the file cannot be written.
    """
    target = path.resolve()  # a link that the user named is followed
    with writing(path, ""), drawing([target], name) as canvas:
        yield canvas


@contextlib.contextmanager
def house_style(style: Style = REPORT) -> Iterator[None]:
    """Apply scalebench's style sheet and `style` to matplotlib's defaults, independently of the user's matplotlibrc."""
    import matplotlib as mpl

    sheet = mpl.rc_params_from_file(
        Path(__file__).with_name("scalebench.mplstyle"), use_default_template=False
    )
    # whatever the user's own file says, equal records give equal pictures
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(sheet)
        mpl.rcParams.update(mpl.RcParams(style.parameters()))
        yield


def place_for(records: Path, output: Path) -> Path:
    """Create and return `output`/<study> for the study in `records`, or <study>-2 ... if other records own that folder.

    A mark in the folder names its records; a folder without a mark is taken.

    Raises:
        ResultsError: there are no records, or the folder cannot be made.
    """
    attempts = Attempts(records / RUNS)
    if not len(attempts):
        raise ResultsError(
            f"{records / RUNS} holds no runs yet; `{filled_by(records)}` fills it"
        )
    study = slug(to_text(attempts.row(len(attempts) - 1)["study"]))
    # A hash, as a path may name its user.
    mark = hashlib.sha256(str(records.resolve()).encode()).hexdigest()[:12]
    for number in count(1):
        place = output / (study if number == 1 else f"{study}-{number}")
        # Two studies may have one name: their figures must not replace each other.
        if _mark_of(place) in ("", mark):
            break
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        with open_own(place / _MARK, "w") as file:
            file.write(mark + "\n")
    return place


def _mark_of(place: Path) -> str:
    with contextlib.suppress(OSError):
        return (place / _MARK).read_text(encoding="ascii", errors="replace").strip()
    return ""
