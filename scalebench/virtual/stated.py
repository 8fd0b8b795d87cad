"""Step times that somebody stated, where they cannot be measured: another device's."""

from __future__ import annotations

from scalebench.cluster.spec import Cluster
from scalebench.study.spec import Training
from scalebench.virtual.step_times import BatchTimes, StepTable

# A backward pass does two matrix products for each one of the forward pass; the update is left out of the split.
FORWARD_SHARE, BACKWARD_SHARE = 1 / 3, 2 / 3


def stated_table(training: Training, cluster: Cluster, batch_size: int) -> StepTable:
    """The table of the study's `device_step_time` (of a full batch of `batch_size`), else of the cluster file.

    A stated step time is split 1:2 into forward and backward pass (an assumption) and taken as proportional to the
    samples of a batch. Stated times have no spread, so no jitter unless the study states one.
    """
    busy = cluster.node.workers_per_node
    seconds = training.device_step_time
    if seconds is not None:
        batches = [
            _batch(n, seconds * n / batch_size * FORWARD_SHARE, seconds * n / batch_size * BACKWARD_SHARE, 0.0)
            for n in sorted({1, batch_size})
        ]
        source = f"stated: {seconds:g} s a step of {batch_size} samples"
    else:
        entries = cluster.step_times_of(str(training.model), training.dtype)
        batches = [_batch(n, entry.forward_s, entry.backward_s, entry.update_s) for n, entry in sorted(entries.items())]
        source = f"cluster file {cluster.name}"
    return StepTable(source=source, busy_workers=busy, batches=batches, shuffle_s_per_sample=0.0, release=[], jitter=[])


def _batch(samples: int, forward: float, backward: float, update: float) -> BatchTimes:
    return BatchTimes(samples=samples, data_s=[0.0], forward_s=[forward], backward_s=[backward], update_s=[update])
