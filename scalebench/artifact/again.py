"""What runs that are made again are expected to give, by how their times were obtained and what strategies ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scalebench.artifact.shipping import Shipment
from scalebench.strategies.registry import is_deterministic

_EQUAL = (
    "give the same times and metrics, to the last bit on the same processor and build of PyTorch, and up to rounding "
    "on another."
)
_MACHINE = (
    "on the one described below they are expected within the intervals shown, on another the order of the strategies "
    "and the direction of the differences are what can be compared."
)


def expected_again(strategies: Mapping[str, Iterable[str]], shipment: Shipment) -> tuple[str, ...]:
    """A sentence or more for each execution, in which the named `strategies` ran."""
    said = []
    for execution, names in strategies.items():
        racing = [name for name in dict.fromkeys(names) if not is_deterministic(name)]
        only = len(racing) == len(set(names))
        if execution == "virtual":
            said.append(_virtual(shipment, racing, only))
        if execution == "paced":
            begin = "Paced times hold the stated compute and the communication of the machine"
            said.append(f"{begin}: {_MACHINE} {_metrics(racing, only)}")
        if execution == "native":
            said.append(f"Native times depend on the machine: {_MACHINE} {_metrics(racing, only)}")
    return tuple(said)


def _metrics(racing: list[str], only: bool) -> str:
    arriving = "vary with the order in which workers arrive, which no seed fixes"
    if not racing:
        return "Metrics vary with the order of sums only."
    if only:
        return f"Metrics {arriving}."
    return f"Metrics vary with the order of sums only; those of {_and(racing)} {arriving}."


def _virtual(shipment: Shipment, racing: list[str], only: bool) -> str:
    if shipment.has_calibration:
        return f"Virtual runs that are run again with the calibration in the artifact {_EQUAL}"
    if shipment.is_stated:
        return (
            "Step times and network of the virtual runs are stated, by the study and its cluster, and nothing of them "
            f"is measured: run again, on whatever machine, they {_EQUAL}"
        )
    lost = "The calibration of the virtual runs is not among the records: run again, they have"
    times = "the times of the machine that runs them"
    if only:
        return f"{lost} {times}, and metrics that vary with these, as the order in which workers arrive does."
    if racing:
        times += (
            f"; only the metrics of {_and(racing)} vary with these times, as the order in which workers arrive does"
        )
    return f"{lost} the metrics of the records and {times}."


def _and(names: list[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
