"""Protocols of communication between a strategy and an engine.

`Communicator` is a group of workers, `SharedState` a model into which all workers may
merge, `Server` a party with deferred replies. Every engine states which of them, and
which special operations, it `provides`; a strategy states what it `requires`; the two
are matched before a run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from scalebench.cluster.operation import Kind, Operation

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
ACTIVATIONS, GRADIENTS = BETWEEN_STAGES = (
    0x57A6,
    0x57A7,
)  # tags: waiting for these messages is a replica's bubble


class Capability(StrEnum):
    """Capability provided by an engine or required by a strategy."""

    # allreduce, reduce, reduce-scatter, broadcast, allgather, alltoallv, barrier
    COLLECTIVES = "collectives"
    # iallreduce and iallgather that progress during compute
    NONBLOCKING = "nonblocking"
    SPLIT = "split"  # sub-communicators
    POINT_TO_POINT = "point_to_point"  # send, isend, recv
    ADASUM = "adasum"  # Adasum's merge of all workers' steps, by messages
    SHARED_STATE = "shared_state"  # exclusive access to one shared model
    SERVER = "server"  # a party with deferred replies
    HOROVOD_OPTIMIZER = "horovod_optimizer"  # the real hvd.DistributedOptimizer
    # a torch.distributed process group, for the real DDP
    PROCESS_GROUP = "process_group"
    # exchanges between the batches of an epoch, and a look at their gradients
    BATCHES = "batches"
    # gradient averaging charged as overlapped with backward; virtual only
    OVERLAP = "overlap"


@dataclass(frozen=True)
class Overlap:
    """Rule by which an engine overlaps gradient averaging with the backward pass, for the cost of virtual runs.

    `cycle_s` > 0 is Horovod's rule: tensors ready on every worker when a cycle begins
    are fused up to `bucket_bytes`. `cycle_s` = 0 is DDP's: fixed buckets in backward
    order, the first up to `first_bucket_bytes`.
    """

    engine: str
    bucket_bytes: int
    first_bucket_bytes: int
    cycle_s: float = 0.0
    wire: str | None = None


class Request(Protocol):
    """A pending non-blocking operation."""

    def wait(self) -> None:
        """Block until the result is in the tensor; time hidden by compute is not charged."""

    def done(self) -> bool:
        """Return True if `wait` would return at once."""


class Gathering(Protocol):
    """A pending allgather whose messages are combined."""

    def result(self) -> Tensor:
        """Block until all messages are here, and return the read-only result, equal on every rank. Called once."""


class Communicator(Protocol):
    """A group of workers. All tensors are contiguous; names ending in `_` work in place.

    `op` is `sum`, `mean`, `max` or `min`. `weight` scales this worker's contribution
    (then the result of `mean` is sum(weight_i x_i) / sum(weight_i)). `wire` is the
    dtype on the wire (`float16`, `bfloat16`), default the tensor's. `collectives`
    counts synchronisations, `bytes_sent` the payload passed by this worker (not the
    traffic of the algorithm), both outside pauses only. `calls` counts collective calls
    of the engine: one for each synchronisation, or several if that is faster; None if
    unknown (virtual; Horovod's optimizer).
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    collectives: int
    bytes_sent: int
    calls: int | None

    def operation(
        self, kind: Kind, nbytes: int, root: int = 0, linear: bool = False
    ) -> Operation:
        """Return a collective of all members as a value."""

    def count(self, operation: Operation, calls: int | None = 0) -> None:
        """Count an operation that something else made and timed, in `calls` collectives of the engine.

        `BY_MESSAGES` counts messages, sent by this communicator, as one
        synchronisation.
        """

    def split(self, color: Callable[[int], int]) -> Communicator:
        """Return the communicator of the ranks r of equal `color(r)`, in order of rank; collective."""

    def barrier(self) -> None: ...
    def allreduce_(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        weight: float | None = None,
        wire: str | None = None,
    ) -> None: ...
    def mean_(self, tensors: Sequence[Tensor], weight: float | None = None) -> None:
        """Average each of `tensors`, of one dtype, over the workers: one synchronisation in any number of calls."""

    def iallreduce_(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        weight: float | None = None,
        wire: str | None = None,
    ) -> Request: ...
    def reduce_(
        self, tensor: Tensor, root: int = 0, op: str = "sum", *, linear: bool = False
    ) -> None:
        """Sum or average at `root`; the tensors of other ranks are unchanged.

        `linear`: `root` receives p-1 tensors one by one and adds them in the order of
        the ranks.
        """

    def reduce_scatter_(self, own: Tensor, tensor: Tensor, op: str = "sum") -> None:
        """Sum or average `tensor` (K n,) of all K ranks; `own` (n,) becomes the part of it that has this rank's number.

        The tensor's values are undefined afterwards.
        """

    def broadcast_(
        self, tensor: Tensor, root: int = 0, *, linear: bool = False
    ) -> None:
        """Copy the tensor of `root` to all ranks; `linear`: by p-1 sequential messages."""

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        """Return the read-only tensors of all ranks."""

    def allgather_combined(
        self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        """Return the read-only result of `combine` on the tensors of all ranks, equal on every rank."""

    def iallgather_combined(
        self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> Gathering:
        """Begin an allgather of `tensor`, which must not change until the result is asked for; then `combine`."""

    def cached(self, make: Callable[[], _T]) -> _T:
        """Return the read-only result of `make`, which depends on values equal on every rank.

        Without communication: each process computes it, and the first of virtual
        workers computes it for all.
        """

    def by_rows(
        self,
        compute: Callable[..., Sequence[Tensor]],
        own: Sequence[Tensor],
        *equal: Any,
    ) -> Sequence[Tensor]:
        """Return this rank's row of each result of `compute(*matrices, *equal)`.

        The row of a rank in the matrices are `own`, which stay as they are, and a row
        of a result depends on that row alone; `equal` are the same on every rank.
        Without communication: each process computes its row, and the last of virtual
        workers to come computes those of all.
        """

    def merge_(self, tensor: Tensor, merge: Callable[[Tensor, Tensor], None]) -> None:
        """Merge the tensors of all K workers, K a power of two, in lg K exchanges with partners at doubling distances.

        `merge(a, b)` replaces `a`, of the lower ranks, by the merge. Of two partners
        the higher one merges and replies with the result. Counted as messages.
        """

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send tensor i to rank i; return the tensors of all ranks. Shapes may differ in the first dimension only."""

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None: ...
    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Request:
        """Begin to send a tensor, which must not change until the request has been waited for."""

    def recv_(
        self, tensor: Tensor, source: int, tag: int = 0, *, add: bool = False
    ) -> None:
        """Receive a tensor from `source` into `tensor`; `add`: add it instead."""

    def recv_like(self, like: Tensor, source: int, tag: int = 0) -> Tensor:
        """Receive a tensor of the shape and dtype of `like` from `source` into memory of its own."""


class OverlapCommunicator(Communicator, Protocol):
    """A communicator of an engine with OVERLAP: virtual workers."""

    def overlapped_mean_(self, tensor: Tensor, overlap: Overlap) -> None:
        """Average gradients in buckets, charged as if each began when the backward pass had made its tensors."""


class LibraryCommunicator(Communicator, Protocol):
    """A communicator of real workers, between which a library moves bytes too: Horovod, DDP. They are counted here."""

    @property
    def process_group(self) -> Any:
        """That of torch.distributed, of an engine with PROCESS_GROUP."""

    def overlapped(self, operation: Operation, calls: int | None = None) -> None:
        """Count an operation that a library made at an unknown moment, as inside the backward pass.

        The waiting of this worker is unknown from then on. `calls` is the number of
        collectives of the engine, if known.
        """

    def carried(self, operation: Operation, calls: int | None = None) -> None:
        """Count an operation that a library has just made, which took the time since the last lap."""

    def called(self, more: int | None) -> None:
        """Count further collective calls of a synchronisation; None if unknown."""

    def operation_among(self, consecutive: int, kind: Kind, nbytes: int) -> Operation:
        """Return a collective of this rank and its neighbours, of whom `consecutive` make a group."""

    def linger(self, operation: Operation) -> None:
        """Sleep for the delay of slow links in `operation`."""


class SharedState(Protocol):
    """One flat vector that workers change one at a time."""

    @property
    def merges(self) -> int: ...

    def exclusive(self, *, counted: bool = True) -> AbstractContextManager[Tensor]:
        """Lock and yield the shared vector; on leaving, store changes and release the lock.

        `merges` is, inside the block, the number of previous exclusive accesses. An
        access counts as a synchronisation unless `counted` is False (for a vector of
        this worker). Two vectors are locked in the same order by all workers, to avoid
        deadlocks.
        """


class Server(Protocol):
    """A party with a state of its own that answers requests now or later.

    `rule` (given at construction) is called in the order of arrival: `rule(worker,
    payload, now)` returns the replies to release as (worker, tensor) pairs; other
    workers continue to wait. A rule may have `updates`, its number of optimizer steps,
    and `shards`, the number of servers that hold its vector; it then provides the rule
    of server i, `part(i)`, the split of a payload, `parted`, and the joined replies,
    `joined`.
    """

    def request(self, payload: Tensor) -> Tensor:
        """Send `payload` to the server and block until its reply."""


ServerRule = Callable[[int, Any, float], Sequence[tuple[int, Any]]]
