"""The page docs/records.md, the data dictionary: `python docs/_generate/records.py`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from pydantic import BaseModel

from scalebench.records.schema import (
    ENVIRONMENT_COLUMNS,
    SCHEMA_VERSION,
    Doc,
    ElasticRow,
    EpochRow,
    RunRow,
    kinds,
)

_WAITING = """\
`wait_s` is the part of `comm_s` in which a worker is idle because another one is not ready. Transfer, merging, and the
work of a server are not waiting. The rule is the same for virtual and real workers: a worker that is blocked from time
t to time d, by a partner that is ready at time u, waits min(max(u - t, 0), d - t) seconds:
"""
_UNTIL = {  # communication: (u, what is not waiting)
    "collective (allreduce, broadcast, barrier ...)": (
        "arrival of the last member of the group",
        "the operation itself",
    ),
    "non-blocking collective": (
        "the same; t is the time at which the worker needs the result",
        "the part hidden by compute, and the operation itself",
    ),
    "receiving a message": ("start of sending", "the transfer"),
    "sending a message": (
        "start of receiving; at once if buffered",
        "the transfer",
    ),
    "lock of a shared vector (`epoch_async`, `ad_psgd`)": (
        "release by the previous worker",
        "locking, fetching, storing, unlocking",
    ),
    "request to a server (`bsp`, `asp`, `ssp` ...)": (
        "t + max(f - t, 0) + (r - b): the server finished earlier requests at f, started this one at b, and at r the "
        "one upon which its rule released the reply",
        "the transfer in both directions, and the server's work",
    ),
}
_WHO_WAITS = """\
In lockstep a fast worker waits for the slowest one; under `asp` only while the server handles other requests; under
`ssp` while its lead exceeds the bound; in `gossip` for its partner. In a run's `wait_s` and `comm_s`, idle time between
a worker's end and that of the last worker counts as waiting; an epoch's row holds the time before its end.
Virtual messages are always buffered.

`bubble_s` is the part of `wait_s` in which a stage of a pipeline has no micro-batch: it waits for activations of the
stage before it, or for gradients of the one after it, or has ended before the others. It is measured, not a formula.

Real workers log the start and end of each operation, and the logs are compared after the run. The times need one clock:
`wait_s` is known on one node and empty on several. It is also empty if communication is hidden inside the backward
pass (`ddp`, `adasum` on Horovod). With several `shards` the slowest server counts. A real request is ready when it is
sent: part of its transfer may overlap with the queue.
"""


_CALLS = """\
`syncs` is the number of synchronisations of the replicas, `collective_calls` the number of calls of the engine's
collectives in a real run. One call carries one synchronisation, except:

- Averages of more than 8 MiB x K at K workers: `mpi` and `horovod` send pieces of 8 MiB x K, each divided while it is
  in the cache; `gloo` sends two halves and divides the first during the transfer of the second.
- State that is not contiguous. Parameters, floating-point buffers and SGD's momentum are contiguous in this order and
  need one call. Separate are Adam's moments, momentum if the buffers between it and the parameters are not averaged,
  buffers of another dtype, and buffers that the forward pass replaces by new tensors: a separate piece of more than
  1 MiB is sent from its place, in one call or in pieces, as a copy takes longer than a call; smaller pieces are copied
  to one vector.
- Sums in half precision by `mpi`, which lacks them: two calls (each worker sums its share of all contributions, then
  the sums are gathered) above 1 MiB of all workers' numbers together, else one.
- Rows exchanged between workers (`shuffle`) count as calls, not as synchronisations: one for the samples and one for
  the labels, by `mpi` and `gloo` each after one for their number.
- `ddp`: an allreduce for each bucket of gradients, as torch logs them; PowerSGD: three for its one bucket. A model's
  buffers (BatchNorm) are one more synchronisation a step, a broadcast for each of their dtypes.

Messages (`gossip`, `aggregation: master`, `collective: tree`, `adasum` on `mpi`), accesses to a shared model and
requests to a server are synchronisations without such a call. The cell is empty if the number is unknown: virtual runs,
Horovod's own optimizer, which fuses ready tensors at each cycle, `torch_post_local_sgd`, and `ddp` in runs without
warm-up that are too short for torch to log its buckets.
"""


_ENERGY = """\
`energy_j` is counted from the barrier before the first step to the last worker's end, in `native` runs only.
`energy_source` names the counter:

- `rapl`: the processors of all nodes of the run, and their memory where it is counted apart
  (`/sys/class/powercap/intel-rapl:*/energy_uj`, which root has to make readable). It covers the whole node, idle
  cores, sleeping ranks and other programs included.
- `nvml`: the GPUs of the run, one for each worker. `rapl+nvml` is the sum of both.
- `slurm`: if neither can be read, the job's energy during the run in Slurm's accounting (`sstat`,
  `ConsumedEnergyRaw`), in steps of its `JobAcctGatherFrequency`. A job step has the energy of its nodes, so that
  `batch`, `extern` and `0` on one node have all the same: the step that took most counts, not the sum.

