"""Sentences of captions: study, executions, machines, marks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from scalebench.analysis import Results, cells, environment
from scalebench.analysis.grouping import DISTURBED_BY, crowding
from scalebench.analysis.intervals import CONFIDENCE, NOTHING_VARIES, interval_name
from scalebench.analysis.loading import cached, cells_in, rows_where
from scalebench.analysis.native_check import BESIDE_PROGRAMS, error_name, error_of_times
from scalebench.analysis.tuning_trials import optimizer_in_words
from scalebench.cluster.cluster_file import Cluster, load_cluster
from scalebench.cluster.network import allreduce_name
from scalebench.errors import ClusterError
from scalebench.figures.selection import Added
from scalebench.formatting import counted, digits, seconds
from scalebench.study.cell import EXECUTIONS, PLACE, Cell, batch_in_words
from scalebench.study.heterogeneity import STATED
from scalebench.study.spec import SIMULATED

_SIZES = ("node", "worker")


def describe_label(results: Results) -> str:
    """Return model and data in the words of the study's `label`, by default their names."""
    # A study may say it better than names of a model and a data set.
    if label := str(results.study.get("label") or ""):
        return label if label.endswith(".") else f"{label}."
    # The configuration that counts is that of the last row (`loading.load`).
    last = results.completed.iloc[-1]
    return f"{last['model']} on {last['dataset']}."


def describe_added(added: Added, *, bars: bool = True) -> str:
    """Return what was run in an added study, or the file of an added curve."""
    if not added.is_study:
        return f"{added.label}: from {added.path.name}."
    own = added.results()
    return (
        f"In {added.label}: {describe_label(own)} {describe_executions(own, bars=bars)}"
    )


def describe_study(results: Results, drawn: pd.DataFrame | None = None) -> str:
    """Return scaling mode, model, data, and batch policy with the steps per epoch at each worker count.

    `drawn` limits the runs by execution, engine, label and worker count; default: all.
    So it does below.
    """
    runs = _of(results, drawn)
    last = runs.iloc[-1]
    parameters = (
        f" ({int(last['parameters']):,} parameters)"
        if pd.notna(last["parameters"])
        else ""
    )
    if last["scaling"] == "strong":
        samples = (
            f"{int(last['n_train']):,} training samples"
            if pd.notna(last["n_train"])
            else "fixed size"
        )
        scaling = f"Strong scaling: {last['model']}{parameters} on {last['dataset']} ({samples} at every worker count)"
    else:
        sizes = (runs["n_train"] / runs["workers"]).dropna()
        samples = (
            f"{round(sizes.median()):,} training samples"
            if len(sizes)
            else "a fixed number of samples"
        )
        scaling = f"Weak scaling: {last['model']}{parameters} on {last['dataset']} ({samples} per worker)"
    epochs = counted(int(last["epochs"]), "epoch")
    return f"{scaling}, {epochs}, {last['dtype']}, {optimizer_in_words(results, last)}. {_batch(runs)}"


def describe_executions(
    results: Results, drawn: pd.DataFrame | None = None, *, bars: bool = True
) -> str:
    """Return cluster, engines and repetitions of each execution, and with `bars` the meaning of error bars."""
    runs = _of(results, drawn)
    parts = []
    for execution in [
        name for name in EXECUTIONS if name in set(runs["execution"].unique())
    ]:
        own = runs[runs["execution"] == execution]
        engines = (
            ""
            if execution in SIMULATED
            else f" through {', '.join(sorted(own['engine'].unique()))}"
        )
        about = _repetitions(own) + (_bars(results, own, execution) if bars else "")
        cluster = str(own["cluster"].iloc[-1])
        named = known.name if (known := _cluster_of(cluster)) else Path(cluster).stem
        parts.append(f"{execution} on {named}{engines} ({about})")
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _cluster_of(name: str) -> Cluster | None:
    # The file may be gone, or another machine's: its name is in the rows.
    with suppress(ClusterError):
        return load_cluster(name)
    return None


