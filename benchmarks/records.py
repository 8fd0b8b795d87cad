"""How fast records are written, read and looked at: a study of 166,667 runs with a million epoch rows.

    python benchmarks/records.py

Goals: 2,000 rows a second without fsync, and as many runs as two fsyncs a run allow
with it; `scalebench status` in 1 s; reading and summarising in 10 s and 2 GiB. Each
command is a process of its own; its CPU time stands beside the wall time.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ratios import Finding, Goal, compare, finding, show

from scalebench.records.append_only import to_lines
from scalebench.records.progress import Planned, keep_planned
from scalebench.records.schema import EpochRow, RunRow
from scalebench.records.store import Store

RUNS, EPOCHS = 166_667, 6
SYNCED = 100  # runs
STRATEGIES = (
    "allreduce",
    "horovod",
    "ddp",
    "epoch_average",
    "epoch_async",
    "local_sgd",
)
WORKERS = (1, 2, 4, 8, 16, 32, 64)
_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
_SUMMARY = "from scalebench.analysis import load, summary; print(len(summary(load({!r})).rows))"
_HASH = "0123456789ab"


def main() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="scalebench-records-") as name:
        folder = Path(name)
        yield _synced(folder / "synced")
        yield _unsynced(folder / "large")
        runs = [run_of(number) for number in range(RUNS)]
        keep_planned(
            folder / "large",
            [
                Planned(run.run_id, run.config_hash, "virtual", run.epochs)
                for run in runs
            ],
        )
        program = str(Path(sys.executable).with_name("scalebench"))
        yield command(
            "scalebench status",
            [program, "status", str(folder / "large")],
            Goal("<=", 1, "s"),
            f"{RUNS:,} runs",
        )
        summary = [sys.executable, "-c", _SUMMARY.format(str(folder / "large"))]
        yield command(
            "reading and summarising", summary, Goal("<=", 10, "s"), f"{RUNS:,} runs"
        )
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        yield finding(
            "reading and summarising, memory",
            peak,
            Goal("<=", 2, "GiB"),
            f"{peak:.2f} GiB",
        )


def _unsynced(folder: Path) -> Finding:
    """Rows of both tables a second, the making of the rows not counted."""
    seconds = 0.0
    with Store(folder, fsync=False) as store:
        for number in range(RUNS):
            run = run_of(number)
            epochs = epochs_of(run)
            begin = time.perf_counter()
            store.append(run, epochs)
            seconds += time.perf_counter() - begin
    rate = RUNS * (1 + EPOCHS) / seconds
    return finding(
        "rows kept, fsync off", rate, Goal(">=", 2000, "rows/s"), f"{rate:,.0f} rows/s"
    )


def _synced(folder: Path) -> Finding:
    """Against the same bytes written and synced by hand, in turn."""
    folder.mkdir()
    rows = [(run, epochs_of(run)) for run in map(run_of, range(SYNCED))]
    lines = [
        (to_lines([_cells(run)]), to_lines(map(_cells, epochs))) for run, epochs in rows
    ]

    def keep() -> None:
        for run, epochs in rows:
            store.append(run, epochs)

    def write_by_hand() -> None:
        for run, epochs in lines:
            for file, data in ((by_hand[0], epochs), (by_hand[1], run)):
                os.write(file, data)
                os.fsync(file)

    by_hand = [
        os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for name in ("epochs", "runs")
    ]
    with Store(folder / "study") as store:
        found = compare(keep, write_by_hand, 5).finding(
            "a run kept, fsync on", Goal("<=", 1.5), per=SYNCED
        )
    for file in by_hand:
        os.close(file)
    return found


def command(name: str, words: list[str], goal: Goal | None, of: str) -> Finding:
    """The least wall time of three processes, as others share the machine, and its CPU time."""
    took = []
    for _ in range(3):
        before, begin = (
            resource.getrusage(resource.RUSAGE_CHILDREN),
            time.perf_counter(),
        )
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        wall, after = (
            time.perf_counter() - begin,
            resource.getrusage(resource.RUSAGE_CHILDREN),
        )
        took.append(
            (wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        )
    wall, cpu = min(took)
    return finding(name, wall, goal, f"{wall:.2f} s ({cpu:.2f} s CPU)", of)


def _cells(row: RunRow | EpochRow) -> list[object]:
    return [getattr(row, name) for name in type(row).model_fields]


def run_of(number: int) -> RunRow:
    """A virtual run as the default study makes them, with all that it fills in."""
    place, workers = number // len(WORKERS), WORKERS[number % len(WORKERS)]
    strategy, repetition = STRATEGIES[place % len(STRATEGIES)], place // len(STRATEGIES)
    train_s = 2.5 / workers * (1 + 1e-5 * (number * 7919 % 4001))
    return RunRow.model_construct(
        study="large", run_id=f"{strategy}-w{workers}-r{repetition}-virtual-{number:08x}",
        config_hash=f"{number:016x}", attempt=1, status="completed", execution="virtual", engine="virtual",
        oversubscribed=False, cluster="this-machine", strategy=strategy,
        strategy_options='{"every": 2}' if strategy.startswith("epoch") else "{}", sync_every=1, sync_unit="batch",
        averaged_state="parameters", optimizer_state_policy="keep", merge_policy="mean", model="mlp(hidden=[128])",
        parameters=9610, dtype="float32", dataset="digits_shifted", dataset_sha256=64 * "a", n_train=7185, n_test=360,
        partition="iid", shuffle="in_block", workers=workers, nodes=workers, workers_per_node=1, threads_per_worker=1,
        device="Intel(R) Xeon(R) Processor @ 2.90GHz", scaling="strong", batch_policy="per_worker", batch_per_worker=8,
        batch_global=8 * workers, lr=0.1, lr_policy="constant", optimizer="sgd(momentum=0.9)", epochs=EPOCHS,
        steps_per_epoch=898 // workers, seed=repetition, repetition=repetition, run_order=number, warmup_steps=10,
        optimizer_steps=5388 // workers, syncs=5388 // workers, bytes_sent_per_worker=2.07e8, train_s=train_s,
        compute_s=0.8 * train_s, comm_s=0.15 * train_s, wait_s=0.01 * train_s, straggler_factor=1.01,
        data_s=0.03 * train_s, other_s=0.02 * train_s, eval_s=0.012345678, final_train_loss=0.0123456789,
        metric_name="accuracy", final_metric=0.9694444444, best_metric=0.9722222222, peak_rss_mib=412.3359375,
        started_utc=(_BEGAN + timedelta(seconds=0.31 * number)).isoformat(timespec="milliseconds"), host_hash=_HASH,
        git_commit=40 * "c", git_dirty=False, packages_hash=_HASH, provenance=_HASH,
    )  # fmt: skip


def epochs_of(run: RunRow) -> list[EpochRow]:
    """Its epochs."""
    epoch_s = (run.train_s or 0.0) / run.epochs
    return [
        EpochRow.model_construct(
            run_id=run.run_id, attempt=1, epoch=epoch, elapsed_s=(epoch + 1) * epoch_s, epoch_s_max=epoch_s,
            epoch_s_min=0.98 * epoch_s, epoch_s_mean=0.99 * epoch_s, compute_s=0.8 * epoch_s, comm_s=0.15 * epoch_s,
            wait_s=0.01 * epoch_s, data_s=0.03 * epoch_s, train_loss=0.5 / (epoch + 1),
            test_metric=0.97 - 0.3 / (epoch + 1) ** 2, syncs=run.steps_per_epoch, bytes_sent=3.45e7,
        )
        for epoch in range(run.epochs)
    ]  # fmt: skip


if __name__ == "__main__":
    show(main())
