"""Runs independent virtual runs on all cores: a few long-lived processes, each with one run at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from scalebench.data.dataset import open_dataset
from scalebench.errors import in_one_line
from scalebench.study.spec import Run
from scalebench.system.parent_watch import follow, preloaded_forkserver, unheard
from scalebench.training.initial_weights import save_weights
from scalebench.training.outcome import Outcome
from scalebench.virtual.engine import CostModel, alike, simulate_alike

OnOutcome = Callable[[Run, Outcome], None]
_POLL_S = 0.2  # between two questions whether to stop


def run_virtual(
    runs: Sequence[Run],
    folders: dict[int, Path],
    cost_model: CostModel,
    *,
    jobs: int,
    weights_folder: Path,
    on_start: Callable[[Run], None],
    on_outcome: OnOutcome,
    stopping: Callable[[], bool] = lambda: False,
    fail_fast: bool = False,
) -> None:
    """Simulate `runs` in `jobs` processes; report each as it ends. A run that takes its process down is failed alone.

    With one job all happens in this process. Once `stopping`, runs under way are finished and no other begins; with
    `fail_fast` that is so from the moment a run fails, which its process knows first.
    Runs whose arithmetic is alike are one piece of work. `folders` are the data sets by worker count; weights that a
    run keeps go to `weights_folder`.
    """
    pieces: dict[str, list[Run]] = {}
    for run in runs:
        pieces.setdefault(alike(run), []).append(run)
    if jobs == 1:
        for piece in pieces.values():
            if stopping():
                return
            for run in piece:
                on_start(run)
            outcomes = _simulate(piece, (cost_model, folders, weights_folder), stopping, fail_fast=fail_fast)
            for run, outcome in zip(piece, outcomes, strict=False):
                on_outcome(run, outcome)
            if fail_fast and _failed(outcomes):
                return
        return
    waiting = list(pieces.values())
    suspects: list[list[Run]] = []  # were under way when a process died: tried again, one at a time
    while (waiting or suspects) and not stopping():
        alone = bool(suspects)
        work = [suspects.pop(0)] if alone else waiting
        processes = 1 if alone else min(jobs, len(work))
        left = _pass(work, folders, cost_model, processes, weights_folder, on_start, on_outcome, stopping, fail_fast)
        if stopping():
            return
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
    cost_model: CostModel,
    processes: int,
    weights_folder: Path,
    on_start: Callable[[Run], None],
    on_outcome: OnOutcome,
    stopping: Callable[[], bool],
    fail_fast: bool,
) -> list[list[Run]]:
    """Work until all is done or a process dies; return the pieces without outcomes, those under way first."""
    left = dict(enumerate(pieces))
    context = preloaded_forkserver()
    stop = context.Event()
    pool = ProcessPoolExecutor(processes, context, _begin, ((cost_model, folders, weights_folder), stop, fail_fast))
    under_way: dict[Future[list[Outcome]], int] = {}
    queue = list(left)
    try:
        while under_way or (queue and not stopping()):
            while queue and len(under_way) < 2 * processes and not stopping():  # for each: one in work, one waiting
                place = queue.pop(0)
                for run in left[place]:
                    on_start(run)
                with unheard():
                    under_way[pool.submit(_simulate_here, left[place])] = place
            done, _ = wait(under_way, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                outcomes = future.result()
                for run, outcome in zip(left.pop(under_way.pop(future)), outcomes, strict=False):
                    on_outcome(run, outcome)
            if stopping():
                stop.set()
    except BrokenProcessPool:
        return list(left.values())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if left:  # interrupted, or a process died: the others have nothing to finish
            for process in multiprocessing.active_children():
                process.terminate()
    return []


_Stage = tuple[CostModel, dict[int, Path], Path]
_stage: _Stage | None = None  # of this worker process, set once when it starts
_stop: Any = None  # likewise: the event that says that no run should begin
_fail_fast = False  # likewise


def _begin(simulation: _Stage, stop: Any, fail_fast: bool) -> None:
    global _stage, _stop, _fail_fast
    follow()
    _stage, _stop, _fail_fast = simulation, stop, fail_fast


def _simulate_here(runs: list[Run]) -> list[Outcome]:
    assert _stage is not None
    outcomes = _simulate(runs, _stage, _stop.is_set, fail_fast=_fail_fast)
    if _fail_fast and _failed(outcomes):
        _stop.set()  # here, before this process takes the piece that waits for it
    return outcomes


def _failed(outcomes: list[Outcome]) -> bool:
    return any(outcome.status != "completed" for outcome in outcomes)


def _simulate(runs: list[Run], simulation: _Stage, stopping: Callable[[], bool], *, fail_fast: bool) -> list[Outcome]:
    """The outcomes of `runs`, in their order; of fewer when it was `stopping` before the last began.

    With `fail_fast` the first that is not completed is the last.
    """
    cost_model, folders, weights_folder = simulation
    outcomes: list[Outcome] = []
    if stopping():
        return outcomes
    try:
        for run, outcome, weights in simulate_alike(runs, open_dataset(folders[runs[0].workers]), cost_model):
            if run.save_weights and weights:
                save_weights(weights_folder, run.run_id, weights["initial"], weights["final"])
            outcomes.append(outcome)
            if stopping() or (fail_fast and outcome.status != "completed"):
                return outcomes
    except Exception as error:  # of a strategy or model of somebody's own: any
        begun = len(outcomes)
        outcomes += [Outcome(run.run_id, "failed", in_one_line(error)) for run in runs[begun:]]
        return outcomes[: begun + 1] if fail_fast else outcomes
    return outcomes
