"""The page of a paper, `plots/<paper>/index.html`: a verdict, published numbers with ours beside them, the figures.

The same page in Markdown is index.md. `plans.yaml` of a paper has the peak memory of
strategies, and the choices of `adaptive` for each component, which are priced for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from html import escape
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, get_args

import pandas as pd
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from pydantic import Field, PositiveFloat, PositiveInt

from scalebench.analysis import Results
from scalebench.cluster.cluster_file import load_cluster
from scalebench.errors import ResultsError, StudyError
from scalebench.figures import PlotRequest, plot_folder, plotting, style, traced_run
from scalebench.formatting import EMPTY, counted, is_interval, memory_size, natural
from scalebench.launch import planning, tracing
from scalebench.models.zoo.layers import load_layers
from scalebench.papers import obtained, paper_folder, side_by_side
from scalebench.papers.side_by_side import draw, number
from scalebench.pricing.devices import Stated
from scalebench.pricing.memory import WorkerMemory, memory_of
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Predictor
from scalebench.pricing.workload import Workload
from scalebench.strategies import adaptive, registry
from scalebench.strategies.base import LayerProfile
from scalebench.study.cell import EXECUTIONS
from scalebench.study.spec import Component, slug
from scalebench.study.validation import StrictModel, read_as
from scalebench.system.file_access import open_own
from scalebench.tables import Column, Table, render

_GIB = 2**30
# by execution
_FIGURES = {"modelled": ("{scaling}-scaling", "time-reduction", "breakdown")}
_OF_TRAINED = ("convergence", "time-to-target")
_HEADER = (
    "quantity",
    "strategy",
    "workers",
    "published",
    "ours [95 % interval]",
    "execution",
    "difference",
    "read where",
)
_COLUMNS = [
    Column[Sequence[str]](name, itemgetter(place), left=True, title=name)
    for place, name in enumerate(_HEADER)
]


_HTML = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; display: block; font-size: 0.9rem; overflow-x: auto; }}
th, td {{ border-bottom: 1px solid #ccc; padding: 0.2rem 0.6rem; text-align: left; }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
{body}</body>
</html>
"""

_PARTS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "strategy": "#CC79A7",
    "activations": "#E69F00",
}
_SIZE_IN = (9.0, 3.2)


class Page(NamedTuple):
    """The page of a paper in HTML, and the verdict that it begins with."""

    path: Path
    verdict: str


def write_page(
    paper: paper_folder.Paper, results: Mapping[str, Results], scale: str, output: Path
) -> Page:
    """Write `output`/<paper>/index.html and index.md with figures, from the `results` of its studies by name.

    Scale smoke trains so little that its numbers are not compared with published ones.
    Published numbers whose study is not in `results` are shown too, as not run.

    Raises:
        ResultsError: `published.csv` is not well formed, or `output` cannot be written.
    """
    folder = output / paper.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(
            f"cannot write {folder}: {error.strerror}; choose another folder with --output"
        ) from None
    # Before anything is drawn: a faulty file is found at once.
    pairs = side_by_side.pair_up(
        paper,
        paper_folder.read_published(paper.folder / paper_folder.PUBLISHED),
        results,
    )
    verdict = _verdict(paper, pairs, results, scale)
    title = f"{paper.name}: {paper.title}"
    lines = [
        f"# {title}",
        "",
        f"**{verdict}**",
        "",
        *_introduction(paper, results, scale),
        "",
    ]
    lines += _published_and_ours(pairs, scale, folder)
    for study, one in results.items():
        # A single run has no curve.
        drawn_of = _timeline if len(one.runs) == 1 else _pictures
        lines += [
            f"## Study {study}",
            "",
            *_study(paper, study, one),
            *drawn_of(paper, scale, one, folder / study),
            "",
        ]
    for name, what_if in obtained.read_what_ifs(
        paper.folder / paper_folder.WHAT_IFS
    ).items():
        found = _what_if(what_if, folder / f"what-if-{slug(name)}.svg")
        lines += [f"## What if: {name}", "", *found, ""]
    for name, plan in read_plans(paper.folder / paper_folder.PLANS).items():
        found = _plan(plan, folder / f"plan-{slug(name)}.svg")
        lines += [f"## Plan: {name}", "", *found, ""]
    page = _write(folder, title, "\n".join(lines).rstrip() + "\n")
    return Page(page, verdict)


