"""Local SGD with a second optimizer over the averages: SlowMo, BMUF and DiLoCo.

All three read the move of the mean over one interval, w0 - mean_i w_i (w0: where it
began), as a gradient. Between two synchronisations the model handed out is the plain
mean of the replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from scalebench.strategies.base import Setting, Synchronisation, Worker
from scalebench.strategies.local_sgd import LocalSgd
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits

if TYPE_CHECKING:
    from torch import Tensor


# times as long a way, from which on a learning rate that was found without it deserves
# a look
_MUCH = 2.0
OuterRate = Annotated[float, Field(gt=0, description="lr: of the outer optimizer")]
OuterMomentum = Annotated[
    float,
    Field(
        ge=0,
        lt=1,
        description="m: share of the outer momentum that each average keeps",
    ),
]


class BlockMomentum(LocalSgd):
    """Local SGD that restarts from `outer`'s update of the weights at which the interval began."""

    combination: ClassVar[str]

    @property
    def traits(self) -> Traits:
        return super().traits  # when is as in local_sgd

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.steps, merge=self.combination)

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        worker.state.anchor = worker.parameters.clone()
        worker.state.momentum = worker.parameters.clone().zero_()

    def synchronise(self, worker: Worker) -> None:
        self.average(worker)
        worker.clock.work(self._restart, worker)

    def _restart(self, worker: Worker) -> None:
        self.outer(
            worker, worker.parameters, worker.state.anchor, worker.state.momentum
        )
        worker.parameters.copy_(worker.state.anchor)

    def outer(
        self, worker: Worker, mean: Tensor, anchor: Tensor, momentum: Tensor
    ) -> None:
        """Change `anchor` and `momentum` in place, given the `mean`."""
        raise NotImplementedError


@register()
class SlowMo(BlockMomentum):
    """After every H local steps from w0, with eta the learning rate of that moment:

        u <- b u + (w0 - mean w) / eta;   w <- w0 - a eta u

    Wang et al., ICLR 2020, arXiv 1910.00643. With a = 1, b = 0 it is local SGD. eta is
    that of an interval's last step; where a schedule has brought it to 0, w <- w0 - a
    (w0 - mean w), and older moves are forgotten. Trap: moves of the mean add up to a /
    (1 - b) times their length, 3.3 times by default, on top of the optimizer's own
    momentum. Where local_sgd just trains, take a smaller learning rate, slow_lr or
    slow_momentum.
    """

    slow_lr: float = Field(
        1.0, gt=0, description="a: how far along the slow momentum a step goes"
    )
    slow_momentum: float = Field(
        0.7,
        ge=0,
        lt=1,
        description="b: share of the slow momentum that each average keeps",
    )

    name = "slowmo"
    summary = "local SGD with a slow momentum over the averages"
    source = "Wang et al., ICLR 2020, arXiv 1910.00643"
    combination = "slow momentum"

    @property
    def traits(self) -> Traits:
        return super().traits  # when is as in local_sgd

    def check(self, setting: Setting) -> list[str]:
        options = setting.training.optimizer.options
        inner, gain = (
            options.get("momentum", 0.0),
            self.slow_lr / (1 - self.slow_momentum),
        )
        found = super().check(setting)
        if (
            setting.workers > 1
            and isinstance(inner, int | float)
            and inner >= 0.5
            and gain > _MUCH
        ):
            found.append(
                f"slow_momentum {self.slow_momentum:g} makes moves up to {gain:.1f} times as long, beside the "
                f"optimizer's momentum of {inner:g}: if it learns less than local_sgd, take a smaller lr, slow_lr or "
                "slow_momentum"
            )
        return found

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        worker.state.rate = 0.0

    def outer(
        self, worker: Worker, mean: Tensor, anchor: Tensor, momentum: Tensor
    ) -> None:
        """`momentum` is eta u, which stays in the range of weights where 1 / eta leaves that of numbers.

        v <- b (eta / eta before) v + w0 - mean w;  w <- w0 - a v. At a rate of 0 no old move is left in v.
        """
        # Of the last step, whatever policy made it.
        rate, before = float(worker.optimizer.param_groups[0]["lr"]), worker.state.rate
        worker.state.rate = rate
        momentum.mul_(
            self.slow_momentum * (rate / before) if before > 0.0 else 0.0
        ).add_(anchor - mean)
        anchor.sub_(momentum, alpha=self.slow_lr)


