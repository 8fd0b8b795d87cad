"""Arithmetic of a parameter server: apply a push, count its staleness, reply to the workers that the gate releases.

The same object is the rule of the virtual and of the real server
(`comm.base.ServerRule`). It is picklable: natively worker 0 sends it to the server's
rank.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from scalebench.strategies.server_rules import Gate
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor

PUSH_NUMBERS = 2  # learning rate, weight
_NUMBER_BYTES = 8


class Reply(NamedTuple):
    """Numbers in a server's reply, beside the weights."""

    # updates between the pull of the weights the gradient was computed at, and its
    # arrival
    staleness: int
    used: bool  # False: the push came after its round and was dropped
    lead_at_push: int
    lead_at_release: int
    rounds: int  # how far training is
    mark: int  # e + 1: these weights end epoch e; 0: they end none


class Message(NamedTuple):
    """A push or a reply within one process: as many bytes as the packed one."""

    vector: Tensor
    numbers: Any  # of a push a list; of a reply a `Reply`
    into: Tensor | None = None  # of a push: where the weights of the reply go

    @property
    def nbytes(self) -> int:
        return self.vector.nbytes + _NUMBER_BYTES * len(self.numbers)


class ParameterServer:
    """Weights w, the study's optimizer over them, and a gate that releases workers.

    Push (g, eta, m) of worker p with staleness tau: at once w <- step(w, share g, eta),
    divided by max(1, tau) where `slow_stale` (Zhang et al., 2016, arXiv 1511.05950);
    or, where the gate works in rounds, w <- step(w, `of_round` sum m g / sum m, eta)
    when the round is over: the mean of the pushes or, times K, their sum. Workers push
    m g, and with every reply pull w. One optimizer step is one update, momentum
    included: it lives here, not on the workers.

    `ends` says after how many rounds each epoch is over; `shards` over how many
    servers, side by side, the vector is spread. Each has a `part`: the same gate over
    its piece of the weights, which decides alike as it hears of the same pushes at the
    same times. A virtual server is one, and charged as so many.
    """

    def __init__(
        self,
        gate: Gate,
        weights: Tensor,
        optimizer: torch.optim.Optimizer,
        ends: list[int],
        *,
        share: float = 1.0,
        of_round: float = 1.0,
        slow_stale: bool = False,
        shards: int = 1,
    ) -> None:
        self.gate = gate
        self.updates = 0
        self.shards = shards
        # torch computes shapes in Python, slower than a small model's numbers, and
        # imports its compiler for a division
        self._computes = not weights.is_meta
        self._weights = (
            weights.detach().cpu() if self._computes else weights.detach()
        ).clone()
        # Told what to take for its parameter, deepcopy does not copy it a second time.
        (parameter,) = optimizer.param_groups[0]["params"]
        self._optimizer = copy.deepcopy(optimizer, {id(parameter): self._weights})
        self._sum: Tensor | None = None
        self._sum_weight = 0.0
        self._share, self._of_round, self._slow_stale = share, of_round, slow_stale
        self._pulled = [0] * gate.workers  # `updates` when each worker last pulled
        # staleness, used, lead of each worker's last push
        self._heard = [(0, False, 0)] * gate.workers
        self._ends, self._marked = ends, 0
        self._replies: list[Tensor | None] = [None] * gate.workers

    def part(self, place: int) -> ParameterServer:
        """The part of server `place` of `shards`."""
        piece = copy.deepcopy(self)
        piece.shards = 1
        piece._weights = self._weights.tensor_split(self.shards)[place].clone()
        piece._optimizer.param_groups[0]["params"] = [piece._weights]
        return piece

    def parted(self, payload: Tensor) -> list[Tensor]:
        """Split a push into one piece for each server, each with the numbers."""
        cut = payload.numel() - _elements(PUSH_NUMBERS, payload)
        return [
            torch.cat([piece, payload[cut:]])
            for piece in payload[:cut].tensor_split(self.shards)
        ]

    def joined(self, replies: list[Tensor]) -> Tensor:
        """Join the replies of all servers into one."""
        cut = _elements(len(Reply._fields), replies[0])
        return torch.cat([*(reply[:-cut] for reply in replies[:-1]), replies[-1]])

    def __call__(self, worker: int, payload: Any, now: float) -> list[tuple[int, Any]]:
        """Replies are packed as the payload was: one flat tensor, or a `Message`."""
        packed = not isinstance(payload, Message)
        if packed:
            gradient, numbers = unpack(payload, PUSH_NUMBERS)
        else:
            gradient, numbers, self._replies[worker] = payload
        released = (
            self.on_push(worker, gradient, now, *numbers)
            if gradient.numel()
            else [worker]
        )
        return [(each, self._reply(each, packed)) for each in released]

    def on_push(
        self, worker: int, gradient: Tensor, now: float, lr: float, weight: float = 1.0
    ) -> list[int]:
        """Apply `weight` * gradient of `worker` at `now`, reusing its memory; return the released workers."""
        staleness, used = self.updates - self._pulled[worker], self.gate.accepts(worker)
        rounds = self.gate.rounds
        released = self.gate.on_push(worker, now)
        self._heard[worker] = (staleness, used, self.gate.lead(worker))
        if not self.gate.in_rounds:
            slowed = max(1, staleness) if self._slow_stale else 1
            if self._computes and self._share != slowed:
                gradient.mul_(self._share / slowed)
            self._step(gradient, lr)
        elif used:
            if self._sum is None:
                self._sum = gradient.clone()
            elif self._computes:
                self._sum.add_(gradient)
            self._sum_weight += weight
            if self.gate.rounds > rounds:
                if self._computes:
                    self._sum.div_(self._sum_weight / self._of_round)
                self._step(self._sum, lr)
                self._sum, self._sum_weight = None, 0.0
        return released

    def _step(self, gradient: Tensor, lr: float) -> None:
        self.updates += 1
        if not self._computes:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._weights.grad = gradient
        self._optimizer.step()

    def _told(self, worker: int) -> Reply:
        self._pulled[worker] = self.updates
        mark = 0
        if (
            self._marked < len(self._ends)
            and self.gate.rounds >= self._ends[self._marked]
        ):
            self._marked += 1
            mark = self._marked
        staleness, used, lead = self._heard[worker]
        return Reply(
            staleness, used, lead, self.gate.lead(worker), self.gate.rounds, mark
        )

    def _reply(self, worker: int, packed: bool) -> Any:
        """The weights and what is told of them, in memory of the last reply or where a worker of this process asked."""
        numbers, memory = self._told(worker), self._replies[worker]
        if packed:
            message = self._replies[worker] = pack(self._weights, numbers, memory)
            return message
        if memory is None:
            memory = self._weights.clone()
        elif self._computes:
            memory.copy_(self._weights)
        return Message(memory, numbers)


