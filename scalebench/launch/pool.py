"""Runs independent virtual runs on all cores: a few long-lived processes, each with one run at a time."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from scalebench.data.dataset import open_dataset
from scalebench.errors import ScalebenchError
from scalebench.outcome import Outcome
from scalebench.study.spec import Run
from scalebench.virtual.engine import Scenery, alike, simulate_alike
from scalebench.weights import save_weights

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

    With one job all happens in this process.
    Runs whose arithmetic is alike are one piece of work. `folders` are the data sets by worker count; weights that a
    run keeps go to `weights_folder`.
    """
    pieces: dict[str, list[Run]] = {}
    for run in runs:
        pieces.setdefault(alike(run), []).append(run)
    if jobs == 1:
        for piece in pieces.values():
            for run in piece:
                on_start(run)
            for run, outcome in zip(piece, _simulate(piece, (scenery, folders, weights_folder)), strict=True):
                on_outcome(run, outcome)
        return
    waiting = list(pieces.values())
    suspects: list[list[Run]] = []  # were under way when a process died: tried again, one at a time
    while waiting or suspects:
        alone = bool(suspects)
        work = [suspects.pop(0)] if alone else waiting
        processes = 1 if alone else min(jobs, len(work))
        left = _pass(work, folders, scenery, processes, weights_folder, on_start, on_outcome)
        if not alone:
            suspects, waiting = left[: 2 * processes], left[2 * processes :]
        elif left and len(left[0]) > 1:
            suspects = [[run] for run in left[0]] + suspects
        else:
            for run in left[0] if left else []:
                on_outcome(run, Outcome(run.run_id, "failed", "its process died (killed, or out of memory)"))


def _pass(
    pieces: Sequence[list[Run]],
    folders: dict[int, Path],
    scenery: Scenery,
    processes: int,
    weights_folder: Path,
    on_start: Callable[[Run], None],
    on_outcome: OnOutcome,
) -> list[list[Run]]:
    """Work until all is done or a process dies; return the pieces without outcomes, those under way first."""
    left = dict(enumerate(pieces))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (scenery, folders, weights_folder))
    under_way: dict[Future[list[Outcome]], int] = {}
    queue = list(left)
    try:
        while queue or under_way:
            while queue and len(under_way) < 2 * processes:  # one in work, one waiting for each process
                place = queue.pop(0)
                for run in left[place]:
                    on_start(run)
                under_way[pool.submit(_simulate_here, left[place])] = place
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                outcomes = future.result()
                for run, outcome in zip(left.pop(under_way.pop(future)), outcomes, strict=True):
                    on_outcome(run, outcome)
    except BrokenProcessPool:
        return list(left.values())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if left:  # interrupted, or a process died: the others have nothing to finish
            for process in multiprocessing.active_children():
                process.terminate()
    return []


_Stage = tuple[Scenery, dict[int, Path], Path]
_stage: _Stage | None = None  # of this worker process, set once when it starts


def _begin(scenery: Scenery, folders: dict[int, Path], weights_folder: Path) -> None:
    global _stage
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    _stage = scenery, folders, weights_folder


def _simulate_here(runs: list[Run]) -> list[Outcome]:
    assert _stage is not None
    return _simulate(runs, _stage)


def _simulate(runs: list[Run], stage: _Stage) -> list[Outcome]:
    scenery, folders, weights_folder = stage
    outcomes: list[Outcome] = []
    try:
        for run, outcome, weights in simulate_alike(runs, open_dataset(folders[runs[0].workers]), scenery):
            if run.save_weights and weights:
                save_weights(weights_folder, run.run_id, weights["initial"], weights["final"])
            outcomes.append(outcome)
    except (ScalebenchError, MemoryError, RuntimeError, ValueError, TypeError, OSError) as error:
        cause = str(error) if isinstance(error, ScalebenchError) else f"{type(error).__name__}: {error}"
        outcomes += [Outcome(run.run_id, "failed", " ".join(cause.split())) for run in runs[len(outcomes) :]]
    return outcomes
