"""Rules about baselines (Hoefler and Belli 2015, rule 1)."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from scalebench.analysis.grouping import chosen_strategies
from scalebench.analysis.loading import is_representative
from scalebench.analysis.methodology import Evidence, Finding, Severity, finding, rule
from scalebench.formatting import counted, listed, percent, seconds_with_interval
from scalebench.study.cell import PLACE, group_of
from scalebench.study.choices import LIBRARY_BASELINES, PER_BATCH

_BEYOND_NOISE = 1.2  # efficiency that the noise of single runs does not reach


@rule("a speedup has a base, serial on one worker, whose absolute time is stated")
def speedup_base(evidence: Evidence) -> Iterator[Finding]:
    """Rule 1 of the twelve: state the base case of a speedup and its absolute time."""
    table = evidence.ratios
    against = table[(table["baseline"] == "serial") & (table["strategy"] != "serial")]
    missing = against[against["note"] != ""]
    severity: Severity = "warning" if "serial" in chosen_strategies(evidence.results) else "note"
    for note, own in missing.groupby("note", sort=False):
        fix = "add serial to the study's strategies, and let it complete without oversubscription in each repetition"
        yield finding(severity, f"no speedup can be given: {note}", own, fix)
    known = evidence.cells
    fair = (known["strategy"] == "serial") & is_representative(known)
    for base in known[fair].to_dict("records"):
        time = seconds_with_interval(base["train_s"], base["low_s"], base["high_s"])
        kind = group_of(str(base["execution"]), str(base["engine"]))
        yield finding(
            "note",
            f"{kind} speedups are over serial on one worker, {time}"
            + (f", {base['interval']}" * bool(base["interval"])),
            f"serial at 1 worker ({kind})",
            "state this time wherever a speedup is shown",
        )


@rule("a reduction has a per-batch baseline of the same execution, engine, worker count and global batch")
def reduction_base(evidence: Evidence) -> Iterator[Finding]:
    """A reduction needs a per-batch run on the same engine, at the same worker count and global batch."""
    table = evidence.ratios
    table = table[~table["strategy"].isin(PER_BATCH) & is_representative(table)]
    others = table[(table["baseline"] != "serial") & (table["note"] == "")][PLACE].drop_duplicates()
    missing = table[(table["baseline"] == "allreduce") & (table["note"] != "")]
    missing = missing.merge(others.assign(compared=True), on=PLACE, how="left")
    rest = missing["compared"].notna()
    matters: list[tuple[Severity, str, pd.DataFrame]] = [
        ("error", "any reduction", missing[~rest]),
        ("warning", "what synchronising less often saves", missing[rest]),
    ]
    for severity, measured, own in matters:
        if len(own):
            yield finding(
                severity,
                f"nothing to measure {measured} against: {listed(own['note'].unique(), 3)}",
                own,
                "run allreduce on the same engine at these worker counts (--strategy allreduce)",
            )


@rule("the baseline allreduce is not slower than another per-batch strategy")
def weak_baseline(evidence: Evidence) -> Iterator[Finding]:
    """A reduction against a slow baseline overstates the effect of the synchronisation frequency."""
    table = evidence.ratios
    table = table[(table["strategy"] == "allreduce") & table["baseline"].isin(LIBRARY_BASELINES)]
    plain = table["label"] == "allreduce"  # with options it is a variant, and a baseline only where it ran alone
    alone = ~plain.groupby([table["execution"], table["engine"], table["workers"]]).transform("any").astype(bool)
    table = table[plain | alone]
    slower = table[(table["ratio_high"] < 1) & (table["workers"] > 1) & is_representative(table)]
    for name, own in slower.groupby("baseline", sort=False):
        worst = own.iloc[int(own["ratio"].to_numpy(dtype=float).argmin())]
        yield finding(
            "warning",
            f"allreduce is slower than {name}, by up to {percent(1 / worst['ratio'] - 1).lstrip('+')} of {name}'s "
            f"time at {worst['workers']} workers: a reduction against allreduce flatters",
            own,
            f"give the reduction against {name} as well",
        )


@rule("no efficiency lies above 1 by more than its interval, or without one above 1.2")
def superlinear(evidence: Evidence) -> Iterator[Finding]:
    """Efficiency above one needs an explanation: a slow base, less work at more workers, or caches."""
    table = evidence.ratios
    over = table[(table["baseline"] == "serial") & (table["workers"] > 1)]
    if len(over):
        unknown = over["efficiency_low"].isna() & (over["efficiency"] > _BEYOND_NOISE)
        over = over[(over["efficiency_low"] > 1) | unknown]
    if len(over):
        worst = over.iloc[int(over["efficiency"].to_numpy(dtype=float).argmax())]
        without = " without an interval" if pd.isna(worst["efficiency_low"]) else ""
        yield finding(
            "warning",
            f"efficiency is up to {worst['efficiency']:.2f}{without} ({worst['label']}, "
            f"{worst['workers']} workers), more than ideal",
            over,
            "say why: a slow base case, fewer steps at more workers, or caches; check the base first",
        )


@rule("every reduction against allreduce has a sign: its interval does not hold zero")
def unsettled(evidence: Evidence) -> Iterator[Finding]:
    """Rule 7 of the twelve: a difference within its interval is not established."""
    table = evidence.ratios
    headline = table[(table["baseline"] == "allreduce") & (table["workers"] > 1) & is_representative(table)]
    open_ = headline[(headline["reduction_low"] < 0) & (headline["reduction_high"] > 0)]
    for execution in dict.fromkeys(open_["execution"]):
        own = open_[open_["execution"] == execution]
        several = int((headline["execution"] == execution).sum())
        yield finding(
            "note",
            f"whether time is saved against allreduce is open in "
            f"{len(own)} of {counted(several, f'{execution} comparison')}: the interval of the reduction holds zero",
            own,
            "repeat measured times more often; calibrate virtual ones better",
        )
