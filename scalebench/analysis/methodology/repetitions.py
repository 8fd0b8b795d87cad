"""Rules about how often runs were repeated, and with which seeds. Hoefler and Belli 2015, rules 5 and 6.

What the repetitions say is judged where the statistics are, in `analysis.claims`; here each of those judgements gets a
name, so that it can be listed and left out like any other rule.
"""

from __future__ import annotations

from collections.abc import Iterator

from scalebench.analysis.cell_names import listed, place
from scalebench.analysis.findings import Finding
from scalebench.analysis.grouping import CELL
from scalebench.analysis.methodology.base import RULES, Evidence, Rule
from scalebench.formatting import counted


class _Claim(Rule):
    """One judgement of `analysis.claims`, by its name."""

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        return (finding for finding in evidence.claims if finding.rule == self.name)


@RULES.add
class FewRuns(_Claim):
    """Rule 5 of the twelve: nondeterministic times have intervals, and those want repetitions."""

    name = "few-runs"
    summary = "every cell was repeated often enough for an interval"


@RULES.add
class Spread(_Claim):
    """Rule 8 of the twelve: a mean of values far apart says little."""

    name = "spread"
    summary = "the repetitions of a cell lie within 10 % of each other (coefficient of variation)"


@RULES.add
class OddRuns(_Claim):
    """Rule 8 of the twelve: where single runs move the mean, the median is what to report."""

    name = "odd-runs"
    summary = "no cell's mean time lies outside the interval of its median"


@RULES.add
class TwoGroups(_Claim):
    """Rule 6 of the twelve: times of two modes are not normal on any scale."""

    name = "two-groups"
    summary = "no cell's times fall into two groups"


@RULES.add
class Drift(_Claim):
    """Rule 6 of the twelve, again: repetitions are a sample only of a machine that stays the same."""

    name = "drift"
    summary = "times neither grow nor shrink while the study runs"


@RULES.add
class RunsApart(_Claim):
    """Rule 7 of the twelve: what is paired shares the state of the machine, or is not paired."""

    name = "runs-apart"
    summary = "runs of one block were made side by side"


@RULES.add
class VirtualError(_Claim):
    """A simulation says as much as its comparison with real runs."""

    name = "virtual-error"
    summary = "native runs check the virtual times, and lie within 15 % of them"


@RULES.add
class Unsettled(_Claim):
    """Rule 7 of the twelve: a difference within its interval is no difference."""

    name = "unsettled"
    summary = "every reduction against allreduce has a sign: its interval does not hold zero"


@RULES.add
class Seeds(Rule):
    """A metric's spread over seeds needs different seeds; comparing strategies at equal seeds needs the same ones."""

    name = "seeds"
    summary = "each repetition has a seed of its own, and all strategies have the same seeds"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        runs = evidence.runs
        groups = runs.groupby(CELL, dropna=False)["seed"]
        equal = runs[(groups.transform("nunique") == 1) & (groups.transform("size") > 1)]
        if len(equal):
            yield self.finding(
                "warning",
                f"repetitions share a seed (seed {listed(sorted(equal['seed'].unique()))}): the metric's interval says "
                "nothing about other seeds",
                place(equal),
                "repeat with different seeds, as `scalebench run` does by itself",
            )
        seeds = runs.groupby(["execution", "repetition"])["seed"].nunique()
        if (seeds > 1).any():
            yield self.finding(
                "warning",
                f"strategies have different seeds in {counted(int((seeds > 1).sum()), 'block')} of the run order: "
                "their metrics are not paired",
                listed(sorted({str(execution) for execution, _ in seeds[seeds > 1].index})),
                "run all strategies in one study, which gives each repetition one seed",
            )
