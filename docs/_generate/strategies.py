"""The pages of the strategies: docs/strategies.md whole, options and formulas in docs/strategies/NAME.md.

In a strategy's page the table under `## Options` (or `None.`) and the block under `##
Bytes`, the recorded traffic of the default study, are replaced; the rest is written by
hand, for which a new strategy gets a page that begins with its docstring. Pages that
count the strategies get the number. `python docs/_generate/strategies.py` writes all;
timelines.py draws their pictures.
"""

from __future__ import annotations

import re
from pathlib import Path

from scalebench.comm.base import Capability
from scalebench.comm.engines import named
from scalebench.errors import StudyError
from scalebench.launch.engine_choice import (
    ENGINES,
    StrategyEngines,
    describe_strategies,
)
from scalebench.launch.planning import plan_study
from scalebench.launch.traffic import traffic_of
from scalebench.strategies import registry
from scalebench.strategies.registry import options_of, rule_of
from scalebench.strategies.torch_averagers import TorchAverager
from scalebench.study.load import load_study

DOCS = Path(__file__).parents[1]
COUNTS, CLUSTER = (2, 4, 16, 64), "juwels-booster"
# strategies whose lone worker, by default, does not end with the weights of serial
UNLIKE_SERIAL = {
    "bmuf": "mu is 0 then, and w0 + (w - w0) is w but for rounding",
    "demo": "it takes the sign of its own strongest cosines",
    "diloco": "the outer Nesterov step acts on its own moves too",
    "dislib-compat": "momentum is lost at every block, and the tail of a block is left out",
    "dislib-compat-async": "as dislib-compat, and it merges with its own past by halves",
    "easgd": "the worker and its centre draw each other, and the centre is handed out",
    "epoch_async": "`merge: half` merges it with its own past (`merge: inverse_k`: serial)",
    "fedavg": "momentum is forgotten with each round (`optimizer_state: keep` makes it serial)",
    "fedprox": "as fedavg, and it is held near where its round began (`mu: 0`: it is not)",
    "sparse_loco": "w0 - (w0 - w) is w but for rounding (with another outer_lr than 1 not even that)",
    "streaming_diloco": "as diloco, fragment by fragment, and it keeps a share of its own weights",
    "slowmo": "the slow momentum acts on its own moves too (`slow_momentum: 0`: serial but for rounding)",
}
_OPTIONS = re.compile(
    r"(?<=^## Options\n\n)(?:\|.*\n)+|(?<=^## Options\n\n)None\.\n", re.MULTILINE
)
_TRAFFIC = re.compile(
    r"(?<=^## Bytes\n\n```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL
)
# pages that count the strategies, and the words before and after the number
_COUNTED = {
    DOCS.parent / "README.md": (r"\*\*", r" strategies\*\*"),
    DOCS / "alternatives.md": (r"\| ", r" strategies,"),
}


def matrix_markdown() -> str:
    """Return the page docs/strategies.md."""
    entries = describe_strategies()
    lines = [
        "# Strategies and engines",
        "",
        "A strategy is written once and runs on every engine that provides what it requires; anything else is refused",
        "before a run starts. ● marks the engine that `--engine auto` takes (`nccl` instead where there are several",
        "GPUs and the strategy names it), ○ one that `--engine` may name, – one that lacks something. `virtual` is the",
        "virtual cluster, in which the same class trains for real and time is computed. Each mark under mpi, horovod",
        "and gloo is tested, native and paced, on two real ranks, against the weights of virtual workers where timing",
        "does not decide them (tests/strategies/test_paced_ranks.py).",
        "",
        "*Generated from the code; after a change run `python docs/_generate/strategies.py`.*",
        "",
        "| strategy | " + " | ".join(ENGINES) + " | what it does |",
        "|---|" + ":-:|" * len(ENGINES) + "---|",
    ]
    lines += [_row(entry) for entry in entries]
    lines += ["", "## What is missing where", ""]
    for entry in entries:
        lacks = [
            f"{engine} has no {', '.join(what)}"
            for engine, what in entry.missing.items()
        ]
        if lacks:
            lines.append(f"- `{entry.name}`: {'; '.join(lacks)}")
    lines += _of_libraries()
    lines += [
        "",
        "## What the engines provide",
        "",
        "| | " + " | ".join(ENGINES) + " |",
    ]
    lines.append("|---|" + ":-:|" * len(ENGINES))
    for capability in Capability:
        marks = [
            "●" if capability in named(engine).provides else "–" for engine in ENGINES
        ]
        lines.append(f"| {capability.value} | {' | '.join(marks)} |")
    lines += ["", "## One worker", ""]
    lines += [
        "One worker ends with the weights of `serial`, bit for bit, whatever the strategy (those that need more"
    ]
    lines += ["workers are refused), but for these:", ""]
    lines += [f"- `{name}`: {why}" for name, why in UNLIKE_SERIAL.items()]
    lines += ["", "## Sources", ""]
    lines += [f"- `{entry.name}`: {entry.source}" for entry in entries]
    return "\n".join(lines) + "\n"