def _write(folder: Path, title: str, text: str) -> Path:
    """Write a text in Markdown as it is, for readers in a terminal, and as a page; return the page."""
    with open_own(folder / "index.md", "w") as file:
        file.write(text)
    page = folder / "index.html"
    # Names and notes come from files: markup in them must not run in a browser.
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    with open_own(page, "w") as file:
        file.write(_HTML.format(title=escape(title), body=body))
    return page


def _published_and_ours(
    pairs: Sequence[side_by_side.Pair], scale: str, folder: Path
) -> list[str]:
    """Return a section for each figure of the paper, and draw those that are compared."""
    by_figure: dict[str, list[side_by_side.Pair]] = {}
    for pair in pairs:
        by_figure.setdefault(pair.published.figure, []).append(pair)
    lines = []
    # Figure 10 behind figure 9.
    for figure in sorted(by_figure, key=lambda figure: natural(figure.lower())):
        own = by_figure[figure]
        lines += [
            f"## {figure[0].upper()}{figure[1:]}, published and ours",
            "",
            *_table(own, scale != paper_folder.SMOKE),
            "",
        ]
        picture = folder / f"published-{slug(figure.lower())}.svg"
        if scale != paper_folder.SMOKE and draw(own, picture):
            lines.append(f"![published and ours, {figure}]({picture.name})\n")
    return lines


def _verdict(
    paper: paper_folder.Paper,
    pairs: Sequence[side_by_side.Pair],
    results: Mapping[str, Results],
    scale: str,
) -> str:
    """Return what became of the paper's claims, and how many of its numbers have ours beside them, in a sentence."""
    incomplete = [
        name for name, one in results.items() if len(one.failed) or one.completed.empty
    ]
    if scale == paper_folder.SMOKE:
        whole = len(results) - len(incomplete)
        ran = f"{whole} of {_studies(len(results))} ran to the end"
        return (
            f"{ran}; scale smoke trains too little to compare anything with the paper."
        )
    judged = Counter(
        side_by_side.judge(claim, results, paper.folder).verdict
        for claim in side_by_side.read_claims(paper.folder / paper_folder.CLAIMS)
    )
    counts = ", ".join(
        f"{judged[verdict]} {verdict}"
        for verdict in get_args(side_by_side.Verdict)
        if judged[verdict]
    )
    claims = f"Of {counted(judged.total(), 'claim')}: {counts}. " if judged else ""
    # of one published number there is a pair for each execution
    numbers = {pair.published for pair in pairs}
    beside = {pair.published for pair in pairs if pair.obtained is not None}
    covered = {pair.published for pair in pairs if _covers(pair)}
    return (
        f"{claims}Of {counted(len(numbers), 'published number')}, {len(beside)} have ours beside them, and "
        f"{len(covered)} lie in an interval of ours."
    )


def _studies(number: int) -> str:
    return "1 study" if number == 1 else f"{number} studies"


def _covers(pair: side_by_side.Pair) -> bool:
    """Return True if the published value lies in the interval of ours."""
    if pair.obtained is None:
        return False
    _, low, high, *_ = pair.obtained.measured
    return is_interval(low, high) and low <= pair.published.value <= high


def _introduction(
    paper: paper_folder.Paper, results: Mapping[str, Results], scale: str
) -> list[str]:
    ran = f"{_studies(len(results))} at scale {scale}" if results else "No study"
    return [
        f"{ran}. What the paper did, what is the same here and what is not: `{paper.folder}/README.md`. Each of our "
        "numbers says how it was obtained: native (measured), paced (real messages, stated compute), virtual (real "
        "training, virtual time), modelled (virtual time without training) or fitted (to published rows alone).",
    ]


def _table(pairs: Sequence[side_by_side.Pair], compared: bool) -> list[str]:
    # Numbers of scale smoke stand there without a difference: they mean nothing.
    rows = [_cells(pair, compared) for pair in pairs]
    return render(Table.of("", _COLUMNS, rows), "markdown").rstrip().splitlines()


