"""Streaming DiLoCo: fragments of the model take turns at synchronising, behind training and in few bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from scalebench.comm.base import Capability, Gathering, Request
from scalebench.errors import StudyError
from scalebench.strategies import block_momentum
from scalebench.strategies.averaging import Averaging, local_intervals, too_few_steps
from scalebench.strategies.base import Setting, Synchronisation, Worker
from scalebench.strategies.few_bits import RowScaled
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import (
    average_,
    packed,
    parameter_shapes,
    unpack_,
)
from scalebench.strategies.traits import Stretch, Traits
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHT_BYTES = 8  # float64, behind a message


@register()
class StreamingDiLoCo(Averaging):
    """DiLoCo in P fragments. Every H / P local steps the next fragment f in turn is due; tau steps before that each
    worker sends how far it moved, and at that moment, with a_f where the fragment's
    last interval began,

        g = mean (a_f - w_f as sent);   v_f <- m v_f + g;   a_f <- a_f - lr (g + m v_f)
        w_f <- alpha w_f + (1 - alpha) a_f

    Douillard et al., 2025, arXiv 2501.18512; when is as in torchft 0.2.0's DiLoCo
    (`fragment_sync_delay` tau, `fragment_update_alpha` alpha). The average travels
    behind the next tau steps; tau < H / P, so that one fragment is under way at a time.
    Each fragment synchronises every H steps. P = 1, tau = 0, alpha = 0 in 32 bits is
    `diloco`, bit for bit. In 8 or 4 bits (a scale for each row; 4 bits are E3M0: sign,
    exponent) the moves are gathered from all workers, and added in full precision: n
    bits / 32 bytes from each to all others, which grows with K where an allreduce does
    not.

    A layer is a matrix with the vectors behind it, in the order of the parameters:
    fragment f holds the layers f, f + P ... (`strided`), or one after the other.
    Buffers and optimizer state, where they are averaged, take their mean with the last
    fragment, once every H steps. At the end of training the fragment under way arrives,
    the others take their outer step, and all workers take a. Trap: with alpha > 0
    replicas stay apart; the model handed out between is their mean.
    """

    steps: int = Field(
        8,
        ge=1,
        description="H: local steps between two synchronisations of a fragment; P divides it",
    )
    # The paper's three changes to DiLoCo: fragments in turn need a lower peak of the
    # bandwidth; their averages travel while training goes on; in few bits.
    fragments: int = Field(
        2, ge=1, description="P: parts of the model that synchronise in turn"
    )
    delay: int = Field(
        1,
        ge=0,
        description="tau: local steps behind which a fragment's average travels, below H / P",
    )
    alpha: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="share of its own weights that a worker keeps at a synchronisation",
    )
    bits: Literal[32, 8, 4] = Field(
        32, description="of a number on the wire; 32: as the study has it"
    )
    pattern: Literal["strided", "sequential"] = Field(
        "strided", description="which layers a fragment has: every P-th, or neighbours"
    )
    outer_lr: block_momentum.OuterRate = 0.7
    outer_momentum: block_momentum.OuterMomentum = 0.9

    name = "streaming_diloco"
    summary = "diloco in fragments that synchronise in turn, behind local steps (options fragments, delay)"
    source = "Douillard et al., 2025, arXiv 2501.18512; torchft 0.2.0"
    requires = frozenset({Capability.COLLECTIVES, Capability.NONBLOCKING})

    @model_validator(mode="after")
    def _one_fragment_at_a_time(self) -> StreamingDiLoCo:
        if self.steps % self.fragments:
            raise ValueError(
                f"steps: {self.steps} is no multiple of the {self.fragments} fragments; use a multiple"
            )
        if self.delay >= self.turn:
            raise ValueError(
                f"delay: {self.delay} is not below steps / fragments, {self.turn}: an average has to arrive before "
                "the next one is sent; use a smaller delay, fewer fragments or more steps"
            )
        return self

    @property
    def turn(self) -> int:
        """H / P: local steps from one fragment's synchronisation to the next one's."""
        return self.steps // self.fragments

    def setup(self, worker: Worker) -> None:
        shapes = parameter_shapes(worker)
        layers = fragments_of(shapes, self.fragments, self.pattern)
        worker.state.taken = 0
        worker.state.arrived = None  # when the last fragment did
        worker.state.fragments = [
            Fragment(worker, self, shapes, each) for each in layers
        ]

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        state = worker.state
        for epoch_ends in local_intervals(worker, epoch, self.due):
            if self.is_sent(state.taken):
                self._fragment(worker, state.taken + self.delay).send()
            if self.arrives(state.taken):
                self._receive(worker)
            if epoch_ends and self.ends_training(worker, epoch):
                self._conclude(worker)

    def due(self, taken: int) -> bool:
        """Return True if a fragment is sent or received after `taken` steps."""
        return self.is_sent(taken) or self.arrives(taken)

    def is_sent(self, taken: int) -> bool:
        return (taken + self.delay) % self.turn == 0

    def arrives(self, taken: int) -> bool:
        return taken % self.turn == 0

    def _fragment(self, worker: Worker, taken: int) -> Fragment:
        """Return the fragment that arrives after `taken` steps."""
        # The first fragment arrives after the first turn: place -1 is the last one's.
        found: Fragment = worker.state.fragments[
            taken // self.turn % self.fragments - 1
        ]
        return found

    def _receive(self, worker: Worker) -> None:
        state = worker.state
        self._fragment(worker, state.taken).receive(self.alpha)
        state.arrived = state.taken
        # Once in H steps, as without fragments.
        if state.taken % self.steps == 0:
            self._average_the_rest(worker)

    def _average_the_rest(self, worker: Worker) -> None:
        """Average what is averaged beside the weights."""
        rest = self.averaged(worker)[1:]
        if rest and worker.size > 1:
            average_(worker.comm, rest, self.weight(worker))
        self.after_average(worker)

    def _conclude(self, worker: Worker) -> None:
        """Synchronise what has moved since it was, and take the same weights everywhere."""
        state = worker.state
        last = self._fragment(worker, state.taken)
        for fragment in state.fragments:
            if fragment is last and state.arrived == state.taken:
                fragment.restart()
                continue
            if not fragment.under_way:
                fragment.send()
            # A share of the own weights would keep replicas apart for good.
            fragment.receive(0.0)
        if state.taken % self.steps:
            self._average_the_rest(worker)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        whole = (
            self.fragments == 1
            and self.delay == 0
            and self.alpha == 0
            and self.arrives(worker.state.taken)
        )
        return worker.size == 1 or whole or self.ends_training(worker, epoch)

    @property
    def traits(self) -> Traits:
        return self.repeated(Stretch(period=self.steps), interval="steps")

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.steps, merge="outer nesterov")

    def check(self, setting: Setting) -> list[str]:
        if setting.shapes is not None:
            fragments_of(setting.shapes, self.fragments, self.pattern)
        return too_few_steps(
            setting, self.turn
        ) + block_momentum.unlike_the_papers_optimizer(setting)


class Fragment:
    """Layers that synchronise together; `tensors`: the numbers of their parameters in the model."""

    def __init__(
        self,
        worker: Worker,
        policies: StreamingDiLoCo,
        shapes: Sequence[tuple[int, ...]],
        tensors: Sequence[int],
    ) -> None:
        bounds = list(pairwise(accumulate(map(math.prod, shapes), initial=0)))
        self._worker, self._policies = worker, policies
        self._own = [worker.parameters[slice(*bounds[place])] for place in tensors]
        self._anchor = packed(self._own).clone()
        self._momentum = self._anchor.clone().zero_()
        self._codec: RowScaled | None = None
        if policies.bits < 32:
            self._codec = RowScaled(
                [shapes[place] for place in tensors], policies.bits, self._anchor
            )
        # weights; their mean once the request has been waited for
        self._sent: Tensor | None = None
        self._request: Request | None = None
        self._gathering: Gathering | None = None

    @property
    def under_way(self) -> bool:
        """True from `send` to `receive`."""
        return self._sent is not None or self._gathering is not None

    def send(self) -> None:
        """Begin to average over all workers."""
        worker, weight = self._worker, self._policies.weight(self._worker)
        weights = packed(self._own)
        if worker.size > 1 and self._codec is not None:
            message = worker.clock.work(self._encode, weights, weight or 1.0)
            self._gathering = worker.comm.iallgather_combined(message, self._mean_move)
            return
        # Local steps go on in place while it travels.
        self._sent = (
            weights.clone()
            if weights.data_ptr() == self._own[0].data_ptr()
            else weights
        )
        if worker.size > 1:
            self._request = worker.comm.iallreduce_(self._sent, "mean", weight=weight)

    def receive(self, alpha: float) -> None:
        """Wait for the average, take the outer step, and keep the share `alpha` of the own weights."""
        if self._gathering is not None:
            # The outer step writes into it, and the workers of a process share the
            # result.
            move = self._gathering.result().clone()
        else:
            assert self._sent is not None, "sent before it is received"
            if self._request is not None:
                self._request.wait()
            move = self._anchor - self._sent
        self._sent = self._request = self._gathering = None
        self._worker.clock.work(self._step, move, alpha)

    def restart(self) -> None:
        """Take the weights that all workers have in common."""
        unpack_(self._anchor, self._own)

    def _step(self, move: Tensor, alpha: float) -> None:
        block_momentum.nesterov_(
            self._anchor,
            self._momentum,
            move,
            self._policies.outer_lr,
            self._policies.outer_momentum,
        )
        weights = self._anchor.lerp(packed(self._own), alpha) if alpha else self._anchor
        unpack_(weights, self._own)

    def _encode(self, weights: Tensor, weight: float) -> Tensor:
        """Return the message to all others: the move in few bits, with this worker's weight behind it."""
        assert self._codec is not None
        # In float64, as few bits would round it; and moves in place of weights, as
        # their range is small.
        behind = (
            torch.tensor([weight], dtype=torch.float64)
            .view(torch.uint8)
            .to(weights.device)
        )
        return torch.cat([self._codec.encode(self._anchor - weights), behind])

    def _mean_move(self, messages: list[Tensor]) -> Tensor:
        assert self._codec is not None
        weights = [
            message[-_WEIGHT_BYTES:].clone().view(torch.float64).to(self._anchor.dtype)
            for message in messages
        ]
        # In full precision: codes with scales of their own cannot be summed on the way.
        total = torch.zeros_like(self._anchor)
        for message, weight in zip(messages, weights, strict=True):
            total.add_(self._codec.decode(message[:-_WEIGHT_BYTES]).mul_(weight))
        return total.div_(torch.stack(weights).sum())


def fragments_of(
    shapes: Sequence[tuple[int, ...]],
    fragments: int,
    pattern: Literal["strided", "sequential"],
) -> list[list[int]]:
    """Return the numbers of the parameters in each fragment of a model whose parameters have these `shapes`.

    Raises:
        StudyError: the model has fewer layers than fragments.
    """
    # A bias, or the vectors of a norm, belong to the matrix before them.
    begins = [place for place, shape in enumerate(shapes) if len(shape) > 1] or list(
        range(len(shapes))
    )
    layers = [list(range(*pair)) for pair in pairwise([0, *begins[1:], len(shapes)])]
    if fragments > len(layers):
        raise StudyError(
            f"strategy streaming_diloco: {fragments} fragments of a model of {len(layers)} layer"
            f"{'s' * (len(layers) > 1)}; use at most {len(layers)}, or a deeper model"
        )
    if pattern == "strided":
        return [
            list(chain.from_iterable(layers[first::fragments]))
            for first in range(fragments)
        ]
    bounds = [round(each * len(layers) / fragments) for each in range(fragments + 1)]
    return [
        list(chain.from_iterable(layers[low:high])) for low, high in pairwise(bounds)
    ]
