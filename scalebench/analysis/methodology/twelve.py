"""The twelve rules of Hoefler and Belli, and how each is kept: by a check, by construction, or by the author.

T. Hoefler, R. Belli: Scientific Benchmarking of Parallel Computing Systems: twelve ways to tell the masses when
reporting performance results. SC '15, doi:10.1145/2807591.2807644. Paraphrased.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """One of the twelve rules: `checked` by rules of `scalebench check`, kept `by_construction`, or left `to_you`."""

    number: int
    rule: str
    checked: tuple[str, ...] = ()
    by_construction: str = ""
    to_you: str = ""


TWELVE = (
    Kept(
        1,
        "Say what a speedup's base case is, and its absolute time.",
        ("speedup-base", "reduction-base", "weak-baseline", "superlinear"),
        "the base is always serial on one worker of the same execution; no ratio is printed without its baseline",
        "that the serial base is a good one: no model or library option would make it faster",
    ),
    Kept(
        2,
        "Say why only a part of a benchmark, or of the system, was used.",
        ("failed-runs", "retried-runs", "unfinished", "missing-epochs"),
        to_you="the reason for the worker counts, strategies, data and share of the machine that you chose",
    ),
    Kept(
        3,
        "Summarise costs by the arithmetic mean, rates by the harmonic one.",
        by_construction="no rate is summarised; of times the geometric mean (they are compared as ratios), the "
        "arithmetic mean and the median stand side by side in the table of cells",
    ),
    Kept(
        4,
        "Do not summarise ratios; summarise the times they are made of.",
        by_construction="a ratio of cells is the ratio of the mean times shown; ratios of different cells are never "
        "averaged",
    ),
    Kept(
        5,
        "Say whether values are deterministic; if not, give confidence intervals.",
        ("few-runs", "mixed-executions", "virtual-error", "still-wide"),
        "measured times and metrics have 95 % intervals; virtual ones are named for what their repetitions vary in",
    ),
    Kept(
        6,
        "Do not assume a normal distribution without looking.",
        ("odd-runs", "two-groups", "drift"),
        "times are compared on a log scale, tests are exact rank tests, every interval's coverage is simulated",
    ),
    Kept(
        7,
        "Compare nondeterministic values by sound statistics.",
        ("few-runs", "runs-apart", "unsettled"),
        "differences are paired by round, tests adjusted by Holm and offered only where they can reach their level",
    ),
    Kept(
        8,
        "Ask whether mean or median is what matters, or another percentile.",
        ("spread", "odd-runs"),
        "median and quartiles stand beside the means",
        "whether your question is about the typical run or the slowest one",
    ),
    Kept(
        9,
        "Document all factors, their levels and the complete set-up.",
        (
            *("mixed-configurations", "mixed-commits", "dirty-commit", "mixed-machines"),
            *("mixed-packages", "no-provenance", "frequency-scaling", "reduced-batch", "falling-steps"),
            *("untuned", "tuning-edge"),
        ),
        "the resolved study, machine, packages, environment and calibration are kept beside the rows",
        "what nothing in the machine knows: its cooling, the network's other traffic",
    ),
    Kept(
        10,
        "Say how parallel time was measured, synchronised and summarised.",
        (
            "clock-resolution",
            "short-runs",
            "warm-up",
            "oversubscribed",
            "disturbed",
            "busy-machine",
            "trimmed-memory",
            "retrained-blocks",
        ),
        "a barrier before the first step, a monotonic clock on each rank, the time of the last worker to end; "
        "evaluation outside",
    ),
    Kept(
        11,
        "Show upper bounds, so that results can be judged.",
        ("superlinear", "few-steps"),
        "ideal scaling is drawn in every scaling figure; few steps between synchronisations bound the saving",
        "the bound your machine sets: its peak, or a model of the network",
    ),
    Kept(
        12,
        "Plot what is needed to interpret; join points only where a line means something.",
        ("mixed-executions", "metric", "time-to-target", "metric-cost", "at-chance"),
        "intervals at every point, executions drawn differently and never joined, the drawn numbers beside each figure",
        "the caption: it has to stay with the figure",
    ),
)
