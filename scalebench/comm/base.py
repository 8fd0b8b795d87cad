"""How bytes move: the seams between a strategy and whatever carries its messages.

A strategy sees only these protocols. `Communicator` is a group of workers, `SharedState` a model that all may
merge into, `Server` a party that answers when it wants to. Every engine says which of them, and which special
operations, it `provides`; a strategy says what it `requires`; the two are matched before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")


class Capability(StrEnum):
    """What an engine can carry, and what a strategy may ask for."""

    COLLECTIVES = "collectives"  # allreduce, reduce, broadcast, allgather, alltoallv, barrier
    NONBLOCKING = "nonblocking"  # iallreduce that progresses beside compute
    SPLIT = "split"  # sub-communicators
    POINT_TO_POINT = "point_to_point"  # send, recv
    ADASUM = "adasum"  # Adasum's merge of all workers' steps, in exchanges of our own
    SHARED_STATE = "shared_state"  # exclusive access to one shared model
    SERVER = "server"  # a party with deferred replies
    HOROVOD_OPTIMIZER = "horovod_optimizer"  # the real hvd.DistributedOptimizer
    PROCESS_GROUP = "process_group"  # a torch.distributed process group, for the real DDP
    OVERLAP = "overlap"  # gradient averaging that is charged as if hidden behind backward; virtual only


@dataclass(frozen=True)
class Overlap:
    """How an engine hides gradient averaging behind the backward pass; a virtual run is charged by it.

    `cycle_s` > 0 is Horovod's rule: what is ready on every worker when a cycle begins is fused up to `bucket_bytes`.
    `cycle_s` = 0 is DDP's: fixed buckets in backward order, the first up to `first_bucket_bytes`.
    """

    engine: str
    bucket_bytes: int
    first_bucket_bytes: int
    cycle_s: float = 0.0
    wire: str | None = None


class Request(Protocol):
    """A non-blocking operation in flight."""

    def wait(self) -> None:
        """Block until the result is in the tensor; only what is not hidden by compute is charged."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""


class Communicator(Protocol):
    """A group of workers. All tensors are contiguous; names ending in `_` work in place.

    `op` is `sum`, `mean`, `max` or `min`. `weight` scales this worker's contribution (then the result of `mean` is
    sum(weight_i x_i) / sum(weight_i)). `wire` is the dtype on the wire (`float16`, `bfloat16`), default the tensor's.
    `collectives` counts the synchronisations, `bytes_sent` the payload this worker handed over (not what the
    algorithm underneath makes of it), both outside pauses only. `calls` counts the engine's own collective calls that
    carried them: one each, or several where that is faster; None where nobody knows (virtual; Horovod's optimizer).
    """

    rank: int
    size: int
    collectives: int
    bytes_sent: int
    calls: int | None

    def count(self, nbytes: int, calls: int | None = None) -> None:
        """Count one synchronisation of `nbytes` that something else carried (DDP, inside the backward pass).

        When is not known, and so nothing of this worker's waiting; of 0 bytes: its messages are known, and counted.
        `calls`: how many of the engine's collectives it took, if that is known.
        """

    def carried(self, nbytes: int, among: int | None = None, calls: int | None = None) -> None:
        """Count one, and book the time since the last lap on it: something else (Horovod) has just carried it.

        It was one of all workers, or of each `among` consecutive ranks, in `calls` of the engine's collectives.
        """

    def split(self, color: int, key: int = 0) -> Communicator: ...
    def barrier(self) -> None: ...
    def allreduce_(
        self, tensor: Tensor, op: str = "sum", *, weight: float | None = None, wire: str | None = None
    ) -> None: ...
    def mean_(self, tensors: Sequence[Tensor], weight: float | None = None) -> None:
        """The mean of each of `tensors`, of one dtype, over the workers: one synchronisation, in however many calls."""

    def iallreduce_(
        self, tensor: Tensor, op: str = "sum", *, weight: float | None = None, wire: str | None = None
    ) -> Request: ...
    def reduce_(self, tensor: Tensor, root: int = 0, op: str = "sum", *, linear: bool = False) -> None:
        """Sum, or mean, at `root`; the others' tensors stay as they are.

        `linear`: gathered by `root`, which receives p-1 tensors one by one and adds them in the order of the ranks.
        """

    def broadcast_(self, tensor: Tensor, root: int = 0, *, linear: bool = False) -> None:
        """Give all ranks what `root` has; `linear`: by p-1 messages of its own, one after the other."""

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        """What each rank gave; not to be written into."""

    def allgather_combined(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """What `combine` makes of all that an allgather brings, alike on every rank; not to be written into."""

    def cached(self, make: Callable[[], _T]) -> _T:
        """What `make` computes from what is alike on every rank; not to be written into.

        Nothing travels: each process computes it, and of virtual workers the first one does for all.
        """

    def merge_(self, tensor: Tensor, merge: Callable[[Tensor, Tensor], None]) -> None:
        """Merge all workers' tensors, a power of two of them, in lg K exchanges with ever farther partners.

        `merge(a, b)` puts what two become in place of `a`, of the lower ranks. Of two partners the higher merges and
        answers with the result. Counted as messages.
        """

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Give tensor i to rank i; return what each rank gave. Shapes but the first dimension must agree."""

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None: ...
    def recv_(self, tensor: Tensor, source: int, tag: int = 0, *, add: bool = False) -> None:
        """Wait for what `source` sends; `add`: add it to `tensor` instead of replacing it."""


class SharedState(Protocol):
    """One flat vector that every worker may change, one at a time."""

    @property
    def merges(self) -> int: ...

    def exclusive(self, *, counted: bool = True) -> AbstractContextManager[Tensor]:
        """Yield the shared vector, fetched; on leaving, what was written into it is stored and the lock released.

        `merges` is, inside the block, the number of exclusive accesses that came before this one. An access is a
        synchronisation unless `counted` is false: one to a vector that is this worker's own. Whoever wants two
        vectors at once takes them in an order that is the same for all.
        """


class Server(Protocol):
    """A party with a state of its own that answers a request now or later.

    `rule` (given when the server is made) is called in the order of arrival: `rule(worker, payload, now)` returns
    the replies to release, as (worker, tensor) pairs; a worker not among them goes on waiting. A rule may have
    `updates`, how many optimizer steps it has taken, and `shards`, over how many servers its vector is spread; it then
    says what server i runs, `part(i)`, what of a payload each gets, `parted`, and what their replies make, `joined`.
    """

    def request(self, payload: Tensor | None) -> Tensor:
        """Send `payload` to the server and block until it replies."""


ServerRule = Callable[[int, Any, float], Sequence[tuple[int, Any]]]
