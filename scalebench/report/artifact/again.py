"""What runs that are made again are expected to give, by how their times were obtained."""

from __future__ import annotations

from collections.abc import Sequence

from scalebench.report.artifact.shipping import Shipment

_EQUAL = (
    "give the same times and metrics, to the last bit on the same processor and build of PyTorch, and up to rounding "
    "on another."
)
_MACHINE = (
    "on the one described below they are expected within the intervals shown, on another the order of the strategies "
    "and the direction of the differences are what can be compared. Metrics vary with the order of sums only."
)


def expected_again(executions: Sequence[str], shipment: Shipment) -> tuple[str, ...]:
    """A sentence or two for each of the `executions`."""
    said = {
        "virtual": _virtual(shipment),
        "paced": f"Paced times hold the stated compute and the communication of the machine: {_MACHINE}",
        "native": f"Native times depend on the machine: {_MACHINE}",
    }
    return tuple(said[execution] for execution in executions if execution in said)


def _virtual(shipment: Shipment) -> str:
    if shipment.has_calibration:
        return f"Virtual runs that are run again with the calibration in the artifact {_EQUAL}"
    if shipment.is_stated:
        return (
            "Step times and network of the virtual runs are stated, by the study and its cluster, and nothing of them "
            f"is measured: run again, on whatever machine, they {_EQUAL}"
        )
    return (
        "The calibration of the virtual runs is not among the records: run again, they have the metrics of the records "
        "and the times of the machine that runs them."
    )
