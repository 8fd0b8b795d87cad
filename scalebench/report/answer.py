"""The answer to the study's question in one sentence with its intervals, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from scalebench.analysis import Results, agreement, cells, differences, median_error, virtual_error
from scalebench.analysis.environment import jitter_in_words
from scalebench.analysis.grouping import listed
from scalebench.analysis.intervals import CHECKED_STATED, METRIC_FROM, NOTHING_VARIES, SAME_METRIC, STATED
from scalebench.formatting import (
    counted,
    deviation,
    is_equal,
    metric_change,
    metric_word,
    percent,
    reduction_range,
    seconds,
    share,
)
from scalebench.report.comparison import (
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
from scalebench.report.next_step import ABOUT_EQUAL, to_answer, to_show_metric, to_show_saving
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
    fastest = headline(found)
    ties = _ties(fastest, found, results)
    first = _most_accurate(fastest, ties)
    sentence = (Phrase(f"At {first.workers} workers, "), *_clauses(first, f"per-batch {first.baseline}"))
    tied = [one for one in (fastest, *ties) if one is not first]
    target = target_answer(first, results)
    return Answer(question, sentence, tuple(target), tuple(_beside(first, found, tied, results)))


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
        text = "; ".join(steps)
        yield plain(f"{text[:1].upper()}{text[1:]}.")


def _clauses(one: Comparison, baseline: str, *, brief: bool = False) -> Sentence:
    """The saving of time and its cost in the metric; a `brief` sentence does not say how the times were obtained."""
    return (
        *_time(one, baseline, brief),
        Phrase(", and "),
        *_metric(one),
        Phrase("."),
    )


def _time(one: Comparison, baseline: str, brief: bool = False) -> Iterator[Phrase]:
    facts = f"{seconds(one.strategy_s)} instead of {seconds(one.baseline_s)}"
    how = f"{one.execution}: {EXECUTIONS_IN_WORDS[one.execution]}"
    change = f"{share(one.saved)} {'less' if one.saved >= 0 else 'more'} time"
    several = math.isfinite(one.saved_low)
    if not several:
        yield Phrase(f"{one.label} took {change}", "strong")
        yield Phrase(f" than {baseline}")
    elif not one.saved_low <= 0 <= one.saved_high:
        yield Phrase(f"{one.label} takes {change}", "strong")
        yield Phrase(f" than {baseline}")
    elif max(-one.saved_low, one.saved_high) <= ABOUT_EQUAL:
        yield Phrase(f"{one.label} takes about as long", "strong")
        yield Phrase(f" as {baseline}")
    else:
        yield Phrase(f"whether {one.label} saves time is not shown", "strong")
        yield Phrase(f" against {baseline}")
    of_each = "runs of each"
    if one.execution == "virtual":
        of_each = "draws" if one.interval in (STATED, CHECKED_STATED) else "draws of the calibration"
    interval = f"{reduction_range(one.saved_low, one.saved_high)}, {one.interval} from {one.n} {of_each}"
    if one.interval == NOTHING_VARIES:
        interval = one.interval
    if not several:
        interval = "one run of each, so no interval" if one.n < 2 else f"no interval from {one.n} {of_each}"
    if brief:
        interval, how = interval.partition(", ")[0] if several and interval != NOTHING_VARIES else interval, ""
    yield Phrase(f" ({'; '.join(part for part in (facts, interval, how) if part)})", "detail")


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


def _ties(fastest: Comparison, found: list[Comparison], results: Results) -> list[Comparison]:
    """Return the rivals of `fastest` whose difference in time from it has an interval that holds zero."""
    ties = []
    for one in _rivals(fastest, found):
        if one is fastest:
            continue
        own = _differences(one, fastest, results)
        if ((own["ratio_low"] <= 1) & (own["ratio_high"] >= 1)).any():
            ties.append(one)
    return ties


def _differences(one: Comparison, other: Comparison, results: Results) -> pd.DataFrame:
    """Return the rows of `differences` between two strategies of one execution, engine and worker count."""
    table = differences(results, one.label, other.label)
    own = (table["execution"] == one.execution) & (table["workers"] == one.workers)
    return table[own & (table["engine_a"] == one.engine) & (table["engine_b"] == one.engine)]


def _most_accurate(fastest: Comparison, ties: list[Comparison]) -> Comparison:
    """Return the strategy with the highest mean metric among `fastest` and its ties; of equal ones, the fastest."""
    alike = [fastest, *ties]
    if not all(math.isfinite(one.metric) for one in alike):
        return fastest
    highest = max(one.metric for one in alike)
    return max((one for one in alike if highest - one.metric <= SAME_METRIC), key=lambda one: one.saved)


def _rivals(first: Comparison, found: list[Comparison]) -> list[Comparison]:
    """Return the comparisons of the same execution, engine and worker count, `first` included."""
    place = (first.execution, first.engine, first.workers)
    return [one for one in found if (one.execution, one.engine, one.workers) == place]


def _beside(first: Comparison, found: list[Comparison], tied: list[Comparison], results: Results) -> Iterator[Sentence]:
    """Rank among the strategies, worker counts with a saving, best choice without loss, other executions, agreement."""
    yield from _next_steps(first, results)
    if not first.baseline.startswith(BASELINES[0]):
        yield plain(f"What it saves against {first.baseline} holds what its engine saves: {BASELINES[0]} did not run.")
    yield from _parts_of_the_saving(first, results)
    same = [one for one in found if (one.execution, one.engine) == (first.execution, first.engine)]
    rivals = _rivals(first, found)
    if len(rivals) > 1:
        standing = _standing(first, tied, results)
        yield plain(f"Of the {len(rivals)} strategies compared at {first.workers} workers {standing}.")
    if since := _since(first, same):
        deterministic = first.interval == NOTHING_VARIES
        yield plain(f"It takes less time {since}." if deterministic else f"Its saving is shown {since}.")
    if first.costs_metric and len(rivals) > 1:
        yield _without_loss(first, rivals)
    for place in dict.fromkeys((one.execution, one.engine) for one in found):
        if place != (first.execution, first.engine):
            other = headline([one for one in found if (one.execution, one.engine) == place])
            where = other.execution if other.execution == other.engine else f"{other.execution} on {other.engine}"
            start = f"{where[:1].upper()}{where[1:]}, at {other.workers} workers: "
            yield (Phrase(start), *_clauses(other, other.baseline))
    if first.execution == "virtual":
        error, within = median_error(agreement(results)), virtual_error(results)
        rms = f", and {deviation(within.rms)} RMS, which the intervals hold" if within else ""
        if within and not within.known:
            rms = f"; that is {counted(within.checks, 'check')} only, too little for an interval"
        off = f"Where both ran, virtual times are off native ones by {deviation(error or 0)} in the median{rms}."
        asked = ", as the study asks for" if results.study.get("execution") == "virtual" else ""
        alone = f"All times of this study are simulated{asked}: no native run checks them."
        yield plain(alone if error is None else off)


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
    text = ""
    if math.isfinite(exchange):
        avoided = f"{percent(exchange)} is communication avoided and {percent(waiting)} waiting avoided"
        text = f"Of the baseline's time, {avoided}"
    steady = [_without_jitter(results, one, label) for label in (one.label, one.baseline)]
    if all(map(math.isfinite, steady)):
        text += f"{'; without' if text else 'Without'} any jitter the saving is {percent(1 - steady[0] / steady[1])}"
    if one.execution == "virtual" and (spread := jitter_in_words(results)):
        text += f" ({spread})"
    if text:
        yield plain(f"{text}.")


def _without_jitter(results: Results, one: Comparison, label: str) -> float:
    """Return the mean virtual time of a strategy without jitter in seconds; NaN if unknown."""
    runs = results.completed
    own = (runs["execution"] == one.execution) & (runs["label"] == label) & (runs["workers"] == one.workers)
    return float(runs.loc[own, "train_s_no_jitter"].astype(float).mean())


def _standing(first: Comparison, tied: list[Comparison], results: Results) -> str:
    """Rank of `first` in time among its rivals."""
    if not tied:
        return "it takes the least time" if math.isfinite(first.saved_low) else "it took the least time"
    names = listed(one.label for one in tied)
    why = "the intervals of their differences hold zero"
    if all(_differences(one, first, results)["interval"].eq(NOTHING_VARIES).all() for one in tied):
        why = "their times are equal"
    place = f"it ties for the least time with {names}: {why}"
    return "; ".join([place, *_accuracy_among(first, tied, results)])


def _accuracy_among(first: Comparison, tied: list[Comparison], results: Results) -> Iterator[str]:
    """Rank of the metric of `first` among its ties; a difference is shown if its interval lies above zero."""
    if not all(math.isfinite(one.metric) for one in (first, *tied)):
        return
    word = metric_word(first.metric_name or "accuracy")
    lower = [one for one in tied if first.metric - one.metric > SAME_METRIC]
    if not lower:
        yield f"{'both' if len(tied) == 1 else 'all of these'} have the same mean {word}"
        return
    unshown = [one.label for one in lower if not (_differences(first, one, results)["metric_low"] > 0).any()]
    doubt = ", no difference shown" if unshown else ""
    doubt += f" from {listed(unshown)}" if 0 < len(unshown) < len(lower) else ""
    if len(lower) < len(tied):
        yield f"none of these has a higher mean {word}{doubt}"
    else:
        yield f"it has the highest {'mean ' if unshown else ''}{word} of these{doubt}"


def _since(first: Comparison, same: list[Comparison]) -> str:
    """The consecutive worker counts, up to that of `first`, at which a saving is shown."""
    own = sorted((one for one in same if one.label == first.label), key=lambda one: -one.workers)
    shown = next((place for place, one in enumerate(own) if not one.saves), len(own))
    if shown == 0 or len(own) == 1:
        return ""
    if shown == 1:
        return f"at {first.workers} workers only"
    return f"at every worker count from {own[shown - 1].workers} to {first.workers}"


def _without_loss(first: Comparison, rivals: list[Comparison]) -> Sentence:
    word = metric_word(first.metric_name)
    kept = [one for one in rivals if one.saves and one.metric_n >= METRIC_FROM and not one.costs_metric]
    if not kept:
        return plain(f"No strategy saves time there without a shown loss of {word}.")
    best = max(kept, key=lambda one: one.saved)
    return (Phrase(f"Without a shown loss of {word}: "), *_clauses(best, best.baseline))
