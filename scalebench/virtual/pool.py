"""Virtual runs of a study, in a pool of long-lived processes.

A piece of work are the runs whose arithmetic is the same: it is computed once, and each
of them is timed. Others are pieces by themselves.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scalebench.data.dataset import Dataset, open_dataset
from scalebench.errors import RunError, in_one_line
from scalebench.pricing.held_parts import meta_model
from scalebench.pricing.machine import Machine
from scalebench.pricing.price import NotLockStepError
from scalebench.study.spec import Run
from scalebench.system import parent_watch
from scalebench.training.initial_weights import save_weights
from scalebench.training.outcome import Outcome
from scalebench.virtual.engine import compute, compute_and_time, model_time, simulate
from scalebench.virtual.lock_step import (
    Trace,
    Weights,
    is_lock_step,
    rows_stay,
    strategy_of,
    time,
    without_jitter,
)

OnOutcome = Callable[[Run, Outcome], None]
_POLL_S = 0.2  # between two checks of `stopping`
_NOT_TIMED = (
    NotLockStepError,
    RuntimeError,
    RunError,
)  # a schedule that is not recorded, or not that of a trace
Simulated = tuple[Run, Outcome, Weights]


def alike(run: Run) -> str:
    """A key that runs of one study share whose arithmetic is the same, whatever their time."""
    arithmetic = strategy_of(run).arithmetic(run.workers)
    shares = arithmetic and rows_stay(run) and run.execution == "virtual"
    return (
        f"{arithmetic} {run.workers} {run.seed} {sorted(run.tuned.items())}"
        if shares
        else run.run_id
    )


def simulate_alike(
    runs: Sequence[Run], dataset: Dataset, machine: Machine
) -> Iterator[Simulated]:
    """Simulate runs of one `alike` key: the arithmetic of the first one is that of all, each of which is timed.

    Of a model with buffers, a strategy that sends them is computed for itself: workers
    would else have their own.
    """
    shared: Trace | None = None
    failed: Outcome | None = None
    for run in runs:
        weights: Weights = {}
        if run.execution == "modelled":
            outcome = model_time(run, dataset, machine)
        elif run.trace:
            outcome, weights = simulate(run, dataset, machine)
        elif alike(run) == run.run_id:
            outcome, weights = compute_and_time(run, dataset, machine)
        elif failed is not None:
            outcome = replace(failed, run_id=run.run_id)
        else:
            own_buffers = (
                run.workers > 1
                and strategy_of(run).traits.sends_buffers
                and _has_buffers(run, dataset)
            )
            try:
                trace = (
                    compute(run, dataset, machine)
                    if shared is None or own_buffers
                    else shared
                )
                (outcome,) = time([run], dataset, machine, [trace])
            except RunError as error:
                outcome = failed = Outcome(run.run_id, error.status, in_one_line(error))
            else:
                weights = trace.weights
                if trace is not shared:
                    outcome.eval_s = trace.eval_s
                shared = shared if own_buffers else trace
        yield run, _also_without_jitter(run, outcome, dataset, machine), weights


def time_or_simulate(
    runs: Sequence[Run], dataset: Dataset, machine: Machine, traces: Sequence[Trace]
) -> Iterator[Simulated]:
    """Time repetitions of a completed run anew, or compute them again if their schedules are not those of `traces`."""
    try:
        outcomes = time(runs, dataset, machine, traces)
    except _NOT_TIMED:
        for run in runs:
            yield from simulate_alike([run], dataset, machine)
        return
    for run, outcome in zip(runs, outcomes, strict=True):
        yield run, outcome, {}


def _also_without_jitter(
    run: Run, outcome: Outcome, dataset: Dataset, machine: Machine
) -> Outcome:
    """Add the time without jitter, if the run asks for it and was timed on the event engine, which gives one time."""
    is_missing = run.also_without_jitter and outcome.facts.train_s_no_jitter is None
    if is_missing and outcome.status == "completed" and is_lock_step(run):
        with suppress(*_NOT_TIMED):
            (steady,) = time(
                [without_jitter(run)], dataset, machine, [Trace.of(outcome)]
            )
            outcome.add_facts(train_s_no_jitter=steady.train_s)
    return outcome


def _has_buffers(run: Run, dataset: Dataset) -> bool:
    return next(meta_model(run, dataset).buffers(), None) is not None


@dataclass(frozen=True)
class Simulator:
    """Simulates pieces of work; it is sent to each process of the pool.

    `folders` are the data sets by worker count; `weights_folder` gets the weights of
    runs that keep them. Runs that left `traces`, by run_id, are timed without
    arithmetic.
    """

    machine: Machine
    folders: Mapping[int, Path]
    weights_folder: Path
    fail_fast: bool = False
    traces: Mapping[str, Trace] = field(default_factory=dict)

    def piece_of(self, run: Run) -> str:
        """Return a key that runs share which are simulated together: of equal arithmetic, or repetitions timed anew."""
        return (
            f"{run.strategy} {run.workers}" if run.run_id in self.traces else alike(run)
        )

    def simulated(self, runs: Sequence[Run]) -> Iterator[tuple[Run, Outcome, Weights]]:
        """Simulate the runs of a piece."""
        dataset = open_dataset(self.folders[runs[0].workers])
        if runs[0].run_id not in self.traces:
            return simulate_alike(runs, dataset, self.machine)
        return time_or_simulate(
            runs, dataset, self.machine, [self.traces[run.run_id] for run in runs]
        )

    def outcomes(
        self, runs: Sequence[Run], stopping: Callable[[], bool]
    ) -> list[Outcome]:
        """The outcomes of `runs` in order, as far as they were made before `stopping` or a failure."""
        found: list[Outcome] = []
        if stopping():
            return found
        try:
            for run, outcome, weights in self.simulated(runs):
                if run.save_weights and weights:
                    save_weights(
                        self.weights_folder,
                        run.run_id,
                        weights["initial"],
                        weights["final"],
                    )
                found.append(outcome)
                if stopping() or self.ends_with(run, [outcome]):
                    return found
        except (
            Exception,
            SystemExit,
        ) as error:  # of any kind, raised by a user's strategy or model
            begun = len(found)
            found += [
                Outcome(run.run_id, "failed", in_one_line(error))
                for run in runs[begun:]
            ]
            return found[: begun + 1] if self.fail_fast else found
        return found

    def ends_with(self, run: Run, outcomes: Sequence[Outcome]) -> bool:
        """Return True if no run may follow these outcomes of runs like `run`."""
        return self.fail_fast and any(outcome.failed(run) for outcome in outcomes)


def run_virtual(
    runs: Sequence[Run],
    simulator: Simulator,
    *,
    jobs: int,
    on_start: Callable[[Run], None],
    on_outcome: OnOutcome,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Simulate `runs` in `jobs` processes and report each as it ends; a run that kills its process fails alone.

    One job is done in this process. Once `stopping` returns True, or a run has failed
    if the simulator fails fast, runs under way are finished and no other begins.
    """
    pieces: dict[str, list[Run]] = {}
    for run in runs:
        pieces.setdefault(simulator.piece_of(run), []).append(run)
    if jobs == 1:
        for piece in pieces.values():
            if stopping():
                return
            for run in piece:
                on_start(run)
            outcomes = simulator.outcomes(piece, stopping)
            for run, outcome in zip(piece, outcomes, strict=False):
                on_outcome(run, outcome)
            if simulator.ends_with(piece[0], outcomes):
                return
            # Users' models may hold themselves. Only objects that are new are searched:
            # those of all imports are old after the first piece.
            gc.collect(1)
        return
    waiting = list(pieces.values())
    # under way when a process died: repeated, one at a time
    suspects: list[list[Run]] = []
    while (waiting or suspects) and not stopping():
        alone = bool(suspects)
        work = [suspects.pop(0)] if alone else waiting
        processes = 1 if alone else min(jobs, len(work))
        left = _run_in_processes(
            work, simulator, processes, on_start, on_outcome, stopping
        )
        if stopping():
            return
        if not alone:
            suspects, waiting = left[: 2 * processes], left[2 * processes :]
        elif left and len(left[0]) > 1:
            suspects = [[run] for run in left[0]] + suspects
        else:
            for run in left[0] if left else []:
                on_outcome(
                    run,
                    Outcome(
                        run.run_id,
                        "failed",
                        "its process died (killed, or out of memory)",
                    ),
                )


