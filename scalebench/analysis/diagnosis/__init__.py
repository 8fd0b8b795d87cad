"""Faults of machine and set-up that a study's rows show: slow workers and nodes, clocks, cores, the network."""

from scalebench.analysis.diagnosis.clocks import clocks_apart, throttled_cores, throttled_gpus
from scalebench.analysis.diagnosis.network import slow_network
from scalebench.analysis.diagnosis.placement import busy_cores, oversubscribed_cores, unbound_workers
from scalebench.analysis.diagnosis.symptom import Symptom
from scalebench.analysis.diagnosis.workers import slow_nodes, slow_workers
from scalebench.analysis.loading import Results

LOOKS = (
    slow_nodes,
    slow_workers,
    throttled_cores,
    throttled_gpus,
    oversubscribed_cores,
    busy_cores,
    unbound_workers,
    slow_network,
    clocks_apart,
)


def diagnose(results: Results) -> list[Symptom]:
    """Return the symptoms in the completed runs of `results`."""
    return [found for look in LOOKS for found in look(results)]


__all__ = ["LOOKS", "Symptom", "diagnose"]