def describe_machines(results: Results, drawn: pd.DataFrame | None = None) -> str:
    """Return processor, cores and network of real runs, and the cluster, step time and jitter of simulated ones."""
    runs = _of(results, drawn)
    real = runs[~runs["execution"].isin(SIMULATED)]
    sentences = []
    if len(real):
        known = environment.machines_of(
            real, environment.provenance_in(results.folder)
        ).values()
        machines = sorted(
            {environment.hardware(facts) for facts in known if facts}
        ) or ["a machine that nothing describes"]
        nodes = int(real["nodes"].fillna(1).max())
        cards = sorted(
            {
                _card(card)
                for facts in known
                if facts
                for card in facts.get("network") or []
            }
        )
        way = (
            f"up to {nodes} nodes by {', '.join(cards) or 'an unknown network'}"
            if nodes > 1
            else "within one node"
        )
        sentences.append(f"Real runs: {' and '.join(machines)}, {way}.")
    for execution in SIMULATED:
        own = runs[runs["execution"] == execution]
        if len(own):
            sentences.append(
                f"{execution.capitalize()} runs: {_simulated(results, own)}."
            )
    return " ".join(sentences)


def _simulated(results: Results, runs: pd.DataFrame) -> str:
    """Return cluster, size, step time, links, engine, allreduce algorithm and jitter of simulated runs."""
    name = str(runs["cluster"].iloc[-1])
    cluster = _cluster_of(name)
    description = cluster.description if cluster else ""
    rest = description.partition(" ")[0][1:]  # JUWELS stays
    parts = [
        (
            f"{description[:1].lower()}{description[1:]}"
            if rest == rest.lower()
            else description
        )
        or name
    ]
    sizes = runs[["nodes", "workers_per_node"]].dropna().max()
    if not sizes.isna().any():
        nodes, workers = (
            counted(int(sizes[key]), word)
            for key, word in zip(sizes.index, _SIZES, strict=True)
        )
        parts.append(f"up to {nodes} of {workers}")
    parts.append(_step_time(results, runs, cluster))
    if cluster:
        parts.append(_links(cluster, several=bool((runs["nodes"].fillna(1) > 1).any())))
    if named := environment.charged_engine(results):
        parts.append(f"collectives at the cost of {named}'s")
    parts.append(_between_nodes(results, runs))
    uneven = cluster.uneven.describe(int(runs["workers"].max())) if cluster else []
    # A jitter that is measured stands in place of the cluster's.
    of_cluster = [phrase for phrase in uneven if phrase.partition(" ")[0] in STATED]
    parts += [phrase for phrase in uneven if phrase not in of_cluster]
    stated = of_cluster or (["no jitter"] if environment.states_steps(results) else [])
    parts += (
        [environment.jitter_in_words(results)]
        if environment.jitter_in_words(results)
        else stated
    )
    return "; ".join(part for part in parts if part)


def _step_time(results: Results, runs: pd.DataFrame, cluster: Cluster | None) -> str:
    """Return the stated time of a step; empty where it was measured."""
    stated = results.study.get("device_step_time")
    if isinstance(stated, int | float):
        return f"step time stated as {seconds(stated)}"
    last = runs.iloc[-1]
    # A cluster file may have batches that the study does not use.
    batches = set(runs["batch_per_worker"].unique())
    times = (
        cluster.step_times_of(str(last["model"]), str(last["dtype"])) if cluster else {}
    )
    used = [
        f"{seconds(times[batch].step_s)} at batch {batch}"
        for batch in sorted(times)
        if batch in batches
    ]
    return f"step time of the cluster file, {', '.join(used)}" if used else ""


def _links(cluster: Cluster, *, several: bool) -> str:
    """Return latency and bandwidth of the links inside a node and, with `several` nodes, between them."""
    links = [("within a node", cluster.links.intra)] + [
        ("between nodes", cluster.links.inter)
    ] * several
    costs = [
        (seconds(link.latency_s), _bandwidth(link.bandwidth_bytes_per_s), where)
        for where, link in links
    ]
    said = [f"{latency} + n / ({rate}) {where}" for latency, rate, where in costs]
    return f"a message of n bytes takes {', '.join(said)}"


def _bandwidth(bytes_per_s: float) -> str:
    return (
        f"{digits(bytes_per_s / 1e9)} GB/s"
        if bytes_per_s >= 1e9
        else f"{digits(bytes_per_s / 1e6)} MB/s"
    )


def _between_nodes(results: Results, runs: pd.DataFrame) -> str:
    """Return the measurement or the algorithm by which allreduce between nodes is priced; empty on one node."""
    if not (runs["nodes"].fillna(1) > 1).any():
        return ""
    options = results.study.get("virtual")
    collective = (
        options.get("collective", "auto") if isinstance(options, dict) else "auto"
    )
    algorithm = allreduce_name(str(collective))
    if (measured := environment.measured_nodes(results)) > 1:
        return f"allreduce between nodes as measured between {measured}, in proportion to {algorithm}"
    return f"allreduce between nodes assumed by {algorithm}"


