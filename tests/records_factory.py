"""Synthetic records: a small analytic model of training on K workers, so that every ratio is known beforehand."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import yaml

from scalebench.records.limits import WITHIN
from scalebench.records.schema import EpochRow, RunRow

STRATEGIES = ("serial", "allreduce", "horovod", "ddp", "epoch_average", "epoch_async")
ENGINES = {
    "serial": "mpi",
    "allreduce": "mpi",
    "horovod": "horovod",
    "ddp": "gloo",
    "epoch_average": "mpi",
    "epoch_async": "mpi",
}
SAMPLES, EPOCHS, STEP_S = 7185, 6, 3e-4
SYNC_S = {
    "allreduce": 1.2e-4,
    "horovod": 1.0e-3,
    "ddp": 3e-4,
    "epoch_average": 3e-4,
    "epoch_async": 2e-4,
}


def keep_study(folder: Path, resolved: dict[str, Any]) -> None:
    """Write a study.yaml, which need not be one that can run."""
    (folder / "study.yaml").write_text(
        yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )


def run_row(**changes: Any) -> RunRow:
    """A completed virtual run of allreduce on one worker; `changes` say what differs."""
    values: dict[str, Any] = {
        "study": "synthetic",
        "run_id": "allreduce-w1-r0",
        "config_hash": "c0ffee",
        "attempt": 1,
        "status": "completed",
        "execution": "virtual",
        "engine": "virtual",
        "oversubscribed": False,
        "cluster": "this-machine",
        "strategy": "allreduce",
        "model": "mlp(hidden=[128])",
        "parameters": 9610,
        "dtype": "float32",
        "dataset": "digits_shifted",
        "n_train": SAMPLES,
        "n_test": 360,
        "partition": "iid",
        "shuffle": "in_block",
        "workers": 1,
        "scaling": "strong",
        "batch_policy": "per_worker",
        "batch_per_worker": 8,
        "batch_global": 8,
        "lr": 0.1,
        "lr_policy": "constant",
        "optimizer": "sgd(momentum=0.9)",
        "epochs": EPOCHS,
        "seed": 0,
        "repetition": 0,
        "run_order": 0,
        "train_s": 1.0,
        "metric_name": "accuracy",
        "final_metric": 0.97,
    }
    return RunRow(**{**values, **changes})


def in_proportion(row: RunRow) -> RunRow:
    """`row`, whose train_s a test has changed, with parts that are not longer than it."""
    if row.train_s is None or row.train_s <= 0:
        return row
    parts = {
        part: getattr(row, part) for part, whole in WITHIN.items() if whole == "train_s"
    }
    longest = max((value for value in parts.values() if value is not None), default=0.0)
    factor = min(1.0, row.train_s / longest) if longest > 0 else 1.0
    return row.model_copy(
        update={part: None if v is None else v * factor for part, v in parts.items()}
    )


def epoch_row(**changes: Any) -> EpochRow:
    values: dict[str, Any] = {
        "run_id": "allreduce-w1-r0",
        "attempt": 1,
        "epoch": 0,
        "elapsed_s": 1.0,
    }
    return EpochRow(**{**values, **changes})


def study_rows(
    *,
    strategies: tuple[str, ...] = STRATEGIES,
    workers: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    native_workers: tuple[int, ...] = (1, 2, 4),
    allreduce_on: tuple[str, ...] = ("mpi",),
    cores: int = 2,
    repetitions: int = 3,
    scaling: str = "strong",
    noise: float = 0.03,
    seed: int = 0,
) -> list[tuple[RunRow, list[EpochRow]]]:
    """The runs of a study like the default one, virtual everywhere and native at `native_workers`."""
    random_ = random.Random(seed)
    plan: list[tuple[str, str, str, int, int]] = []
    for repetition in range(repetitions):
        for strategy in strategies:
            for count in workers if strategy != "serial" else (1,):
                plan.append(("virtual", "virtual", strategy, count, repetition))
            for count in native_workers if strategy != "serial" else native_workers[:1]:
                engines = (
                    allreduce_on if strategy == "allreduce" else (ENGINES[strategy],)
                )
                plan += [
                    ("native", engine, strategy, count, repetition)
                    for engine in engines
                ]
    return [
        _run(order, *point, cores, scaling, noise, random_)
        for order, point in enumerate(plan)
    ]


def _run(
    order: int,
    execution: str,
    engine: str,
    strategy: str,
    workers: int,
    repetition: int,
    cores: int,
    scaling: str,
    noise: float,
    random_: random.Random,
) -> tuple[RunRow, list[EpochRow]]:
    samples = SAMPLES if scaling == "strong" else SAMPLES // 8 * workers
    steps = math.ceil(samples / workers / 8)
    crowding = max(1.0, workers / cores) if execution == "native" else 1.0
    gap = 1.1 if execution == "native" else 1.0
    compute = steps * STEP_S * crowding * gap
    often = 1 if strategy in ("epoch_average", "epoch_async") else steps
    comm = 0.0
    if strategy != "serial" and workers > 1:
        engine_factor = (
            {"horovod": 3.0, "gloo": 1.6}.get(engine, 1.0)
            if strategy == "allreduce"
            else 1.0
        )
        comm = (
            often
            * SYNC_S[strategy]
            * engine_factor
            * math.log2(workers)
            * crowding
            * gap
        )
    spread = math.exp(random_.gauss(0.0, noise))
    compute, comm = compute * spread, comm * spread
    data = 0.04 * compute
    epoch_s = 1.02 * (compute + comm + data)
    per_batch = strategy in ("serial", "allreduce", "horovod", "ddp")
    best = 0.985 - (0.002 if per_batch else 0.006) * math.log2(workers)
    rate = 1.3 / (1 + 0.15 * math.log2(workers) * (1 if per_batch else 1.6))
    metrics = [
        best - 0.75 * math.exp(-rate * (epoch + 1)) + random_.gauss(0, 0.002)
        for epoch in range(EPOCHS)
    ]
    run_id = f"{execution}-{engine}-{strategy}-w{workers}-r{repetition}"
    # the real DDP communicates inside backward
    split = strategy != "ddp" or execution == "virtual"
    seconds = {
        "compute_s": compute if split else None,
        "comm_s": comm if split else None,
        "wait_s": 0.4 * comm if split else None,
        "data_s": data,
    }
    run = run_row(
        run_id=run_id,
        config_hash=f"hash-{run_id}",
        execution=execution,
        engine=engine,
        oversubscribed=execution == "native" and workers > cores,
        strategy=strategy,
        sync_every=1,
        sync_unit="batch" if per_batch else "epoch",
        workers=workers,
        scaling=scaling,
        n_train=samples,
        batch_global=8 * workers,
        steps_per_epoch=steps,
        optimizer_steps=steps * EPOCHS,
        repetition=repetition,
        seed=repetition,
        run_order=order,
        train_s=EPOCHS * epoch_s,
        other_s=EPOCHS * (epoch_s - compute - comm - data) if split else None,
        final_train_loss=1 - metrics[-1],
        final_metric=metrics[-1],
        final_train_metric=metrics[-1],
        best_metric=max(metrics),
        **{
            name: None if value is None else EPOCHS * value
            for name, value in seconds.items()
        },
    )
    epochs = [
        epoch_row(
            run_id=run_id,
            epoch=epoch,
            elapsed_s=(epoch + 1) * epoch_s,
            epoch_s_max=epoch_s,
            epoch_s_min=0.9 * epoch_s,
            epoch_s_mean=0.95 * epoch_s,
            train_loss=1 - metric,
            test_metric=metric,
            syncs=often,
            **seconds,
        )
        for epoch, metric in enumerate(metrics)
    ]
    return run, epochs
