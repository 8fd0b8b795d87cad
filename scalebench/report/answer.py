"""The study's question answered in one sentence, with its intervals, or why it cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from scalebench.analysis import Results, agreement, median_error, virtual_error
from scalebench.analysis.formatting import seconds
from scalebench.analysis.grouping import PER_BATCH
from scalebench.report.comparison import BASELINE, Comparison, headline
from scalebench.report.wording import EXECUTIONS_IN_WORDS, metric_change, metric_word, percent_range, share

ABOUT_EQUAL = 0.05  # an interval of the saving within +- this share shows that there is none worth the name
QUESTION = "How much time does synchronising less often save, at how many workers, and what does it cost in {metric}?"


class Phrase(NamedTuple):
    """A piece of a sentence: what is `strong` can be read alone, what is `detail` can be passed over."""

    text: str
    kind: Literal["plain", "strong", "detail"] = "plain"


Sentence = tuple[Phrase, ...]


@dataclass(frozen=True)
class Answer:
    """`sentence` answers `question`; `beside` is what has to be known with it."""

    question: str
    sentence: Sentence
    beside: tuple[Sentence, ...] = ()


def answer(results: Results, compared: Sequence[Comparison]) -> Answer:
    """The answer that `results`, with their `comparisons`, can carry."""
    names = results.completed["metric_name"].dropna().unique()
    question = QUESTION.format(metric=metric_word(str(names[0])) if len(names) == 1 else "accuracy")
    found = [one for one in compared if one.answers]
    if not found:
        why = _why_none(results)
        return Answer(question, (Phrase("These records cannot answer it", "strong"), Phrase(f": {why}.")))
    first = headline(found)
    sentence = (Phrase(f"At {first.workers} workers, "), *_clauses(first, f"per-batch {first.baseline}"))
    return Answer(question, sentence, tuple(_beside(first, found, results)))


def as_text(sentence: Sentence) -> str:
    """The sentence without its emphasis."""
    return "".join(phrase.text for phrase in sentence)


def _clauses(one: Comparison, baseline: str) -> Sentence:
    """What it saves, and what that costs."""
    return (
        *_time(one, baseline),
        Phrase(", and "),
        *_metric(one),
        Phrase("."),
    )


def _time(one: Comparison, baseline: str) -> Iterator[Phrase]:
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
    low, high, word = one.saved_low, one.saved_high, "less"
    if high < 0:
        low, high, word = -high, -low, "more"
    interval = f"{percent_range(low, high)} {word}, {one.interval} from {one.n} runs of each"
    yield Phrase(f" ({facts}; {interval if several else 'one run of each, so no interval'}; {how})", "detail")


def _metric(one: Comparison) -> Iterator[Phrase]:
    word = metric_word(one.metric_name or "accuracy")
    if not one.metric_n:
        yield Phrase(f"what that costs in {word} was not measured", "strong")
        return
    facts = f"{one.metric:.3f} instead of {one.metric_baseline:.3f}"
    change = f"{metric_change(abs(one.difference), one.metric_name)} {'lower' if one.difference < 0 else 'higher'}"
    several = math.isfinite(one.difference_low)
    if not several:
        yield Phrase(f"its {word} was {change}", "strong")
    elif one.difference_low <= 0 <= one.difference_high:
        yield Phrase(f"no difference in {word} is shown", "strong")
    else:
        yield Phrase(f"its {word} is {change}", "strong")
    interval = metric_change(one.difference_low, one.metric_name, one.difference_high)
    over = f"{interval}, 95 % confidence interval over {one.metric_n} seeds"
    yield Phrase(f" ({facts}; {over if several else 'one seed, so no interval'})", "detail")


def _beside(first: Comparison, found: list[Comparison], results: Results) -> Iterator[Sentence]:
    """Chosen from how many, from how many workers on, what is without loss, what the other executions say."""
    same = [one for one in found if (one.execution, one.engine) == (first.execution, first.engine)]
    rivals = [one for one in same if one.workers == first.workers]
    if len(rivals) > 1:
        yield _plain(f"Of the {len(rivals)} strategies compared at {first.workers} workers it takes the least time.")
    if since := _since(first, same):
        yield _plain(f"Its saving is shown {since}.")
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
        rms = f", and {share(math.expm1(within.rms))} RMS, which the intervals hold" if within else ""
        yield _plain(
            "No native run checks the virtual times of this study."
            if error is None
            else f"Where both ran, virtual times are off native ones by {share(error)} in the median{rms}."
        )


def _since(first: Comparison, same: list[Comparison]) -> str:
    """The worker counts, without a gap up to the answer's own, at which a saving is shown."""
    own = sorted((one for one in same if one.label == first.label), key=lambda one: -one.workers)
    shown = next((place for place, one in enumerate(own) if not one.saves), len(own))
    if shown == 0 or len(own) == 1:
        return ""
    if shown == 1:
        return f"at {first.workers} workers only"
    return f"at every worker count from {own[shown - 1].workers} to {first.workers}"


def _without_loss(first: Comparison, rivals: list[Comparison]) -> Sentence:
    word = metric_word(first.metric_name)
    kept = [one for one in rivals if one.saves and one.metric_n > 1 and not one.costs_metric]
    if not kept:
        return _plain(f"No strategy saves time there without a shown loss of {word}.")
    best = max(kept, key=lambda one: one.saved)
    return (Phrase(f"Without a shown loss of {word}: "), *_clauses(best, best.baseline))


def _why_none(results: Results) -> str:
    runs = results.completed
    if runs.empty:
        return f"none of {len(results.runs)} runs was completed"
    if runs["strategy"].isin(PER_BATCH).all():
        return "no strategy in them synchronises less often than every batch"
    if not (runs["strategy"] == BASELINE).any():
        return f"there is no completed run of the baseline, per-batch {BASELINE}"
    several = runs[runs["workers"] > 1]
    if several.empty:
        return "all runs have one worker"
    if several["oversubscribed"].all():
        return "every run of several workers is oversubscribed"
    return (
        f"no strategy ran beside {BASELINE} on the same engine, at the same worker count and global batch, within "
        "what the machine can feed"
    )


def _plain(text: str) -> Sentence:
    return (Phrase(text),)
