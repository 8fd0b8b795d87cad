"""The page docs/records.md, the data dictionary: `python docs/_generate/records.py`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from pydantic import BaseModel

from scalebench.records.schema import ENVIRONMENT_COLUMNS, SCHEMA_VERSION, Doc, EpochRow, RunRow, kinds

_WAITING = """\
`wait_s` is the part of `comm_s` in which a worker stands still because another has not done its part yet. Moving
bytes, merging, a server's own work and the way of a message are not waiting. The rule is the same for virtual and for
real workers. With t: when the worker began to stand still, d: when it could go on, u: when what it stood still for was
there, it waited min(max(u - t, 0), d - t) seconds:
"""
_UNTIL = {  # communication: (u, what is not waiting)
    "collective (allreduce, broadcast, barrier ...)": (
        "when the last member of the group has come",
        "the operation from then on",
    ),
    "one that does not block": (
        "the same; t is when the worker needs the result",
        "what compute hides, and the rest of the operation",
    ),
    "receiving a message": ("when the other begins to send it", "its way"),
    "sending a message": (
        "when the other begins to receive it; what is buffered is over at once",
        "handing it over",
    ),
    "lock of a shared vector (`epoch_async`, `ad_psgd`)": (
        "when the one before has left it",
        "locking, fetching, storing, unlocking",
    ),
    "request to a server (`bsp`, `asp`, `ssp` ...)": (
        "t + max(f - t, 0) + (r - b): the server was done with what came before at f, took this request up at b, and "
        "at r the one upon which its rule let the reply go",
        "the way there and back, and the server's work",
    ),
}
_WHO_WAITS = """\
In lockstep a fast worker waits for as long as the slowest one computes longer; under `asp` only while the server is at
others' requests; under `ssp` while its lead exceeds the bound; in `gossip` for its partner. In a run's `wait_s` and
`comm_s` who is at the end before the last one waits for it; an epoch's row holds what lies before the epoch's end.
Virtual messages are always buffered.

Real workers write down when they came and went, and are compared after the run. All moments have to be of one clock:
`wait_s` is known on one node and empty on several. It is empty too where communication is hidden inside the backward
pass (`ddp`, `adasum` on Horovod). With several `shards` the slowest of the servers counts. A real request counts as
there when it is sent: part of its way may lie in the queue behind others' requests.
"""


_CALLS = """\
`syncs` counts how often replicas synchronised; `collective_calls` counts how often a real run called the engine's
collectives for it. One call carries one synchronisation, whatever is averaged and weighted in it, except:

- An average of more than 8 MiB x K, K workers: to divide all of it once it is there would take longer. By `mpi` and
  `horovod` it goes in pieces of 8 MiB x K, one after the other, each divided while it is in the cache; by `gloo` in two
  halves, the first of which is divided while the second travels.
- Where what is averaged together does not lie side by side. Parameters, floating-point buffers and SGD's momentum do,
  in this order, and go as one from where they lie. Apart lie Adam's moments, momentum where the buffers between it
  and the parameters are not averaged, a buffer of another dtype and one that the model's forward pass replaces by a
  new tensor: each piece of more than 1 MiB then goes from where it lies, in a call or in pieces, for to copy it takes
  longer than a call; the rest goes as one vector.
- Sums in half precision by `mpi`, which has none: two calls (every worker adds its share of what all send, then the
  sums are gathered) where the workers' numbers together exceed 1 MiB, else one.
- Rows that change workers (`shuffle`) are no synchronisation, but calls: one for the samples and one for their labels,
  by `mpi` and `gloo` each after one for how many.
- `ddp`: an allreduce for each bucket of gradients, as torch logs them; PowerSGD: three for its one bucket. A model's
  buffers (BatchNorm) are one more synchronisation a step, a broadcast for each of their dtypes.

Messages (`gossip`, `aggregation: master`, `collective: tree`, `adasum` on `mpi`), accesses to a shared model and
requests to a server are synchronisations without such a call. The cell is empty where nobody knows: virtual runs, in
which nothing is called; Horovod's own optimizer, which fuses what is ready at each of its cycles;
`torch_post_local_sgd`; and `ddp` in runs without warm-up that are too short for torch to log its buckets.
"""


_ENERGY = """\
`energy_j` is counted from the barrier before the first step to the last worker's end, in `native` runs only.
`energy_source` names what counted it:

- `rapl`: the processors of all nodes of the run, and their memory where it is counted apart
  (`/sys/class/powercap/intel-rapl:*/energy_uj`, which root has to let users read). It holds the whole node: idle cores,
  ranks that sleep and other programs too.
- `nvml`: the GPUs of the run, one for each worker. `rapl+nvml` is the sum of both.
- `slurm`: where neither can be read, what Slurm's accounting counted for the job meanwhile (`sstat`,
  `ConsumedEnergyRaw`), in the steps of its `JobAcctGatherFrequency`.

Where a node or a GPU of the run cannot be read both cells are empty; the processors of a run on GPUs may be missing,
and then the source says `nvml`. Paced and virtual runs have none: what they take here is not what a device would take.
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
            "A study's folder `results/<study>/` holds `runs.csv`, `epochs.csv`, `study.yaml` (what was run, resolved)",
            "and `provenance/` (one JSON file per launch environment). Rows are appended and never rewritten. A run's",
            "epoch rows are written first; its row in `runs.csv` commits them. An empty cell means *not measured*,",
            "never zero. Text that a spreadsheet would take for a formula is preceded by an apostrophe.",
            "",
            "What provenance/ tells of processor, memory, GPUs and network is that of the node on which the command",
            "ran; where real processes ran on others, `nodes` in it tells the same of each node that they used.",
            "",
            "The same study with the same calibration gives the same virtual rows after sorting, bit for bit on one",
            "machine and build of torch, apart from what tells when and where they were computed:",
            *textwrap.wrap(f"{_listed(ENVIRONMENT_COLUMNS)}, and `attempt` where a run failed before.", 118),
            "",
            "## runs.csv: one row per run and attempt",
            "",
            *_dictionary(RunRow),
            "",
            "## epochs.csv: one row per run, attempt and epoch",
            "",
            *_dictionary(EpochRow),
            "",
            "## What counts as a synchronisation, and as a call",
            "",
            _CALLS,
            "## What counts as energy",
            "",
            _ENERGY,
            "## What counts as waiting",
            "",
            _WAITING,
            "| communication | u | not waiting |",
            "|---|---|---|",
            *(f"| {what} | {until} | {rest} |" for what, (until, rest) in _UNTIL.items()),
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
        lines.append(f"| `{name}` | {kind_of[name]} | {column.unit} | {column.meaning} |")
    return lines


if __name__ == "__main__":
    page = Path(__file__).parents[1] / "records.md"
    page.write_text(data_dictionary_markdown(), encoding="utf-8")
