"""Carries the runs of a study out: real ones, then virtual ones, and the blocks that follow from what these took."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from scalebench.launch import engines
from scalebench.launch.keeping import Keeper, Reporter, redact_logs
from scalebench.launch.mpirun import launch
from scalebench.launch.planning import Plan
from scalebench.launch.pool import run_virtual
from scalebench.launch.stopping_rule import StoppingRule
from scalebench.records.progress import Planned, group_of, keep_planned
from scalebench.records.provenance import redact
from scalebench.study.spec import Run
from scalebench.virtual.engine import CostModel, carrier


class Conduct:
    """The runs of `plan` that `replication` says, kept by `keeper`, until none is left or it is `stopping`."""

    def __init__(
        self,
        plan: Plan,
        replication: StoppingRule,
        folder: Path,
        keeper: Keeper,
        reporter: Reporter,
        stopping: Callable[[], bool],
        *,
        fail_fast: bool = False,
    ) -> None:
        self._fail_fast = fail_fast
        self._plan, self._replication, self._folder = plan, replication, folder
        self._keeper, self._reporter, self._stopping = keeper, reporter, stopping

    def left(self, *, virtual: bool) -> list[Run]:
        """The planned runs without an end; with `until`, asking decides what the next block holds."""
        return [run for run in self._replication.left() if (run.execution == "virtual") == virtual]

    def real(self) -> None:
        """Runs in real processes; what these printed is kept if a run failed."""
        while (runs := self.left(virtual=False)) and not self._stopping():
            self._announce(runs)
            failed_before = len(self._keeper.tally.failed)
            logs = self._folder / "logs" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
            try:
                launch(
                    runs,
                    self._plan.prepared.folders,
                    ranks=max(run.workers for run in runs),
                    work_dir=logs,
                    weights_folder=self._folder / "weights",
                    on_start=self._keeper.started,
                    on_outcome=self._keeper.ended,
                    log=lambda text: self._reporter.note(redact(text, names=False)),
                    stopping=self._stopping,
                    more=self._next_block if self._replication.grows else None,
                    warmup_runs=self._plan.study.warmup_runs,
                )
            finally:
                if len(self._keeper.tally.failed) == failed_before:
                    shutil.rmtree(logs, ignore_errors=True)
                    with suppress(OSError):  # logs of earlier commands lie there
                        logs.parent.rmdir()
                else:
                    redact_logs(logs)

    def virtual(self, cost_model: CostModel, jobs: int) -> None:
        """Runs of virtual workers, `jobs` at a time, but for those on engines whose costs could not be measured."""
        unknown = frozenset() if self._plan.study.noisy else cost_model.engines.disturbed
        if unknown:
            self._reporter.note(
                f"not simulated: strategies on {' and '.join(sorted(unknown))}, as other programs took the cores while "
                "that was measured; the same command simulates them on a quieter machine, or here with --noisy"
            )

        def left() -> list[Run]:
            return [run for run in self.left(virtual=True) if carrier(run) not in unknown]

        while (runs := left()) and not self._stopping():
            self._announce(runs)
            run_virtual(
                runs,
                self._plan.prepared.folders,
                cost_model,
                jobs=jobs,
                weights_folder=self._folder / "weights",
                on_start=self._keeper.started,
                on_outcome=self._keeper.ended,
                stopping=self._stopping,
                fail_fast=self._fail_fast,
            )

    def _next_block(self) -> list[Run]:
        runs = self.left(virtual=False)
        if runs:
            self._announce(runs)
        return runs

    def _announce(self, runs: list[Run]) -> None:
        if self._replication.grows:
            keep_plan(self._folder, self._replication)
        block = f", block {runs[0].repetition + 1}" if runs[0].repetition >= self._plan.study.repetitions else ""
        self._reporter.phase(f"{_listed(runs)}{block}", len(runs))


def _listed(runs: list[Run]) -> str:
    """How they are executed: `virtual workers`, `mpi, horovod and gloo processes`."""
    if runs[0].execution == "virtual":
        return "virtual workers"
    *names, last = sorted({run.engine for run in runs}, key=engines.NAMES.index)
    return f"{', '.join(names)} and {last} processes" if names else f"{last} processes"


def keep_plan(folder: Path, replication: StoppingRule) -> None:
    """Write what the study in `folder` consists of, as far as it is known by now."""
    runs = [Planned(run.run_id, run.config_hash, group_of(run.execution, run.engine)) for run in replication.planned()]
    keep_planned(folder, runs, most_to_come=replication.most_to_come(), begun_in=Path.cwd())