Both cells are empty if a node or a GPU of the run cannot be read; with unreadable processors, a run on GPUs has the
source `nvml`. Paced and virtual runs have no energy: the energy used here is not that of the stated device.
"""


_ELASTIC = """\
`scalebench run --elastic` makes [runs that go on when a worker dies](clusters.md#elastic-runs). Their times hold what
was lost, so that no figure, law, ratio or check reads this table; the report shows it. The columns `interrupted_...`
list a value for each interruption, the first one first; `null` is a rank that the launcher did not name.
"""


_COST = """\
`cost_core_hours` and `cost_gpu_hours` are what the training holds of a machine, in every execution: the cores in which
the workers compute (`workers` x `threads_per_worker`) and, where they compute on GPUs, one GPU for each, from the
barrier before the first step to the last worker's end. Of a virtual run they are those of the virtual cluster.
Not counted are processes of parameter servers, idle cores of a node, evaluation, and start and warm-up of processes;
whole nodes cost `train_s` x `nodes` x the cores of a node.
"""
_WORKERS = """\
Columns that begin with `worker_` list a value for each worker of a real run, worker 0 first; `null` is one that was not
measured. `scalebench diagnose` reads them.

- `worker_mhz_before` is read after the warm-up steps, when the cores have been busy for a while, and `worker_mhz_after`
  when training has ended: by cpufreq (`scaling_cur_freq`), else from /proc/cpuinfo. Most virtual machines report a
  constant.
- `worker_throttles` is counted by the kernel (`thermal_throttle/`), which most virtual machines leave out.
- `worker_gpu_mhz_before`, `worker_gpu_mhz_after` and `worker_gpu_slowdowns` are read by NVML, the reasons after each
  epoch and at the end: `power-cap` (the limit of its power), `thermal`, `power-brake` (the power supply), `hardware`.
- `worker_clock_offset_s` is measured before training by ten exchanges with worker 0, of which the shortest counts: a
  worker that answers with its time T between t0 and t1 is ahead by T - (t0 + t1) / 2, within (t1 - t0) / 2
  (`worker_clock_error_s`). Traces of several nodes are corrected by the offsets of the clocks that measure durations,
  which are found in the same exchanges.
"""


def data_dictionary_markdown() -> str:
    """Return the page docs/records.md."""
    return "\n".join(
        [
            "# The records",
            "",
            f"Schema version {SCHEMA_VERSION}. This page is generated from the row models in",
            "`scalebench/records/schema.py`; a test keeps it equal to them.",
            "",
            "A study's folder `results/<study>/` holds `runs.csv`, `epochs.csv`, `elastic.csv` of elastic runs,",
            "`study.yaml` (what was run, resolved) and `provenance/` (one JSON file per launch environment). Rows are",
            "appended and never rewritten. A run's epoch rows are written first; its row in `runs.csv` commits them.",
            "An empty cell means *not measured*, never zero. Text that a spreadsheet would take for a formula is",
            "preceded by an apostrophe.",
            "",
            "provenance/ describes processor, memory, GPUs and network of the node on which the command ran; if real",
            "processes ran on other nodes, its key `nodes` describes each of them.",
            "",
            "The same study with the same calibration gives the same virtual rows after sorting, bit for bit on one",
            "machine and build of torch, apart from the columns on the time and place of their computation:",
            *textwrap.wrap(
                f"{_listed(ENVIRONMENT_COLUMNS)}, and `attempt` where a run failed before.",
                118,
            ),
            "",
            "## runs.csv: one row per run and attempt",
            "",
            *_dictionary(RunRow),
            "",
            "## epochs.csv: one row per run, attempt and epoch",
            "",
            *_dictionary(EpochRow),
            "",
            "## elastic.csv: one row per elastic run and attempt",
            "",
            _ELASTIC,
            *_dictionary(ElasticRow),
            "",
            "## Synchronisations and calls",
            "",
            _CALLS,
            "## Workers",
            "",
            _WORKERS,
            "## Energy",
            "",
            _ENERGY,
            "## Cost",
            "",
            _COST,
            "## Waiting",
            "",
            _WAITING,
            "| communication | u | not waiting |",
            "|---|---|---|",
            *(
                f"| {what} | {until} | {rest} |"
                for what, (until, rest) in _UNTIL.items()
            ),
            "",
            _WHO_WAITS.rstrip("\n"),
            "",
        ]
    )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _dictionary(row_type: type[BaseModel]) -> list[str]:
    lines = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    kind_of = kinds(row_type)
    for name, field in row_type.model_fields.items():
        column = next(item for item in field.metadata if isinstance(item, Doc))
        lines.append(
            f"| `{name}` | {kind_of[name]} | {column.unit} | {column.meaning} |"
        )
    return lines


if __name__ == "__main__":
    page = Path(__file__).parents[1] / "records.md"
    page.write_text(data_dictionary_markdown(), encoding="utf-8")
