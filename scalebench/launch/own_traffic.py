"""Whether a strategy of the user's own sends what its formulas say; those shipped are held to theirs by tests."""

from __future__ import annotations

from scalebench.launch.planning import Plan
from scalebench.records.schema import RunRow
from scalebench.strategies import registry
from scalebench.strategies.base import Strategy
from scalebench.study.spec import Run

_SHIPPED = "scalebench."
_ROUNDING = 1e-9


class OwnTraffic:
    """Compares what runs of `plan` counted with `syncs_formula` and `bytes_formula`; each difference is told once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._told: set[str] = set()

    def differences(self, run: Run, row: RunRow) -> list[str]:
        """One line for each formula of an own strategy that says something else than the completed `run` counted."""
        strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
        first = run.repetition == 0 and row.status == "completed"  # others shuffle with other seeds
        if not first or type(strategy).__module__.startswith(_SHIPPED):
            return []
        try:
            both = self._both(strategy, run, row)
        except Exception as error:  # whatever somebody's formula raises, the run is kept
            key = f"{run.strategy} fails"
            if key in self._told:
                return []
            self._told.add(key)
            return [f"{run.strategy}: its formulas cannot be evaluated: {type(error).__name__}: {error}"]
        return [
            line
            for name, what, counted, stated in both
            if counted is not None and abs(counted - stated) > _ROUNDING * max(counted, stated)
            for line in self._once(run, name, what, counted, stated)
        ]

    def _both(self, strategy: Strategy, run: Run, row: RunRow) -> list[tuple[str, str, float | None, float]]:
        import torch

        from scalebench.launch.traffic import bytes_of_row, setting_of

        prepared, epochs = self._plan.prepared, range(run.epochs)
        shards, dataset = prepared.plans[run.workers], prepared.datasets[run.workers]
        per_node = row.workers_per_node or self._plan.cluster.node.workers_per_node
        setting = setting_of(self._plan.study, dataset, run.workers, shards.steps(0), per_node)
        syncs = sum(strategy.syncs_in_epoch(epoch, setting) for epoch in epochs)
        sent = sum(strategy.bytes_in_epoch(epoch, setting) for epoch in epochs)
        rows = sum(int(shards.moved(epoch).sum()) for epoch in epochs) / run.workers
        sent += rows * bytes_of_row(dataset, getattr(torch, run.dtype))
        return [
            ("syncs_formula", "synchronisations", row.syncs, syncs),
            ("bytes_formula", "bytes of a worker", row.bytes_sent_per_worker, sent),
        ]

    def _once(self, run: Run, name: str, what: str, counted: float, stated: float) -> list[str]:
        key = f"{run.strategy} {name}"
        if key in self._told:
            return []
        self._told.add(key)
        return [
            f"{run.strategy} at {run.workers} worker{'s' * (run.workers > 1)}: {counted:,.0f} {what} were counted, "
            f"its {name} says {stated:,.0f}; the records hold what was counted, `explain` prints the formula: override "
            "it (docs/own-strategy.md)"
        ]
