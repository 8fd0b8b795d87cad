"""Draw the timelines in the pages of the strategies: `python docs/_generate/timelines.py [NAME ...]`.

Every strategy runs on the same small virtual cluster with the same slow worker. The
step time is stated, not measured, so that every machine draws the same pictures.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.errors import RunError
from scalebench.figures.traced_run import draw_timeline
from scalebench.launch.hosts import reachable
from scalebench.launch.sweep import expand
from scalebench.pricing.machine import Machine, stated_table
from scalebench.strategies import registry
from scalebench.study.spec import Study
from scalebench.training.outcome import Timeline, timeline_from
from scalebench.virtual.engine import simulate

WORKERS = 4
# Options that show a rule within a few steps, unlike its defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "bmuf": {"steps": 4},
    "daso-fixed": {"global_skip": 4, "wait": 2},
    "daso-heat": {"warm_up_epochs": 1, "cool_down_epochs": 1},
    "diloco": {"steps": 4},
    "dssp": {"lower": 1, "upper": 4},
    "easgd": {"steps": 4},
    "elastic_bsp": {"lookahead": 4},
    "fedavg": {"fraction": 0.5},
    "fedprox": {"fraction": 0.5},
    "hierarchical_local_sgd": {"groups": {2: 2, 4: 6}},
    "hybrid": {"tensor": 2, "micro_batches": 3},
    "local_sgd": {"steps": 4},
    "noloco": {"steps": 4},
    "pipeline": {"stages": 4, "micro_batches": 6},
    "post_local_sgd": {"start": 6, "steps": 4},
    "slowmo": {"steps": 4},
    "sparse_loco": {"steps": 4},
    "ssp": {"staleness": 1},
    "streaming_diloco": {"steps": 4},
    "torch_hierarchical_local_sgd": {"groups": {2: 2, 4: 6}},
    "torch_local_sgd": {"period": 4},
    "torch_pipeline": {"stages": 4, "micro_batches": 6},
    "torch_post_local_sgd": {"start": 6, "period": 4},
}
# a layer for each stage, and the last one
MODELS = {name: [256, 128, 64] for name in ("pipeline", "torch_pipeline")}
EPOCHS = {"daso-heat": 3}  # warm-up, one epoch that cycles, cool-down


def timeline_of(name: str) -> Timeline:
    """Run strategy `name` on two nodes of two workers, one of which computes 1.5 times as long."""
    cluster = load_cluster("ethernet-10g")
    node = cluster.node.model_copy(update={"workers_per_node": 2, "cores": 2})
    cluster = cluster.model_copy(update={"node": node})
    study = Study.model_validate(
        {
            "name": "timelines",
            "strategies": [{name: OPTIONS.get(name, {})}],
            "workers": [WORKERS],
            "dataset": "wine",
            "model": {"mlp": {"hidden": MODELS.get(name, [256, 128])}},
            "epochs": EPOCHS.get(name, 2),
            "batch_per_worker": 6,
            "repetitions": 1,
            "execution": "virtual",
            "cluster": "ethernet-10g",
            "device_step_time": 1e-3,
            "virtual": {"slowdown": {2: 1.5}},
        }
    )
    run = expand(study, cluster, reachable()).runs[0].model_copy(update={"trace": True})
    dataset = open_dataset(prepare(study, run.workers))
    batch = BatchPlan.of(study, run.workers, run.seed, dataset).batch_size
    outcome, _ = simulate(
        run,
        dataset,
        Machine(cluster, EngineCosts(), [stated_table(study, cluster, batch)]),
    )
    if outcome.status != "completed":
        raise RunError(f"{name}: {outcome.error}")
    return timeline_from(
        run,
        outcome,
        "2 nodes of 2 workers, 10 Gbit/s Ethernet, a step of 1 ms (stated)",
    )


def draw_pages(folder: Path, names: list[str]) -> None:
    """Write `folder`/timelines/<name>.png for each of `names`."""
    (folder / "timelines").mkdir(parents=True, exist_ok=True)
    for name in names:
        with (
            tempfile.TemporaryDirectory() as scratch
        ):  # the pages show the picture only
            files = draw_timeline(timeline_of(name), Path(scratch) / name, ("png",))
            (folder / "timelines" / files[0].name).write_bytes(files[0].read_bytes())


if __name__ == "__main__":
    draw_pages(
        Path(__file__).parents[1] / "strategies", sys.argv[1:] or registry.names()
    )
