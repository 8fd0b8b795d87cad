"""What virtual runs are charged by: measured once per study, kept beside its results, used again by later commands."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from scalebench.cluster.engine_costs import EngineCosts
from scalebench.cluster.spec import Cluster
from scalebench.errors import ClusterError, ResultsError
from scalebench.launch import engines
from scalebench.launch.engine_costs import measure_engine_costs
from scalebench.launch.preparation import Preparation
from scalebench.study.spec import Run, Study
from scalebench.virtual.calibration import measure_steps
from scalebench.virtual.engine import Scenery
from scalebench.virtual.stated import stated_table
from scalebench.virtual.step_times import StepTable
from scalebench.whole_file import write_whole

FILE = "calibration.json"
Note = Callable[[str], None]


class Calibration(BaseModel):
    """The numbers, and what they are numbers of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    tables: list[StepTable]
    engines: EngineCosts


def scenery_for(
    study: Study,
    cluster: Cluster,
    runs: list[Run],
    prepared: Preparation,
    *,
    folder: Path,
    cache: Path,
    host: str,
    note: Note = lambda _: None,
) -> Scenery:
    """The step times and engine costs for the virtual `runs`; measured unless `folder` holds them already.

    A study's own `calibration` file is taken as it is.
    """
    if cluster.compute != "this-machine" or study.device_step_time is not None:
        return _stated(study, cluster, runs, prepared, cache, note)
    if study.calibration is not None:
        return _from(cluster, read_calibration(study.calibration))
    workers = {run.workers for run in runs}
    sizes = prepared.batch_sizes(study.epochs, workers)
    key = _key(study, cluster, prepared, sizes, host)
    path = folder / FILE
    if path.exists():
        kept = read_calibration(path)
        if kept.key == key:
            return _from(cluster, kept)
    smallest = min(workers)
    tables = measure_steps(
        next(run for run in runs if run.workers == smallest),
        prepared.folders[smallest],
        sizes,
        min(max(workers), cluster.node.workers_per_node),
    )
    calibration = Calibration(key=key, tables=tables, engines=_engine_costs(cache, note))
    try:
        write_whole(path, calibration.model_dump_json(indent=1))
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror}") from None
    return _from(cluster, calibration)


def read_calibration(path: Path) -> Calibration:
    """A calibration that was kept.

    Raises:
        ClusterError: the file cannot be read or is none.
    """
    try:
        return Calibration.model_validate_json(path.read_text())
    except OSError as error:
        raise ClusterError(f"calibration: cannot read {path}: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError):
        raise ClusterError(
            f"calibration: {path} is not a calibration of this version; delete it or name another"
        ) from None


def _stated(study: Study, cluster: Cluster, runs: list[Run], prepared: Preparation, cache: Path, note: Note) -> Scenery:
    batch = max(prepared.plans[run.workers].batch_size for run in runs)
    # Another machine's engines were not measured: its network model alone is charged.
    costs = _engine_costs(cache, note) if cluster.compute == "this-machine" else EngineCosts()
    return Scenery(cluster, costs, [stated_table(study, cluster, batch)])


def _engine_costs(cache: Path, note: Note) -> EngineCosts:
    here = [name for name in ("mpi", "horovod", "gloo") if engines.available(name) is None]
    return measure_engine_costs(cache, here, note=note) if here else EngineCosts()


def _from(cluster: Cluster, calibration: Calibration) -> Scenery:
    return Scenery(cluster, calibration.engines, calibration.tables)


def _key(study: Study, cluster: Cluster, prepared: Preparation, sizes: set[int], host: str) -> str:
    import torch

    checksum = next(iter(prepared.datasets.values())).sha256
    parts = (
        host,
        torch.__version__,
        study.model,
        checksum,
        study.dtype,
        study.optimizer,
        study.threads_per_worker,
        sorted(sizes),
        cluster.node.workers_per_node,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