def _run_in_processes(
    pieces: Sequence[list[Run]],
    simulator: Simulator,
    processes: int,
    on_start: Callable[[Run], None],
    on_outcome: OnOutcome,
    stopping: Callable[[], bool],
) -> list[list[Run]]:
    """Work until all pieces are done or a process dies; return those without outcomes, those under way first."""
    left = dict(enumerate(pieces))
    others = multiprocessing.active_children()  # of a notebook, for instance
    context = parent_watch.preloaded_forkserver()
    stop = context.Event()
    pool = ProcessPoolExecutor(processes, context, _begin, (simulator, stop))
    under_way: dict[Future[list[Outcome]], int] = {}
    queue = list(left)
    try:
        while under_way or (queue and not stopping()):
            # per process: one in work, one waiting
            while queue and len(under_way) < 2 * processes and not stopping():
                place = queue.pop(0)
                for run in left[place]:
                    on_start(run)
                with parent_watch.signals_blocked():
                    under_way[pool.submit(_simulate_here, left[place])] = place
            done, _ = wait(under_way, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                outcomes = future.result()
                for run, outcome in zip(
                    left.pop(under_way.pop(future)), outcomes, strict=False
                ):
                    on_outcome(run, outcome)
            if stopping():
                stop.set()
    except BrokenProcessPool:
        return list(left.values())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if left:  # interrupted, or a process died: the others have nothing to finish
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
    return []


_simulator: Simulator | None = None  # of this worker process, set when it starts
_stop: Any = None  # likewise: the event that is set when no further run should begin


def _begin(simulator: Simulator, stop: Any) -> None:
    global _simulator, _stop
    parent_watch.exit_with_parent()
    _simulator, _stop = simulator, stop


def _simulate_here(runs: list[Run]) -> list[Outcome]:
    assert _simulator is not None
    outcomes = _simulator.outcomes(runs, _stop.is_set)
    if _simulator.ends_with(runs[0], outcomes):
        _stop.set()  # here, before this process takes the piece that waits for it
    return outcomes