@register()
class Bmuf(BlockMomentum):
    """Blockwise model-update filtering. After every H local steps from w0:

        D <- mu D + zeta (mean w - w0);   w <- w0 + D

    Chen and Huo, ICASSP 2016, who take mu = 1 - 1/K; so does the default. With mu = 0,
    zeta = 1 it is local SGD. Trap: moves of the mean add up to zeta / (1 - mu) times
    their length, K times by default, on top of the optimizer's own momentum: take a
    smaller learning rate than for local_sgd, or a smaller block_momentum.
    """

    block_momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="mu: share of its last move that each average keeps; default: 1 - 1/K",
    )
    block_lr: float = Field(1.0, gt=0, description="zeta: how far towards the mean")

    name = "bmuf"
    summary = "local SGD whose averages are filtered by a block momentum"
    source = "Chen and Huo, ICASSP 2016"
    combination = "block momentum"

    @property
    def traits(self) -> Traits:
        return super().traits  # when is as in local_sgd

    def outer(
        self, worker: Worker, mean: Tensor, anchor: Tensor, momentum: Tensor
    ) -> None:
        mu = (
            # Moves then add up to 1 / (1 - mu) = K times the mean move, as of K workers
            # one after the other.
            1.0 - 1.0 / worker.size
            if self.block_momentum is None
            else self.block_momentum
        )
        momentum.mul_(mu).add_(mean - anchor, alpha=self.block_lr)
        anchor.add_(momentum)


@register()
class DiLoCo(BlockMomentum):
    """Nesterov SGD over the averages. After every H local steps from w0:

        g = w0 - mean w;   v <- m v + g;   w <- w0 - lr (g + m v)

    Douillard et al., 2023, arXiv 2311.08105. The inner optimizer is the study's: the
    paper's is AdamW, whose state stays with its worker, and H is some hundred steps.
    """

    # The paper's outer optimizer is Nesterov's with these two.
    outer_lr: OuterRate = 0.7
    outer_momentum: OuterMomentum = 0.9

    name = "diloco"
    summary = "local steps, then one Nesterov step over the average"
    source = "Douillard et al., 2023, arXiv 2311.08105"
    combination = "outer nesterov"

    @property
    def traits(self) -> Traits:
        return super().traits  # when is as in local_sgd

    def check(self, setting: Setting) -> list[str]:
        return super().check(setting) + unlike_the_papers_optimizer(setting)

    def outer(
        self, worker: Worker, mean: Tensor, anchor: Tensor, momentum: Tensor
    ) -> None:
        nesterov_(anchor, momentum, anchor - mean, self.outer_lr, self.outer_momentum)


def nesterov_(
    weights: Tensor, momentum: Tensor, slope: Tensor, lr: float, m: float
) -> None:
    """v <- m v + g;  w <- w - lr (g + m v), in place; `slope` g is used up."""
    momentum.mul_(m).add_(slope)
    weights.sub_(slope.add_(momentum, alpha=m), alpha=lr)


def unlike_the_papers_optimizer(setting: Setting) -> list[str]:
    """Warning where the inner optimizer is not that of the papers of the DiLoCo family."""
    inner = setting.training.optimizer.name
    if setting.workers == 1 or inner in ("adam", "adamw", "muon"):
        return []
    return [
        f"the inner optimizer is {inner}, the paper's is adamw: say optimizer: adamw, and a learning rate that fits "
        "it, such as lr: 1e-3"
    ]
