"""Epoch averaging as dislib 1.0.0 does it, to be compared with it number by number."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scalebench.errors import StudyError
from scalebench.strategies.base import Setting, Worker
from scalebench.strategies.epoch_async import EpochAsync
from scalebench.strategies.epoch_average import EpochAverage
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits

# what dislib does without a choice
_PerBlock = Annotated[
    Literal["reset_per_block"], Field(description="a new optimizer for each block")
]
_Kept = Annotated[
    Literal["keep"],
    Field(description="what becomes of the model's buffers: dislib knows none"),
]
_Uniform = Annotated[
    Literal["uniform"], Field(description="weight of a worker in the mean")
]


@register()
class DislibCompat(EpochAverage):
    """`epoch_average` by the reference's rule: for each ds-tensor block of m samples, with batches of b,

        a new optimizer;  c = ceil(m / b) batches of floor(m / c) samples each, the m mod c at the end left out

    and every `every` epochs, and after the last, w <- (1/K) sum_j w_j through a master:
    (K - 1) n bytes in and as many out over worker 0's link, (K - 1) (2 (a + n/B) + n
    gamma). Constant learning rate; parameters alone. dislib is told c as `num_batches`;
    b = m / c says the same. Vazquez-Novoa et al., WACCPD 2025. Traps: momentum is lost
    at every block; workers with more blocks than others train more but weigh the same.
    """

    aggregation: Literal["allreduce", "master"] = Field(
        "master", description="how the mean is formed"
    )
    optimizer_state: _PerBlock = "reset_per_block"
    buffers: _Kept = "keep"
    weighting: _Uniform = "uniform"
    trailing: Literal["synchronise"] = Field(
        "synchronise", description="the last epoch ends with an average"
    )

    @property
    def traits(self) -> Traits:
        return super().traits  # when is as in epoch_average

    name = "dislib-compat"
    summary = "epoch_average exactly as dislib does it: a new optimizer per block, tail samples dropped"
    source = "Vazquez-Novoa et al., WACCPD 2025; dislib 1.0.0"

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        # floor(block / num_batches) samples a batch; dislib drops those that are left
        # over.
        worker.local_steps(worker.block_batches(epoch), reset_per_block=True)
        if self.ends_interval(worker, epoch):
            self.average_all(worker)

    def check(self, setting: Setting) -> list[str]:
        _require_constant_rate(self.name, setting)
        return super().check(setting)


@register()
class DislibCompatAsync(EpochAsync):
    """`epoch_async` by the reference's rule: blocks as in `dislib-compat`, merges by halves without a barrier.

        g <- (g + w_j) / 2,  then w_j <- g;   in the end the plain mean of all w_j

    The result depends on the order of the merges, as the reference's does.
    """

    merge: Literal["half"] = Field(
        "half", description="weight of the merging worker: 1/2"
    )
    optimizer_state: _PerBlock = "reset_per_block"
    buffers: _Kept = "keep"
    weighting: _Uniform = "uniform"
    trailing: Literal["leave"] = Field(
        "leave", description="a partial interval at the end is not merged"
    )

    @property
    def traits(self) -> Traits:
        return super().traits  # when is as in epoch_async

    name = "dislib-compat-async"
    summary = "epoch_async exactly as dislib does it: a new optimizer per block, tail samples dropped"
    source = "Vazquez-Novoa et al., WACCPD 2025, asynchronous; dislib 1.0.0"

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        worker.local_steps(worker.block_batches(epoch), reset_per_block=True)
        if (epoch + 1) % self.every == 0:
            self.merge_with_shared(worker)

    def check(self, setting: Setting) -> list[str]:
        _require_constant_rate(self.name, setting)
        return super().check(setting)


def _require_constant_rate(name: str, setting: Setting) -> None:
    # A new optimizer for each block begins at the same rate.
    policy = setting.training.lr_policy
    if policy != "constant":
        raise StudyError(
            f"strategy {name}: dislib knows no lr_policy {policy}; write lr_policy: constant"
        )
