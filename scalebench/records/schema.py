"""Columns of runs.csv (one tidy row per run and attempt), epochs.csv (one per run, attempt and epoch) and elastic.csv.

Names are snake_case with SI units at their end. A value that was not measured is None
and becomes an empty cell, never zero. Statistics are computed from these rows and never
stored. The data dictionary in the documentation is generated from the models.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from scalebench.study.choices import EngineName, Execution

SCHEMA_VERSION = 1

# Columns of a virtual run that depend on when and where it was computed, not on the
# study and its calibration.
ENVIRONMENT_COLUMNS = (
    "eval_s",
    "peak_rss_mib",
    "started_utc",
    "host_hash",
    "git_commit",
    "git_dirty",
    "packages_hash",
    "scheduler_job_id",
    "provenance",
)

# in the column worker_gpu_slowdowns, beside other reasons
NOT_SLOWED, POWER_CAP = (
    "none",
    "power-cap",
)

Status = Literal["completed", "failed", "diverged", "timeout", "interrupted"]
Kind = Literal["text", "integer", "number", "flag"]


@dataclass(frozen=True)
class Doc:
    """Meaning of a column and unit of its numbers (empty for a count, a name or a ratio)."""

    meaning: str
    unit: str = ""


def _as_json(value: Any) -> Any:
    return (
        json.dumps(value, sort_keys=True, default=str)
        if isinstance(value, dict | list)
        else value
    )


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunRow(_Row):
    """One attempt at a run."""

    schema_version: Annotated[int, Doc("version of this table")] = SCHEMA_VERSION
    study: Annotated[str, Doc("name of the study")]
    run_id: Annotated[
        str, Doc("name of the run within its study; the same for every attempt")
    ]
    config_hash: Annotated[
        str, Doc("hash of everything that determines the result of the run")
    ]
    attempt: Annotated[int, Doc("1 for the first try; the latest attempt counts")]
    status: Annotated[
        Status,
        Doc(
            "completed, failed, diverged (loss became NaN or infinite), timeout, interrupted"
        ),
    ]
    error: Annotated[
        str | None, Doc("reason why the run was not completed, one line")
    ] = None

    execution: Annotated[
        Execution,
        Doc("way in which the number was obtained; ratios never mix two of them"),
    ]
    engine: Annotated[Literal["virtual", EngineName], Doc("communication engine")]
    oversubscribed: Annotated[
        bool,
        Doc("more workers x (compute + progress threads) than cores: never a baseline"),
    ]
    paced_overrun: Annotated[
        float | None,
        Doc(
            "share of steps that were slower than the pace; above 0.01 the run is oversubscribed"
        ),
    ] = None
    launcher: Annotated[
        str | None, Doc("launcher of the processes; of tasks their backend")
    ] = None
    blocks_retrained: Annotated[
        int | None,
        Doc(
            "of tasks: blocks that were trained again, as the process that had them died"
        ),
    ] = None
    malloc_trim_bytes: Annotated[
        int | None,
        Doc(
            "of tasks: MALLOC_TRIM_THRESHOLD_ of their processes, where set; low, it slows torch",
            "bytes",
        ),
    ] = None
    binding: Annotated[str | None, Doc("binding of processes to cores")] = None
    cluster: Annotated[str, Doc("cluster used, or stood for by a virtual run")]
    cluster_sha256: Annotated[
        str | None, Doc("checksum of the cluster file, if user-supplied")
    ] = None

    strategy: Annotated[str, Doc("strategy by which the replicas synchronise")]
    strategy_options: Annotated[
        str,
        BeforeValidator(_as_json),
        Doc("strategy options as written, JSON with sorted keys"),
    ] = "{}"
    strategy_sha256: Annotated[
        str | None, Doc("checksum of the strategy file, if user-supplied")
    ] = None
    sync_every: Annotated[
        int | None, Doc("sync units between two synchronisations")
    ] = None
    sync_unit: Annotated[
        str | None, Doc("unit of sync_every: batch, epoch or none")
    ] = None
    averaged_state: Annotated[
        str | None, Doc("averaged state: parameters, + buffers, + optimizer")
    ] = None
    optimizer_state_policy: Annotated[
        str | None, Doc("optimizer state at a synchronisation: keep, average, reset")
    ] = None
    merge_policy: Annotated[
        str | None, Doc("rule that combines replicas: mean, half, inverse_k ...")
    ] = None

    model: Annotated[str, Doc("model with its options")]
    model_sha256: Annotated[
        str | None, Doc("checksum of the model file, if user-supplied")
    ] = None
    init_weights_sha256: Annotated[
        str | None, Doc("checksum of the file of initial weights, if one was given")
    ] = None
    parameters: Annotated[int | None, Doc("trainable parameters of the model")] = None
    dtype: Annotated[
        str, Doc("floating-point type of the training: float32, float64, bfloat16")
    ]
    dataset: Annotated[str, Doc("data set with its options")]
    dataset_sha256: Annotated[str | None, Doc("checksum of the data")] = None
    n_train: Annotated[int | None, Doc("training samples, all workers together")] = None
    n_test: Annotated[
        int | None,
        Doc("samples of the held-out split; of a trial, of the validation split"),
    ] = None
    partition: Annotated[
        str, Doc("distribution of samples over workers: iid, dirichlet, by order")
    ]
    shuffle: Annotated[
        str,
        Doc(
            "permutation between epochs: none, in_block, rotate_blocks, pairwise, global"
        ),
    ]

    workers: Annotated[int, Doc("workers: replicas of the model, or parts of replicas")]
    data_parallel: Annotated[
        int | None, Doc("replicas: workers / (pipeline_parallel x tensor_parallel)")
    ] = None
    pipeline_parallel: Annotated[
        int | None, Doc("stages of a replica, each of consecutive layers")
    ] = None
    tensor_parallel: Annotated[
        int | None, Doc("workers that share the layers of a stage")
    ] = None
    micro_batches: Annotated[
        int | None, Doc("pieces into which a replica cuts its batch")
    ] = None
    nodes: Annotated[int | None, Doc("nodes of the workers")] = None
    workers_per_node: Annotated[int | None, Doc("workers on the fullest node")] = None
    threads_per_worker: Annotated[int | None, Doc("compute threads of one worker")] = (
        None
    )
    device: Annotated[str | None, Doc("device of one worker")] = None
    scaling: Annotated[
        Literal["strong", "weak"],
        Doc("strong: samples per epoch fixed; weak: samples per worker fixed"),
    ]
    batch_policy: Annotated[
        Literal["per_worker", "global"],
        Doc("batch that is kept when the worker count changes"),
    ]
    batch_per_worker: Annotated[
        int | None, Doc("samples in one worker's batch, after reducing it to the shard")
    ] = None
    batch_global: Annotated[
        int | None, Doc("samples in one optimizer step of all workers")
    ] = None
    lr: Annotated[float, Doc("learning rate as written, before lr_policy")]
    lr_policy: Annotated[
        str,
        Doc(
            "constant, linear (in the worker count, with warm-up), cosine, step, optimizer_steps"
        ),
    ]
    optimizer: Annotated[str, Doc("optimizer with its options")]
    epochs: Annotated[int, Doc("requested epochs")]
    steps_per_epoch: Annotated[
        int | None, Doc("optimizer steps of one worker in one epoch")
    ] = None
    seed: Annotated[int, Doc("seed of weights, batches and jitter")]
    repetition: Annotated[
        int, Doc("0-based; runs that differ in nothing else are repetitions")
    ]
    run_order: Annotated[
        int,
        Doc("0-based place in the interleaved order; runs added later go on from it"),
    ]
    warmup: Annotated[bool, Doc("warm-up run: recorded, excluded from statistics")] = (
        False
    )
    trial: Annotated[
        int | None,
        Doc(
            "0-based trial of tuning, on a validation split of the training samples; empty: a run"
        ),
    ] = None
    tuned: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("values given by tuning, JSON object; empty without tuning"),
    ] = None
    warmup_steps: Annotated[
        int | None, Doc("steps before the clock started, in no time")
    ] = None

    optimizer_steps: Annotated[int | None, Doc("optimizer steps, largest worker")] = (
        None
    )
    syncs: Annotated[int | None, Doc("synchronisations made by the strategy")] = None
    collective_calls: Annotated[
        int | None,
        Doc("calls of the engine's collectives (see below), worker 0; virtual: empty"),
    ] = None
    bytes_sent_per_worker: Annotated[
        float | None,
        Doc("payload handed to the communicator, mean over workers", "bytes"),
    ] = None
    train_s: Annotated[
        float | None,
        Doc(
            "time from the barrier before the first step to the last worker's end, without evaluation",
            "s",
        ),
    ] = None
    compute_s: Annotated[
        float | None, Doc("forward, backward and update, mean over workers", "s")
    ] = None
    comm_s: Annotated[
        float | None, Doc("communication not hidden by compute, mean over workers", "s")
    ] = None
    hidden_comm_s: Annotated[
        float | None,
        Doc(
            "communication hidden by compute, mean over workers; virtual and modelled runs only",
            "s",
        ),
    ] = None
    wait_s: Annotated[
        float | None,
        Doc(
            "part of comm_s spent waiting for others (see below), mean; real runs: on one node only",
            "s",
        ),
    ] = None
    bubble_s: Annotated[
        float | None,
        Doc(
            "part of wait_s for other stages of the replica (see below), mean; empty without stages",
            "s",
        ),
    ] = None
    straggler_factor: Annotated[
        float | None,
        Doc(
            "compute_s per optimizer step, of the slowest worker over the mean of all that took one; empty where "
            "compute_s is"
        ),
    ] = None
    worker_step_s: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "compute_s per optimizer step of each worker, JSON list; real runs: empty where compute_s is",
            "s",
        ),
    ] = None
    data_s: Annotated[
        float | None, Doc("fetching batches and shuffling, mean over workers", "s")
    ] = None
    other_s: Annotated[
        float | None,
        Doc(
            "remainder: compute + comm + data + other = training time of a worker, mean",
            "s",
        ),
    ] = None
    eval_s: Annotated[
        float | None, Doc("evaluating the consensus model, outside train_s", "s")
    ] = None

    worker_weights: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "weight of each worker's training in the final model, JSON list (asynchronous merges only)"
        ),
    ] = None
    staleness_histogram: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "JSON object: staleness of a push or merge, counted in updates of others -> how often (asynchronous)"
        ),
    ] = None
    lead_histogram: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "JSON object: a worker's lead over the slowest at a push, in steps -> how often (parameter servers)"
        ),
    ] = None
    final_train_loss: Annotated[
        float | None, Doc("training loss of the last epoch, mean over workers")
    ] = None
    metric_name: Annotated[
        Literal["accuracy", "r2"] | None, Doc("metric of the metric columns")
    ] = None
    chance_metric: Annotated[
        float | None,
        Doc(
            "metric of a constant prediction: share of the most frequent test class; R2 of 0"
        ),
    ] = None
    final_metric: Annotated[
        float | None,
        Doc("metric of the consensus model on the held-out split, at the end"),
    ] = None
    final_train_metric: Annotated[
        float | None,
        Doc(
            "metric of the same model on training samples, as many as are held out, spread evenly over the training set"
        ),
    ] = None
    best_metric: Annotated[float | None, Doc("best evaluation during training")] = None
    target_metric: Annotated[
        float | None, Doc("metric to reach, if the study states one")
    ] = None
    time_to_target_s: Annotated[
        float | None,
        Doc(
            "training time until target_metric was reached; empty with a stated target: never reached",
            "s",
        ),
    ] = None
    epochs_to_target: Annotated[
        int | None, Doc("epochs until target_metric was reached")
    ] = None

    peak_rss_mib: Annotated[
        float | None,
        Doc("largest resident memory of a worker process in training", "MiB"),
    ] = None
    peak_device_mib: Annotated[
        float | None, Doc("largest memory taken on a device in training", "MiB")
    ] = None
    energy_j: Annotated[
        float | None, Doc("energy of the training, native runs (see below)", "J")
    ] = None
    energy_source: Annotated[
        str | None, Doc("source of the energy: rapl, nvml, rapl+nvml or slurm")
    ] = None
    cost_core_hours: Annotated[
        float | None,
        Doc("train_s x workers x threads_per_worker / 3600 (see below)", "core-hours"),
    ] = None
    cost_gpu_hours: Annotated[
        float | None,
        Doc(
            "train_s x GPUs of the workers, one each, / 3600; empty without GPUs",
            "GPU-hours",
        ),
    ] = None
    others_load: Annotated[
        float | None,
        Doc(
            "share of cores used by other programs meanwhile, busiest node; virtual: during calibration"
        ),
    ] = None
    worker_nodes: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("node of each worker, as host_hash, JSON list; real runs"),
    ] = None
    worker_cores: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("cores that each worker may use (0-3,8), JSON list; real runs"),
    ] = None
    worker_mhz_before: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "clock rate of each worker's cores before training, after the warm-up, JSON list; real runs",
            "MHz",
        ),
    ] = None
    worker_mhz_after: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("the same right after training, JSON list", "MHz"),
    ] = None
    worker_throttles: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "times that the most throttled core of each worker was throttled during training, JSON list; real runs"
        ),
    ] = None
    worker_gpu_mhz_before: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "clock rate of each worker's GPU before training, after the warm-up, JSON list; by NVML",
            "MHz",
        ),
    ] = None
    worker_gpu_mhz_after: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("the same right after training, JSON list", "MHz"),
    ] = None
    worker_gpu_slowdowns: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "why each worker's GPU was clocked down during training (power-cap, thermal, ..., none), JSON list"
        ),
    ] = None
    worker_clock_offset_s: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "time of day of each worker's node less that of worker 0's, JSON list; real runs on several nodes",
            "s",
        ),
    ] = None
    worker_clock_error_s: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("most that each of these offsets can be wrong, JSON list", "s"),
    ] = None
    calibration: Annotated[
        Literal["quiet", "disturbed"] | None,
        Doc(
            "disturbed: a virtual run charged by what could only be measured beside busy programs; empty: nothing was "
            "measured"
        ),
    ] = None
    arithmetic: Annotated[
        Literal["per_replica", "batched", "one_batch"] | None,
        Doc(
            "gradients of a virtual run: of each replica, of all that compute at once, or one for equal replicas"
        ),
    ] = None

    reference_step_s: Annotated[
        float | None,
        Doc(
            "time of a fixed small training step, beside a real run; virtual: when it was calibrated",
            "s",
        ),
    ] = None
    train_s_no_jitter: Annotated[
        float | None,
        Doc("train_s of the same virtual run without jitter (jitter: none)", "s"),
    ] = None

    started_utc: Annotated[str | None, Doc("start of the run, ISO 8601, UTC")] = None
    host_hash: Annotated[
        str | None, Doc("hash that identifies the machine without naming it")
    ] = None
    git_commit: Annotated[
        str | None, Doc("commit of scalebench, if it runs from a checkout")
    ] = None
    git_dirty: Annotated[
        bool | None, Doc("true if the checkout had uncommitted changes")
    ] = None
    packages_hash: Annotated[
        str | None, Doc("hash of all package versions; the list is in provenance/")
    ] = None
    scheduler_job_id: Annotated[str | None, Doc("job of the batch scheduler")] = None
    provenance: Annotated[
        str | None,
        Doc("file of provenance/ that describes the environment, without .json"),
    ] = None


class EpochRow(_Row):
    """One epoch of one attempt at a run."""

    run_id: Annotated[str, Doc("run of this epoch")]
    attempt: Annotated[int, Doc("attempt of this epoch")]
    epoch: Annotated[int, Doc("0-based")]
    elapsed_s: Annotated[
        float | None,
        Doc("training time from the start to the last worker's end of the epoch", "s"),
    ] = None
    epoch_s_max: Annotated[
        float | None, Doc("duration of the epoch on the slowest worker", "s")
    ] = None
    epoch_s_min: Annotated[float | None, Doc("duration on the fastest worker", "s")] = (
        None
    )
    epoch_s_mean: Annotated[float | None, Doc("duration, mean over workers", "s")] = (
        None
    )
    compute_s: Annotated[
        float | None, Doc("forward, backward and update, mean over workers", "s")
    ] = None
    comm_s: Annotated[
        float | None, Doc("communication not hidden by compute, mean over workers", "s")
    ] = None
    wait_s: Annotated[
        float | None,
        Doc(
            "part of comm_s spent waiting for others (see below), mean; real runs: on one node only",
            "s",
        ),
    ] = None
    data_s: Annotated[
        float | None, Doc("fetching batches and shuffling, mean over workers", "s")
    ] = None
    train_loss: Annotated[float | None, Doc("training loss, mean over workers")] = None
    test_metric: Annotated[
        float | None,
        Doc("metric of the consensus model at the end of the epoch, if evaluated"),
    ] = None
    syncs: Annotated[int | None, Doc("synchronisations in the epoch")] = None
    bytes_sent: Annotated[
        float | None,
        Doc("payload handed to the communicator, mean over workers", "bytes"),
    ] = None
    mean_staleness: Annotated[
        float | None,
        Doc(
            "merges of others between a worker's fetch and its merge, mean (asynchronous only)"
        ),
    ] = None
    max_staleness: Annotated[float | None, Doc("largest staleness")] = None
    merge_positions: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "each worker's 0-based place among all merges of the run, JSON list (asynchronous merges only)"
        ),
    ] = None


class ElasticRow(_Row):
    """One attempt at an elastic run."""

    schema_version: Annotated[int, Doc("version of this table")] = SCHEMA_VERSION
    study: Annotated[str, Doc("name of the study")]
    run_id: Annotated[str, Doc("name of the run within its study, as in runs.csv")]
    config_hash: Annotated[
        str,
        Doc(
            "hash of everything that determines the result of the run without interruptions"
        ),
    ]
    attempt: Annotated[int, Doc("1 for the first try; the latest attempt counts")]
    status: Annotated[
        Status,
        Doc("completed, failed, diverged (loss became NaN or infinite), timeout"),
    ]
    error: Annotated[
        str | None, Doc("reason why the run was not completed, one line")
    ] = None
    engine: Annotated[EngineName, Doc("communication engine")]
    launcher: Annotated[str, Doc("elastic launcher: torchrun or horovodrun")]
    oversubscribed: Annotated[
        bool, Doc("more workers x (compute + progress threads) than cores")
    ]
    strategy: Annotated[str, Doc("strategy by which the replicas synchronise")]
    strategy_options: Annotated[
        str,
        BeforeValidator(_as_json),
        Doc("strategy options as written, JSON with sorted keys"),
    ] = "{}"
    model: Annotated[str, Doc("model with its options")]
    dtype: Annotated[
        str, Doc("floating-point type of the training: float32, float64, bfloat16")
    ]
    dataset: Annotated[str, Doc("data set with its options")]
    epochs: Annotated[int, Doc("requested epochs")]
    seed: Annotated[int, Doc("seed of weights and batches")]
    repetition: Annotated[
        int, Doc("0-based; runs that differ in nothing else are repetitions")
    ]
    workers: Annotated[int, Doc("workers at the start")]
    workers_at_end: Annotated[int | None, Doc("workers at the end")] = None
    dealt_anew: Annotated[bool, Doc("the data were dealt anew, to fewer workers")] = (
        False
    )
    max_restarts: Annotated[
        int, Doc("interruptions after which the run would have gone on")
    ]
    interruptions: Annotated[int, Doc("times that a worker died and the run went on")]
    interrupted_utc: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("time of each interruption, ISO 8601, UTC, JSON list"),
    ] = None
    interrupted_rank: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("rank that died, by its number at the start, JSON list"),
    ] = None
    interrupted_host: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("node of that rank, as host_hash, JSON list"),
    ] = None
    interrupted_epoch: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("epoch that was begun again, 0-based, JSON list"),
    ] = None
    interrupted_lost_s: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc("training since the last committed epoch, which was lost, JSON list", "s"),
    ] = None
    interrupted_pause_s: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Doc(
            "from when the rank that died was last seen alive until training went on, JSON list",
            "s",
        ),
    ] = None
    total_s: Annotated[
        float | None,
        Doc(
            "from the first step to the end of the last epoch, with what was lost, pauses and evaluations",
            "s",
        ),
    ] = None
    metric_name: Annotated[
        Literal["accuracy", "r2"] | None, Doc("metric of final_metric")
    ] = None
    final_metric: Annotated[
        float | None,
        Doc("metric of the consensus model on the held-out split, at the end"),
    ] = None
    started_utc: Annotated[str | None, Doc("start of the run, ISO 8601, UTC")] = None
    host_hash: Annotated[
        str | None, Doc("hash that identifies the machine without naming it")
    ] = None
    provenance: Annotated[
        str | None,
        Doc("file of provenance/ that describes the environment, without .json"),
    ] = None


def columns(row_type: type[BaseModel]) -> list[str]:
    """Return the header of the table of `row_type`."""
    return list(row_type.model_fields)


def optional_columns(row_type: type[BaseModel]) -> list[str]:
    """Return the columns that are empty in rows that do not give them."""
    fields = row_type.model_fields.items()
    return [
        name
        for name, field in fields
        if not field.is_required() and field.default is None
    ]


def kinds(row_type: type[BaseModel]) -> dict[str, Kind]:
    """Return the kind of each column: text, integer, number or flag (true/false)."""
    return {
        name: _kind(field.annotation) for name, field in row_type.model_fields.items()
    }


def _kind(annotation: Any) -> Kind:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(
            part for part in typing.get_args(annotation) if part is not types.NoneType
        )
    kind: dict[Any, Kind] = {bool: "flag", int: "integer", float: "number"}
    return kind.get(annotation, "text")