def _cells(pair: side_by_side.Pair, compared: bool) -> list[str]:
    row, ours = pair.published, pair.obtained
    difference = EMPTY
    if compared and not pd.isna(pair.difference):
        difference = f"{'+' if pair.difference > 0 else ''}{number(pair.difference)}"
    return [
        side_by_side.in_words(row.quantity),
        row.strategy or EMPTY,
        str(row.workers or EMPTY),
        number(row.value),
        pair.absent if ours is None else side_by_side.with_interval(ours.measured),
        EMPTY if ours is None else ours.execution,
        difference,
        "; ".join(
            filter(None, [row.source, "digitised" if row.digitised else "", row.note])
        ),
    ]


def _study(paper: paper_folder.Paper, study: str, results: Results) -> list[str]:
    runs = results.completed
    # A failed study has its section, as a page that leaves it out looks complete.
    if runs.empty:
        return [f"No run of {results.folder} was completed."]
    first = runs.iloc[0]
    executions = [name for name in EXECUTIONS if name in set(runs["execution"])]
    stated = results.study.get("device_step_time")
    step = f" A step is stated to take {stated:g} s." if stated is not None else ""
    failed = (
        f" {counted(len(results.failed), 'run')} did not complete."
        if len(results.failed)
        else ""
    )
    return [
        f"{results.study.get('description', '')} {counted(len(runs), 'run')}, {' and '.join(executions)}: "
        f"{first['model']} on {first['dataset']}, {counted(int(first['epochs']), 'epoch')}, cluster "
        f"{first['cluster']}.{step}{failed} "
        f"Again: `scalebench run {paper.folder / study}.yaml`; rows: `{results.folder}/`.",
        "",
    ]


def _timeline(
    paper: paper_folder.Paper, scale: str, results: Results, folder: Path
) -> list[str]:
    """Draw the timeline of a study of one run, which is played again for it."""
    plan = planning.plan_study(paper.study_at(folder.name, scale))
    with TemporaryDirectory(prefix="scalebench-trace-") as scratch:
        timeline = tracing.trace(plan, Path(scratch))
    traced_run.draw_timeline(timeline, folder / "timeline", ("svg",))
    return [f"![timeline]({folder.name}/timeline.svg)"]


def _what_if(one: obtained.WhatIf, picture: Path) -> list[str]:
    plane = one.price()
    one.draw(plane, picture)
    return [
        one.description,
        "",
        *(f"- {line}" for line in plane.sentences()),
        "",
        f"![what if]({picture.name})",
    ]


def _plan(plan: Plan, picture: Path) -> list[str]:
    """Draw a plan; return its memory by strategy and its components in sentences, and the picture."""
    plan.draw(picture)
    memories = [
        f"{strategy} {memory_size(memory.total)}"
        for strategy, memory in plan.memories().items()
    ]
    components = [
        f"- {one.first if one.first == one.last else f'{one.first} to {one.last}'}: {one.parameters:,} parameters, "
        f"{'data parallelism' if one.degree == 1 else f'shared by {one.degree} of {plan.devices} devices'}"
        for one in plan.components()
    ]
    saved = f"This layout moves {plan.numbers_saved():.1%} fewer numbers in a step than data parallelism:"
    return [
        plan.description,
        "",
        f"Memory of the fullest worker, modelled: {', '.join(memories)}.",
        "",
        saved,
        "",
        *components,
        "",
        f"![plan]({picture.name})",
    ]


def _pictures(
    paper: paper_folder.Paper, scale: str, results: Results, folder: Path
) -> list[str]:
    executions = dict.fromkeys(results.completed["execution"])
    scaling = results.study.get("scaling", "strong")
    figures = [
        figure
        for execution in executions
        for figure in _FIGURES.get(execution, _OF_TRAINED)
    ]
    lines = []
    for name in dict.fromkeys(figure.format(scaling=scaling) for figure in figures):
        with suppress(ResultsError):  # the study has no such figure
            plot_folder(
                results.folder,
                folder.parent,
                PlotRequest((name,), ("svg",)),
                place=folder,
            )
            lines.append(f"![{name}]({folder.name}/{name}.svg)")
    return lines


