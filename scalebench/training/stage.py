"""One worker's part of a step: micro-batches through its stage, with messages to the stages before and after it.

The same program trains (`StageArithmetic`) and is recorded without arithmetic
(`StageShapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import ACTIVATIONS, GRADIENTS, Communicator, Request
from scalebench.data.layout import cut
from scalebench.models import parts
from scalebench.models.sharding import Held, Segment, called
from scalebench.strategies.base import Batch, Move, Recompute
from scalebench.system.clock import Clock, Task
from scalebench.system.random_state import put_back, random_state

Order = Callable[[int, int, int], Iterable[Move]]


@dataclass(frozen=True)
class StageFacts:
    """A stage of a pipeline: its layers `first` to `last` (exclusive), and the shapes of one sample at its ends.

    A worker with several chunks of layers has as many of these.
    """

    stage: int
    stages: int
    first: int
    last: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]

    @classmethod
    def of(
        cls,
        facts: Sequence[parts.LayerFacts],
        input_shape: tuple[int, ...],
        sizes: Sequence[int],
        stage: int,
    ) -> StageFacts:
        """Return the stage that is the `stage`-th of stages with `sizes` layers."""
        first, last = parts.bounds_of(sizes)[stage]
        takes = facts[first - 1].shape if first else input_shape
        return cls(stage, len(sizes), first, last, takes, facts[last - 1].shape)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def share_of_inputs(self) -> float:
        """That of a backward pass for the gradients of the inputs, where it comes in halves: as counted in work."""
        return 0.0 if self.is_first else 0.5


class SegmentFacts(NamedTuple):
    """A segment of a stage: shapes of one sample of what it takes last and gives last, and shares of the model's work.

    The outputs of a `divided` one are summed over the workers of the stage, and so are
    the gradients of its inputs if these are `needed`.
    """

    divided: bool
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    forward: float
    backward: float
    needed: bool


def segment_facts(
    segments: Sequence[Segment],
    x: Tensor,
    facts: Sequence[parts.LayerFacts],
    *,
    first: bool,
) -> list[SegmentFacts]:
    """Return the sizes of the segments of a stage, the `first` or a later one, by a forward pass of samples `x`.

    `facts` are those of the layers of the whole model: as in `facts_of`, the backward
    pass of the first layer does the work of its forward pass, that of others twice as
    much.
    """
    # Shares of the work of the whole model, which the clock divides a step by.
    whole = sum(each.forward for each in facts), sum(each.backward for each in facts)
    samples = len(x)
    found = []
    state = [x]
    layers = 0 if first else 2  # begun so far, the first two of which count
    with torch.no_grad(), parts.evaluating([segment.module for segment in segments]):
        for segment in segments:
            takes = tuple(state[-1].shape[1:])
            made = state[-1:] if segment.divided else state
            forward = backward = 0.0
            needed = layers > 0
            for module in (
                segment.module
                if type(segment.module) is nn.Sequential
                else [segment.module]
            ):
                made, work = parts.counted(partial(called, module, made))
                layers += any(each.requires_grad for each in module.parameters())
                forward += work / samples / whole[0]
                backward += (2 if layers > 1 else 1) * work / samples / whole[1]
            state = [*state[:-1], *made] if segment.divided else made
            gives = tuple(state[-1].shape[1:])
            found.append(
                SegmentFacts(segment.divided, takes, gives, forward, backward, needed)
            )
    return found


def sizes_of(
    facts: Sequence[parts.LayerFacts],
    held: Held,
    sizes: Sequence[int],
    mesh: Mesh,
    part: int,
    sample: Tensor,
) -> list[tuple[StageFacts, list[SegmentFacts]]]:
    """Return the sizes of each chunk that a part of a replica holds, and of its segments; `sample` are some samples.

    `facts` are those of the layers of the whole model.
    """
    found = []
    for group, segments in zip(
        mesh.groups_of(part, len(sizes)), held.chunks, strict=True
    ):
        stage = StageFacts.of(facts, tuple(sample.shape[1:]), sizes, group)
        x = sample.new_zeros((len(sample), *stage.takes))
        found.append((stage, segment_facts(segments, x, facts, first=stage.is_first)))
    return found


class StageCompute(Protocol):
    """Forward and backward passes of a stage by micro-batch."""

    def forward(
        self, place: int, x: Tensor, y: Tensor, scale: float, clock: Clock
    ) -> Tensor:
        """Return the output for micro-batch `place`: on the last stage its mean loss, whose gradient is scaled."""

    def backward(
        self, place: int, gradient: Tensor | None, clock: Clock, share: float = 1.0
    ) -> Tensor:
        """Add to the parameters' gradients; return that of the input. The clock takes a share of the pass."""

    def finish(self, samples: int, clock: Clock, share: float) -> None:
        """Take the time of a share of the backward pass of a micro-batch, which `backward` has left out."""

    def pieces(self, tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        """Return the samples of each micro-batch."""

    def room(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor to receive into."""

    def filled(self, x: Tensor, samples: int) -> Tensor:
        """Return `x` filled up to so many samples."""

    def joined(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Return the first samples of each piece, of these sizes, behind one another."""

    def added(self, total: Tensor | None, loss: Tensor, share: float) -> Tensor:
        """Return the mean loss of a batch with that of a micro-batch, which has a share of its samples."""


class Chunk(NamedTuple):
    """Consecutive layers that a worker holds, and their passes."""

    facts: StageFacts
    compute: StageCompute


def by_mesh(comm: Communicator, mesh: Mesh) -> tuple[Communicator, Communicator]:
    """Divide all workers: into those of one replica, and those with the same part of every replica."""
    if mesh.parts == 1:
        return comm, comm
    replica = comm.split(lambda rank: rank // mesh.parts)
    return replica, comm.split(lambda rank: rank % mesh.parts)


class Stage:
    """The chunks of layers that this worker holds, and its channels to the neighbouring stages.

    The stage behind the last one is the first one, with its next chunk; of a folded
    mesh it is the last one itself, without messages. Activations and gradients travel
    on communicators of their own, and so do those of the way from the last stage to the
    first: messages of one kind then never wait for the other, also where an engine
    carries those between two ranks one after the other (NCCL).
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        order: Order,
        micro_batches: int,
        replica: Communicator,
        mesh: Mesh,
    ) -> None:
        self.chunks = chunks
        self._order = order
        self._micro_batches = micro_batches
        self._stage, self._stages = chunks[0].facts.stage, mesh.pipeline
        # by samples of a batch
        self._programs: dict[int, tuple[list[int], list[Move]]] = {}
        self._mesh, self._rank = mesh, replica.rank
        self._sent: list[Request] = []
        self._handed_over: dict[tuple[int, int], Tensor] = {}  # by tag and micro-batch
        if mesh.pipeline > 1:
            ways = 1 if len(chunks) == 1 or mesh.folded else 2
            # All ranks in one colour: a split that only makes another channel.
            channels = [replica.split(lambda rank: rank * 0) for _ in range(2 * ways)]
            self._activations, self._gradients = channels[:2]
            self._activations_around, self._gradients_around = channels[-2:]
        # Samples of each chunk between their forward and their backward pass at the
        # same time, after each forward pass.
        self.kept: set[tuple[int, ...]] = set()
        self.largest_piece = 0  # samples of a micro-batch

    def step(self, batch: Batch, weight: float, clock: Clock) -> Tensor | None:
        """Compute the gradient of weight * mean loss of `batch`; return the mean loss () on the last stage.

        A batch with fewer samples than micro-batches is cut into its samples.
        """
        samples = len(batch.x)
        sizes, moves = self._program(samples)
        compute = self.chunks[0].compute
        inputs = compute.pieces(batch.x, sizes)
        targets = compute.pieces(batch.y, sizes)
        total: Tensor | None = None
        for move in moves:
            place, size = move.micro_batch, sizes[move.micro_batch]
            facts, compute = self.chunks[move.chunk]
            if move.forward:
                x = inputs[place]
                if not facts.is_first:
                    x = self._receive(
                        ACTIVATIONS,
                        facts.stage - 1,
                        place,
                        compute.room((size, *facts.takes)),
                    )
                made = compute.forward(
                    place, x, targets[place], weight * (size / samples), clock
                )
                if facts.is_last:
                    total = compute.added(total, made, size / samples)
                else:
                    self._send(ACTIVATIONS, facts.stage + 1, place, made.detach())
            elif move.half == "weights":
                compute.finish(size, clock, 1 - facts.share_of_inputs)
            else:
                gradient = None
                if not facts.is_last:
                    gradient = self._receive(
                        GRADIENTS,
                        facts.stage + 1,
                        place,
                        compute.room((size, *facts.gives)),
                    )
                share = facts.share_of_inputs if move.half == "inputs" else 1.0
                back = compute.backward(place, gradient, clock, share)
                if not facts.is_first:
                    self._send(GRADIENTS, facts.stage - 1, place, back)
        for request in self._sent:
            request.wait()
        self._sent.clear()
        return total

    def _receive(self, tag: int, group: int, place: int, room: Tensor) -> Tensor:
        """Return what came from the worker with a group of layers, of micro-batch `place`; received into `room`."""
        rank = self._rank_with(group)
        if rank == self._rank:
            return self._handed_over.pop((tag, place))
        self._channel(tag, group + 1 if tag == ACTIVATIONS else group).recv_(
            room, rank, tag
        )
        return room

    def _send(self, tag: int, group: int, place: int, tensor: Tensor) -> None:
        rank = self._rank_with(group)
        if rank == self._rank:
            self._handed_over[tag, place] = tensor
            return
        channel = self._channel(tag, group if tag == ACTIVATIONS else group + 1)
        # Not waited for: the next stage may still compute what comes before.
        self._sent.append(channel.isend(tensor.contiguous(), rank, tag))

    def _rank_with(self, group: int) -> int:
        """Return the worker of this replica that holds the same share of a group of layers."""
        return (
            self._mesh.stage_with(group) * self._mesh.tensor
            + self._rank % self._mesh.tensor
        )

    def _channel(self, tag: int, group: int) -> Communicator:
        """Return the communicator of the border before a group of layers."""
        around = group % self._stages == 0
        if tag == ACTIVATIONS:
            return self._activations_around if around else self._activations
        return self._gradients_around if around else self._gradients

    def _program(self, samples: int) -> tuple[list[int], list[Move]]:
        """Return the sizes of the micro-batches of so many samples, and the moves of the stage."""
        if samples not in self._programs:
            sizes = cut(samples, min(self._micro_batches, samples)).tolist()
            moves = list(self._order(self._stage, self._stages, len(sizes)))
            self._programs[samples] = sizes, moves
            self.largest_piece = max(self.largest_piece, *sizes)
            self.kept |= most_kept(moves, sizes, len(self.chunks))
        return self._programs[samples]


def most_kept(
    moves: Iterable[Move], sizes: Sequence[int], chunks: int
) -> set[tuple[int, ...]]:
    """Return the samples of each chunk that are between their passes, by micro-batches of `sizes` samples.

    These are sets of numbers after which a backward pass follows: there are never more
    samples than in one of them.
    """
    now = [0] * chunks
    found = set()
    rises = False
    for move in moves:
        # A peak: after it a backward pass gives samples back.
        if rises and not move.forward:
            found.add(tuple(now))
        rises = move.forward
        if move.half != "inputs":  # whose activations are needed once more
            now[move.chunk] += (
                sizes[move.micro_batch] if move.forward else -sizes[move.micro_batch]
            )
    return found


class Pass(NamedTuple):
    """Forward pass of a segment: inputs, outputs unless they are computed again, and the generators before it."""

    inputs: list[Tensor]
    outputs: list[Tensor] | None
    generators: dict[str, Any]


class StageArithmetic:
    """Implements `StageCompute` by torch's autograd, segment by segment.

    It ends at the borders of the stage, and where outputs or gradients are summed over the workers that share its
    layers: no communication happens inside autograd. What `recompute` gives up is computed again before the backward
    pass of a micro-batch: each segment by itself from its inputs (`layer`), or the stage from its input (`all`).
    """

    def __init__(
        self,
        facts: StageFacts,
        segments: Sequence[Segment],
        sizes: Sequence[SegmentFacts],
        loss: Callable[[Tensor, Tensor], Tensor],
        sharing: Communicator,
        like: Tensor,
        recompute: Recompute = "none",
    ) -> None:
        self._facts = facts
        self.segments = segments
        self.sizes = sizes
        self.loss = loss
        self._sharing = sharing
        self.like = like
        self._recompute = recompute
        self._kept: dict[int, list[Pass]] = {}  # of each segment, by micro-batch
        self._of_loss: dict[int, Tensor] = {}  # gradients of the outputs

    def forward(
        self, place: int, x: Tensor, y: Tensor, scale: float, clock: Clock
    ) -> Tensor:
        made, passes = self._through(x, clock)
        if self._recompute == "all":
            passes[1:] = [each._replace(inputs=[]) for each in passes[1:]]
        self._kept[place] = passes
        if self._facts.is_last:
            # The graph is cut here: the gradient of the loss is kept, and the segments
            # go on from it later.
            leaf = made.detach().requires_grad_()
            made = self.loss(leaf, y)
            run_backward((made,), (scalar(scale, made.dtype, made.device),))
            assert leaf.grad is not None
            self._of_loss[place] = leaf.grad
        return made

    def _through(
        self, x: Tensor, clock: Clock, before: Sequence[Pass] = ()
    ) -> tuple[Tensor, list[Pass]]:
        """Return the output of the stage, and the passes of its segments: new ones, or those `before` made again."""
        # Of two tensors in the state the first is a residual, which a divided segment
        # leaves alone.
        state, passes = [x], []
        for place, (segment, size) in enumerate(
            zip(self.segments, self.sizes, strict=True)
        ):
            taken = state[-1:] if segment.divided else state
            inputs = [each.detach().requires_grad_(size.needed) for each in taken]
            if before:
                outputs = _again(segment, inputs, before[place].generators)
                passes.append(Pass(inputs, outputs, {}))
            elif self._recompute == "none":
                outputs = called(segment.module, inputs)
                passes.append(Pass(inputs, outputs, {}))
            else:
                passes.append(Pass(inputs, None, _generators(x)))
                with torch.no_grad():
                    outputs = called(segment.module, inputs)
            clock.did(Task.FORWARD, len(x), size.forward)
            if segment.divided:
                # Contiguous, as communicators carry nothing else, and a copy: the graph
                # keeps the summand.
                total = outputs[0].detach().clone(memory_format=torch.contiguous_format)
                self._sharing.allreduce_(total)
                state = [*state[:-1], total]
            else:
                state = outputs
        return state[-1], passes

    def backward(
        self, place: int, gradient: Tensor | None, clock: Clock, share: float = 1.0
    ) -> Tensor:
        gradients = [self._of_loss.pop(place) if gradient is None else gradient]
        passes = self._kept.pop(place)
        if self._recompute == "all":
            _, passes = self._through(passes[0].inputs[0], clock, passes)
        for segment, size, (inputs, outputs, generators) in zip(
            reversed(self.segments), reversed(self.sizes), reversed(passes), strict=True
        ):
            if outputs is None:
                outputs = _again(segment, inputs, generators)
                clock.did(Task.FORWARD, len(inputs[0]), size.forward)
            given = gradients[-1:] if segment.divided else gradients
            tracked = [
                (each, own)
                for each, own in zip(outputs, given, strict=True)
                if each.requires_grad
            ]
            if tracked:
                roots, seeds = zip(*tracked, strict=True)
                run_backward(roots, seeds)
            found = [own if own.grad is None else own.grad for own in inputs]
            clock.did(Task.BACKWARD, len(inputs[0]), size.backward * share)
            if segment.divided:
                total = found[0].contiguous()
                if size.needed:
                    self._sharing.allreduce_(total)
                found = [*gradients[:-1], total]
            gradients = found
        return gradients[0]

    def finish(self, samples: int, clock: Clock, share: float) -> None:
        for size in reversed(self.sizes):
            clock.did(Task.BACKWARD, samples, size.backward * share)

    def pieces(self, tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        return torch.split(tensor, sizes)

    def room(self, shape: tuple[int, ...]) -> Tensor:
        return self.like.new_empty(shape)

    def filled(self, x: Tensor, samples: int) -> Tensor:
        filled = x.new_zeros((samples, *x.shape[1:]))
        filled[: len(x)] = x
        return filled

    def joined(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        return torch.cat(
            [piece[:size] for piece, size in zip(pieces, sizes, strict=True)]
        )

    def added(self, total: Tensor | None, loss: Tensor, share: float) -> Tensor:
        part = loss.detach() * share
        return part if total is None else total + part


def _generators(x: Tensor) -> dict[str, Any]:
    """Return the states of the generators that a forward pass of `x` may draw from."""
    states = random_state()
    if x.is_cuda:
        states["cuda"] = torch.cuda.get_rng_state(x.device)
    return states


def _put_back(states: dict[str, Any], x: Tensor) -> None:
    put_back({name: state for name, state in states.items() if name != "cuda"})
    if x.is_cuda:
        torch.cuda.set_rng_state(states["cuda"], x.device)


def _again(
    segment: Segment, inputs: Sequence[Tensor], generators: dict[str, Any]
) -> list[Tensor]:
    """Make a forward pass again: with the numbers that it drew, and without a trace in generators and buffers."""
    now = _generators(inputs[0])
    buffers = [(buffer, buffer.clone()) for buffer in segment.module.buffers()]
    _put_back(generators, inputs[0])
    outputs = called(segment.module, inputs)
    _put_back(now, inputs[0])
    for buffer, value in buffers:
        buffer.data.copy_(value)  # not seen by autograd, which may hold the buffer
    return outputs


class StageShapes:
    """Implements `StageCompute` without arithmetic: outputs have only their shapes."""

    def __init__(
        self,
        facts: StageFacts,
        sizes: Sequence[SegmentFacts],
        sharing: Communicator,
        like: Tensor,
        recompute: Recompute = "none",
    ) -> None:
        self._facts = facts
        self._sizes = sizes
        self._sharing = sharing
        self._like = like
        self._recompute = recompute
        self._samples: dict[int, int] = {}  # of each micro-batch
        self._rooms: dict[tuple[int, ...], Tensor] = {}

    def forward(
        self, place: int, x: Tensor, y: Tensor, scale: float, clock: Clock
    ) -> Tensor:
        self._samples[place] = samples = len(x)
        self._through(samples, clock)
        return self.room(() if self._facts.is_last else (samples, *self._facts.gives))

    def _through(self, samples: int, clock: Clock) -> None:
        for size in self._sizes:
            clock.did(Task.FORWARD, samples, size.forward)
            if size.divided:
                self._sharing.allreduce_(self.room((samples, *size.gives)))

    def backward(
        self, place: int, gradient: Tensor | None, clock: Clock, share: float = 1.0
    ) -> Tensor:
        samples = self._samples[place]
        if self._recompute == "all":
            self._through(samples, clock)
        for size in reversed(self._sizes):
            if self._recompute == "layer":
                clock.did(Task.FORWARD, samples, size.forward)
            clock.did(Task.BACKWARD, samples, size.backward * share)
            if size.divided and size.needed:
                self._sharing.allreduce_(self.room((samples, *size.takes)))
        return self.room((samples, *self._facts.takes))

    def finish(self, samples: int, clock: Clock, share: float) -> None:
        for size in reversed(self._sizes):
            clock.did(Task.BACKWARD, samples, size.backward * share)

    def pieces(self, tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        return [self.room((size,)) for size in sizes]

    def room(self, shape: tuple[int, ...]) -> Tensor:
        """Return the one tensor of a shape, which is never changed."""
        if shape not in self._rooms:
            self._rooms[shape] = self._like.new_empty(shape)
        return self._rooms[shape]

    def filled(self, x: Tensor, samples: int) -> Tensor:
        return self.room((samples, *x.shape[1:]))

    def joined(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        return self.room((sum(sizes), *pieces[0].shape[1:]))

    def added(self, total: Tensor | None, loss: Tensor, share: float) -> Tensor:
        return loss


def run_backward(made: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Compute `torch.autograd.backward(made, gradients)` without its checks.

    They load half of torch's compiler (0.5 s) and take a tenth of a small model's
    backward pass.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        made, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@lru_cache(maxsize=256)
def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor (), made once: to bring it to a GPU takes a wait for its queue."""
    return torch.tensor(value, dtype=dtype, device=device)
