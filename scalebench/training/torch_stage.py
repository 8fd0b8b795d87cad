"""The stage of a worker under a schedule of torch.distributed.pipelining, in place of `Stage`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from scalebench.cluster.operation import Kind
from scalebench.comm.base import LibraryCommunicator
from scalebench.data.layout import cut
from scalebench.strategies.base import Batch
from scalebench.system.clock import Clock, Task
from scalebench.training.stage import Chunk, StageArithmetic

_OF_A_STAGE: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
}
_OF_CHUNKS: dict[str, Any] = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class TorchStage:
    """Micro-batches through the chunks of this worker by torch's own schedule; the same numbers as `Stage`.

    Torch wants micro-batches of one shape: smaller ones are filled up with a sample
    that no module sees. It would run each stage once more for the shapes of its ends,
    which changes running statistics: they are stated. Gradients are those of the scaled
    loss (`scale_grads` would divide them by the number of micro-batches).
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        schedule: str,
        micro_batches: int,
        replica: LibraryCommunicator,
    ) -> None:
        """`replica` is the communicator of the workers with the other stages."""
        self._chunks = [(chunk.facts, TimedChunk(chunk)) for chunk in chunks]
        self._schedule = schedule
        self._micro_batches = micro_batches
        self._replica = replica
        compute = chunks[0].compute
        assert isinstance(compute, StageArithmetic)
        self._loss, self._like = compute.loss, compute.like
        self._added = compute.added
        # by micro-batches, and samples of each
        self._schedules: dict[tuple[int, int], Any] = {}
        self._weights: list[float] = []  # of the losses of the micro-batches of a step
        self._targets: Sequence[Tensor] = ()
        self._found: list[Tensor] = []  # these losses

    def step(self, batch: Batch, weight: float, clock: Clock) -> Tensor | None:
        """Compute the gradient of weight * mean loss of `batch`; return the mean loss () on the last stage."""
        samples = len(batch.x)
        sizes = cut(samples, min(self._micro_batches, samples)).tolist()
        room = max(sizes)
        schedule = self._schedule_of(len(sizes), room)
        for _, module in self._chunks:
            module.begin(sizes, clock)
        self._weights = [weight * size / samples for size in sizes]
        self._targets, self._found = torch.split(batch.y, sizes), []
        first, last = (
            any(getattr(facts, end) for facts, _ in self._chunks)
            for end in ("is_first", "is_last")
        )
        inputs = [_filled(batch.x, sizes)] if first else []
        # whose targets are wanted
        places = torch.arange(len(sizes)).repeat_interleave(room) if last else None
        schedule.step(*inputs, target=places, return_outputs=False)
        clock.did(Task.COMM)
        self._count(len(sizes), room)
        if not last:
            return None
        mean: Tensor | None = None
        for loss, size in zip(self._found, sizes, strict=True):
            mean = self._added(mean, loss, size / samples)
        return mean

    def _loss_of(self, outputs: Tensor, places: Tensor) -> Tensor:
        place = int(places[0])
        loss = self._loss(outputs[: len(self._targets[place])], self._targets[place])
        self._found.append(loss.detach())
        return loss * self._weights[place]

    def _schedule_of(self, micro_batches: int, room: int) -> Any:
        key = (micro_batches, room)
        if key not in self._schedules:
            stages = []
            for facts, module in self._chunks:
                takes = self._like.new_empty((room, *facts.takes)).requires_grad_(
                    not facts.is_first
                )
                gives = self._like.new_empty((room, *facts.gives)).requires_grad_()
                stage = TimedStage(
                    module,
                    facts.stage,
                    facts.stages,
                    self._like.device,
                    input_args=takes,
                    output_args=gives,
                    group=self._replica.process_group,
                )
                stages.append(stage)
            options = {"loss_fn": self._loss_of, "scale_grads": False}
            if self._schedule in _OF_CHUNKS:
                self._schedules[key] = _OF_CHUNKS[self._schedule](
                    stages, micro_batches, **options
                )
            else:
                self._schedules[key] = _OF_A_STAGE[self._schedule](
                    *stages, micro_batches, **options
                )
        return self._schedules[key]

    def _count(self, micro_batches: int, room: int) -> None:
        """Count the messages of a step, which torch has sent."""
        number = self._like.element_size()
        own = {facts.stage for facts, _ in self._chunks}
        for facts, _ in self._chunks:
            ends = ((facts.stage + 1, facts.gives), (facts.stage - 1, facts.takes))
            for shape in (
                shape
                for other, shape in ends
                if other in range(facts.stages) and other not in own
            ):
                nbytes = number * room * torch.Size(shape).numel()
                sent = self._replica.operation(Kind.SEND, micro_batches * nbytes)
                self._replica.overlapped(sent, calls=0)


class TimedChunk(nn.Module):
    """The modules of a chunk, with laps of the clock around the passes of each micro-batch.

    Forward passes come in the order of the micro-batches.
    """

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        compute = chunk.compute
        assert isinstance(compute, StageArithmetic)
        self.facts = chunk.facts
        self._inner = nn.Sequential(*(segment.module for segment in compute.segments))
        self._shares = (
            sum(size.forward for size in compute.sizes),
            sum(size.backward for size in compute.sizes),
        )
        self._sizes: list[int] = []
        self._forwards = 0
        self._clock: Clock | None = None

    def begin(self, sizes: list[int], clock: Clock) -> None:
        """Prepare for a step with micro-batches of `sizes` samples."""
        self._sizes, self._clock = sizes, clock
        self._forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        assert self._clock is not None
        samples = self._sizes[self._forwards]
        self._forwards += 1
        self._clock.did(Task.COMM)
        made: Tensor = self._inner(x[:samples])
        self._clock.did(Task.FORWARD, samples, self._shares[0])
        if samples < len(x):
            rest = made.new_zeros((len(x) - samples, *made.shape[1:]))
            made = torch.cat([made, rest])
        # torch detaches outputs in place, after the first half of a backward pass
        if made._is_view():
            made = made.clone(memory_format=torch.contiguous_format)
        return made.contiguous()  # torch sends the memory as it lies

    @contextmanager
    def backward_pass(self, place: int, share: float) -> Iterator[None]:
        """Take the time inside the context as a share of the backward pass of a micro-batch."""
        assert self._clock is not None
        self._clock.did(Task.COMM)
        yield
        self._clock.did(Task.BACKWARD, self._sizes[place], self._shares[1] * share)


class TimedStage(pipelining.PipelineStage):
    """A stage of torch whose backward passes, whole or in halves, are laps of the clock."""

    submod: TimedChunk

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        with self.submod.backward_pass(
            bwd_chunk_id, 1.0 if full_backward else self.submod.facts.share_of_inputs
        ):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, last_backward: bool = False
    ) -> None:
        with self.submod.backward_pass(
            bwd_chunk_id, 1 - self.submod.facts.share_of_inputs
        ):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def _filled(x: Tensor, sizes: list[int]) -> Tensor:
    """Return the micro-batches of `sizes` samples one after the other, filled up to the largest of them."""
    room = max(sizes)
    if min(sizes) == room:
        return x
    pieces = []
    for piece in torch.split(x, sizes):
        pieces.append(piece)
        if len(piece) < room:  # by one sample, as sizes differ by one at most
            pieces.append(piece[-1:])
    return torch.cat(pieces)
