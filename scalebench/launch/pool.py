"""Runs independent virtual runs on all cores: a few long-lived processes, each with one run at a time."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from scalebench.outcome import Outcome
from scalebench.study.spec import Run
from scalebench.virtual.engine import Scenery

OnOutcome = Callable[[Run, Outcome], None]


def run_virtual(
    runs: Sequence[Run],
    folders: dict[int, Path],
    scenery: Scenery,
    *,
    jobs: int,
    weights_folder: Path,
    on_start: Callable[[Run], None],
    on_outcome: OnOutcome,
) -> None:
    """Simulate `runs` in `jobs` processes; report each as it ends. A run that takes its process down is failed alone.

    `folders` are the data sets by worker count; weights that a run keeps go to `weights_folder`.
    """
    waiting = list(runs)
    suspects: list[Run] = []  # were under way when a process died: tried again, one at a time
    while waiting or suspects:
        alone = bool(suspects)
        batch = [suspects.pop(0)] if alone else waiting
        jobs_now = 1 if alone else min(jobs, len(batch))
        left = _pass(batch, folders, scenery, jobs_now, weights_folder, on_start, on_outcome)
        if alone:
            for run in left:
                on_outcome(run, Outcome(run.run_id, "failed", "its process died (killed, or out of memory)"))
        else:
            suspects = left[: jobs_now * 2]
            waiting = left[jobs_now * 2 :]


def _pass(
    runs: Sequence[Run],
    folders: dict[int, Path],
    scenery: Scenery,
    jobs: int,
    weights_folder: Path,
    on_start: Callable[[Run], None],
    on_outcome: OnOutcome,
) -> list[Run]:
    """Run until all are done or a process dies; return those without an outcome, the ones under way first."""
    left = {run.run_id: run for run in runs}
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _begin, (scenery, folders, weights_folder))
    under_way: dict[Future[Outcome], Run] = {}
    queue = list(runs)
    try:
        while queue or under_way:
            while queue and len(under_way) < jobs * 2:  # one running, one waiting for each process
                run = queue.pop(0)
                on_start(run)
                under_way[pool.submit(_simulate, run)] = run
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                run = under_way.pop(future)
                outcome = future.result()
                del left[run.run_id]
                on_outcome(run, outcome)
    except BrokenProcessPool:
        return list(left.values())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if left:  # interrupted, or a process died: the others have nothing to finish
            for process in multiprocessing.active_children():
                process.terminate()
    return []


_stage: tuple[Scenery, dict[int, Path], Path] | None = None  # of this worker process, set once when it starts


def _begin(scenery: Scenery, folders: dict[int, Path], weights_folder: Path) -> None:
    global _stage
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    _stage = scenery, folders, weights_folder


def _simulate(run: Run) -> Outcome:
    from scalebench.data.dataset import open_dataset
    from scalebench.errors import ScalebenchError
    from scalebench.virtual.engine import simulate
    from scalebench.weights import save_weights

    assert _stage is not None
    scenery, folders, weights_folder = _stage
    try:
        outcome, weights = simulate(run, open_dataset(folders[run.workers]), scenery)
        if run.save_weights and weights:
            save_weights(weights_folder, run.run_id, weights["initial"], weights["final"])
    except (ScalebenchError, MemoryError, RuntimeError, ValueError, TypeError, OSError) as error:
        return Outcome(run.run_id, "failed", f"{type(error).__name__}: {' '.join(str(error).split())}")
    return outcome
