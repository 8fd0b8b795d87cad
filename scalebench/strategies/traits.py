"""What a strategy states about itself, as values that others may rely on.

What is not stated is found out by recording the whole program: right, but slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from scalebench.cluster.mesh import Mesh

# From the places of each worker's merges among all, the epochs, and the sizes of the
# shards.
FinalWeights = Callable[[Sequence[Iterable[int]], int, Sequence[int]], list[float]]

# Interval between synchronisations; stages, and workers that share the layers of each;
# micro-batches; layers of each stage.
Varied = Literal["interval", "pipeline", "tensor", "micro_batches", "balance"]


@dataclass(frozen=True)
class Stretch:
    """A part of a training in which a program repeats after every `period` batches, or epochs.

    It lasts `epochs`, or `steps` batches at the beginning of a training; without
    either, as long as other stretches leave. Batches are counted through the whole
    training, or anew in each epoch (`restarts`); a partial interval at the end of
    either may then be treated in its own way. In a stretch of whole epochs (`unit`
    "epoch") all batches of an epoch are alike, and nothing is exchanged between them.
    """

    epochs: int | None = None
    period: int = 1
    unit: Literal["batch", "epoch"] = "batch"
    steps: int | None = None
    restarts: bool = False


@dataclass(frozen=True)
class Traits:
    """Facts about a strategy with its options. Defaults mean "not stated", and are safe to assume.

    `stretches` follow one another, at most one of which has no length. The excerpt of a
    training that they allow is recorded for the first worker, and where groups differ
    for those of its node.
    """

    # None: the program is recorded whole, for every worker
    stretches: tuple[Stretch, ...] | None = None
    # of the workers that train in a round; below 1, who does is drawn
    fraction: float = 1.0
    # each step takes the mean gradient over the batches of all workers
    mean_over_global_batch: bool = False
    local_steps: bool = False  # a worker's optimizer steps are by its own batches alone
    # floating-point buffers are averaged with the weights
    averages_buffers: bool = False
    sends_buffers: bool = False  # worker 0's buffers replace those of the others
    servers: int = 0  # 1: a parameter server answers the workers
    pipeline: int = 1  # stages of a replica
    tensor: int = 1  # workers that share the layers of a stage
    folded: bool = False  # groups of layers are dealt to the stages forth and back
    micro_batches: int = 1  # into which a replica's batch is cut
    # 1: workers keep shards of the optimizer's state, 2: of gradients too, 3: of
    # parameters too
    sharded: int = 0
    mixed: bool = False  # layers are shared by numbers of workers of their own
    # what is exchanged in an epoch depends on the measured times of those before
    adapts: bool = False
    # ranks over which the server's weights are spread, at most one a worker
    shards: int = 1
    # the server answers when the pushes of all have come, or at once
    in_rounds: bool | None = None
    # the options that set what others vary
    options: Mapping[Varied, str] = field(default_factory=dict)
    # after which a thread of the engine looks for gradients anew; 0: they do not wait
    # for one
    cycle_s: float = 0.0
    wire: str | None = None  # dtype that travels in place of the study's
    # variables that the engine reads at its start
    environment: Mapping[str, str] = field(default_factory=dict)
    # native runs measure compute and communication separately
    split_is_measured: bool = True
    # at the end of an epoch, from nothing but a replica's weights, buffers and
    # optimizer
    resumes: bool = False
    # of sums of gradients, so that a different rounding can change a step's direction
    takes_signs: bool = False
    # of each worker's training in the final model
    final_weights: FinalWeights | None = None

    def __post_init__(self) -> None:
        open_ended = [
            each
            for each in self.stretches or ()
            if each.epochs is None and each.steps is None
        ]
        if len(open_ended) > 1:
            raise ValueError(
                "stretches: at most one may be without epochs and steps, for it takes what others leave"
            )

    def of_changed_program(self) -> Traits:
        """Return these traits without those that follow from the order of a program's operations."""
        return replace(
            self,
            stretches=None,
            fraction=1.0,
            mean_over_global_batch=False,
            in_rounds=None,
            resumes=False,
        )

    @property
    def equals_one_batch(self) -> bool:
        """Return True if one whole model, on the batches of all workers side by side, ends with the same weights.

        But for the rounding of sums, and for models whose samples depend on one
        another.
        """
        return self.mean_over_global_batch and self.wire is None

    def mesh(self, workers: int) -> Mesh:
        """Return how `workers` divide into replicas and parts of these; a lone worker holds the whole model."""
        parts = self.pipeline * self.tensor
        if workers == 1 or parts == 1:
            return Mesh(workers)
        if workers % parts:
            raise ValueError(
                f"{workers} workers are no multiple of {parts}, which `check` refuses"
            )
        return Mesh(workers // parts, self.pipeline, self.tensor, self.folded)

    @property
    def trains_alone(self) -> bool:
        """Return True if nothing is exchanged between the batches of an epoch."""
        whole = (
            # parts of a model exchange activations within a batch
            self.pipeline * self.tensor == 1
            and not self.sharded
            and not self.mixed
            and not self.servers
        )
        return (
            whole
            and self.stretches is not None
            and all(stretch.unit == "epoch" for stretch in self.stretches)
        )

    def cuts_model(self, workers: int) -> bool:
        """Return True if `workers` compute with the model layer by layer."""
        return workers > 1 and (
            self.pipeline * self.tensor > 1 or self.sharded > 1 or self.mixed
        )

    def shares_layers(self, workers: int) -> bool:
        """Return True if each of several workers computes or keeps a share of a layer."""
        return workers > 1 and bool(self.tensor > 1 or self.sharded or self.mixed)

    def server_ranks(self, workers: int) -> int:
        """Return the ranks of the parameter server for `workers`; 0 without one."""
        return min(self.shards, workers) if self.servers else 0