class Plan(StrictModel):
    """A model on a number of devices at a global batch."""

    description: str
    model: str = Field(description="layer table")
    cluster: str
    devices: PositiveInt
    batch: PositiveInt = Field(description="samples of a step of all devices")
    step_time: PositiveFloat = Field(
        description="seconds of a step of that batch on one device"
    )
    strategies: list[Component]

    def memories(self) -> dict[str, WorkerMemory]:
        """Return the memory of the fullest worker by strategy; of serial on one device."""
        found = {}
        for strategy in self.strategies:
            workers = (
                # A strategy that requires nothing of an engine runs at one worker.
                self.devices
                if registry.create(strategy.name, strategy.options).requires
                else 1
            )
            found[str(strategy)] = memory_of(self._predictor, strategy, workers)
        return found

    def components(self) -> list[adaptive.Shared]:
        """Return the components of the layout that moves the least numbers in a step."""
        return adaptive.components_of(self._layers, self._degrees)

    def numbers_saved(self) -> float:
        """Return the share of the numbers of data parallelism that this layout does not move."""
        whole = self._costs.of_layout(self._layers, [1] * len(self._layers))
        return 1 - self._costs.of_layout(self._layers, self._degrees) / whole

    def draw(self, path: Path) -> None:
        """Write the figure to `path`: memory by strategy, and parameters by layer with the devices that share it."""
        memories = self.memories()
        with plotting.house_style(style.REPORT):
            figure = Figure(figsize=_SIZE_IN, layout="constrained")
            memory, choice = figure.subplots(1, 2)
            names = list(memories)
            left = [0.0] * len(memories)
            for part, colour in _PARTS.items():
                values = [getattr(each, part) / _GIB for each in memories.values()]
                memory.barh(names, values, left=left, color=colour, label=part)
                left = [
                    before + value for before, value in zip(left, values, strict=True)
                ]
            # Bars begin at the bottom, lists at the top.
            memory.invert_yaxis()
            memory.set_xlabel("memory of the fullest worker [GiB]")
            memory.legend(fontsize="small")
            layers = self._layers
            millions = [layer.parameters / 1e6 for layer in layers]
            bars = choice.bar(range(len(layers)), millions, color=_PARTS["parameters"])
            choice.bar_label(bars, [str(degree) for degree in self._degrees])
            choice.set_xticks(
                range(len(layers)), [layer.name for layer in layers], rotation=90
            )
            choice.set_ylabel("parameters [millions]")
            choice.set_title(
                f"above each layer: how many of {self.devices} devices share it"
            )
            with open_own(path, "wb") as file:
                figure.savefig(file, format=path.suffix[1:], metadata={"Date": None})

    @cached_property
    def _predictor(self) -> Predictor:
        workload = Workload(
            load_layers(self.model), self.batch, 1, self.batch, in_all=True
        )
        return Predictor(
            workload,
            Platform(load_cluster(self.cluster), Stated(self.step_time, self.batch)),
        )

    @cached_property
    def _layers(self) -> list[LayerProfile]:
        return self._predictor.cut(self.batch / self.devices).profiles(self.devices)

    @property
    def _costs(self) -> adaptive.Costs:
        return adaptive.Costs(self.devices, self.batch / self.devices)

    @cached_property
    def _degrees(self) -> tuple[int, ...]:
        found = adaptive.chosen(self._layers, self._costs, math.inf, "viterbi")
        assert found is not None, "without a cap every layout fits"
        return found


class _Plans(StrictModel):
    plans: dict[str, Plan]


def read_plans(path: Path) -> dict[str, Plan]:
    """Read `plans.yaml`; no plans where there is no such file.

    Raises:
        StudyError: not a mapping of plans; one line that names file and key.
    """
    if not path.is_file():
        return {}
    plans = read_as(path, _Plans, StudyError, "file of plans").plans
    clusters = {
        name: paper_folder.found_file(path.parent, plan.cluster)
        for name, plan in plans.items()
    }
    return {
        name: plan.model_copy(update={"cluster": clusters[name]})
        for name, plan in plans.items()
    }
