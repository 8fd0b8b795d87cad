"""Draw figures and write each as PDF, SVG, PNG and the CSV of its drawn data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scalebench.errors import ResultsError
from scalebench.figures.base import FIGURES, Figure, default_figures
from scalebench.records.cells import to_cell
from scalebench.study.spec import slug

if TYPE_CHECKING:
    from scalebench.analysis import Results
    from scalebench.figures.drawing.canvas import Canvas

FORMATS = ("pdf", "svg", "png")
_SLOWEST = ("time-reduction", "scaling-laws", "breakdown", "strong-scaling")
# Without dates: the same records give the same bytes.
_METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "Creator": "scalebench", "Producer": None},
    "svg": {"Date": None, "Creator": "scalebench"},
    "png": {"Software": "scalebench"},
}


class Drawn(NamedTuple):
    """The files of one figure, or the reason why it cannot be drawn."""

    name: str
    files: list[Path]
    absent: str = ""
    notes: tuple[str, ...] = ()


def plot(results: Results, output: Path, names: Sequence[str] = (), formats: Sequence[str] = FORMATS) -> list[Drawn]:
    """Write the figures `names` to `output/<study>/`; default: the `default_figures` that can be drawn.

    Raises:
        UsageError: an unknown figure.
        ResultsError: a named figure, or every figure, cannot be drawn, or `output` cannot be written.
    """
    for name in names:
        FIGURES.find(name)
    return _settle(
        [_draw(results, name, output, formats) for name in names or default_figures()], names, results.folder
    )


def plot_folder(
    folder: Path,
    output: Path,
    names: Sequence[str] = (),
    formats: Sequence[str] = FORMATS,
    jobs: int = 1,
    place: Path | None = None,
) -> list[Drawn]:
    """Write figures of the records in `folder` as `plot` does, in `jobs` processes.

    `place` overrides the folder `output`/<study>. Each figure's `notes` are those of the results.
    """
    for name in names:
        FIGURES.find(name)
    wanted = list(names or default_figures())
    # The slowest figures first, so that all processes end at about the same time.
    order = sorted(wanted, key=lambda name: _SLOWEST.index(name) if name in _SLOWEST else len(_SLOWEST))
    work = [(folder, name, output, tuple(formats), place) for name in order]
    jobs = min(jobs, len(wanted))
    if jobs == 1:
        drawn = [_load_and_draw(item) for item in work]
    else:  # spawn: forking a process with threads is not safe
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            drawn = list(pool.map(_load_and_draw, work))
    drawn.sort(key=lambda figure: wanted.index(figure.name))
    return _settle(drawn, names, folder)


def _load_and_draw(work: tuple[Path, str, Path, tuple[str, ...], Path | None]) -> Drawn:
    folder, name, output, formats, place = work
    return _draw(_load(folder), name, output, formats, place)


@cache
def _load(folder: Path) -> Results:
    from scalebench.analysis import load

    return load(folder)


def _settle(drawn: list[Drawn], names: Sequence[str], folder: Path) -> list[Drawn]:
    left_out = [figure for figure in drawn if figure.absent]
    if left_out and names:
        raise ResultsError(f"{folder}: {left_out[0].name} cannot be drawn: {left_out[0].absent}")
    if len(left_out) == len(drawn):
        raise ResultsError(f"{folder}: no figure can be drawn: {left_out[0].absent}")
    return drawn


def _draw(results: Results, name: str, output: Path, formats: Sequence[str], place: Path | None = None) -> Drawn:
    kind = FIGURES.create(name, {})
    notes = tuple(results.notes)
    if absent := kind.absent(results):
        return Drawn(name, [], absent, notes)
    stem = (place or output / slug(str(results.runs["study"].iloc[-1]))) / name
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        return Drawn(name, _write(kind, results, stem, formats), "", notes)
    except OSError as error:
        raise ResultsError(
            f"cannot write {stem.parent}: {error.strerror}; choose another folder with --output"
        ) from None


def _write(kind: Figure, results: Results, stem: Path, formats: Sequence[str]) -> list[Path]:
    canvases: list[Canvas] = []

    def draw(canvas: Canvas) -> None:
        canvases.append(canvas)
        kind.draw(results, canvas)

    files = write_figure(kind.name, draw, stem, formats)
    data = stem.with_suffix(".csv")
    table = canvases[0].data()
    texts = table.select_dtypes(exclude=["number", "bool"]).columns
    safe = {name: [to_cell(cell) if isinstance(cell, str) else cell for cell in table[name]] for name in texts}
    table.assign(**safe).to_csv(data, index=False, lineterminator="\n")  # texts are escaped for spreadsheets
    return [*files, data]


def write_figure(name: str, draw: Callable[[Canvas], None], stem: Path, formats: Sequence[str]) -> list[Path]:
    """Call `draw` on a canvas in scalebench's style and write `stem` in each of `formats`.

    Raises:
        OSError: a file cannot be written.
    """
    from scalebench.figures.drawing.canvas import Canvas

    with house_style():
        canvas = Canvas(name)
        draw(canvas)
        figure = canvas.finish()
        files = [stem.with_suffix(f".{suffix}") for suffix in formats]
        for file in files:
            _save(figure, file)
    return files


def _save(figure: Any, file: Path) -> None:
    """Write `figure` without the second drawing of `savefig`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    canvases: dict[str, Any] = {".png": FigureCanvasAgg, ".svg": FigureCanvasSVG, ".pdf": FigureCanvasPdf}
    suffix, dpi = file.suffix, figure.dpi
    write = getattr(canvases[suffix](figure), f"print_{suffix[1:]}")
    fast = {"pil_kwargs": {"compress_level": 4}} if suffix == ".png" else {}
    write(file, metadata=_METADATA[suffix[1:]], **fast)
    figure.dpi = dpi  # vector formats change it


@contextlib.contextmanager
def house_style() -> Iterator[None]:
    """Apply scalebench's style to matplotlib's defaults, independently of the user's matplotlibrc."""
    import matplotlib as mpl

    sheet = mpl.rc_params_from_file(Path(__file__).with_name("scalebench.mplstyle"), use_default_template=False)
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(sheet)
        yield
