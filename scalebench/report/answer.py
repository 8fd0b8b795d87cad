"""The answer to the study's question in a sentence with its intervals, or the reason why there is none.

The first sentence is one that is shown, at the largest worker count where one is. Where
a target metric is stated and a strategy is shown to reach it sooner, or later, that
comes first: a run of fewer epochs that reach nothing is no saving.

The time to the target metric is the headline where it is shown, else it stands beside
it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import pandas as pd

from scalebench import formatting
from scalebench.analysis import Results, cells, differences, intervals, loading, rounds
from scalebench.analysis.environment import jitter_in_words
from scalebench.analysis.methodology import RULES, Evidence
from scalebench.analysis.native_check import slowdown_of_native_runs, virtual_error
from scalebench.analysis.verdicts import METRIC_MARGIN
from scalebench.records.progress import progress_of
from scalebench.report import comparison, unanswered
from scalebench.report.comparison import Comparison, Phrase, Sentence, as_text, plain
from scalebench.study.choices import BASELINES

# rules whose warnings stand beside the answer
_QUALIFY = ("few-runs", "disturbed", "busy-machine")
_OBTAINED = {
    "native": "Measured natively",
    "paced": "Measured with stated compute",
    "virtual": "Virtual",
    "modelled": "Modelled",
}
QUESTION = "How much time does synchronising less often save, at how many workers, and what does it cost in {metric}?"

Row = dict[Hashable, Any]


@dataclass(frozen=True)
class Answer:
    """Question, answer for all epochs, answer for the target metric, and the sentences that qualify them."""

    question: str
    sentence: Sentence
    target: tuple[Sentence, ...] = ()
    beside: tuple[Sentence, ...] = ()


def answer(results: Results, compared: Sequence[Comparison]) -> Answer:
    """Answer the question from `results` and their `comparisons`."""
    names = results.completed["metric_name"].dropna().unique()
    question = QUESTION.format(
        metric=formatting.metric_word(str(names[0])) if len(names) == 1 else "accuracy"
    )
    found = [one for one in compared if one.answers]
    if not found:
        return _without_saving(question, results)
    first = comparison.headline(found)
    sentence, *further = _headline_sentences(first, found, results)
    return Answer(
        question, sentence, tuple(further), tuple(_beside(first, found, results))
    )


def spoken(results: Results) -> list[str]:
    """Return the answer as plain lines: the headline, that of the other kind of execution, and what qualifies them.

    Where something is not shown, the line ends with what would show it. Without a
    comparison that answers the question, the first line has the order by time, and the
    reason why no saving is stated.
    """
    found = [one for one in comparison.comparisons(results) if one.answers]
    if not found:
        return _spoken_without_saving(results)
    first = comparison.headline(found)
    sentences = [
        *_headline_sentences(first, found, results, brief=True),
        *_next_steps(first, results),
    ]
    lines = [" ".join(map(as_text, sentences))]
    # Measured and computed times are in no ratio together: each kind has its headline.
    others = [
        one
        for one in found
        if (one.cell.execution in rounds.MEASURED)
        != (first.cell.execution in rounds.MEASURED)
    ]
    if others:
        other = comparison.headline(others)
        start = Phrase(
            f"{_OBTAINED[other.cell.execution]}, at {formatting.counted(other.cell.workers, 'worker')}: "
        )
        own = (
            start,
            *_clauses(
                other,
                results,
                f"per-batch {other.baseline.label}",
                brief=True,
                obtained=False,
            ),
        )
        sentences = [
            own,
            *comparison.answer_to_target(other, results, brief=True),
            *_next_steps(other, results),
        ]
        lines.append(" ".join(map(as_text, sentences)))
    elif first.cell.execution not in rounds.MEASURED:
        # none of the measured runs is compared with a baseline
        lines += map(as_text, unanswered.fastest(results, rounds.MEASURED))
    if first.cell.execution == "virtual":
        lines.append(_error_of_virtual_times(results))
    return [*lines, *map(as_text, _qualifying(results))]


def _without_saving(question: str, results: Results) -> Answer:
    why = unanswered.why_no_saving(results)
    known = [*unanswered.fastest(results)]
    if not known:
        refusal = Phrase("These records cannot answer it", "strong")
        return Answer(question, (refusal, Phrase(f": {why}.")))
    first, *further = known
    return Answer(
        question,
        first,
        (*further, plain(f"No saving is stated: {why}.")),
        tuple(_warnings(results)),
    )


def _spoken_without_saving(results: Results) -> list[str]:
    why = unanswered.why_no_saving(results)
    known = [*map(as_text, unanswered.fastest(results))]
    line = (
        f"{' '.join(known)} No saving is stated: {why}."
        if known
        else f"No answer yet: {why}."
    )
    return [line, *map(as_text, _warnings(results))]


def headline_so_far(results: Results) -> str:
    """Return the headline of a study that still runs as plain text; empty if nothing answers the question yet."""
    found = [one for one in comparison.comparisons(results) if one.answers]
    if not found:
        return ""
    return " ".join(
        map(
            as_text,
            _headline_sentences(comparison.headline(found), found, results, brief=True),
        )
    )


def _headline_sentences(
    first: Comparison, found: list[Comparison], results: Results, *, brief: bool = False
) -> Iterator[Sentence]:
    """The sentences of the headline: to the target metric first, where that is shown, and for all epochs."""
    aimed = comparison.sooner(found, results)
    if aimed is None:
        start = Phrase(f"At {formatting.counted(first.cell.workers, 'worker')}, ")
        yield (
            start,
            *_clauses(first, results, f"per-batch {first.baseline.label}", brief=brief),
        )
        yield from comparison.answer_to_target(first, results, brief=brief)
        return
    *clause, _ = aimed.sentence(
        brief=brief, how=f"; {_how(aimed.one, results)}", than="per-batch "
    )
    epochs = int(results.completed["epochs"].max())
    training = "one epoch" if epochs == 1 else f"all {epochs} epochs"
    # A headline for all epochs adds nothing at fewer workers, or if it is open: the
    # strategy that reaches the target sooner answers for all epochs, too.
    if not first.is_shown or first.cell.workers <= aimed.one.cell.workers:
        yield (*clause, Phrase("."))
        start, same = Phrase(f"For {training} "), aimed.one
        yield (
            start,
            *_clauses(same, results, same.baseline.label, brief=brief, obtained=False),
        )
        return
    # Otherwise a saving for all epochs would pass for one of time to accuracy.
    where = "" if comparison.reached_at(first, results) else ", where no run reaches it"
    obtained = first.cell.execution != aimed.one.cell.execution
    yield (
        *clause,
        Phrase(f"; at {formatting.counted(first.cell.workers, 'worker')}{where}, "),
        *_time(
            first,
            results,
            f"{first.baseline.label} for {training}",
            brief,
            obtained,
        ),
        Phrase("."),
    )
    yield (Phrase("There "), *_metric(first, brief), Phrase("."))


def _next_steps(one: Comparison, results: Results) -> Iterator[Sentence]:
    """Runs that would show the saving and the difference of the metric that `one` does not show.

    Of a study that is not complete, the rest of its runs.
    """
    left = progress_of(results.folder).remaining.total()
    steps = [
        step
        for step in (
            comparison.to_show_saving(one, results),
            comparison.to_show_metric(one, results),
        )
        if step
    ]
    # Runs that are planned anyway may show it, and come before further ones.
    if steps and left:
        yield plain(
            f"The same command makes the {formatting.counted(left, 'run')} that {'is' if left == 1 else 'are'} left."
        )
    elif steps:
        yield plain(_capital(f"{'; '.join(steps)}."))


def _qualifying(results: Results) -> Iterator[Sentence]:
    """Warnings of `scalebench check` about few runs and a busy machine, and what crowded engines leave."""
    yield from _warnings(results)
    if text := comparison.crowded_engines(results):
        yield plain(text)


def _warnings(results: Results) -> Iterator[Sentence]:
    """Warnings of `scalebench check` about few runs and a busy machine."""
    evidence = Evidence(results)
    found = [
        one
        for name in _QUALIFY
        for one in RULES.find(name).find(evidence)
        if one.severity == "warning"
    ]
    if found:
        yield plain(
            f"Beware: {'; '.join(one.what.partition(':')[0] for one in found)}."
        )


def _how(one: Comparison, results: Results) -> str:
    """How the times of `one` were obtained, in words."""
    runs = results.completed
    # Records of other writers may lack the column.
    calibrated = (
        runs["calibration"]
        if "calibration" in runs
        else pd.Series(None, runs.index, dtype=object)
    )
    own = calibrated[
        (runs["execution"] == one.cell.execution)
        & (runs["workers"] == one.cell.workers)
    ]
    beside = ", calibrated beside other programs" if own.eq("disturbed").any() else ""
    return f"{comparison.EXECUTIONS_IN_WORDS[one.cell.execution]}{beside}"


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _clauses(
    one: Comparison,
    results: Results,
    baseline: str,
    *,
    brief: bool = False,
    obtained: bool = True,
) -> Sentence:
    """The saving of time and its cost in the metric; a `brief` sentence does not name intervals.

    If not `obtained`, it does not say how the times were.
    """
    return (
        *_time(one, results, baseline, brief, obtained),
        Phrase(", and "),
        *_metric(one, brief),
        Phrase("."),
    )


def _time(
    one: Comparison, results: Results, baseline: str, brief: bool, obtained: bool
) -> Iterator[Phrase]:
    several = math.isfinite(one.saved.low)
    is_open = several and one.saved.low <= 0 <= one.saved.high
    if is_open and one.is_shown:
        change, than = "takes about as long", "as"
    else:
        # The past tense says what was measured, and claims nothing.
        verb = "took" if is_open or not several else "takes"
        change, than = comparison.change_of_time(one.saved.value)
        change = f"{verb} {change}"
    yield Phrase(f"{one.cell.label} {change}", "strong")
    yield Phrase(f" {than} {baseline}")
    of_each = "runs of each"
    if one.cell.execution == "virtual":
        of_each = "repetitions"
    if one.saved.kind == intervals.NOTHING_VARIES:
        interval = one.saved.kind
    elif several:
        interval = formatting.reduction_range(one.saved.low, one.saved.high)
        interval += "" if brief else f", {one.saved.kind} from {one.saved.n} {of_each}"
        interval += "" if one.is_shown else f", {comparison.HOLDS_ZERO}"
    else:
        interval = (
            "one run of each, so no interval"
            if one.saved.n < 2
            else f"no interval from {one.saved.n} {of_each}"
        )
    facts = f"{formatting.seconds(one.strategy_s)} instead of {formatting.seconds(one.baseline_s)}; {interval}"
    how = f"; {_how(one, results)}" if obtained else ""
    yield Phrase(f" ({facts}{how})", "detail")


def _metric(one: Comparison, brief: bool) -> Iterator[Phrase]:
    """The verdict on the metric, by the function of `scalebench compare`."""
    word = formatting.metric_word(one.metric_name or "accuracy")
    verdict = one.metric_verdict
    if verdict == "not compared":
        yield Phrase(f"what that costs in {word} was not measured", "strong")
        return
    # Strategies that compute the same weights have the same metric with each seed.
    if verdict == "equal" and formatting.is_equal(*one.difference[:3]):
        yield Phrase(f"its {word} is equal", "strong")
        yield Phrase(
            f" ({one.metric:.3f} with each of {one.difference.n} seeds)", "detail"
        )
        return
    words = {
        "better": f"better by {formatting.metric_change(one.difference.value, one.metric_name)}",
        "worse": f"worse by {formatting.metric_change(-one.difference.value, one.metric_name)}",
        "equal": f"equal within {_margin(one)}",
        "undecided": "undecided",
    }
    yield Phrase(f"its {word} is {words[verdict]}", "strong")
    facts = f"{one.metric:.3f} instead of {one.metric_baseline:.3f}"
    if math.isfinite(one.difference.low):
        over = formatting.metric_change(
            one.difference.low, one.metric_name, one.difference.high
        )
        over += (
            "" if brief else f", 95 % confidence interval over {one.difference.n} seeds"
        )
    else:
        over = (
            "one seed, so no interval"
            if one.difference.n == 1
            else f"no interval from {one.difference.n} seeds"
        )
    yield Phrase(f" ({facts}; {over})", "detail")


def _margin(one: Comparison) -> str:
    return formatting.metric_change(METRIC_MARGIN, one.metric_name).replace(
        "1.0 points", "1 point"
    )


def _beside(
    first: Comparison, found: list[Comparison], results: Results
) -> Iterator[Sentence]:
    """Rank among the strategies, worker counts with a saving, best choice without loss, other executions, warnings."""
    yield from _next_steps(first, results)
    if not first.baseline.label.startswith(BASELINES[0]):
        yield plain(
            f"What it saves against {first.baseline.label} holds what its engine saves: {BASELINES[0]} did not run."
        )
    yield from _parts_of_the_saving(first, results)
    same = [
        one
        for one in found
        if (one.cell.execution, one.cell.engine)
        == (first.cell.execution, first.cell.engine)
    ]
    # Only on the same engine: the difference between engines is no strategy's.
    rivals = [
        one
        for one in same
        if one.cell.workers == first.cell.workers and one is not first
    ]
    if rivals:
        compared = f"{len(rivals) + 1} strategies compared at {formatting.counted(first.cell.workers, 'worker')}"
        yield plain(
            f"Of the {compared} {first.cell.label} {_standing(first, rivals, results)}."
        )
    if since := _since(first, same):
        # Without noise there is nothing to show.
        deterministic = first.saved.kind == intervals.NOTHING_VARIES
        verb = "takes less time" if deterministic else "is shown to save time"
        yield plain(f"{first.cell.label} {verb} {since}.")
    if first.metric_verdict == "worse" and rivals:
        yield _without_loss(first, rivals, results)
    for place in dict.fromkeys((one.cell.execution, one.cell.engine) for one in found):
        if place != (first.cell.execution, first.cell.engine):
            other = comparison.headline(
                [one for one in found if (one.cell.execution, one.cell.engine) == place]
            )
            where = (
                other.cell.execution
                if other.cell.execution == other.cell.engine
                else f"{other.cell.execution} on {other.cell.engine}"
            )
            start = Phrase(
                _capital(
                    f"{where}, at {formatting.counted(other.cell.workers, 'worker')}: "
                )
            )
            yield (start, *_clauses(other, results, other.baseline.label))
    if not any(one.cell.execution in rounds.MEASURED for one in found):
        yield from unanswered.fastest(results, rounds.MEASURED)
    if first.cell.execution == "virtual":
        yield plain(_error_of_virtual_times(results))
    yield from _qualifying(results)


def _error_of_virtual_times(results: Results) -> str:
    error = virtual_error(results)
    if error is None:
        text = "No native run checks the virtual times of this study"
        runs = results.completed
        native = runs[runs["execution"] == "native"]
        if len(native) and not loading.is_representative(native).any():
            text += f": every one is {unanswered.marks_in_words(native)}"
        return f"{text}."
    text = f"Where both ran, virtual times are off native ones by {error.words}"
    if not error.known:
        held = "too few for an interval."
    elif not error.is_split:
        held = "the interval of a saving holds all of that, as nothing tells what is common to all times."
    else:
        held = "what is common to all times cancels in a saving, and the rest is in its interval."
    return f"{text}: {held}{_speed_of_native_runs(results)}"


def _speed_of_native_runs(results: Results) -> str:
    """Return the speed of this machine in native runs that virtual times are off by more than their interval."""
    slowdown = slowdown_of_native_runs(results)
    if slowdown is None:
        return ""
    return (
        " Steps of native runs that differ by more than their interval took "
        f"{formatting.digits(slowdown.factor)} times as long as in the calibration: at its speed, and without "
        f"waiting, virtual times are off these by {formatting.deviation(slowdown.left)}."
    )


def _parts_of_the_saving(one: Comparison, results: Results) -> Iterator[Sentence]:
    """Communication and waiting avoided as shares of the baseline's time, and the virtual saving without jitter.

    Communication avoided is (c_b - w_b - c + w) / T_b and waiting avoided (w_b - w) /
    T_b, with c the seconds of communication that no computing hides and w those of them
    spent waiting for others, means over the workers.
    """
    table = cells(results)
    rows = dict(zip(loading.cells_in(table), table.to_dict("records"), strict=True))
    a, b = (rows[cell] for cell in (one.cell, one.baseline))
    waiting = (b["wait_s"] - a["wait_s"]) / b["train_s"]
    exchange = (b["comm_s"] - a["comm_s"]) / b["train_s"] - waiting
    parts = []
    if math.isfinite(exchange):
        parts.append(
            f"of the baseline's time, {formatting.percent(exchange)} is communication avoided and "
            f"{formatting.percent(waiting)} waiting avoided"
        )
    # Jitter makes workers wait, which a strategy avoids that synchronises less often:
    # how much of the saving is that?
    steady = [
        _without_jitter(results, one, label)
        for label in (one.cell.label, one.baseline.label)
    ]
    if all(map(math.isfinite, steady)):
        parts.append(
            f"without any jitter the saving is {formatting.percent(1 - steady[0] / steady[1])}"
        )
    if parts:
        spread = jitter_in_words(results) if one.cell.execution == "virtual" else ""
        yield plain(_capital(f"{'; '.join(parts)}{f' ({spread})' if spread else ''}."))


def _without_jitter(results: Results, one: Comparison, label: str) -> float:
    """Return the mean virtual time of a strategy without jitter in seconds; NaN if unknown."""
    runs = results.completed
    own = (
        (runs["execution"] == one.cell.execution)
        & (runs["label"] == label)
        & (runs["workers"] == one.cell.workers)
    )
    return float(runs.loc[own, "train_s_no_jitter"].astype(float).mean())


def _standing(first: Comparison, rivals: list[Comparison], results: Results) -> str:
    """Rank of `first` in time, as a predicate; it ties with rivals where the interval of the difference holds zero."""
    # Rivals are compared directly: two savings share the noise of their baseline.
    tied = []
    for one in rivals:
        table = differences(results, one.cell.label, first.cell.label)
        own = table[
            (table["execution"] == one.cell.execution)
            & (table["workers"] == one.cell.workers)
        ]
        own = own[
            (own["engine_a"] == one.cell.engine) & (own["engine_b"] == one.cell.engine)
        ]
        if ((own["ratio_low"] <= 1) & (own["ratio_high"] >= 1)).any():
            tied.append(one.cell.label)
    if tied:
        return f"ties for the least time with {formatting.listed(tied)}: the intervals of their differences hold zero"
    return (
        "takes the least time"
        if math.isfinite(first.saved.low)
        else "took the least time"
    )


def _since(first: Comparison, same: list[Comparison]) -> str:
    """The consecutive worker counts, up to that of `first`, at which a saving is shown."""
    own = sorted(
        (one for one in same if one.cell.label == first.cell.label),
        key=lambda one: -one.cell.workers,
    )
    shown = list(takewhile(lambda one: one.saves, own))
    return (
        f"at every worker count from {shown[-1].cell.workers} to {first.cell.workers}"
        if len(shown) > 1
        else ""
    )


def _without_loss(
    first: Comparison, rivals: list[Comparison], results: Results
) -> Sentence:
    word = formatting.metric_word(first.metric_name)
    # An undecided difference is not shown to be none.
    kept = [
        one for one in rivals if one.saves and one.metric_verdict in ("equal", "better")
    ]
    if not kept:
        return plain(
            f"No strategy that saves time there is shown to have an equal {word} within {_margin(first)}."
        )
    best = max(kept, key=lambda one: one.saved.value)
    return (
        Phrase(f"Without a loss of {word}: "),
        *_clauses(best, results, best.baseline.label),
    )