def pack(
    vector: Tensor, numbers: Sequence[float], into: Tensor | None = None
) -> Tensor:
    """`vector` followed by `numbers` in float64, bit for bit, as one flat tensor of the vector's dtype.

    `into`: an earlier such message to be overwritten; new memory costs more than
    copying.
    """
    tail = torch.frombuffer(
        bytearray(struct.pack(f"{len(numbers)}d", *numbers)), dtype=vector.dtype
    )
    return torch.cat(
        [vector, tail if vector.is_cpu else tail.to(vector.device)], out=into
    )


def unpack(message: Tensor, numbers: int) -> tuple[Tensor, list[float]]:
    """Inverse of `pack`."""
    end = message.numel() - _elements(numbers, message)
    vector = message.narrow(0, 0, end)
    if message.is_cpu and message.dtype != torch.bfloat16:  # which numpy has not
        return vector, list(
            struct.unpack(f"{numbers}d", message.numpy()[end:].tobytes())
        )
    tail = message[end:].cpu().view(torch.uint8)
    return vector, list(struct.unpack(f"{numbers}d", tail.numpy().tobytes()))


def _elements(numbers: int, message: Tensor) -> int:
    """Elements of `message` that `numbers` float64 values take."""
    return numbers * _NUMBER_BYTES // message.element_size()


def read_reply(message: Tensor) -> tuple[Tensor, Reply]:
    """Weights and numbers of a reply."""
    weights, numbers = unpack(message, len(Reply._fields))
    staleness, used, at_push, at_release, rounds, mark = (
        int(number) for number in numbers
    )
    return weights, Reply(staleness, bool(used), at_push, at_release, rounds, mark)


def request(
    server: Any,
    vector: Tensor,
    numbers: list[float],
    into: Tensor,
    message: Tensor | None = None,
) -> tuple[Tensor, Reply]:
    """Push `vector` (empty: pull only), and wait for the weights.

    A server in this process, which a virtual one is, takes `vector` itself, and its
    memory, and writes the weights `into` the memory that the worker takes them over to.
    Others get the vector by way of `message`. Their reply lies in memory that the next
    one overwrites: take it over at once.
    """
    if getattr(server, "in_process", False):
        answer: Message = server.request(Message(vector, numbers, into))
        return answer.vector, answer.numbers
    return read_reply(server.request(pack(vector, numbers, message)))
