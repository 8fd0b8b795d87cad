"""Parameter servers: workers push gradients to a server, which holds the weights and releases workers by a rule.

Li et al., OSDI 2014. Each step a worker computes g at its copy of the weights, pushes
it, and goes on with the weights of the reply: 2 n bytes a step and worker, 2 K n / S a
round over the link of each of S servers, which is what limits them. The optimizer, its
momentum included, lives on the server. Rules: server_rules.py; arithmetic:
server_weights.py.

Trap: under `scale: mean` a push moves the weights by eta g / K, so that K pushes are
one step of `bsp` at equal learning rate; the literature's asynchronous SGD is often
`scale: sum`, K times as fast and less stable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from scalebench.comm.base import Capability
from scalebench.errors import StudyError
from scalebench.strategies import server_rules, server_weights
from scalebench.strategies.base import Batch, Setting, Strategy, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.server_rules import Gate
from scalebench.strategies.traits import Stretch, Traits
from scalebench.study.spec import BY_LAYER


class ParameterServerStrategy(Strategy):
    """A worker pushes the gradient of each batch and continues from the weights of the reply, once it is released.
    The optimizer, its momentum included, lives on the server.
    """

    scale: Literal["mean", "sum"] = Field(
        "mean", description="a push counts as g / K, or as g"
    )
    shards: int = Field(
        1,
        ge=1,
        le=1024,
        description="servers over which the weights are spread, at most one a worker",
    )

    requires = frozenset({Capability.COLLECTIVES, Capability.SERVER})
    engines = ("mpi",)
    deterministic = False
    # a worker that is behind skips the batches of rounds that are over
    misses_rounds: ClassVar[bool] = False

    # Its last push releases a worker for good, and one that waits for others elsewhere
    # pushes nothing: the gate has to know after how many pushes that is.
    def gate(self, workers: int, meetings: Sequence[int]) -> Gate:
        """The rule that releases `workers`, which wait for all others after `meetings` pushes, the last at the end."""
        raise NotImplementedError

    def setup(self, worker: Worker) -> None:
        state, ends = worker.state, [0]
        for epoch in range(worker.epochs):
            ends.append(ends[-1] + worker.steps_in(epoch))
        # rows move when every worker has made the pushes of an epoch
        meetings = ends[1:] if worker.rows_move else ends[-1:]

        def rule() -> server_weights.ParameterServer:
            return server_weights.ParameterServer(
                self.gate(worker.size, meetings),
                worker.parameters,
                worker.optimizer,
                ends[1:],
                shards=self.traits.server_ranks(worker.size),
                **self._application(worker.size),
            )

        state.server = worker.server(rule)
        state.begins, state.rounds = ends, 0
        # Memory of every push, unless the server takes the gradient where it lies.
        in_process = getattr(state.server, "in_process", False)
        numbers = [0.0] * server_weights.PUSH_NUMBERS
        state.message = (
            None if in_process else server_weights.pack(worker.gradients, numbers)
        )

    def _application(self, workers: int) -> dict[str, Any]:
        """Arguments of `ParameterServer` that say how a push is applied."""
        # The literature's asynchronous SGD is mostly the sum, K times as fast and less
        # stable.
        if self.scale == "mean":
            return {"share": 1.0 / workers}
        return {"share": 1.0, "of_round": float(workers)}

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        worker.gradient(batch, batch.weight)
        self._pull(worker)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        state = worker.state
        for batch in worker.batches(epoch):
            if self.misses_rounds and state.begins[epoch] + batch.step < state.rounds:
                continue
            worker.gradient(batch, batch.weight)
            numbers = [worker.learning_rate, batch.weight]
            weights, reply = server_weights.request(
                state.server,
                worker.gradients,
                numbers,
                into=worker.parameters,
                message=state.message,
            )
            # The optimizer's step was the server's, where momentum lives.
            worker.adopt(weights)
            worker.observe("staleness" if reply.used else "dropped", reply.staleness)
            worker.observe("lead_at_push", reply.lead_at_push)
            worker.observe("lead_at_release", reply.lead_at_release)
            state.rounds = reply.rounds
            # Only the server knows which push ends an epoch of all workers.
            if reply.mark:
                worker.snapshot(reply.mark - 1, weights)

    def finish(self, worker: Worker) -> None:
        worker.comm.barrier()  # training ends when the last worker has pushed
        # the model is on the server; no worker trains on a last copy
        with worker.clock.paused():
            worker.parameters.copy_(self._pull(worker))

    def _pull(self, worker: Worker) -> Any:
        # The gate counts pushes that hold something; this one is empty.
        nothing = worker.parameters[:0]
        numbers = [0.0] * server_weights.PUSH_NUMBERS
        return server_weights.request(
            worker.state.server, nothing, numbers, worker.parameters
        )[0]

    def in_agreement(self, worker: Worker, epoch: int) -> None:
        return None  # the server says which weights end an epoch

    @property
    def synchronisation(self) -> Synchronisation:
        if self.gate(workers=2, meetings=[1]).in_rounds:
            merge = f"{self.scale} of the round"
        else:
            merge = "each push at once" + (", scale sum" if self.scale == "sum" else "")
        return Synchronisation(optimizer_state="on the server", merge=merge)

    @property
    def traits(self) -> Traits:
        return Traits(servers=1, shards=self.shards)

    def served(self, in_rounds: bool) -> Traits:
        """Return the traits of workers that push in every step to servers that answer `in_rounds`, or at once."""
        mean = in_rounds and self.scale == "mean"
        return Traits(
            (Stretch(),),
            mean_over_global_batch=mean,
            servers=1,
            shards=self.shards,
            in_rounds=in_rounds,
        )

    def check(self, setting: Setting) -> list[str]:
        optimizer = setting.training.optimizer.name
        if optimizer in BY_LAYER:
            raise StudyError(
                f"strategy {self.name}: optimizer {optimizer} needs whole layers, and the server knows one "
                "vector; use sgd, adam or adamw"
            )
        if self.shards > setting.workers > 1:
            workers = setting.workers
            return [
                f"shards {self.shards} are more servers than workers: the weights are spread over {workers}"
            ]
        return []


@register()
class Bsp(ParameterServerStrategy):
    """w <- w - eta sum_i n_i g_i / sum_i n_i when all K pushes of the round have come; then all are released."""

    name = "bsp"
    summary = "parameter server with a barrier each step"
    source = "Valiant, 1990; Li et al., OSDI 2014"
    deterministic = True

    @property
    def traits(self) -> Traits:
        return self.served(in_rounds=True)

    def gate(self, workers: int, meetings: Sequence[int]) -> Gate:
        return server_rules.Lockstep(workers, meetings[-1])


@register()
class BspBackup(ParameterServerStrategy):
    """As `bsp`, but a round is over when K - b pushes have come.

    Late pushes are dropped; their workers skip to the round that is under way. w <- w -
    eta sum n_i g_i / sum n_i over the K - b used. A worker skips the rounds it misses,
    and sends less then. Trap: the slowest worker's samples are then hardly seen.
    """

    backup: int = Field(1, ge=1, description="pushes that a round does not wait for")

    name = "bsp_backup"
    summary = "parameter server whose rounds do not wait for the last b pushes"
    source = "Chen et al., 2016, arXiv 1604.00981"
    misses_rounds = True

    @property
    def synchronisation(self) -> Synchronisation:
        return replace(
            super().synchronisation,
            merge=f"{self.scale} of the first K - b of the round",
        )

    @property
    def traits(self) -> Traits:
        return replace(self.served(in_rounds=True), mean_over_global_batch=False)

    def gate(self, workers: int, meetings: Sequence[int]) -> Gate:
        return server_rules.Lockstep(workers, meetings[-1], self.backup)

    def check(self, setting: Setting) -> list[str]:
        workers = setting.workers
        if self.backup >= workers == 1:
            raise StudyError(
                f"strategy bsp_backup at 1 worker: backup {self.backup} leaves none to wait for; "
                f"start at {self.backup + 1} workers"
            )
        if self.backup >= workers:
            raise StudyError(
                f"strategy bsp_backup: backup {self.backup} of {workers} workers leaves none to wait for; "
                f"use backup: {workers - 1} or less, or more workers"
            )
        return super().check(setting)


@register()
class Asp(ParameterServerStrategy):
    """No worker waits: w <- w - eta g / K at once, with g as stale as it is; eta / max(1, staleness) if so asked."""

    # So that an old gradient, of weights long gone, moves them little (Zhang et al.,
    # 2016).
    staleness_lr: bool = Field(
        False, description="divide the learning rate of a push by its staleness"
    )

    name = "asp"
    summary = "parameter server that never makes a worker wait"
    source = (
        "Dean et al., NeurIPS 2012; Zhang et al., 2016, arXiv 1511.05950 (staleness_lr)"
    )

    def _application(self, workers: int) -> dict[str, Any]:
        return {**super()._application(workers), "slow_stale": self.staleness_lr}

    @property
    def traits(self) -> Traits:
        return self.served(in_rounds=False)

    def gate(self, workers: int, meetings: Sequence[int]) -> Gate:
        return Gate(workers, meetings[-1])


@register()
class Ssp(ParameterServerStrategy):
    """As `asp`, but a worker waits while it is more than `staleness` pushes ahead of the slowest.

    staleness 0 is `bsp`: nobody sees the weights between two barriers, and a round is
    applied as one step, of the mean or the sum of its pushes as `scale` says.
    """

    staleness: int = Field(
        3,
        ge=0,
        description="largest lead over the slowest worker with which one goes on",
    )

    name = "ssp"
    summary = "parameter server that bounds the lead over the slowest worker"
    source = "Ho et al., NeurIPS 2013"

    @property
    def traits(self) -> Traits:
        return self.served(in_rounds=self.staleness == 0)

    def gate(self, workers: int, meetings: Sequence[int]) -> Gate:
        return server_rules.Bounded(workers, meetings[-1], self.staleness)


@register()
class Dssp(ParameterServerStrategy):
    """As `ssp(lower)`, but the fastest worker may run on, up to `upper`, where that shortens its wait.

        lead <= lower: release. Else, for the fastest p: release for r more pushes, 0 <= r <= upper - lower, where r
        is the smallest that minimises |(last_s + (k + 1) I_s) - (now + r I_p)| over r and k = 0, 1, ...

    I: latest push-to-push intervals of p and of the slowest worker s, last_s: when s
    pushed last; others wait until the lead is `lower`. strict: r <- min(r, upper -
    lead). `bound: paper` is the published rule to the letter: it grants r + 1 pushes,
    and never enforces `upper`.
    """

    # The defaults are the published run's, s_L = 3 and r_max = s_U - s_L = 12.
    lower: int = Field(
        3, ge=0, le=10_000, description="s_L: lead with which everybody goes on"
    )
    upper: int = Field(
        15,
        ge=0,
        le=10_000,
        description="s_U: largest lead that the fastest may be granted; lower or more",
    )
    bound: server_rules.Bound = Field(
        "strict", description="whether `upper` is enforced"
    )

    name = "dssp"
    summary = "parameter server with a staleness bound that follows the workers' speeds"
    source = "Zhao et al., ICDCS 2019"

    @field_validator("upper")
    @classmethod
    def _not_below_lower(cls, upper: int, info: ValidationInfo) -> int:
        if upper < info.data.get("lower", 0):
            raise ValueError(
                f"expected at least lower ({info.data['lower']}), got {upper}"
            )
        return upper

    @property
    def traits(self) -> Traits:
        return self.served(in_rounds=self.upper == 0)

    def gate(self, workers: int, meetings: Sequence[int]) -> Gate:
        return server_rules.Dynamic(
            workers, meetings[-1], self.lower, self.upper, self.bound
        )


@register()
class ElasticBsp(ParameterServerStrategy):
    """Between barriers as `asp`; each barrier lies where the next pushes of all workers are predicted to come together.

    The authors' code is not public; where pushes between barriers are applied is our
    reading: at once.
    """

    lookahead: int = Field(
        10, ge=1, le=10_000, description="R: pushes of each worker that are predicted"
    )

    name = "elastic_bsp"
    summary = "parameter server with barriers where the workers arrive together anyway"
    source = "Zhao et al., ICDM 2019 (reconstruction)"

    @property
    def traits(self) -> Traits:
        # Equal workers meet at every barrier, but their pushes are applied one by one.
        return replace(self.served(in_rounds=True), mean_over_global_batch=False)

    def gate(self, workers: int, meetings: Sequence[int]) -> Gate:
        return server_rules.Elastic(workers, meetings, self.lookahead)