def _of_libraries() -> list[str]:
    """Return the section on strategies of libraries, with the equivalent strategy on mpi."""
    lines = [
        "",
        "## Strategies that are a library's own",
        "",
        "`ddp`, `horovod` and the three `torch_` ones are the libraries' own code, measured as their users run it, so",
        "that they run where the library does and never on `mpi`. The same rule on `mpi` is",
        "",
        "- for `horovod`: `allreduce`",
        "- for `ddp`: `allreduce`; BatchNorm's statistics, which DDP sends from worker 0, are then each worker's own",
    ]
    for name in registry.names():
        torchs = registry.create(name, {})
        if isinstance(torchs, TorchAverager):
            options = torchs.rule.model_dump(include=torchs.rule.model_fields_set)
            written = ", ".join(
                f"{option}: {value}" for option, value in options.items()
            )
            lines.append(f"- for `{name}`: `{torchs.rule.name}: {{{written}}}`")
    return [
        *lines,
        "",
        "where torch's options are the defaults; others translate alike: its `period` is `steps`, its `warmup` one",
        "less than `first`. Real ranks of torch end with these rules' weights, to 1e-10 in float64 (tests/strategies).",
    ]


def _row(entry: StrategyEngines) -> str:
    preferred = next((engine for engine in entry.engines if engine != "virtual"), None)
    marks = [
        "–"
        if engine in entry.missing
        else "●"
        if engine in (preferred, "virtual")
        else "○"
        for engine in ENGINES
    ]
    note = " (one worker)" if entry.one_worker else ""
    return f"| `{entry.name}` | {' | '.join(marks)} | {entry.summary}{note} |"


def new_page(entry: StrategyEngines) -> str:
    """Return the beginning of a page: the rule, and places for what `renewed` knows."""
    (own, *_) = rule_of(registry.find(entry.name))
    picture = f"![{entry.name}: what four workers do when](timelines/{entry.name}.png)"
    return "\n\n".join(
        [
            f"# {entry.name}",
            own,
            picture,
            "## Options\n\nNone.",
            "## Bytes\n\n```text\n```",
            "## When to use it",
            f"Source: {entry.source}.\n",
        ]
    )


def renewed(page: str, entry: StrategyEngines) -> str:
    """Return the `page` of one strategy with the options of its class and its recorded traffic.

    Raises:
        ValueError: the page lacks one of the places.
    """
    if entry.one_worker:
        return page
    for place, text in (
        (_OPTIONS, _options(entry.name)),
        (_TRAFFIC, _traffic(entry.name)),
    ):
        found = list(place.finditer(page))
        if len(found) != 1:
            raise ValueError(
                f"the page of {entry.name} has {len(found)} places for {text!r}, not 1"
            )
        page = page[: found[0].start()] + text + page[found[0].end() :]
    return page


def _options(name: str) -> str:
    cls = registry.find(name)
    rows = [
        f"| `{option.name}` | {'' if cls.model_fields[option.name].default is None else f'`{option.default}`'} "
        f"| {option.description} |"
        for option in options_of(cls)
    ]
    return (
        "\n".join(["| option | default | meaning |", "|---|---|---|", *rows, ""])
        if rows
        else "None.\n"
    )


def _traffic(name: str) -> str:
    """Traffic of the default study on nodes of four workers, at the counts that the strategy accepts."""
    lines = [
        f"{'workers':>7}  {'steps':>5}  {'synchronisations':>16}  {'bytes':>12}   of an epoch"
    ]
    for workers in COUNTS:
        try:
            study = load_study(
                None,
                {"strategies": [name], "workers": str(workers), "cluster": CLUSTER},
                [],
            )
            plan = plan_study(
                study.model_copy(update={"execution": "virtual", "repetitions": 1}),
                timed=False,
            )
        except StudyError:
            continue
        (row,) = traffic_of(plan)
        lines.append(
            f"{row.workers:7}  {row.steps:5}  {row.syncs:16,.5g}  {row.bytes_sent:12,.0f}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "strategies.md").write_text(matrix_markdown(), encoding="utf-8")
    for each in describe_strategies():
        path = DOCS / "strategies" / f"{each.name}.md"
        page = path.read_text(encoding="utf-8") if path.is_file() else new_page(each)
        path.write_text(renewed(page, each), encoding="utf-8")
    for path, (before, after) in _COUNTED.items():
        counted = re.compile(f"(?<={before})\\d+(?={after})")
        page = path.read_text(encoding="utf-8")
        path.write_text(counted.sub(str(len(registry.names())), page), encoding="utf-8")