def _of(results: Results, drawn: pd.DataFrame | None) -> pd.DataFrame:
    """Return the completed runs that are `drawn`, by default all."""
    runs = results.completed
    if drawn is None:
        return runs
    # At any batch: tables of comparisons have no batches.
    places = set(cells_in(drawn[PLACE]))
    return rows_where(
        runs, pd.Series([at in places for at in _places(results)], runs.index)
    )


@cached
def _places(results: Results) -> list[Cell]:
    """Return the cell, at any batch, of each completed run."""
    return cells_in(results.completed[PLACE])


def _card(card: dict[str, Any]) -> str:
    speed = card.get("speed_mbit_s")
    return f"{card.get('name')} ({f'{speed / 1000:g} Gbit/s' if speed else card.get('driver')})"


def describe_marks(
    drawn: pd.DataFrame, crosses: str = "Crosses", pluses: str = "Plus signs"
) -> str:
    """Return the meaning of the marks of oversubscribed and disturbed points, empty if there are none."""
    marked = drawn[drawn["oversubscribed"].astype(bool)]
    sentences = (
        [f"{crosses}: {crowding(marked)}, never a baseline."] if len(marked) else []
    )
    if "disturbed" in drawn and drawn["disturbed"].any():
        sentences.append(f"{pluses}: {DISTURBED_BY} meanwhile, never a baseline.")
    return " ".join(sentences)


def over_seeds(table: pd.DataFrame) -> pd.Series[str]:
    """Return the name of the interval of each cell's metric, empty without one."""
    return table["metric_low"].notna().map({True: CONFIDENCE, False: ""})


def with_interval(names: pd.Series[str]) -> str:
    """Return the meaning of the metric's error bars, empty without any; `names` has the interval of each point."""
    return f", with its {CONFIDENCE} over seeds" if (names != "").any() else ""


def _batch(runs: pd.DataFrame) -> str:
    """Return the batch policy with the steps per epoch at each worker count, as far as they are known."""
    per_worker = runs["batch_policy"].iloc[-1] == "per_worker"
    sizes = runs["batch_per_worker" if per_worker else "batch_global"].dropna().unique()
    batch = " or ".join(str(size) for size in sorted(sizes, reverse=True)) or "?"
    words = batch_in_words(runs["batch_policy"].iloc[-1], batch)
    policy = f"{words[:1].upper()}{words[1:]} at every worker count"
    taken = {
        count: sorted(own.dropna().unique())
        for count, own in runs.groupby("workers")["steps_per_epoch"]
    }
    steps = []
    for some in taken.values():
        # one number, or the least and the most
        ends = dict.fromkeys([*some[:1], *some[-1:]])
        steps.append("-".join(str(own) for own in ends) or "–")
    if set(steps) == {"–"}:
        return f"{policy}."
    if len(set(steps)) == 1:
        return f"{policy}: {steps[0]} step{'' if steps[0] == '1' else 's'} per epoch."
    return f"{policy}: {'/'.join(steps)} steps per epoch at {'/'.join(str(count) for count in taken)} workers."


def _repetitions(runs: pd.DataFrame) -> str:
    cells = runs.groupby(PLACE).size()
    low = int(cells.min())
    high = int(cells.max())
    number = f"{low}" if low == high else f"{low}-{high}"
    return f"{number} repetition{'s' if high > 1 else ''}"


def _bars(results: Results, runs: pd.DataFrame, execution: str) -> str:
    if runs.groupby(PLACE).size().max() < 2:
        return ", no error bars"
    if (
        (own := cells(results))
        .loc[own["execution"] == execution, "interval"]
        .eq(NOTHING_VARIES)
        .all()
    ):
        return f", {NOTHING_VARIES}: step times are stated"
    error = error_of_times(results) if execution in SIMULATED else None
    name = interval_name(
        execution, error=error_name(error), stated=environment.states_steps(results)
    )
    if error is None or error.name == BESIDE_PROGRAMS:
        return f", error bars: {name}"
    off = f"off native times by {error.words}"
    if not error.is_split:
        return f", {off}, of which nothing is known to be common to all points: no error bars"
    return f", error bars: {name}; {off}, of which the factor common to all points is in no bar"
