"""Elastic averaging: replicas are drawn to a centre, and the centre to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from scalebench.strategies.averaging import Averaging, local_intervals, too_few_steps
from scalebench.strategies.base import Setting, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import average_
from scalebench.strategies.traits import Stretch, Traits

if TYPE_CHECKING:
    from torch import Tensor


@register()
class Easgd(Averaging):
    """Every `steps` = H local steps, and after the last one:  d_i = alpha (w_i - c);  w_i -= d_i;  c += sum_i d_i.

    Zhang, Choromanska and LeCun, NeurIPS 2015, arXiv 1412.6651, synchronous form, alpha
    = 0.9 / K. Every worker holds the centre c, which starts as the initial weights and
    is the model handed out; replicas never become equal. Weighted by samples, c += K
    sum_i n_i d_i / sum_i n_i. Buffers and optimizer state, where they are averaged,
    take their mean at each exchange. One worker is not serial: its centre follows it.
    """

    steps: int = Field(8, ge=1, description="H: local steps between two exchanges")
    alpha: float | None = Field(
        None, gt=0, le=1, description="how far they are drawn; default: 0.9 / K"
    )

    name = "easgd"
    summary = (
        "replicas and a centre drawn to one another every H local steps (option steps)"
    )
    source = "Zhang, Choromanska and LeCun, NeurIPS 2015, arXiv 1412.6651"

    def setup(self, worker: Worker) -> None:
        worker.state.taken = 0
        worker.state.centre = worker.parameters.clone()

    def train(self, worker: Worker) -> None:
        for epoch in range(worker.epochs):
            self.train_epoch(worker, epoch)
            # Replicas never meet: the centre, the same on all, is the model.
            if worker.rank == 0:
                worker.snapshot(epoch, worker.state.centre)
            worker.epoch_done(epoch, None)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for epoch_ends in local_intervals(worker, epoch, self.due):
            if self.due(worker.state.taken) or (
                epoch_ends and self.ends_training(worker, epoch)
            ):
                self._exchange(worker)

    def due(self, taken: int) -> bool:
        return taken % self.steps == 0

    def _exchange(self, worker: Worker) -> None:
        drawn = worker.clock.work(self._draw, worker)
        average_(worker.comm, [drawn, *self.averaged(worker)[1:]], self.weight(worker))
        worker.clock.work(self._follow, worker, drawn)
        self.after_average(worker)

    def _draw(self, worker: Worker) -> Tensor:
        # beta / K with the paper's beta = 0.9.
        alpha = 0.9 / worker.size if self.alpha is None else self.alpha
        # Both moves start from the same centre, and are opposite: the elastic symmetry
        # to which the paper owes its stability.
        drawn: Tensor = (worker.parameters - worker.state.centre).mul_(alpha)
        worker.parameters.sub_(drawn)
        return drawn

    def _follow(self, worker: Worker, drawn: Tensor) -> None:
        # The mean of the moves, times K, is their sum.
        worker.state.centre.add_(drawn, alpha=worker.size)

    def finish(self, worker: Worker) -> None:
        worker.parameters.copy_(worker.state.centre)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return worker.is_last(epoch)

    @property
    def traits(self) -> Traits:
        return self.repeated(Stretch(period=self.steps), interval="steps")

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.steps, merge="elastic")

    def check(self, setting: Setting) -> list[str]:
        workers, found = setting.workers, too_few_steps(setting, self.steps)
        if self.alpha is not None and self.alpha * workers > 1:
            found.append(
                f"alpha {self.alpha:g} times {workers} workers is above 1: the centre overshoots their mean"
            )
        return found
