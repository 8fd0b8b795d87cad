"""Which strategy runs where: what strategies require against what engines provide, as data and as a page."""

from __future__ import annotations

from dataclasses import dataclass

from scalebench.comm.base import Capability
from scalebench.launch.engine_choice import VIRTUAL_PROVIDES
from scalebench.launch.engines import NAMES, provides
from scalebench.strategies import registry
from scalebench.strategies.base import Strategy
from scalebench.strategies.torch_averagers import TorchAverager

COLUMNS = ("virtual", *NAMES)
_NATIVE = frozenset().union(*(provides(engine) for engine in NAMES))


@dataclass(frozen=True)
class Entry:
    """One strategy's line."""

    name: str
    summary: str
    source: str
    engines: tuple[str, ...]  # of COLUMNS, the native one it prefers first
    missing: dict[str, tuple[str, ...]]  # per other engine, the capabilities it has not
    one_worker: bool
    alone: str  # why one worker is not serial; empty: it is, or is refused


def describe_strategies() -> list[Entry]:
    """Every strategy with the engines that provide what it requires."""
    return [describe_strategy(name) for name in registry.names()]


def describe_strategy(name: str) -> Entry:
    """The strategy called `name` with the engines that provide what it requires."""
    cls = registry.find(name)
    missing: dict[str, tuple[str, ...]] = {}
    for engine in COLUMNS:
        provided = VIRTUAL_PROVIDES if engine == "virtual" else provides(engine)
        lacking = _class_on(name, engine).requires - provided
        if lacking:
            missing[engine] = tuple(sorted(str(capability) for capability in lacking))
    able = [engine for engine in COLUMNS if engine not in missing]
    preferred = {engine: place for place, engine in enumerate(cls.engines)}
    able.sort(key=lambda engine: (engine == "virtual", preferred.get(engine, len(preferred))))
    return Entry(name, cls.summary, cls.source, tuple(able), missing, cls.single_worker, cls.alone)


def _class_on(name: str, engine: str) -> type[Strategy]:
    """The class that would run; where a native engine has none, the one of the engine the strategy prefers."""
    cls = registry.find(name, engine)
    return cls if engine == "virtual" or cls.requires <= _NATIVE else registry.find(name, cls.engines[0])


def matrix_markdown() -> str:
    """The page `docs/strategies.md`."""
    entries = describe_strategies()
    lines = [
        "# Strategies and engines",
        "",
        "A strategy is written once and runs on every engine that provides what it requires; anything else is refused",
        "before a run starts. ● marks the engine that `--engine auto` takes (`nccl` instead where there are several",
        "GPUs and the strategy names it), ○ one that `--engine` may name, – one that lacks something. `virtual` is the",
        "simulated cluster, in which the same class trains for real and time is computed. Each mark under mpi, horovod",
        "and gloo is tested, native and paced, on two real ranks, against the weights of virtual workers where timing",
        "does not decide them (tests/strategies/test_paced_ranks.py).",
        "",
        "*Generated from the code; after a change run `python -m scalebench.launch.matrix docs/strategies.md`.*",
        "",
        "| strategy | " + " | ".join(COLUMNS) + " | what it does |",
        "|---|" + ":-:|" * len(COLUMNS) + "---|",
    ]
    lines += [_row(entry) for entry in entries]
    lines += ["", "## What is missing where", ""]
    for entry in entries:
        lacks = [f"{engine} has no {', '.join(what)}" for engine, what in entry.missing.items()]
        if lacks:
            lines.append(f"- `{entry.name}`: {'; '.join(lacks)}")
    lines += _of_libraries()
    lines += ["", "## What the engines provide", "", "| | " + " | ".join(COLUMNS) + " |"]
    lines.append("|---|" + ":-:|" * len(COLUMNS))
    for capability in Capability:
        marks = [
            "●" if capability in (VIRTUAL_PROVIDES if engine == "virtual" else provides(engine)) else "–"
            for engine in COLUMNS
        ]
        lines.append(f"| {capability.value} | {' | '.join(marks)} |")
    lines += ["", "## One worker", ""]
    lines += ["One worker ends with the weights of `serial`, bit for bit, whatever the strategy (those that need more"]
    lines += ["workers are refused), but for these:", ""]
    lines += [f"- `{entry.name}`: {entry.alone}" for entry in entries if entry.alone]
    lines += ["", "## Sources", ""]
    lines += [f"- `{entry.name}`: {entry.source}" for entry in entries]
    return "\n".join(lines) + "\n"


def _of_libraries() -> list[str]:
    """Why strategies that are a library's own run on its engines only, and which of ours has the same rule on mpi."""
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
            said = torchs.rule.model_dump(include=torchs.rule.model_fields_set)
            written = ", ".join(f"{option}: {value}" for option, value in said.items())
            lines.append(f"- for `{name}`: `{torchs.rule.name}: {{{written}}}`")
    return [
        *lines,
        "",
        "where torch's options are the defaults; others translate alike: its `period` is `steps`, its `warmup` one",
        "less than `first`. Real ranks of torch end with these rules' weights, to 1e-10 in float64 (tests/strategies).",
    ]


def _row(entry: Entry) -> str:
    preferred = next((engine for engine in entry.engines if engine != "virtual"), None)
    marks = ["–" if engine in entry.missing else "●" if engine in (preferred, "virtual") else "○" for engine in COLUMNS]
    note = " (one worker)" if entry.one_worker else ""
    return f"| `{entry.name}` | {' | '.join(marks)} | {entry.summary}{note} |"


if __name__ == "__main__":
    import sys
    from pathlib import Path

    Path(sys.argv[1]).write_text(matrix_markdown(), encoding="utf-8")
