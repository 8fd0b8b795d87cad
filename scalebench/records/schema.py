"""The columns of runs.csv and epochs.csv: one tidy row per run, and one per run, attempt and epoch.

Names are snake_case with SI units at their end. A value that was not measured is None and becomes an empty cell, never
zero. Whatever statistics say is computed from these rows and never stored. The data dictionary in the documentation is
generated from the two models, so that it cannot disagree with them.

History of SCHEMA_VERSION:
    1  the first version.
    2  runs: straggler_factor, worker_weights; epochs: merge_positions.
    3  runs: warmup, warmup_steps, staleness_histogram, lead_histogram, provenance.
    4  runs: others_load.
    5  runs: chance_metric.
    6  runs: collective_calls.
    7  runs: model_sha256, init_weights_sha256.
    8  runs: cluster_sha256.
    9  runs: strategy_sha256, reference_step_s, train_s_no_jitter.

Older tables are read: what they lack is empty (ADDED). They are not appended to, for a table has one set of columns.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

SCHEMA_VERSION = 9
ADDED = {
    4: ("others_load",),
    5: ("chance_metric",),
    6: ("collective_calls",),
    7: ("model_sha256", "init_weights_sha256"),
    8: ("cluster_sha256",),
    9: ("strategy_sha256", "reference_step_s", "train_s_no_jitter"),
}  # columns by the version that brought them, back to the oldest that is read
READABLE = range(min(ADDED) - 1, SCHEMA_VERSION + 1)

# What a virtual run's row owes to when and where it was computed, not to the study and its calibration.
ENVIRONMENT_COLUMNS = (
    *("eval_s", "peak_rss_mib", "started_utc"),
    *("host_hash", "git_commit", "git_dirty", "packages_hash", "scheduler_job_id", "provenance"),
)

Status = Literal["completed", "failed", "diverged", "timeout", "interrupted"]
Kind = Literal["text", "integer", "number", "flag"]


@dataclass(frozen=True)
class Column:
    """What a column means, and the unit of its numbers (empty: a count, a name or a ratio)."""

    meaning: str
    unit: str = ""


def _as_json(value: Any) -> Any:
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, dict | list) else value


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunRow(_Row):
    """One run, or one attempt at it."""

    schema_version: Annotated[int, Column("version of this table")] = SCHEMA_VERSION
    study: Annotated[str, Column("name of the study")]
    run_id: Annotated[str, Column("names the run within its study; the same for every attempt at it")]
    config_hash: Annotated[str, Column("hash of everything that decides the run's result")]
    attempt: Annotated[int, Column("1 for the first try; the latest attempt counts")]
    status: Annotated[Status, Column("completed, failed, diverged (loss became NaN or infinite), timeout, interrupted")]
    error: Annotated[str | None, Column("why the run was not completed, one line")] = None

    execution: Annotated[
        Literal["native", "paced", "virtual", "modelled"],
        Column("how the number was obtained; ratios never join two of them"),
    ]
    engine: Annotated[Literal["virtual", "mpi", "horovod", "gloo", "nccl"], Column("what carried the communication")]
    oversubscribed: Annotated[bool, Column("more workers x (compute + progress threads) than cores: never a baseline")]
    paced_overrun: Annotated[
        float | None, Column("share of steps that were slower than the pace; above 0.01 the run is oversubscribed")
    ] = None
    launcher: Annotated[str | None, Column("how the processes were started")] = None
    binding: Annotated[str | None, Column("how processes were bound to cores")] = None
    cluster: Annotated[str, Column("the cluster that was used, or that a virtual run stands for")]
    cluster_sha256: Annotated[str | None, Column("checksum of the cluster's file, where it is one's own")] = None

    strategy: Annotated[str, Column("how the replicas agree")]
    strategy_options: Annotated[
        str, BeforeValidator(_as_json), Column("the strategy's options as written, JSON with sorted keys")
    ] = "{}"
    strategy_sha256: Annotated[str | None, Column("checksum of the strategy's file, where it is one's own")] = None
    sync_every: Annotated[int | None, Column("sync units between two synchronisations")] = None
    sync_unit: Annotated[str | None, Column("what sync_every counts: batch, epoch or none")] = None
    averaged_state: Annotated[str | None, Column("what is averaged: parameters, + buffers, + optimizer")] = None
    optimizer_state_policy: Annotated[
        str | None, Column("optimizer state at a synchronisation: keep, average, reset")
    ] = None
    merge_policy: Annotated[str | None, Column("how replicas are combined: mean, half, inverse_k ...")] = None

    model: Annotated[str, Column("the model with its options")]
    model_sha256: Annotated[str | None, Column("checksum of the model's file, where it is one's own")] = None
    init_weights_sha256: Annotated[str | None, Column("checksum of the file of initial weights, if one was given")] = (
        None
    )
    parameters: Annotated[int | None, Column("trainable parameters of the model")] = None
    dtype: Annotated[str, Column("floating-point type of the training: float32, float64, bfloat16")]
    dataset: Annotated[str, Column("the data set with its options")]
    dataset_sha256: Annotated[str | None, Column("checksum of the data")] = None
    n_train: Annotated[int | None, Column("training samples, all workers together")] = None
    n_test: Annotated[int | None, Column("samples of the held-out split")] = None
    partition: Annotated[str, Column("how samples are laid out over workers: iid, dirichlet, by order")]
    shuffle: Annotated[str, Column("what is permuted between epochs: none, in_block, rotate_blocks, pairwise, global")]

    workers: Annotated[int, Column("replicas")]
    nodes: Annotated[int | None, Column("nodes they lie on")] = None
    workers_per_node: Annotated[int | None, Column("replicas on the fullest node")] = None
    threads_per_worker: Annotated[int | None, Column("compute threads of one replica")] = None
    device: Annotated[str | None, Column("what a replica computes on")] = None
    scaling: Annotated[
        Literal["strong", "weak"], Column("strong: samples per epoch fixed; weak: samples per worker fixed")
    ]
    batch_policy: Annotated[
        Literal["per_worker", "global"], Column("which batch stays the same when the worker count changes")
    ]
    batch_per_worker: Annotated[int | None, Column("samples in one worker's batch, after reducing it to the shard")] = (
        None
    )
    batch_global: Annotated[int | None, Column("samples in one optimizer step of all workers")] = None
    lr: Annotated[float, Column("learning rate as written, before lr_policy")]
    lr_policy: Annotated[
        str, Column("constant, linear (in the worker count, with warm-up), cosine, step, optimizer_steps")
    ]
    optimizer: Annotated[str, Column("the optimizer with its options")]
    epochs: Annotated[int, Column("epochs asked for")]
    steps_per_epoch: Annotated[int | None, Column("optimizer steps of one worker in one epoch")] = None
    seed: Annotated[int, Column("seed of weights, batches and jitter")]
    repetition: Annotated[int, Column("0-based; runs that differ in nothing else are repetitions")]
    run_order: Annotated[int, Column("0-based place in the interleaved order; runs added later go on from it")]
    warmup: Annotated[bool, Column("a run made to warm the machine up: kept here, in no statistic")] = False
    warmup_steps: Annotated[int | None, Column("steps taken before the clock started, in no time")] = None

    optimizer_steps: Annotated[int | None, Column("optimizer steps of the worker that took most")] = None
    syncs: Annotated[int | None, Column("synchronisations that the strategy made")] = None
    collective_calls: Annotated[
        int | None,
        Column("calls of the engine's collectives that carried them (see below), worker 0's; virtual: empty"),
    ] = None
    bytes_sent_per_worker: Annotated[
        float | None, Column("payload handed to the communicator, mean over workers", "bytes")
    ] = None
    train_s: Annotated[
        float | None, Column("from the barrier before the first step to the last worker's end, without evaluation", "s")
    ] = None
    compute_s: Annotated[float | None, Column("forward, backward and update, mean over workers", "s")] = None
    comm_s: Annotated[float | None, Column("communication not hidden by compute, mean over workers", "s")] = None
    wait_s: Annotated[
        float | None,
        Column("the part of comm_s spent waiting for others (see below), mean; real runs: on one node only", "s"),
    ] = None
    straggler_factor: Annotated[
        float | None,
        Column(
            "compute_s per optimizer step, of the slowest worker over the mean of all that took one; empty where "
            "compute_s is"
        ),
    ] = None
    data_s: Annotated[float | None, Column("fetching batches and shuffling, mean over workers", "s")] = None
    other_s: Annotated[
        float | None, Column("the rest: compute + comm + data + other = a worker's training time, mean", "s")
    ] = None
    eval_s: Annotated[float | None, Column("evaluating the consensus model, outside train_s", "s")] = None

    worker_weights: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Column("how much of each worker's training the final model holds, JSON list (asynchronous merges only)"),
    ] = None
    staleness_histogram: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Column("JSON object: staleness of a push or merge, counted in updates of others -> how often (asynchronous)"),
    ] = None
    lead_histogram: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Column("JSON object: a worker's lead over the slowest at a push, in steps -> how often (parameter servers)"),
    ] = None
    final_train_loss: Annotated[float | None, Column("training loss of the last epoch, mean over workers")] = None
    metric_name: Annotated[Literal["accuracy", "r2"] | None, Column("what the metric columns hold")] = None
    chance_metric: Annotated[
        float | None, Column("what one answer to every input reaches: the share of the commonest test class; R2 of 0")
    ] = None
    final_metric: Annotated[float | None, Column("metric of the consensus model on the held-out split, at the end")] = (
        None
    )
    best_metric: Annotated[float | None, Column("the best of the evaluations during training")] = None
    target_metric: Annotated[float | None, Column("the metric to reach, if the study states one")] = None
    time_to_target_s: Annotated[
        float | None, Column("training time until target_metric was reached; empty although one is stated: never", "s")
    ] = None
    epochs_to_target: Annotated[int | None, Column("epochs until target_metric was reached")] = None

    peak_rss_mib: Annotated[float | None, Column("largest resident memory of a worker process", "MiB")] = None
    peak_device_mib: Annotated[float | None, Column("largest memory taken on a device", "MiB")] = None
    energy_j: Annotated[float | None, Column("energy of the training, native runs (see below)", "J")] = None
    energy_source: Annotated[str | None, Column("what counted the energy: rapl, nvml, rapl+nvml or slurm")] = None
    others_load: Annotated[
        float | None,
        Column(
            "share of its nodes' cores that other programs took meanwhile, the busiest node; virtual: when calibrated"
        ),
    ] = None

    reference_step_s: Annotated[
        float | None,
        Column(
            "time of a fixed small training step: real runs, beside the run; virtual: the machine speed simulated", "s"
        ),
    ] = None
    train_s_no_jitter: Annotated[
        float | None, Column("train_s of the same virtual run if no step took longer than another (jitter: none)", "s")
    ] = None

    started_utc: Annotated[str | None, Column("when the run began, ISO 8601, UTC")] = None
    host_hash: Annotated[str | None, Column("tells machines apart without naming them")] = None
    git_commit: Annotated[str | None, Column("commit of scalebench, if it runs from a checkout")] = None
    git_dirty: Annotated[bool | None, Column("whether the checkout had changes that are not in the commit")] = None
    packages_hash: Annotated[str | None, Column("hash of all package versions; the list is in provenance/")] = None
    scheduler_job_id: Annotated[str | None, Column("the batch scheduler's job")] = None
    provenance: Annotated[
        str | None, Column("which file of provenance/ tells where it was run: the name without .json")
    ] = None


class EpochRow(_Row):
    """One epoch of one attempt at a run."""

    run_id: Annotated[str, Column("the run it belongs to")]
    attempt: Annotated[int, Column("the attempt it belongs to")]
    epoch: Annotated[int, Column("0-based")]
    elapsed_s: Annotated[float | None, Column("training time from the start to the last worker's end of it", "s")] = (
        None
    )
    epoch_s_max: Annotated[float | None, Column("duration of the epoch on the slowest worker", "s")] = None
    epoch_s_min: Annotated[float | None, Column("the same on the fastest worker", "s")] = None
    epoch_s_mean: Annotated[float | None, Column("the same, mean over workers", "s")] = None
    compute_s: Annotated[float | None, Column("forward, backward and update, mean over workers", "s")] = None
    comm_s: Annotated[float | None, Column("communication not hidden by compute, mean over workers", "s")] = None
    wait_s: Annotated[
        float | None,
        Column("the part of comm_s spent waiting for others (see below), mean; real runs: on one node only", "s"),
    ] = None
    data_s: Annotated[float | None, Column("fetching batches and shuffling, mean over workers", "s")] = None
    train_loss: Annotated[float | None, Column("training loss, mean over workers")] = None
    test_metric: Annotated[
        float | None, Column("metric of the consensus model at the end of the epoch, if evaluated")
    ] = None
    syncs: Annotated[int | None, Column("synchronisations in the epoch")] = None
    bytes_sent: Annotated[float | None, Column("payload handed to the communicator, mean over workers", "bytes")] = None
    mean_staleness: Annotated[
        float | None, Column("merges of others between a worker's fetch and its merge, mean (asynchronous only)")
    ] = None
    max_staleness: Annotated[float | None, Column("the same, the largest")] = None
    merge_positions: Annotated[
        str | None,
        BeforeValidator(_as_json),
        Column("each worker's 0-based place among all merges of the run, JSON list (asynchronous merges only)"),
    ] = None


def columns(row_type: type[BaseModel]) -> list[str]:
    """The header of the row type's table."""
    return list(row_type.model_fields)


def kinds(row_type: type[BaseModel]) -> dict[str, Kind]:
    """Column -> how its cells are read: text, integer, number or flag (true/false); all but keys may be empty."""
    return {name: _kind(field.annotation) for name, field in row_type.model_fields.items()}


def _kind(annotation: Any) -> Kind:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not types.NoneType)
    kind: dict[Any, Kind] = {bool: "flag", int: "integer", float: "number"}
    return kind.get(annotation, "text")
