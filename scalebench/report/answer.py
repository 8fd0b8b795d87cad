"""The answer to the study's question in one sentence with its intervals, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from scalebench.analysis import Results, cells, differences, virtual_error
from scalebench.analysis.environment import jitter_in_words
from scalebench.analysis.grouping import listed
from scalebench.analysis.intervals import CHECKED_STATED, METRIC_FROM, NOTHING_VARIES, STATED
from scalebench.formatting import (
    is_equal,
    metric_change,
    metric_word,
    percent,
    reduction_range,
    seconds,
    share,
)
from scalebench.report.comparison import (
    ABOUT_EQUAL,
    BASELINES,
    EXECUTIONS_IN_WORDS,
    Comparison,
    Phrase,
    Sentence,
    as_text,
    comparisons,
    headline,
    plain,
)
from scalebench.report.next_step import to_answer, to_show_metric, to_show_saving
from scalebench.report.target import target_answer

QUESTION = "How much time does synchronising less often save, at how many workers, and what does it cost in {metric}?"


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
    question = QUESTION.format(metric=metric_word(str(names[0])) if len(names) == 1 else "accuracy")
    found = [one for one in compared if one.answers]
    if not found:
        why = to_answer(results)
        return Answer(question, (Phrase("These records cannot answer it", "strong"), Phrase(f": {why}.")))
    first = headline(found)
    sentence = (Phrase(f"At {first.workers} workers, "), *_clauses(first, f"per-batch {first.baseline}"))
    return Answer(question, sentence, tuple(target_answer(first, results)), tuple(_beside(first, found, results)))


def spoken(results: Results) -> list[str]:
    """Return the answer as plain lines: the measured comparison at the largest worker count, then the simulated one.

    Each has its answer to the target metric and, where something is not shown, what would show it. Without a comparison
    that answers the question, return one line with the reason.
    """
    found = [one for one in comparisons(results) if one.answers]
    if not found:
        return [f"No answer yet: {to_answer(results)}."]
    lines = []
    for verb, executions in (("Measured", ("native", "paced")), ("Simulated", ("virtual", "modelled"))):
        if own := [one for one in found if one.execution in executions]:
            first = headline(own)
            clauses = as_text(_clauses(first, f"per-batch {first.baseline}", brief=True))
            further = [*target_answer(first, results, brief=True), *_next_steps(first, results)]
            parts = " ".join(as_text(sentence) for sentence in further)
            lines.append(f"{verb}, at {first.workers} workers: {clauses} {parts}".strip())
    return lines


def _next_steps(one: Comparison, results: Results) -> Iterator[Sentence]:
    """Runs that would show the saving and the difference of the metric that `one` does not show."""
    if steps := [step for step in (to_show_saving(one, results), to_show_metric(one)) if step]:
        yield plain(_capital(f"{'; '.join(steps)}."))


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _clauses(one: Comparison, baseline: str, *, brief: bool = False) -> Sentence:
    """The saving of time and its cost in the metric; a `brief` sentence does not say how the times were obtained."""
    return (*_time(one, baseline, brief), Phrase(", and "), *_metric(one), Phrase("."))


def _time(one: Comparison, baseline: str, brief: bool) -> Iterator[Phrase]:
    change = f"{share(one.saved)} {'less' if one.saved >= 0 else 'more'} time"
    several = math.isfinite(one.saved_low)
    if not several:
        yield from (Phrase(f"{one.label} took {change}", "strong"), Phrase(f" than {baseline}"))
    elif not one.saved_low <= 0 <= one.saved_high:
        yield from (Phrase(f"{one.label} takes {change}", "strong"), Phrase(f" than {baseline}"))
    elif max(-one.saved_low, one.saved_high) <= ABOUT_EQUAL:
        yield from (Phrase(f"{one.label} takes about as long", "strong"), Phrase(f" as {baseline}"))
    else:
        yield from (Phrase(f"whether {one.label} saves time is not shown", "strong"), Phrase(f" against {baseline}"))
    of_each = "runs of each"
    if one.execution == "virtual":
        of_each = "draws" if one.interval in (STATED, CHECKED_STATED) else "draws of the calibration"
    if one.interval == NOTHING_VARIES:
        interval = one.interval
    elif several:
        interval = reduction_range(one.saved_low, one.saved_high)
        interval += "" if brief else f", {one.interval} from {one.n} {of_each}"
    else:
        interval = "one run of each, so no interval" if one.n < 2 else f"no interval from {one.n} {of_each}"
    facts = f"{seconds(one.strategy_s)} instead of {seconds(one.baseline_s)}; {interval}"
    how = "" if brief else f"; {one.execution}: {EXECUTIONS_IN_WORDS[one.execution]}"
    yield Phrase(f" ({facts}{how})", "detail")


def _metric(one: Comparison) -> Iterator[Phrase]:
    word = metric_word(one.metric_name or "accuracy")
    if not one.metric_n:
        yield Phrase(f"what that costs in {word} was not measured", "strong")
        return
    facts = f"{one.metric:.3f} instead of {one.metric_baseline:.3f}"
    change = f"{metric_change(abs(one.difference), one.metric_name)} {'lower' if one.difference < 0 else 'higher'}"
    several = math.isfinite(one.difference_low) and one.metric_n >= METRIC_FROM
    if several and is_equal(one.difference, one.difference_low, one.difference_high):
        yield Phrase(f"its {word} is the same", "strong")
        yield Phrase(f" ({one.metric:.3f}, equal with each of {one.metric_n} seeds)", "detail")
        return
    if 1 < one.metric_n < METRIC_FROM:
        yield Phrase(f"whether its {word} differs, {one.metric_n} seeds cannot tell", "strong")
    elif not several:
        yield Phrase(f"its {word} was {change}", "strong")
    elif one.difference_low <= 0 <= one.difference_high:
        yield Phrase(f"no difference in {word} is shown", "strong")
    else:
        yield Phrase(f"its {word} is {change}", "strong")
    interval = metric_change(one.difference_low, one.metric_name, one.difference_high)
    over = f"{interval}, 95 % confidence interval over {one.metric_n} seeds"
    none = "one seed, so no interval" if one.metric_n == 1 else f"no interval from {one.metric_n} seeds"
    yield Phrase(f" ({facts}; {over if several else none})", "detail")


def _beside(first: Comparison, found: list[Comparison], results: Results) -> Iterator[Sentence]:
    """Rank among the strategies, worker counts with a saving, best choice without loss, other executions, agreement."""
    yield from _next_steps(first, results)
    if not first.baseline.startswith(BASELINES[0]):
        yield plain(f"What it saves against {first.baseline} holds what its engine saves: {BASELINES[0]} did not run.")
    yield from _parts_of_the_saving(first, results)
    same = [one for one in found if (one.execution, one.engine) == (first.execution, first.engine)]
    rivals = [one for one in same if one.workers == first.workers and one is not first]
    if rivals:
        standing = _standing(first, rivals, results)
        yield plain(f"Of the {len(rivals) + 1} strategies compared at {first.workers} workers {standing}.")
    if since := _since(first, same):
        deterministic = first.interval == NOTHING_VARIES
        yield plain(f"It takes less time {since}." if deterministic else f"Its saving is shown {since}.")
    if first.metric_verdict == "worse" and rivals:
        yield _without_loss(first, rivals)
    for place in dict.fromkeys((one.execution, one.engine) for one in found):
        if place != (first.execution, first.engine):
            other = headline([one for one in found if (one.execution, one.engine) == place])
            where = other.execution if other.execution == other.engine else f"{other.execution} on {other.engine}"
            yield (Phrase(_capital(f"{where}, at {other.workers} workers: ")), *_clauses(other, other.baseline))
    if first.execution == "virtual":
        yield plain(_error_of_the_simulation(results))


def _error_of_the_simulation(results: Results) -> str:
    error = virtual_error(results)
    if error is None:
        return "No native run checks the virtual times of this study."
    text = f"Where both ran, virtual times are off native ones by {error.words}"
    if not error.known:
        return f"{text}: too few for an interval."
    if not error.is_split:
        return f"{text}: the interval of a saving holds all of that, as nothing tells what is common to all times."
    return f"{text}: what is common to all times cancels in a saving, and the rest is in its interval."


def _parts_of_the_saving(one: Comparison, results: Results) -> Iterator[Sentence]:
    """Communication and waiting avoided as shares of the baseline's time, and the saving without jitter if simulated.

    Communication avoided is (c_b - w_b - c + w) / T_b and waiting avoided (w_b - w) / T_b, with c the seconds of
    communication that no computing hides and w those of them spent waiting for others, means over the workers.
    """
    table = cells(results)
    place = (table["execution"] == one.execution) & (table["engine"] == one.engine) & (table["workers"] == one.workers)
    own, base = (table[place & (table["label"] == label)] for label in (one.label, one.baseline))
    if own.empty or base.empty:
        return
    (a,), (b,) = own.to_dict("records"), base.to_dict("records")
    waiting = (b["wait_s"] - a["wait_s"]) / b["train_s"]
    exchange = (b["comm_s"] - a["comm_s"]) / b["train_s"] - waiting
    parts = []
    if math.isfinite(exchange):
        avoided = f"{percent(exchange)} is communication avoided and {percent(waiting)} waiting avoided"
        parts.append(f"of the baseline's time, {avoided}")
    steady = [_without_jitter(results, one, label) for label in (one.label, one.baseline)]
    if all(map(math.isfinite, steady)):
        parts.append(f"without any jitter the saving is {percent(1 - steady[0] / steady[1])}")
    if parts:
        spread = jitter_in_words(results) if one.execution == "virtual" else ""
        yield plain(_capital(f"{'; '.join(parts)}{f' ({spread})' if spread else ''}."))


def _without_jitter(results: Results, one: Comparison, label: str) -> float:
    """Return the mean virtual time of a strategy without jitter in seconds; NaN if unknown."""
    runs = results.completed
    own = (runs["execution"] == one.execution) & (runs["label"] == label) & (runs["workers"] == one.workers)
    return float(runs.loc[own, "train_s_no_jitter"].astype(float).mean())


def _standing(first: Comparison, rivals: list[Comparison], results: Results) -> str:
    """Rank of `first` in time among its rivals; it ties with those whose difference has an interval that holds zero."""
    tied = []
    for one in rivals:
        table = differences(results, one.label, first.label)
        own = table[(table["execution"] == one.execution) & (table["workers"] == one.workers)]
        own = own[(own["engine_a"] == one.engine) & (own["engine_b"] == one.engine)]
        if ((own["ratio_low"] <= 1) & (own["ratio_high"] >= 1)).any():
            tied.append(one.label)
    if tied:
        return f"it ties for the least time with {listed(tied)}: the intervals of their differences hold zero"
    return "it takes the least time" if math.isfinite(first.saved_low) else "it took the least time"


def _since(first: Comparison, same: list[Comparison]) -> str:
    """The consecutive worker counts, up to that of `first`, at which a saving is shown."""
    own = sorted((one for one in same if one.label == first.label), key=lambda one: -one.workers)
    shown = list(takewhile(lambda one: one.saves, own))
    return f"at every worker count from {shown[-1].workers} to {first.workers}" if len(shown) > 1 else ""


def _without_loss(first: Comparison, rivals: list[Comparison]) -> Sentence:
    word = metric_word(first.metric_name)
    kept = [one for one in rivals if one.saves and one.metric_n >= METRIC_FROM and one.metric_verdict != "worse"]
    if not kept:
        return plain(f"No strategy saves time there without a shown loss of {word}.")
    best = max(kept, key=lambda one: one.saved)
    return (Phrase(f"Without a shown loss of {word}: "), *_clauses(best, best.baseline))
